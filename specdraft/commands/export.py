"""Write a trained drafter as a serving engine loads it: ``python export engine=vllm checkpoint=PATH``."""

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from specdraft.entry import CONF, build, entry_point
from specdraft.errors import UserError

if TYPE_CHECKING:
    from specdraft.export import Engine


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
    shape = config.decoding.get("shape")
    engine = build(config.engine)
    if config.hub is not None:
        hub.check_repository(config.hub)
    if config.drafter is not None or config.retrieval is not None or shape is not None:
        if config.hub is not None:
            raise UserError("a proposer is code of ours, not weights: expected hub= without drafter=, or leave hub out")
        directory = _proposer(config, engine)
    elif config.checkpoint is None:
        raise UserError("checkpoint= is missing: expected the path of a drafter, or of a run directory that holds one")
    else:
        _check_unused(config)
        directory = export(config.checkpoint, engine, config.output, config.quantize, config.hub)
    usage = (directory / CARD).read_text(encoding="utf-8").partition("\n## Serving")[2].partition("\n## Acceptance")[0]
    print(f"export: {directory}\n\nServing{usage}", end="")
    if config.hub is not None:
        source = find(config.checkpoint)
        trained = read_config(source)
        measured = about_these_weights(evaluation_of(source), config.quantize or trained.get("quantization"))
        address = hub.publish(directory, config.hub, engine.name, trained, measured, config.hub_private)
        print(f"\nhub: {address}")


def _check_unused(config: DictConfig) -> None:
    """Raises UserError for settings of a proposer alone: a checkpoint's weights are for the target that taught them."""
    given = [f"decoding.{name}={value}" for name, value in config.decoding.items() if value is not None]
    given += [f"target.{name}={value}" for name, value in config.target.items() if value is not None]
    if given:
        said = f"{given[0]} does not go with the weights of checkpoint={config.checkpoint}, which is for its own target"
        raise UserError(f"{said}: expected it with drafter= or decoding/shape= alone; leave it out")


def _proposer(config: DictConfig, engine: "Engine") -> Path:
    """For vLLM, which ``engine`` has to be: what drafts from tokens alone, in its process."""
    from specdraft.drafters.checkpoint import complete_options, read_config
    from specdraft.export.proposer import chain_rule, export_proposer
    from specdraft.serving.settings import ProposerSettings
    from specdraft.targets.chat_template import checked_options
    from specdraft.targets.loading import check_options

    given = [f"engine={engine.name}"] if engine.name != "vllm" else []
    given += [f"quantize={config.quantize}"] if config.quantize is not None else []
    given += [f"engine.dtype={engine.dtype}"] if engine.dtype != "auto" else []
    if given:
        asked = "drafter=, drafter@retrieval= and decoding/shape= make vLLM run code of ours"
        raise UserError(f"{asked}, but {given[0]} is given: expected engine=vllm without quantize= and engine.dtype=")
    if (config.drafter is None) == (config.checkpoint is None):
        raise UserError("a proposer drafts with checkpoint= or with drafter=: expected one of the two")
    trained = {} if config.checkpoint is None else read_config(config.checkpoint)
    target = config.target.name or trained.get("target", {}).get("name")
    if target is None:
        raise UserError("target= is missing: expected the target that vLLM is to serve, as target=llama-8b")
    k = config.decoding.num_draft_tokens
    if k is None:
        k = trained.get("extra", {}).get("decoding", {}).get("num_draft_tokens", 5)
    if not isinstance(k, int) or k < 1:
        raise UserError(f"decoding.num_draft_tokens is {k}: expected at least 1 drafted token a round")
    config.decoding.num_draft_tokens = k
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    settings = ProposerSettings(
        drafter=plain["drafter"],
        checkpoint=plain["checkpoint"],
        retrieval=plain["retrieval"],
        retrieval_min_tokens=plain["retrieval_min_tokens"],
        stop=chain_rule(plain["decoding"].get("shape")),
    )
    revision = config.target.get("revision") if config.target.name else trained["target"]["revision"]
    check_options({**config.target, "name": target, "revision": revision})  # those of a checkpoint were checked before
    complete_options(config.target, trained)
    options = checked_options(config.target.get("chat_template_options"))
    return export_proposer(settings, target, k, Path(plain["output"] or "export-vllm"), options)


if __name__ == "__main__":
    main()
