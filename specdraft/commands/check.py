"""``specdraft check model=NAME``: what every drafter has to hold, on one of your own; ``--help`` says more."""

import sys
import time

from omegaconf import DictConfig

from specdraft.entry import CONF, build, entry_point
from specdraft.errors import UserError

FAILURES = 1  # exit status


@entry_point(CONF, "check")
def main(config: DictConfig) -> None:
    """Build the drafter as a training does, beside a small target; print a line per check."""
    # Imported here so that --help answers at once.
    import torch

    from specdraft.check import CHECKS, Level, Subject, run_check
    from specdraft.check.suite import chosen

    if "model" not in config or config.model is None:
        raise UserError("model= is missing: expected the name of a file of conf/model, of specdraft or of your own")
    if config.samples < 100:
        raise UserError(f"samples is {config.samples}: expected at least 100, for a test of a distribution")
    names = chosen(config.checks)
    target = build(config.random if config.target.name is None else config.target)
    size = config.model.get("draft_vocab_size")
    kept = min(size, target.vocab_size // 2) if size is not None else None
    # As a training chooses it, but for the size: a part of the vocabulary, of ids that are not their own numbers.
    ids = torch.arange(target.vocab_size)
    vocabulary = ids if kept is None else ids[1::2][:kept]
    subject = Subject(build(config.model.drafter, _partial_=True), target, vocabulary, config.seed, config.samples)
    kind = type(subject.plain())
    print(f"{kind.__module__}.{kind.__qualname__} beside {target.identity.name} of {target.vocab_size} tokens")
    started, failed, left_out = time.perf_counter(), [], 0
    for name in names:
        outcome = run_check(name, subject)
        print(outcome.line(max(map(len, CHECKS))), flush=True)
        failed += [name] if outcome.level is Level.FAILED else []
        left_out += outcome.level is Level.NOT_APPLICABLE
    tried = len(names) - left_out
    beside = f", {left_out} not applicable" if left_out else ""
    print(f"\n{tried - len(failed)} of {tried} checks hold{beside} ({time.perf_counter() - started:.0f} s)")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
        sys.exit(FAILURES)


if __name__ == "__main__":
    main()
