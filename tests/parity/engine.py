"""What vLLM is asked to decode, in a process and an environment of its own (``vllm_side.py``), and what it answers."""

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import Run

from specdraft.data.prompts import encode, load_prompts
from specdraft.data.tokenization.tokenize import available_cores
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.loading import location

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
MAX_NEW_TOKENS = 64
GREEDILY = {"temperature": 0.0}
PROCESSES = min(2, available_cores())  # of vLLM, 3.4 GB each
RESERVE = 64  # positions behind the longest answer: more than two drafts have


@dataclass(frozen=True)
class Engine:
    """The real vLLM. python: of its environment. work: where requests and answers lie."""

    python: Path
    work: Path
    max_num_seqs: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Engine":
        """As the command line says. Raises UserError where there is no such python."""
        if not options.engine_python.is_file():
            wrong = f"there is no {options.engine_python}"
            raise UserError(f"{wrong}: expected a python with vLLM, which `make parity` installs")
        options.work.mkdir(parents=True, exist_ok=True)
        return cls(options.engine_python, options.work.resolve(), options.max_num_seqs)

    def answers(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        runs: Sequence[Mapping[str, Any]],
        packages: Path | None = None,
        grammar: tuple[str, str] | None = None,
        sampling: Mapping[str, float] | str = GREEDILY,
    ) -> dict[str, Run]:
        """What it did with the prompts' token ids, alone ("plain") and in each of ``runs``: a ``name``, the ``flags``
        of its speculative configuration as JSON (none: it drafts nothing), perhaps ``overrides`` of the target's,
        ``additional`` configuration, ``max_num_seqs``, a ``sampling`` of its own. packages: a folder with more of them
        for vLLM. grammar: what answers follow, ".json" (a schema) or ".regex" and its text. sampling: how tokens are
        chosen, or "served": as vLLM does where it is not told. Two processes share the runs where there are two cores:
        each loads one vLLM after the other."""
        started = [{"name": "plain"}, *({**run, "flags": json.loads(run.get("flags", "null"))} for run in runs)]
        request = {
            "target": location(target.identity.name),
            "revision": target.identity.revision,
            "prompts": prompts,
            "max_new_tokens": MAX_NEW_TOKENS,
            "max_model_len": min(target.max_length, max(map(len, prompts)) + MAX_NEW_TOKENS + RESERVE),
            "max_num_seqs": self.max_num_seqs,
            "grammar": grammar,
            "sampling": sampling,
            "eos_token_ids": sorted(target.eos_token_ids),
        }
        paths = [str(REPOSITORY), *([] if packages is None else [str(packages.resolve())])]
        # No plugins: of what lies in the packages only what is asked for.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": ""}
        shares = [share for number in range(PROCESSES) if (share := started[number::PROCESSES])]
        with ThreadPoolExecutor(len(shares)) as pool:
            parts = pool.map(lambda share: self._decoded(request | {"runs": share}, environment), shares)
            found = {name: Run(**run) for part in parts for name, run in part.items()}
        return {run["name"]: found[run["name"]] for run in started}

    def _decoded(self, request: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
        name = request["runs"][0]["name"].replace(" ", "-")
        request_file, answer_file = self.work / f"request-{name}.json", self.work / f"answer-{name}.json"
        request_file.write_text(json.dumps(request))
        answer_file.unlink(missing_ok=True)
        # -P: without it the script's folder could shadow the engine's packages.
        script = [str(HERE / "vllm_side.py"), str(request_file), str(answer_file)]
        subprocess.run([str(self.python), "-P", "-W", "ignore", *script], env=environment, check=True)
        return dict(json.loads(answer_file.read_text()))


def add_arguments(parser: argparse.ArgumentParser, work: str) -> None:
    """What both comparisons with vLLM take from the command line."""
    python, folder = REPOSITORY / ".venv-parity/bin/python", REPOSITORY / "build" / work
    parser.add_argument("--engine-python", type=Path, default=python, help="a python with vLLM")
    parser.add_argument("--work", type=Path, default=folder, help="where files go")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--max-num-seqs", type=int, default=8, help="requests that vLLM batches")


def held_out_prompts(target: Target, count: int, num_draft_tokens: int) -> list[list[int]]:
    """Token ids of held-out prompts that leave room for the answer, and more.

    When one request comes within K tokens of the context's end, vLLM verifies blank drafts for its whole batch, and
    counts them. Our decoder goes on drafting, so the counts are comparable before that point only."""
    reserve = MAX_NEW_TOKENS + 2 * num_draft_tokens
    ids = [encode(target.tokenizer, prompt.opening) for prompt in load_prompts("python-stdlib", 2 * count)]
    fitting = [prompt for prompt in ids if len(prompt) + reserve <= target.max_length]
    if len(fitting) < count:
        raise UserError(f"{len(fitting)} held-out prompts fit the context: expected {count}; ask for fewer")
    return fitting[:count]
