"""Write a trained drafter as a serving engine loads it: ``python export engine=vllm checkpoint=PATH``."""

from omegaconf import DictConfig

from specdraft.entry import CONF, build, entry_point
from specdraft.errors import UserError


@entry_point(CONF, "export")
def main(config: DictConfig) -> None:
    """Export, and say where to and how it is served."""
    # Imported here so that --help answers at once.
    from specdraft.export import export
    from specdraft.export.writer import CARD
    from specdraft.training.monitoring.silence_warnings import silence_warnings

    silence_warnings()
    if config.checkpoint is None:
        raise UserError("checkpoint= is missing: expected the path of a drafter, or of a run directory that holds one")
    directory = export(config.checkpoint, build(config.engine), config.output, config.quantize)
    usage = (directory / CARD).read_text(encoding="utf-8").partition("\n## Serving")[2].partition("\n## Acceptance")[0]
    print(f"export: {directory}\n\nServing{usage}", end="")


if __name__ == "__main__":
    main()
