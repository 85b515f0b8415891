"""Train a drafter, measure it, export it: ``python train.py model=eagle3 target=llama-8b``; ``--help`` says more."""

import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning import seed_everything
from omegaconf import DictConfig

from specdraft.entry import CONF, INTERRUPTED, build, entry_point


@entry_point(CONF, "train")
def main(config: DictConfig) -> None:
    """Target, data, training, then evaluation and export of the best head."""
    # Imported here so that --help answers at once.
    from specdraft.drafters.base import Drafter
    from specdraft.drafters.checkpoint import about_target, load_drafter
    from specdraft.evaluation import CostSettings, EvaluationSettings, evaluate, load_prompts, table, write_report
    from specdraft.export import export, layout_for
    from specdraft.training.callbacks.checkpoint import Interrupted
    from specdraft.training.checkpoints.resume import check_alike, check_unfinished, find_resume
    from specdraft.training.fit import fit
    from specdraft.training.monitoring.loggers import build_loggers, where
    from specdraft.training.monitoring.silence_warnings import silence_warnings
    from specdraft.training.monitoring.sizes import explain_sizes
    from specdraft.training.planning.plan import find_architecture, make_plan
    from specdraft.training.preflight import check_before_work, check_devices, check_sweep, engine_config
    from specdraft.training.run_lock import acquire_run_lock
    from specdraft.training.strategies import claim_gpu

    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.output_dir)
    settings = EvaluationSettings.from_config(config.decoding, config.seed)
    cost = None if config.evaluation.cost_model is None else CostSettings(**config.evaluation.cost_model)
    if config.plan:
        print("\n".join(make_plan(config, *find_architecture(config)).lines()))
        return
    check_sweep(config.trainer, hydra.mode is RunMode.MULTIRUN)
    check_devices(config.trainer)
    claim_gpu(config.trainer)
    check_before_work(config, directory)
    resume = find_resume(config.resume, Path(config.run_family), print)
    if resume is not None:
        check_unfinished(resume, config.trainer.max_steps)
        check_alike(resume, config)
    acquire_run_lock(directory, resume)
    data = build(config.data)
    engine = build(engine_config(CONF, config.export)) if config.export else None
    silence_warnings()
    seed_everything(config.seed, workers=True, verbose=False)
    loggers = build_loggers(config, directory, resume)
    generator = build(config.generator)
    target = build(config.target)
    data.prepare(target, generator)

    def servable(drafter: Drafter) -> None:
        # Days of training must not end in a format that does not exist.
        if engine is not None:
            layout_for(drafter.served(), about_target(target), engine, directory / f"export-{engine.name}")

    try:
        module = fit(config, target, data, loggers, directory, resume, servable)
    except Interrupted as stop:
        print(f"\n{stop}, as does resume=auto")
        sys.exit(INTERRUPTED)
    if not module.trainer.is_global_zero:
        return

    print(f"\nhead:    {directory / 'drafter'}")
    print(f"size:    {explain_sizes(directory, module.drafter)}")
    for logger in loggers:
        print(f"curves:  {where(logger)}")
    if config.evaluate:
        drafter = load_drafter(directory)[0].to(target.device, target.dtype)
        prompts = load_prompts(config.evaluation.benchmark, config.evaluation.limit)
        notes = {"benchmark": config.evaluation.benchmark, "checkpoint": str(directory)}
        evaluation = evaluate(target, drafter, prompts, settings, build(config.compare), notes, cost=cost)
        print(table(evaluation))
        print(f"\nresults: {evaluation.write_json(directory / 'evaluation.json')}")
        print(f"report:  {write_report(evaluation, directory / 'report.html')}")
    if engine is not None:
        print(f"export:  {export(directory, engine)}")


if __name__ == "__main__":
    main()
