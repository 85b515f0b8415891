"""Write a trained drafter as a serving engine loads it: ``python export engine=vllm checkpoint=PATH``."""

from omegaconf import DictConfig

from specdraft.entry import CONF, build, entry_point
from specdraft.errors import UserError


@entry_point(CONF, "export")
def main(config: DictConfig) -> None:
    """Export, and say where to and how it is served."""
    # Imported here so that --help answers at once.
    from specdraft.drafters.checkpoint import find, read_config
    from specdraft.export import export, hub
    from specdraft.export.model_card import about_these_weights, evaluation_of
    from specdraft.export.writer import CARD
    from specdraft.training.monitoring.silence_warnings import silence_warnings

    silence_warnings()
    if config.checkpoint is None:
        raise UserError("checkpoint= is missing: expected the path of a drafter, or of a run directory that holds one")
    if config.hub is not None:
        hub.check_repository(config.hub)
    engine = build(config.engine)
    directory = export(config.checkpoint, engine, config.output, config.quantize, config.hub)
    usage = (directory / CARD).read_text(encoding="utf-8").partition("\n## Serving")[2].partition("\n## Acceptance")[0]
    print(f"export: {directory}\n\nServing{usage}", end="")
    if config.hub is not None:
        source = find(config.checkpoint)
        trained = read_config(source)
        measured = about_these_weights(evaluation_of(source), config.quantize or trained.get("quantization"))
        address = hub.publish(directory, config.hub, engine.name, trained, measured, config.hub_private)
        print(f"\nhub: {address}")


if __name__ == "__main__":
    main()
