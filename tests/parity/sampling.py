"""``make parity-sampling``: penalties, top-k and top-p, in the real vLLM and in our decoder.

Greedy answers with penalties have the same tokens, with drafts and without, and the same counts: both judge every draft
by the tokens above it. A copy of the target with generation settings is sampled as vLLM does by default, which is what
``temperature=served`` stands for here: greedily with a penalty, token by token, and above temperature 0 with the same
acceptance. Exits with 1 if anything differs."""

import specdraft.threads  # noqa: F401  # first of all

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from comparison import decode, differences, rate_difference, table
from engine import MAX_NEW_TOKENS, held_out_prompts
from one_head import OneHead

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.served import SERVED, SHAPING, served
from specdraft.decoding.shapes import StaticTree
from specdraft.errors import exit_on_user_error
from specdraft.export.engine import GREEDY, SAMPLED
from specdraft.export.vllm import VLLM
from specdraft.targets import Target
from specdraft.targets.loading import location

PENALTIES = {
    "a repetition penalty": Sampling(repetition_penalty=1.2),
    "all penalties": Sampling(repetition_penalty=1.1, presence_penalty=0.4, frequency_penalty=0.15),
}
PUBLISHED = {
    "served greedily": {"temperature": 0.0, "repetition_penalty": 1.05},
    "served warm": {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
}
LEAST_ACCEPTANCE_LENGTH = 1.2  # above which equality says something


def published(target: str, name: str, work: Path) -> Path:
    """A copy of the target's directory with generation settings."""
    copy, settings = work / name.replace(" ", "-"), PUBLISHED[name]
    shutil.copytree(location(target), copy, dirs_exist_ok=True)
    file = copy / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings | {"do_sample": True}))
    return copy


@exit_on_user_error
def main() -> None:
    """Train, export, decode on both sides, compare, and say so."""
    head = OneHead.of(__doc__)
    engine, k = head.engine, head.num_draft_tokens
    runs = {drafting: flags for drafting in (GREEDY, SAMPLED) if (flags := head.flags(drafting))}
    failed = []
    for name in [*PENALTIES, *PUBLISHED]:
        place = str(published(head.target, name, engine.work)) if name in PUBLISHED else head.target
        target = Target.load(place, dtype="float32", device="cpu")
        prompts = held_out_prompts(target, head.prompts, k)
        sampling = served(target) if name in PUBLISHED else PENALTIES[name]
        asked = {each: getattr(sampling, each) for each in ("temperature", *SHAPING)}
        ways = runs if not sampling.greedy else {GREEDY: runs[GREEDY]}
        asked_of_vllm = [{"name": drafting, "flags": flags} for drafting, flags in ways.items()]
        theirs = engine.answers(target, prompts, asked_of_vllm, sampling=SERVED if name in PUBLISHED else asked)
        for drafting in ways:
            shape = StaticTree.chain(k, sampled=drafting == SAMPLED)
            decoder = Decoder(target, head.drafter, shape, replace(sampling, truncates_drafts=VLLM.truncates_drafts))
            ours, vllms = decode(decoder, prompts, MAX_NEW_TOKENS), theirs[drafting]
            print(f"\n== {name}: {sampling}; {drafting} drafts ==")
            if sampling.greedy:
                print(table(ours, theirs["plain"], vllms))
                found = differences(ours, theirs["plain"], vllms, LEAST_ACCEPTANCE_LENGTH)
            else:
                gap, (low, high) = rate_difference(ours, vllms)
                both = f"{ours.acceptance_length:.3f} by our decoder, {vllms.acceptance_length:.3f} by vLLM"
                print(said := f"acceptance length {both}; difference {gap:+.3f} [{low:+.3f}, {high:+.3f}] (99.9 %)")
                found = [] if low <= 0 <= high else [said]
            print("\n".join(f"DIFFERENT: {line}" for line in found) if found else "equal")
            failed += found
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
