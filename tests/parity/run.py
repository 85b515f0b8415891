"""``make parity``: exported drafters in the real vLLM give the same tokens and exactly the same counts as our decoder.

Trains a short drafter of every family on the embedded target unless ``--head`` names a checkpoint, exports them,
decodes held-out prompts here and in vLLM (another environment, another process), and compares. Above temperature 0 it
compares acceptance lengths: vLLM's own greedy drafts and, with ``draft_sample_method``, sampled ones. Exits with 1 if
anything differs.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from comparison import Run, decode, differences, rate_difference, table

from specdraft.data.prompts import encode, load_prompts
from specdraft.data.tokenization.tokenize import available_cores
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import check_target, find, load_drafter
from specdraft.errors import UserError, exit_on_user_error
from specdraft.export import export
from specdraft.export.engine import GREEDY, SAMPLED
from specdraft.export.vllm import VLLM
from specdraft.targets import Target
from specdraft.targets.loading import location

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
MAX_NEW_TOKENS = 64
TRAINING = [
    "trainer.accelerator=cpu",
    "data.limit=160",  # the same for all, so that the target answers once
    "data.validation_limit=16",
    "live.every_n_steps=0",
    "live.prompts=8",
    "evaluate=false",
    "export=null",
]
# Enough to be accepted in a minute or two of 2 cores; a better drafter would show nothing more.
MODELS = {
    "eagle3": ["trainer.max_steps=160"],
    "eagle": ["trainer.max_steps=120"],
    "medusa": ["trainer.max_steps=100", "model.draft_vocab_size=null"],  # as engines serve it
    "draft": ["trainer.max_steps=100"],
}
# Equality means nothing for a drafter that is not accepted; Medusa's later heads seldom are.
WARM = 1.0  # the temperature at which rates are compared, of the first of the families that vLLM samples drafts of
LEAST_ACCEPTANCE_LENGTH = {"eagle3": 1.5, "eagle": 1.4, "medusa": 1.25, "draft_model": 1.5}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", help="a checkpoint or run directory; without it short drafters are trained, once")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which to train and compare")
    parser.add_argument("--engine-python", default=REPOSITORY / ".venv-parity/bin/python", help="a python with vLLM")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build/parity", help="where files go")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--max-num-seqs", type=int, default=8, help="requests that vLLM batches")
    return parser.parse_args()


def trained(model: str, work: Path) -> Path:
    """The cached short drafter, trained by one core if it is not there."""
    run, log = work / model, work / f"{model}.log"
    try:
        return find(run)
    except UserError:
        print(f"training a short {model}, see {log}", flush=True)
        shutil.rmtree(run, ignore_errors=True)
        command = [sys.executable, "train.py", f"model={model}", *TRAINING, *MODELS[model], f"hydra.run.dir={run}"]
        with log.open("w") as output:
            done = subprocess.run(
                command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output
            )
        if done.returncode != 0:
            raise UserError(f"training a short {model} failed: {log} says why\n{log.read_text()[-2000:]}") from None
        return find(run)


def held_out_prompts(target: Target, count: int, reserve: int) -> list[list[int]]:
    """Token ids of held-out prompts that leave ``reserve`` tokens of the context free."""
    ids = [encode(target.tokenizer, prompt.opening) for prompt in load_prompts("python-stdlib", 2 * count)]
    fitting = [prompt for prompt in ids if len(prompt) + reserve <= target.max_length]
    if len(fitting) < count:
        raise UserError(f"{len(fitting)} held-out prompts fit the context: expected {count}; ask for fewer")
    return fitting[:count]


def exported(checkpoint: Path, work: Path) -> tuple[str, Path]:
    """The checkpoint's family, and its directory for vLLM."""
    engine = VLLM(dtype="float32")
    directory = export(checkpoint, engine, work / "exported" / checkpoint.parent.name)
    card = (directory / "README.md").read_text()
    return next(family for family in engine.families if f'"method": "{family}"' in card), directory.resolve()


def answers(options: argparse.Namespace, request: dict[str, Any]) -> dict[str, Run]:
    """What vLLM did, alone ("plain") and with each drafter of the request."""
    request_file, answer_file = options.work / "request.json", options.work / "answer.json"
    request_file.write_text(json.dumps(request))
    answer_file.unlink(missing_ok=True)
    # -P: without it the script's folder could shadow the engine's packages.
    script = [str(HERE / "vllm_side.py"), str(request_file), str(answer_file)]
    subprocess.run([str(options.engine_python), "-P", "-W", "ignore", *script], check=True)
    return {name: Run(**run) for name, run in json.loads(answer_file.read_text()).items()}


