"""From a configuration, a target and its data to a trained head in ``drafter/`` of the run directory."""

import inspect
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig, OmegaConf

from specdraft.data.datamodule import DataModule
from specdraft.decoding.shapes import draft_tokens
from specdraft.drafters.base import Drafter
from specdraft.drafters.checkpoint import about_target, check_target, load_drafter, other_options
from specdraft.drafters.quantization import quantize
from specdraft.drafters.vocabulary import DraftVocabulary
from specdraft.drafters.vocabulary_transfer import with_vocabulary_of
from specdraft.entry import build
from specdraft.errors import UserError
from specdraft.export import layout_for
from specdraft.files import atomic_directory, atomic_file
from specdraft.onednn import learning
from specdraft.redaction import redact
from specdraft.targets import Target
from specdraft.text import shorten
from specdraft.training.boosting import Earlier
from specdraft.training.callbacks import find_callback
from specdraft.training.callbacks.live_acceptance import LiveAcceptance
from specdraft.training.callbacks.rank_heartbeat import broken_connections_explained
from specdraft.training.checkpoints.file import checkpoint_step
from specdraft.training.checkpoints.resume import CHECKPOINTS
from specdraft.training.devices import uses_gpus, wants_compiled
from specdraft.training.gloo import wait_for_gloo
from specdraft.training.module import DrafterModule
from specdraft.training.monitoring.loggers import close, log_identity
from specdraft.training.monitoring.metrics import flops_per_token
from specdraft.training.preflight import Run
from specdraft.training.summary import summary


def fit(config: DictConfig, target: Target, data: DataModule, loggers: list[Logger], run: Run) -> DrafterModule:
    """Train. The run's directory then holds checkpoints/ and drafter/, the best head. ``data`` is prepared. Raises
    Interrupted once a requested stop has left a checkpoint, UserError for a loss that is not finite, or, before any
    training, for a drafter that cannot be exported for the run's engine."""
    drafter, vocabulary = build_drafter(config, target, data)
    quantize(drafter, config.quantize)
    data.read_for(drafter)
    drafter.compiled = wants_compiled(config.compile, uses_gpus(config.trainer.accelerator))
    if run.engine is not None:
        layout_for(drafter.served(), about_target(target), run.engine, run.directory / f"export-{run.engine.name}")
    about = data.describe() | data.coverage(vocabulary)
    settings: Any = OmegaConf.to_container(config, resolve=True)
    length = min(config.data.sequence_length, target.max_length)
    stored = config.data.store is not None
    flops = flops_per_token(target, drafter, length, stored=stored)
    describe = redact({"config": settings, "data": about})
    extra = {
        "data": about,
        "decoding": {"num_draft_tokens": draft_tokens(config.decoding.num_draft_tokens)},
        "training": {"max_steps": config.trainer.max_steps, "seed": config.seed, "boost": settings["boost"]},
        "target": about_target(target),
    }
    earlier = None if config.boost is None else Earlier.of(config.boost, drafter, target, stored)
    module = DrafterModule(drafter, target, run.optimizer, describe, flops, extra, earlier)
    log_identity(loggers, redact(settings), about, target, data)

    callbacks = build_callbacks(config.callbacks)
    trainer = build(config.trainer, _partial_=True)(
        strategy=build(config.strategy),
        precision=_precision(config),
        logger=loggers or False,
        callbacks=callbacks,
        enable_progress_bar=any(isinstance(each, TQDMProgressBar) for each in callbacks),
        default_root_dir=run.directory,
    )
    if (live := find_callback(trainer, LiveAcceptance)) is not None:
        live.truncates_drafts = run.evaluation.drawn_as(run.engine).truncate_drafts is not False
    if run.resume is not None:
        copy_best_from_resumed(run.resume, run.directory)
    gpus = uses_gpus(config.trainer.accelerator)
    if gpus:
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in fp32
    started = time.perf_counter()
    try:
        with broken_connections_explained(run.directory / CHECKPOINTS), nullcontext() if gpus else learning(drafter):
            trainer.fit(module, data, ckpt_path=run.resume, weights_only=True)
    except SystemExit as error:
        # Lightning turns a Ctrl-C outside our handler's reach into exit status 1.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        wait_for_gloo()
        torch.set_float32_matmul_precision("highest")  # the evaluation compares tokens exactly
        close(loggers)
    if run.resume is not None and trainer.global_step == checkpoint_step(run.resume):
        what = f"no step was trained behind {run.resume}: what ended that run, such as trainer.max_time, counts on here"
        raise UserError(f"{what}; raise it or leave it out")
    if trainer.is_global_zero:
        print(f"\n{summary(module, find_callback(trainer, LiveAcceptance), time.perf_counter() - started)}")
    return module


def best_acceptance_length(trainer: Trainer) -> float | None:
    """Of the best head that was measured while training, None without a measurement."""
    live = find_callback(trainer, LiveAcceptance)
    return None if live is None else live.best


