"""Values of a training configuration that no run and no plan can use are refused at once, in one sentence."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specdraft.errors import UserError, check_switch, check_whole_number

# Parts of the configuration that no run is without, and what leaves out what they are about.
_SECTIONS = {
    "evaluation": "; evaluate=false leaves it out",
    "live": "; live.every_n_steps=0 measures after the last step only",
    **dict.fromkeys(("trainer", "data", "decoding", "checkpoint", "guard", "planning"), ""),
}

_WHOLE = (
    ("trainer.max_steps", 1, "the number of optimizer steps"),
    ("trainer.accumulate_grad_batches", 1, "batches per optimizer step"),
    ("trainer.val_check_interval", 1, "batches from one validation to the next"),
    ("trainer.num_nodes", 1, "the machines that take part"),
    ("trainer.log_every_n_steps", 1, "optimizer steps from one line of the curves to the next"),
    ("trainer.num_sanity_val_steps", -1, "batches validated before training, -1 for all"),
    ("data.batch_size", 1, "the sequences per device and step"),
    ("data.sequence_length", 2, "the tokens of a packed sequence"),
    ("live.max_new_tokens", 2, "as the first token of an answer is never drafted"),
    ("live.prompts", 1, "the prompts decoded by each live measurement"),
    ("live.every_n_steps", 0, "0 measures after the last step only"),
    ("checkpoint.every_n_steps", 0, "0 saves with the live measurements only"),
    ("checkpoint.keep", 1, "the last checkpoints that stay on disk"),
    ("seed", 0, "of everything that is drawn at random"),
)


def check_values(config: DictConfig) -> None:
    """Raises UserError for a part that is missing, and for a value that nothing can be."""
    for name, instead in _SECTIONS.items():
        if not isinstance(given := config.get(name), DictConfig):
            given = "null" if given is None else given
            raise UserError(f"{name} is {given}: expected its settings, as conf/train.yaml has them{instead}")
    for key, least, meaning in _WHOLE:
        check_whole_number(key, OmegaConf.select(config, key), least, meaning)
    _check_trainer(config.trainer)
    for name in ("utilization", "disk"):
        if not (_is_number(value := config.planning[name]) and value > 0):
            raise UserError(f"planning.{name} is {value}: expected a positive number")


def _check_trainer(trainer: Mapping[str, Any]) -> None:
    for name in ("enable_model_summary", "use_distributed_sampler"):
        check_switch(f"trainer.{name}", trainer.get(name, False))
    for name in ("limit_train_batches", "overfit_batches"):
        if (given := trainer.get(name)) is not None:
            mend = "leave it out; trainer.max_steps and data.limit say how much is trained on"
            raise UserError(f"trainer.{name} is {given}: expected none, as an epoch has whole optimizer steps; {mend}")
    clip: Any = trainer.get("gradient_clip_val")
    batches: Any = trainer.get("limit_val_batches")
    epochs = trainer.get("check_val_every_n_epoch")
    if clip is not None and not (_is_number(clip) and clip >= 0):
        raise UserError(f"trainer.gradient_clip_val is {clip}: expected a number from 0 upwards, or null for none")
    if not (_is_number(batches) and batches >= 0 and (isinstance(batches, int) or batches <= 1)):
        wanted = "a whole number of validation batches, or a share of them from 0.0 to 1.0"
        raise UserError(f"trainer.limit_val_batches is {batches}: expected {wanted}")
    if epochs is not None:
        check_whole_number("trainer.check_val_every_n_epoch", epochs, 1, "or null to validate by steps")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
