"""``specdraft sharpen checkpoint=RUN output=DIR``: as sure as sampled drafts should be; ``--help`` says more."""

import copy
from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig

from specdraft.entry import CONF, build, entry_point
from specdraft.errors import UserError


@entry_point(CONF, "sharpen")
def main(config: DictConfig) -> None:
    """Scale a drafter's logits on the target's answers, and write it anew."""
    # Imported here so that --help answers at once.
    from specdraft.data.prompts import check_lengths, encode, load_prompts, usual_benchmark
    from specdraft.drafters.checkpoint import check_target, complete_target, load_drafter, other_options, save_drafter
    from specdraft.evaluation.sharpening import best_sharpness, own_heads, scale_logits

    if config.checkpoint is None or config.output is None:
        raise UserError("expected checkpoint=RUN, a run or a drafter, and output=DIR, where the sharpened drafter goes")
    output = Path(config.output)
    if output.exists():
        raise UserError(f"{output} exists: expected a new directory; choose one with output=")
    drafter, trained = load_drafter(config.checkpoint)
    own_heads(drafter)
    prompts = load_prompts(config.prompts or usual_benchmark(trained), config.limit)
    complete_target(config.target, trained)
    target = build(config.target)
    check_target(trained, target)
    if other := other_options(trained, target):
        print(f"note: {other}", flush=True)
    check_lengths(target.tokenizer, prompts, target.max_length, config.max_new_tokens)
    asked = [encode(target.tokenizer, prompt.opening) for prompt in prompts]
    served = copy.deepcopy(drafter).to(target.device, target.dtype)  # as it is decoded with; the weights stay in fp32
    found = best_sharpness(served, target, asked, config.max_new_tokens, config.seed)
    scale_logits(drafter, found.factor)
    earlier = trained["extra"].get("sharpness", {}).get("factor", 1.0)
    about = asdict(found) | {"factor": found.factor * earlier}
    place = save_drafter(drafter, output, target.identity, trained["extra"] | {"sharpness": about})
    pairs = zip(found.before, found.after, strict=True)
    rates = ", ".join(f"{before:.3f} to {after:.3f}" for before, after in pairs)
    print(f"logits times {found.factor:g}: sampled tokens accepted, by position, {rates} ({found.tokens:,} tokens)")
    print(f"drafter: {place}")


if __name__ == "__main__":
    main()