def build_callbacks(nodes: DictConfig) -> list[Callback]:
    """The callbacks of ``conf/callbacks``, in their order; null leaves one out. Raises UserError for what is none."""
    callbacks = {name: build(node) for name, node in nodes.items() if node is not None}
    for name, callback in callbacks.items():
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks.{name!s} makes {type(callback).__name__}: expected a lightning.Callback")
    return list(callbacks.values())


def copy_best_from_resumed(resume: Path, directory: Path) -> None:
    """Copy the best head and its checkpoint of the run that is resumed, in case nothing better follows."""
    if resume.parent.name != CHECKPOINTS:
        return  # a file by itself: what lies around it is not of its run
    for name in ("drafter", f"{CHECKPOINTS}/best.ckpt"):
        source, copy = resume.parent.parent / name, directory / name
        if copy.exists():
            continue
        if source.is_dir():
            with atomic_directory(copy) as temporary:
                shutil.copytree(source, temporary, dirs_exist_ok=True)
        elif source.exists():
            with atomic_file(copy) as temporary:
                shutil.copyfile(source, temporary)


def _precision(config: DictConfig) -> Any:
    if config.trainer.precision != "auto":
        return config.trainer.precision
    gpus = uses_gpus(config.trainer.accelerator)
    return "bf16-mixed" if gpus and torch.cuda.is_bf16_supported() else "32-true"


def build_drafter(config: DictConfig, target: Target, data: DataModule) -> tuple[Drafter, torch.Tensor]:
    """The drafter and its draft vocabulary, ascending target ids ``[Vd]``. ``data`` is prepared. With ``config.init``
    both are of that checkpoint: how the drafter is trained is the configuration's, and all else is its own, but for the
    draft vocabulary with ``config.init_vocabulary=data``. Raises UserError if it is of another target or kind, or other
    than the configuration says where that says something."""
    make = build(config.model.drafter, _partial_=True)
    if config.init is None:
        vocabulary = data.draft_vocabulary(config.model.draft_vocab_size)
        return make(target=target, draft_vocabulary=vocabulary), vocabulary
    given, drafter, vocabulary = load_init(config, target)
    if config.init_vocabulary == "data":
        vocabulary = data.draft_vocabulary(config.model.draft_vocab_size)
        drafter = make(target=target, draft_vocabulary=vocabulary)
        given = with_vocabulary_of(drafter, given)
    training = {name: value for name, value in drafter.config().items() if name in drafter.training_options}
    if drafter.config() != (arguments := given.config() | training):
        drafter = type(given)(**arguments)
        if isinstance(drafter, DraftVocabulary):
            drafter.set_draft_vocabulary(vocabulary)
        drafter.bind(target)
    drafter.load_state_dict(given.state_dict())
    drafter.files = given.files
    return drafter, vocabulary


def check_checkpoints(config: DictConfig, target: Target) -> None:
    """Raises UserError for drafters of ``init`` and ``boost`` that do not go with the target or the drafter to train.
    Needs no data, so that they are refused before the target answers."""
    if config.init is not None:
        load_init(config, target)
    if config.boost is not None:
        vocabulary = torch.arange(config.model.draft_vocab_size or target.vocab_size)
        drafter = build(config.model.drafter, _partial_=True)(target=target, draft_vocabulary=vocabulary)
        Earlier.of(config.boost, drafter, target, config.data.store is not None)


def load_init(config: DictConfig, target: Target) -> tuple[Drafter, Drafter, torch.Tensor]:
    """The drafter of ``config.init``, a new one of the configuration with its draft vocabulary, and that vocabulary.
    Raises UserError for a drafter of another target or kind."""
    given, about = load_drafter(config.init)
    check_target(about, target)
    if other := other_options(about, target):
        rank_zero_warn(other)
    ids = getattr(getattr(given, "vocabulary", None), "ids", None)  # None: the whole vocabulary
    vocabulary = torch.arange(target.vocab_size) if ids is None else ids
    drafter = build(config.model.drafter, _partial_=True)(target=target, draft_vocabulary=vocabulary)
    _check_alike(drafter, given, config)
    return given, drafter, vocabulary


def _check_alike(drafter: Drafter, given: Drafter, config: DictConfig) -> None:
    made, held = type(drafter), type(given)
    if made is not held:
        what = f"init={config.init} holds a drafter of the kind {held.__name__}, and the configuration makes"
        raise UserError(f"{what} {made.__name__}: choose the model of the checkpoint")
    ours, said = drafter.config(), config.model.drafter
    for name, value in given.config().items():
        unsaid = said.get(name) is None or ours.get(name) == _default(held, name)
        chosen = name == "draft_vocab_size" and config.init_vocabulary == "data"
        if name not in drafter.training_options and ours.get(name) != value and not (unsaid or chosen):
            what = f"init={config.init} holds a drafter with {name}={shorten(value)}, and the configuration makes one"
            raise UserError(f"{what} with {shorten(ours[name])}: set model.drafter to what the checkpoint has")


def _default(kind: type[Drafter], name: str) -> Any:
    """What a drafter is without being told of an argument of its constructor, or of one that it inherits."""
    given = (inspect.signature(each).parameters.get(name) for each in kind.__mro__)
    return next((parameter.default for parameter in given if parameter is not None), inspect.Parameter.empty)