@exit_on_user_error
def main() -> None:
    """Export, decode on both sides, compare, and say so."""
    options = arguments()
    if not Path(options.engine_python).is_file():
        raise UserError(
            f"there is no {options.engine_python}: expected a python with vLLM, which `make parity` installs"
        )
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with ThreadPoolExecutor(available_cores()) as pool:  # the first of them lets the target answer, and all read it
        short = () if options.head else pool.map(lambda model: trained(model, options.work), options.models)
        checkpoints = [find(options.head)] if options.head else list(short)
    drafters: dict[str, Drafter] = {}
    directories: dict[str, str] = {}
    for checkpoint in checkpoints:
        family, directory = exported(checkpoint, options.work)
        drafters[family], config = load_drafter(checkpoint)
        directories[family] = str(directory)
    named = config["target"]
    target = Target.load(named["name"], named["revision"], dtype="float32", device="cpu")
    check_target(config, target)
    # When one request comes within K tokens of the context's end, vLLM verifies blank drafts for its whole batch, and
    # counts them. Our decoder goes on drafting, so the counts are comparable before that point only.
    prompts = held_out_prompts(target, options.prompts, MAX_NEW_TOKENS + 2 * options.num_draft_tokens)
    ready = time.perf_counter()
    k = options.num_draft_tokens
    warm = next((family for family in drafters if VLLM.flags(family, "", k, SAMPLED)), None)
    shapes = {drafting: StaticTree.chain(k, sampled=drafting == SAMPLED) for drafting in (GREEDY, SAMPLED) if warm}
    runs = [{"name": family, "flags": VLLM.flags(family, directories[family], k)} for family in drafters]
    runs += [
        {"name": drafting, "flags": VLLM.flags(warm, directories[warm], k, drafting), "temperature": WARM}
        for drafting in shapes
    ]
    request = {
        "target": location(target.identity.name),
        "revision": target.identity.revision,
        "runs": [run | {"flags": json.loads(run["flags"])} for run in runs],
        "prompts": prompts,
        "max_new_tokens": MAX_NEW_TOKENS,
        "max_model_len": target.max_length,
        "max_num_seqs": options.max_num_seqs,
        "eos_token_ids": sorted(target.eos_token_ids),
    }
    with ThreadPoolExecutor(1) as pool:  # vLLM beside our decoder, a core for each
        waiting = pool.submit(answers, options, request)
        ours = {
            family: decode(Decoder(target, drafter, k), prompts, MAX_NEW_TOKENS) for family, drafter in drafters.items()
        }
        warm_ours = {
            drafting: decode(Decoder(target, drafters[warm], shape, Sampling(WARM)), prompts, MAX_NEW_TOKENS)
            for drafting, shape in shapes.items()
        }
        theirs = waiting.result()
    print(
        f"training {ready - started:.0f} s, decoding {time.perf_counter() - ready:.0f} s\n\n"
        f"{len(prompts)} held-out prompts x {MAX_NEW_TOKENS} tokens, K = {options.num_draft_tokens}, greedy, float32"
    )
    failed = False
    for family, run in ours.items():
        print(f"\n== {family} ==\n" + table(run, theirs["plain"], theirs[family]))
        found = differences(run, theirs["plain"], theirs[family], LEAST_ACCEPTANCE_LENGTH[family])
        print("\n".join(f"DIFFERENT: {line}" for line in found) if found else "equal: tokens and all counts")
        failed = failed or bool(found)
    failed = rates_differ(warm, warm_ours, theirs, bool(options.head)) or failed
    sys.exit(1 if failed else 0)


def rates_differ(family: str | None, ours: dict[str, Run], theirs: dict[str, Run], own_head: bool) -> bool:
    """Compare acceptance above temperature 0, of each way of drafting; the two ways must be told apart."""
    failed = False
    for drafting, run in ours.items():
        gap, (low, high) = rate_difference(run, theirs[drafting])
        rounds = sum(map(len, theirs[drafting].accepted_per_round))
        equal = low <= 0 <= high
        print(
            f"\n{'equal' if equal else 'DIFFERENT'}: {family} at temperature {WARM:g}, {drafting} drafts: acceptance "
            f"length {run.acceptance_length:.3f} by our decoder, {theirs[drafting].acceptance_length:.3f} by vLLM in "
            f"{rounds} rounds; difference {gap:+.3f} [{low:+.3f}, {high:+.3f}] (99.9 %)"
        )
        failed = failed or not equal
    if ours:
        low, high = rate_difference(ours[GREEDY], theirs[SAMPLED])[1]
        if low <= 0 <= high:
            print("The two ways of drafting are accepted alike here: this comparison would not notice the wrong one.")
            failed = failed or not own_head  # the short drafters do tell them apart
    return failed


if __name__ == "__main__":
    main()
