"""What training starts from: a new drafter for the target, or one whose weights are trained on."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from specdraft.data.datamodule import DataModule
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import check_target, load_drafter
from specdraft.entry import build
from specdraft.errors import UserError
from specdraft.targets import Target


def build_drafter(config: DictConfig, target: Target, data: DataModule) -> tuple[Drafter, torch.Tensor]:
    """The drafter and its draft vocabulary, ascending target ids ``[Vd]``. ``data`` is prepared.

    With ``config.init`` it has the weights and the draft vocabulary of that checkpoint. Raises UserError for a
    checkpoint of another target or another drafter than the configuration describes.
    """
    make = build(config.model.drafter, _partial_=True)
    if config.init is None:
        vocabulary = data.draft_vocabulary(config.model.draft_vocab_size)
        return make(target=target, draft_vocabulary=vocabulary), vocabulary
    given, about = load_drafter(config.init)
    check_target(about, target)
    ids = getattr(getattr(given, "vocabulary", None), "ids", None)  # None: the whole vocabulary
    vocabulary = torch.arange(target.vocab_size) if ids is None else ids
    drafter = make(target=target, draft_vocabulary=vocabulary)
    _check_alike(drafter, given, config.init)
    drafter.load_state_dict(given.state_dict())
    return drafter, vocabulary


def _check_alike(drafter: Drafter, given: Drafter, path: str | Path) -> None:
    if type(drafter) is not type(given):
        raise UserError(
            f"init={path} holds a drafter of the kind {type(given).__name__}, and the configuration makes "
            f"{type(drafter).__name__}: choose the model of the checkpoint"
        )
    ours: dict[str, Any] = drafter.config()
    for name, value in given.config().items():
        if name not in drafter.training_options and ours.get(name) != value:
            raise UserError(
                f"init={path} holds a drafter with {name}={_shown(value)}, and the configuration makes one with "
                f"{_shown(ours.get(name))}: set model.drafter to what the checkpoint has"
            )


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
