"""``specdraft doctor checkpoint=PATH [target.name=...]``; ``--help`` says more."""

import sys

from omegaconf import DictConfig

from specdraft.entry import CONF, build, entry_point
from specdraft.errors import UserError

FAULTS = 1  # exit status


@entry_point(CONF, "doctor")
def main(config: DictConfig) -> None:
    """Load the drafter as it is served, and its target; print a finding per check."""
    # Imported here so that --help answers at once.
    from specdraft.data.prompts import usual_benchmark
    from specdraft.doctor import Level, LoadedDrafter, Serving, report, run_checks
    from specdraft.doctor.checks import is_checkpoint
    from specdraft.drafters.checkpoint import read_config
    from specdraft.evaluation import load_prompts

    if config.checkpoint is None:
        raise UserError("checkpoint= is missing: expected the path of a run, a drafter, or an exported EAGLE-3 head")
    recorded = read_config(config.checkpoint) if is_checkpoint(config.checkpoint) else {}
    if config.target.name is None:
        if not recorded:
            found = f"{config.checkpoint} is an engine's and names no target"
            raise UserError(f"{found}: expected target.name=... beside it")
        config.target.name, config.target.revision = recorded["target"]["name"], recorded["target"]["revision"]
    prompts = load_prompts(config.traffic or usual_benchmark(recorded), config.limit)
    loaded = LoadedDrafter.load(config.checkpoint, build(config.target))
    findings = run_checks(loaded, prompts, Serving(**config.serving), config.max_new_tokens)
    print(report(findings))
    if any(finding.level is Level.FAULT for finding in findings.values()):
        sys.exit(FAULTS)


if __name__ == "__main__":
    main()
