"""``make parity``: an exported head in the real vLLM gives the same tokens and exactly the same counts as our decoder.

Trains a short head on the embedded target unless ``--head`` names a checkpoint, exports it, decodes held-out prompts
here and in vLLM (another environment, another process), and compares. Exits with 1 if anything differs.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.checkpoint import check_target, find, load_drafter
from specdraft.errors import UserError, exit_on_user_error
from specdraft.evaluation.prompts import encode, load_prompts
from specdraft.export import export
from specdraft.export.parity import Run, decode, differences, table
from specdraft.export.vllm import VLLM
from specdraft.targets import Target
from specdraft.targets.loading import location

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
MAX_NEW_TOKENS = 64
LEAST_ACCEPTANCE_LENGTH = 1.8
# Enough for an acceptance length around 2 in a few minutes of 2 cores; a better head would show nothing more.
TRAINING = [
    "trainer.max_steps=250",
    "trainer.accelerator=cpu",
    "data.limit=400",
    "data.validation_limit=16",
    "live.every_n_steps=0",
    "live.prompts=8",
    "evaluate=false",
    "export=null",
]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", help="a checkpoint or run directory; without it a short head is trained, once")
    parser.add_argument("--engine-python", default=REPOSITORY / ".venv-parity/bin/python", help="a python with vLLM")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build/parity", help="where files go")
    parser.add_argument("--prompts", type=int, default=56)
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--max-num-seqs", type=int, default=8, help="requests that vLLM batches")
    return parser.parse_args()


def trained_head(work: Path) -> Path:
    """The cached short head, trained if it is not there."""
    run = work / "head"
    try:
        return find(run)
    except UserError:
        command = [sys.executable, "train.py", *TRAINING, f"hydra.run.dir={run}"]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        return find(run)


def held_out_prompts(target: Target, count: int, reserve: int) -> list[list[int]]:
    """Token ids of held-out prompts that leave ``reserve`` tokens of the context free."""
    ids = [encode(target.tokenizer, prompt.opening) for prompt in load_prompts("python-stdlib", 2 * count)]
    fitting = [prompt for prompt in ids if len(prompt) + reserve <= target.max_length]
    if len(fitting) < count:
        raise UserError(f"{len(fitting)} held-out prompts fit the context: expected {count}")
    return fitting[:count]


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
    checkpoint = find(options.head) if options.head else trained_head(options.work)
    drafter, config = load_drafter(checkpoint)
    target = Target.load(config["target"]["name"], config["target"]["revision"], dtype="float32", device="cpu")
    check_target(config, target)
    head = export(checkpoint, VLLM(dtype="float32"), options.work / "export-vllm")
    # When one request comes within K tokens of the context's end, vLLM verifies blank drafts for its whole batch, and
    # counts them. Our decoder goes on drafting, so the counts are comparable before that point only.
    prompts = held_out_prompts(target, options.prompts, MAX_NEW_TOKENS + 2 * options.num_draft_tokens)

    request = {
        "target": location(target.identity.name),
        "revision": target.identity.revision,
        "head": str(head.resolve()),
        "prompts": prompts,
        "num_draft_tokens": options.num_draft_tokens,
        "max_new_tokens": MAX_NEW_TOKENS,
        "max_model_len": target.max_length,
        "max_num_seqs": options.max_num_seqs,
        "eos_token_ids": sorted(target.eos_token_ids),
    }
    request_file, answer_file = options.work / "request.json", options.work / "answer.json"
    request_file.write_text(json.dumps(request))
    answer_file.unlink(missing_ok=True)
    started = time.perf_counter()
    ours = decode(Decoder(target, drafter, options.num_draft_tokens), prompts, MAX_NEW_TOKENS)
    decoded = time.perf_counter()
    # -P: without it the script's folder could shadow the engine's packages.
    command = [
        str(options.engine_python),
        "-P",
        "-W",
        "ignore",
        str(HERE / "vllm_side.py"),
        str(request_file),
        str(answer_file),
    ]
    subprocess.run(command, check=True)
    print(f"our decoder {decoded - started:.1f} s, vLLM {time.perf_counter() - decoded:.1f} s\n")

    answer = json.loads(answer_file.read_text())
    plain, speculative = Run(**answer["plain"]), Run(**answer["speculative"])
    print(
        f"{len(prompts)} held-out prompts x {MAX_NEW_TOKENS} tokens, K = {options.num_draft_tokens}, greedy, float32\n"
    )
    print(table(ours, plain, speculative))
    found = differences(ours, plain, speculative, LEAST_ACCEPTANCE_LENGTH)
    print("\n" + "\n".join(f"DIFFERENT: {line}" for line in found) if found else "\nequal: tokens and all counts")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
