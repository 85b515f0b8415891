"""How the engines are started, with and without a drafter, and what their counters are called.

vLLM 0.32 has been run (docs/bench.md); SGLang's command lines have not been tried."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from specdraft.errors import UserError
from specdraft.export.sglang import SGLang
from specdraft.export.vllm import VLLM

NGRAM = "ngram"
NGRAM_MAX = 4  # tokens that its lookup compares, as vLLM's documentation has it


@dataclass(frozen=True)
class ServingEngine:
    """An engine of this machine. command: its own program, or a python that has it; None: found on PATH, or in this
    python. flags: more words of its command line. start_timeout: seconds until it must answer. prefix_caching: whether
    what prompts have in common is read once; prompts that are sent again would then not be read at all."""

    command: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    prefix_caching: bool = False
    flags: tuple[str, ...] = ()
    start_timeout: float = 900.0

    name: ClassVar[str]
    program: ClassVar[str]
    module: ClassVar[str]  # what a python with the engine runs

    def words(self) -> list[str]:
        """What the command line begins with. Raises UserError where there is no such engine."""
        command = self.command or shutil.which(self.program)
        if command is None and importlib.util.find_spec(self.name) is not None:
            command = sys.executable
        if command is None:
            missing = f"{self.name} is not installed: there is no {self.program} on PATH and none in this python"
            mend = "expected engine.command=PATH of its program or of a python that has it, or url= of a running server"
            raise UserError(f"{missing}; {mend}")
        path = shutil.which(os.path.expanduser(command))
        if path is None:
            expected = f"expected the path of {self.program} or of a python that has {self.name}"
            raise UserError(f"engine.command is {command!r}, which is no program: {expected}")
        return self.started(path)

    def started(self, path: str) -> list[str]:
        """As ``words``, with the path of a program that exists."""
        return [path, "-P", "-m", self.module] if Path(path).name.startswith("python") else [path]

    def environment(self, threads: int) -> dict[str, str]:
        """The environment of a server that computes on ``threads`` cores, if it computes on cores."""
        return {**os.environ, "OMP_NUM_THREADS": str(threads)}

    def server(self, target: str, revision: str | None, options: Sequence[str], port: int, model: str) -> list[str]:
        """The whole command line of a server of ``target`` that is called ``model``."""
        raise NotImplementedError

    def ngram(self, num_draft_tokens: int) -> list[str]:
        """Options for drafts that are looked up in the text so far."""
        raise NotImplementedError

    def head(self, family: str, directory: str, num_draft_tokens: int) -> list[str] | None:
        """Options for an exported drafter; None for a family that the engine does not draft with."""
        raise NotImplementedError


@dataclass(frozen=True)
class VLLMServer(ServingEngine):
    """``vllm serve``."""

    name = "vllm"
    program = "vllm"
    # What `vllm serve` runs; the CPU build's own command asks for a package named vllm, which it is not.
    module = "vllm.entrypoints.openai.api_server"
    exported: ClassVar[type[VLLM]] = VLLM

    def environment(self, threads: int) -> dict[str, str]:
        """Servers share the cores, and each takes a GiB of memory for its cache on a CPU unless the user says so."""
        ours = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        return ours | super().environment(threads)

    def server(self, target: str, revision: str | None, options: Sequence[str], port: int, model: str) -> list[str]:
        """See ``ServingEngine``."""
        words = self.words()
        words += ["--model", target] if "-m" in words else ["serve", target]
        words += ["--revision", revision] if revision else []
        words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", model, "--dtype", self.dtype]
        words += ["--max-model-len", str(self.max_model_len)] if self.max_model_len else []
        words += ["--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"]
        return [*words, *self.flags, *options]

    def ngram(self, num_draft_tokens: int) -> list[str]:
        """See ``ServingEngine``."""
        lookup = {"method": NGRAM, "prompt_lookup_max": NGRAM_MAX, "num_speculative_tokens": num_draft_tokens}
        return ["--speculative-config", json.dumps(lookup)]

    def head(self, family: str, directory: str, num_draft_tokens: int) -> list[str] | None:
        """See ``ServingEngine``."""
        return VLLM.options(family, directory, num_draft_tokens)


@dataclass(frozen=True)
class SGLangServer(ServingEngine):
    """``python -m sglang.launch_server``."""

    name = "sglang"
    program = "sglang"
    module = "sglang.launch_server"
    exported: ClassVar[type[SGLang]] = SGLang

    def started(self, path: str) -> list[str]:
        """See ``ServingEngine``."""
        words = super().started(path)
        return words if "-m" in words else [*words, "serve"]

    def server(self, target: str, revision: str | None, options: Sequence[str], port: int, model: str) -> list[str]:
        """See ``ServingEngine``."""
        words = [*self.words(), "--model-path", target, "--served-model-name", model, "--dtype", self.dtype]
        words += ["--revision", revision] if revision else []
        words += ["--host", "127.0.0.1", "--port", str(port), "--enable-metrics"]
        words += ["--context-length", str(self.max_model_len)] if self.max_model_len else []
        words += [] if self.prefix_caching else ["--disable-radix-cache"]
        return [*words, *self.flags, *options]

    def ngram(self, num_draft_tokens: int) -> list[str]:
        """See ``ServingEngine``."""
        return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(num_draft_tokens)]

    def head(self, family: str, directory: str, num_draft_tokens: int) -> list[str] | None:
        """See ``ServingEngine``."""
        if family not in SGLang.families:
            return None
        words: list[Any] = ["--speculative-algorithm", SGLang.families[family]]
        words += ["--speculative-draft-model-path", directory, "--speculative-num-steps", num_draft_tokens]
        words += ["--speculative-eagle-topk", 1, "--speculative-num-draft-tokens", num_draft_tokens + 1]
        return [str(word) for word in words]


ENGINES: dict[str, type[VLLMServer] | type[SGLangServer]] = {"vllm": VLLMServer, "sglang": SGLangServer}
"""By name."""


@dataclass(frozen=True)
class Contender:
    """What takes part. method: plain, ngram, or the engine's name of the head's family. num_draft_tokens: K, 0 for
    plain. options: the engine's. directory: of the exported head. url: of a server that others started."""

    name: str
    method: str
    num_draft_tokens: int = 0
    options: tuple[str, ...] = ()
    directory: Path | None = None
    url: str | None = field(default=None)
