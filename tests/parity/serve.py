"""``make parity-answers``: the real vLLM, as a server on loopback and offline, gives our regenerated answers.

Starts ``vllm serve`` from the engine's environment with the embedded target in float32, regenerates held-out prompts
greedily through it, token ids in and out, then through ``vllm.LLM``, and compares with the answers of this process,
token by token. Exits with 1 if anything differs.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from specdraft.bench.engines import VLLMServer
from specdraft.bench.process import Server as Running
from specdraft.bench.process import ended_by_signals
from specdraft.data.regeneration.in_process import InProcess
from specdraft.data.regeneration.request import Engine, Ids, RegenerationSettings, Request
from specdraft.data.regeneration.server import Server
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.data.tokenization.chat import opening_ids
from specdraft.decoding.sampling import Sampling
from specdraft.errors import UserError, exit_on_user_error
from specdraft.targets import Target
from specdraft.targets.loading import location

REPOSITORY = Path(__file__).parents[2]
NAME, PROMPTS = "embedded://tiny", 16
SETTINGS = RegenerationSettings(temperatures=(0.0,), max_new_tokens=48)
# As vllm_side.py: small, one thread, nothing looked up elsewhere.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def questions(target: Target) -> list[Request]:
    """Held-out prompts, greedily."""
    found = (opening_ids(target.tokenizer, c) for c in PythonStdlib().prompts("validation"))
    fitting = [ids for ids in found if len(ids) + SETTINGS.max_new_tokens <= target.max_length]
    return [
        Request(ids, (), (), Sampling(), number, SETTINGS.max_new_tokens)
        for number, ids in enumerate(fitting[:PROMPTS])
    ]


def answers(engine: Engine, target: Target) -> list[Ids]:
    """What the target says to them through ``engine``."""
    started = time.perf_counter()
    try:
        found = sorted(engine.answers(target, questions(target), SETTINGS))
    finally:
        engine.close()
    print(f"{engine.name}: {len(found)} answers in {time.perf_counter() - started:.1f} s", flush=True)
    return [ids for _, ids in found]


def offline() -> None:
    """The other side: ``vllm.LLM`` in the engine's environment; prints the answers as JSON."""
    from specdraft.data.regeneration.vllm import VLLMOffline

    target = Target.load(NAME, dtype="float32", device="cpu")
    options = {"enforce_eager": True, "max_num_seqs": 8, "use_tqdm_on_load": False}
    Path(sys.argv[2]).write_text(json.dumps(answers(VLLMOffline(options), target)))


@exit_on_user_error
def main() -> None:
    """Answer on both sides, compare, and say so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-python", type=Path, default=REPOSITORY / ".venv-parity/bin/python")
    options = parser.parse_args()
    if not options.engine_python.is_file():
        raise UserError(
            f"there is no {options.engine_python}: expected a python with vLLM, which `make parity` installs"
        )
    torch.set_num_threads(1)
    target = Target.load(NAME, dtype="float32", device="cpu")
    ours = answers(InProcess(), target)
    theirs = {}
    flags = ("--enforce-eager", "--max-num-seqs", "8")
    engine = VLLMServer(str(options.engine_python), "float32", target.max_length, flags=flags)
    with ended_by_signals():
        running = Running(
            lambda port, name: engine.server(location(NAME), None, [], port, name), engine.environment(1), 600
        )
        try:
            theirs["vllm serve"] = answers(Server(running.url, concurrency=8, timeout=120), target)
        finally:
            running.end()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answers.json")
        alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(REPOSITORY)}
        command = [str(options.engine_python), "-P", "-W", "ignore", __file__, "--offline-side", str(answer)]
        subprocess.run(command, env=os.environ | ENVIRONMENT | alone, check=True)
        theirs["vllm.LLM"] = json.loads(answer.read_text())
    failed = False
    for name, found in theirs.items():
        equal = sum(a == b for a, b in zip(ours, found, strict=True))
        print(f"{name}: {equal} of {len(ours)} regenerated answers are equal, {sum(map(len, ours))} tokens")
        failed = failed or equal < len(ours)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    offline() if sys.argv[1:2] == ["--offline-side"] else main()
