"""Measure a trained drafter by really decoding with it: ``python evaluate.py checkpoint=PATH``; see ``--help``."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specdraft.entry import build, entry_point
from specdraft.errors import UserError


@entry_point(Path(__file__).parent / "conf", "evaluate")
def main(config: DictConfig) -> None:
    """Decode the benchmark's prompts with and without the drafter; print a table, write JSON and HTML."""
    # Imported here so that --help answers at once.
    import torch

    from specdraft.drafters.checkpoint import check_target, find, load_drafter
    from specdraft.evaluation import EvaluationSettings, evaluate, load_prompts, table, write_report

    if config.checkpoint is None:
        raise UserError("checkpoint= is missing: expected the path of a drafter, or of a run directory that holds one")
    drafter, trained = load_drafter(config.checkpoint)
    if config.decoding.num_draft_tokens is None:
        config.decoding.num_draft_tokens = trained.get("extra", {}).get("decoding", {}).get("num_draft_tokens", 5)
    settings = EvaluationSettings.from_config(dict(config.decoding), config.seed)
    prompts = load_prompts(config.benchmark, config.limit)

    if config.target.name is None:
        config.target.name, config.target.revision = trained["target"]["name"], trained["target"]["revision"]
    if config.target.dtype is None:
        on_gpu = torch.cuda.is_available() and config.target.device != "cpu"
        config.target.dtype = "auto" if on_gpu else "float32"
    target = build(config.target)
    check_target(trained, target)
    drafter.to(target.device, target.dtype)

    checkpoint = str(find(config.checkpoint).resolve())
    notes = {"benchmark": config.benchmark, "checkpoint": checkpoint, "drafter": trained["drafter"]}
    evaluation = evaluate(target, drafter, prompts, settings, build(config.compare), notes)
    output = Path(HydraConfig.get().runtime.output_dir)
    print(table(evaluation))
    print(f"\nresults: {evaluation.write_json(output / 'evaluation.json')}")
    print(f"report:  {write_report(evaluation, output / 'report.html')}")


if __name__ == "__main__":
    main()
