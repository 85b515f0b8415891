"""``make parity-suffix``: suffix decoding by our proposer beside vLLM's own ``suffix``, computed by arctic-inference.

Both in the real vLLM, on the same prompts in the same order, one by one. Both emit the target's tokens; they are meant
to draft by the same rules, but of equally frequent tokens arctic-inference takes what its hash table has first. Exits
with 1 if tokens differ, or acceptance does beyond chance."""

import specdraft.threads  # noqa: F401  # first of all

import argparse
import json
import sys
from pathlib import Path

import torch
from comparison import COUNTS, decode, rate_difference
from engine import MAX_NEW_TOKENS, Engine, add_arguments, held_out_prompts
from proposed import Proposed
from short import TARGET

from specdraft.decoding.decoder import Decoder
from specdraft.errors import exit_on_user_error
from specdraft.targets import Target


@exit_on_user_error
def main() -> None:
    """Decode three times and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="a folder that holds arctic_inference")
    add_arguments(parser, "parity-suffix")
    options = parser.parse_args()
    engine, k = Engine.of(options), options.num_draft_tokens
    torch.set_num_threads(1)
    target = Target.load(TARGET, dtype="float32", device="cpu")
    prompts = held_out_prompts(target, options.prompts, k)
    case = Proposed.of("suffix", None, TARGET, k, engine.work)
    own = {"flags": json.dumps({"method": "suffix", "num_speculative_tokens": k}), "max_num_seqs": 1}
    runs = [{"name": "our proposer", **case.run(k)}, {"name": "vLLM's own", **own}]
    found = engine.answers(target, prompts, runs, packages=options.packages)
    plain = found.pop("plain")
    found = {"our decoder": decode(Decoder(target, case.drafter, case.shape(k)), prompts, MAX_NEW_TOKENS), **found}
    print(f"{len(prompts)} held-out prompts x {MAX_NEW_TOKENS} tokens, K = {k}, greedy, float32")
    for name, run in found.items():
        print(
            f"{name}: { ({each: run.counts[each] for each in COUNTS}) }, acceptance length {run.acceptance_length:.4f}"
        )
    gap, (low, high) = rate_difference(found["our proposer"], found["vLLM's own"])
    print(f"vLLM's own minus ours: {gap:+.3f} [{low:+.3f}, {high:+.3f}] (99.9 %)")
    sys.exit(0 if low <= 0 <= high and all(run.tokens == plain.tokens for run in found.values()) else 1)


if __name__ == "__main__":
    main()
