"""Train a drafter, measure it, export it: ``python train.py model=eagle3 target=llama-8b``; ``--help`` says more."""

import sys
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from specdraft.entry import CONF, INTERRUPTED, build, entry_point


@entry_point(CONF, "train")
def main(config: DictConfig) -> float | None:
    """Target, data, training, then evaluation and export of the best head; gives its live acceptance length."""
    # Imported here so that --help answers at once.
    from lightning.pytorch.utilities import rank_zero_only

    from specdraft.data.prompts import check_lengths
    from specdraft.export import export
    from specdraft.training.callbacks.stop_signal import Interrupted
    from specdraft.training.fit import best_acceptance_length, check_checkpoints, fit
    from specdraft.training.monitoring.loggers import build_loggers
    from specdraft.training.planning.plan import find_architecture, make_plan
    from specdraft.training.preflight import prepare_run
    from specdraft.training.settings import check_values
    from specdraft.training.summary import outputs

    check_values(config)
    if config.plan:
        print("\n".join(make_plan(config, *find_architecture(config)).lines()))
        return None
    run = prepare_run(config)
    data = build(config.data)
    loggers = build_loggers(config, run.directory, run.resume)
    generator = build(config.generator)
    target = build(config.target)
    run = replace(run, evaluation=run.evaluation.known(target))
    if config.evaluate:
        check_lengths(target.tokenizer, run.prompts, target.max_length, run.evaluation.max_new_tokens)
    check_checkpoints(config, target)
    data.prepare(target, generator)
    try:
        module = fit(config, target, data, loggers, run)
    except Interrupted as stop:
        rank_zero_only(print)(f"\n{stop}, as does resume=auto")
        sys.exit(INTERRUPTED)
    if module.trainer.is_global_zero:
        print(f"\n{outputs(run.directory, module.drafter, loggers)}")
        if config.evaluate:
            measure(config, run, target)
        if run.engine is not None:
            print(f"export:  {export(run.directory, run.engine)}")
    return best_acceptance_length(module.trainer)


def measure(config: DictConfig, run: Any, target: Any) -> None:
    """Evaluate the best head as ``evaluate.py`` would; print a table, write JSON and HTML."""
    from specdraft.drafters.checkpoint import load_drafter
    from specdraft.evaluation import evaluate, table, write_report

    drafter = load_drafter(run.directory)[0].to(target.device, target.dtype)
    notes = {"benchmark": config.evaluation.benchmark, "checkpoint": str(run.directory)}
    compare = build(config.compare)
    result = evaluate(target, drafter, run.prompts, run.evaluation, compare, notes, cost=run.cost, engine=run.engine)
    print(table(result))
    print(f"\nresults: {result.write_json(run.directory / 'evaluation.json')}")
    print(f"report:  {write_report(result, run.directory / 'report.html')}")


if __name__ == "__main__":
    main()
