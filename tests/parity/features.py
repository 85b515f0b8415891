"""``make parity-features``: the hidden states that the real vLLM extracts are those that training computes itself.

vLLM reads packed rows of held-out prompts on the embedded target, in fp32, through ``features=vllm``: started, asked
and stopped as the store's command does. Exits with 1 if anything differs by more than ``TOLERANCE``.
"""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from specdraft.data.packing import pack
from specdraft.data.prompts import encode, load_prompts
from specdraft.data.store.vllm import VLLM
from specdraft.data.tokenization.chat import Example
from specdraft.errors import exit_on_user_error
from specdraft.targets import Target

TOLERANCE = 1e-4  # of numbers up to 70
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@exit_on_user_error
def main() -> None:
    """Both sides read the same rows; the largest difference of each layer is printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-python", default=".venv-parity/bin/python", help="a python with vLLM")
    parser.add_argument("--prompts", type=int, default=24)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = Target.load("embedded://tiny", dtype="float32", device="cpu")
    texts = [encode(target.tokenizer, p.opening) for p in load_prompts("python-stdlib", arguments.prompts)]
    rows = pack([Example(ids, [True] * len(ids)) for ids in texts], target.max_length)[0]
    layers = target.default_layers()
    started = time.perf_counter()
    engine = VLLM(str(Path(arguments.engine_python).absolute()), cpu=True)
    with torch.inference_mode(), engine.open(target, layers, target.max_length) as capture:
        ready = time.perf_counter()
        theirs = capture(rows.input_ids, rows.position_ids)
        read = time.perf_counter()
        ours = target.features(rows.input_ids, rows.position_ids, layers)
    print(
        f"{rows.input_ids.numel()} tokens, {len(texts)} documents in {len(rows.input_ids)} rows, float32; "
        f"vLLM's start {ready - started:.0f} s, its hidden states {read - ready:.1f} s"
    )
    difference = (torch.cat(theirs, -1) - torch.cat(ours, -1)).abs().amax((0, 1)).view(len(layers) + 1, -1).amax(1)
    largest = torch.cat(ours, -1).abs().amax((0, 1)).view(len(layers) + 1, -1).amax(1)
    for name, worst, size in zip([*layers, "after the norm"], difference.tolist(), largest.tolist(), strict=True):
        print(f"  layer {name}: largest number {size:.1f}, largest difference {worst:.1e}")
    equal = bool((difference <= TOLERANCE).all())
    print("equal: hidden states" if equal else f"DIFFERENT: expected at most {TOLERANCE:.0e}")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
