"""``specdraft doctor checkpoint=PATH [target=NAME]``; ``--help`` says more."""

import sys
from pathlib import Path

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
    from specdraft.doctor.checks import is_checkpoint, note
    from specdraft.doctor.drift import check_drift, find_report, sample
    from specdraft.doctor.traffic import write_worst
    from specdraft.drafters.checkpoint import complete_target, find, read_config
    from specdraft.evaluation import load_prompts
    from specdraft.export.importing.files import read_configuration
    from specdraft.export.quantized import scheme_of

    if config.checkpoint is None:
        raise UserError("checkpoint= is missing: expected the path of a run, a drafter or an export")
    if is_checkpoint(config.checkpoint):
        recorded, directory = read_config(config.checkpoint), find(config.checkpoint)
        quantization = recorded.get("quantization")
    else:
        recorded, directory = {}, Path(config.checkpoint)
        quantization = scheme_of(read_configuration(directory))
    if config.target.name is None and not recorded:
        found = f"{config.checkpoint} is an engine's and names no target"
        raise UserError(f"{found}: expected target=NAME or target.name=PATH beside it")
    complete_target(config.target, recorded)
    prompts = load_prompts(config.traffic or usual_benchmark(recorded), config.limit, logged=True)
    answered = sum(prompt.answered for prompt in prompts)
    if config.traffic is None and (config.report or config.worst):
        raise UserError("report= and worst= are about a traffic: expected traffic=PROMPTS.jsonl with them")
    before = find_report(directory, config.report, quantization)
    loaded = LoadedDrafter.load(config.checkpoint, build(config.target))
    serving = Serving(**config.serving)
    findings = run_checks(loaded, prompts, serving, config.max_new_tokens)
    if answered:
        said = f"{answered} of {len(prompts)} conversations end with an answer, which is left out"
        findings["traffic"] = note(f"{said}: the target answers their last question itself")
    traffic = []
    if config.traffic is not None and "decoding" in findings:
        traffic = sample(loaded, before, prompts, serving, config.max_new_tokens)
        findings |= check_drift(loaded, before, serving, traffic)
    print(report(findings))
    if config.worst and traffic:
        settings = write_worst(traffic, config.worst_share, Path(config.worst))
        print(f"\nworst requests: {config.worst}\n  specdraft train init={config.checkpoint} {settings}")
    if any(finding.level is Level.FAULT for finding in findings.values()):
        sys.exit(FAULTS)


if __name__ == "__main__":
    main()
