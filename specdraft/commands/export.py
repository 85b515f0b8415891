"""Write a trained drafter as a serving engine loads it: ``python export engine=vllm checkpoint=PATH``."""

from omegaconf import DictConfig

from specdraft.entry import CONF, build, entry_point
from specdraft.errors import UserError


@entry_point(CONF, "export")
def main(config: DictConfig) -> None:
    """Export, and say where to."""
    # Imported here so that --help answers at once.
    from specdraft.export import export
    from specdraft.training.monitoring.silence_warnings import silence_warnings

    silence_warnings()
    if config.checkpoint is None:
        raise UserError("checkpoint= is missing: expected the path of a drafter, or of a run directory that holds one")
    print(f"export: {export(config.checkpoint, build(config.engine), config.output)}")


if __name__ == "__main__":
    main()
