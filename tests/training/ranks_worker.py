"""One rank of two: trains every case in turn, and leaves what ``test_ranks.py`` compares.

``ranks_worker.py OUTPUT CASE...``; rank, world and port come from the environment, as torchrun sets them. One launch
serves all cases, because starting two processes costs more than all their steps. ``FAMILY/CASE>OTHER`` is trained as
CASE until it is told to stop after half of the steps, and goes on as OTHER.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.data.datamodule import DataModule
from specdraft.data.packing import PackedTensor
from specdraft.drafters.base import Drafter
from specdraft.drafters.dflash import DFlash, Domino, DSpark
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import MTP, Eagle, Eagle3, PEagle
from specdraft.drafters.jacobi_forcing import JacobiForcing
from specdraft.drafters.kangaroo import Kangaroo
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.pard import Pard
from specdraft.drafters.redrafter import ReDrafter
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from specdraft.targets.sharded import load_partitioned
from specdraft.training import strategies
from specdraft.training.callbacks.checkpoint import RunCheckpoint
from specdraft.training.callbacks.live_acceptance import LiveAcceptance
from specdraft.training.callbacks.loss_guard import LossGuard
from specdraft.training.callbacks.stop_signal import Interrupted, StopSignal
from specdraft.training.checkpoints.consolidated import full_precision_drafter
from specdraft.training.module import DrafterModule
from specdraft.training.monitoring.silence_warnings import silence_warnings
from specdraft.training.schedule import OptimizerSettings

VOCAB, LENGTH, STEPS, GLOBAL_BATCH = 64, 32, 4, 4


def make_model() -> LlamaForCausalLM:
    """The random target of every case."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).float()


def make_rows() -> Batch:
    """Ten rows of which some have many tokens to learn, some few, some none: means of means would differ."""
    count = 10
    ids = torch.randint(3, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(7))
    positions = torch.arange(LENGTH).repeat(count, 1)
    learnt = torch.tensor([28, 3, 0, 17, 9, 31, 5, 0, 22, 2])[:, None]
    return Batch(ids, positions, torch.zeros_like(ids), positions >= LENGTH - learnt)


class Rows(DataModule):
    """The rows above under the sampler and the loader of every run."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(source=SimpleNamespace(name="rows"), batch_size=batch_size)
        self._splits = {"train": SimpleNamespace(data=PackedTensor.of(make_rows()), about={"fingerprint": "rows"})}


def draft(target: Target, copies: int = 2, **options: Any) -> DraftModel:
    return DraftModel.for_target(target, copy_layers=copies, **options)


def adapted(target: Target) -> DraftModel:
    model = draft(target)
    model.adapt({"r": 4, "alpha": 8})
    return model


WEIGHED = {"sequence_mean": True, "confidence_smoothing": 0.5}
FAMILIES: dict[str, Callable[[Target], Drafter]] = {
    "eagle3": lambda target: Eagle3.for_target(target, torch.arange(0, VOCAB, 2), ttt_steps=3),
    "eagle1": lambda target: Eagle.for_target(target, ttt_steps=2),
    "eagle3-frozen": lambda target: Eagle3.for_target(
        target, torch.arange(0, VOCAB, 2), ttt_steps=3, projection="frozen", output_norm="frozen"
    ),
    "eagle3-weighed": lambda target: Eagle3.for_target(
        target, torch.arange(0, VOCAB, 2), ttt_steps=3, regression_weight=1.0, **WEIGHED
    ),
    "medusa": lambda target: Medusa.for_target(target, torch.arange(VOCAB), num_heads=3),
    "medusa-weighed": lambda target: Medusa.for_target(target, torch.arange(VOCAB), num_heads=3, **WEIGHED),
    "redrafter": lambda target: ReDrafter.for_target(target, torch.arange(0, VOCAB, 2), exit_size=40, ttt_steps=3),
    "mtp": lambda target: MTP.for_target(target),
    "p_eagle": lambda target: PEagle.for_target(target, torch.arange(0, VOCAB, 2), ttt_steps=3, num_layers=2),
    "dflash": lambda target: DFlash.for_target(target, torch.arange(VOCAB), num_layers=2, block_size=4),
    "dflash-weighed": lambda target: DFlash.for_target(
        target, torch.arange(0, VOCAB, 2), num_layers=1, block_size=4, projection="target", **WEIGHED
    ),
    "dspark": lambda target: DSpark.for_target(
        target, torch.arange(0, VOCAB, 2), num_layers=1, block_size=3, markov_rank=4, divergence="ce_l1"
    ),
    "domino": lambda target: Domino.for_target(
        target, torch.arange(0, VOCAB, 2), num_layers=1, block_size=3, gru_size=5, rank=4
    ),
    "kangaroo": Kangaroo.for_target,
    "jacobi_forcing": lambda target: JacobiForcing.for_target(
        target, rank=3, alpha=3, block_size=4, from_text=0.0, own_guesses=0.0, ar_weight=0.5
    ),
    "draft": draft,
    "pard": lambda target: Pard.for_target(target, copy_layers=2, num_drafts=3, sample_positions=False),
    "lora": adapted,
    "copy": lambda target: DraftModel.for_target(
        target, copy_layers=6
    ),  # the target itself, so that drafts are accepted
    "draft-checkpointed": lambda target: draft(target, activation_checkpointing=True),
}


@dataclass
class Case:
    """A way to train the same steps. ranks x accumulate batches of GLOBAL_BATCH / (ranks * accumulate) rows each."""

    strategy: Callable[[], Any] = lambda: "auto"
    ranks: int = 2
    accumulate: int = 1
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "sgd", "learning_rate": 0.05, "beta1": 0.0})
    options: dict[str, Any] = field(default_factory=dict)
    placed: bool = False  # the target's layers cut over the ranks
    bad: bool = False  # a loss that is not a number on the last rank, in a step that is left out
    live: bool = False  # prompts of several lengths decoded while training


def zero(stage: int, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        strategy = strategies.deepspeed(stage, **options)
        if stage == 3:  # parameters as small as these stay whole otherwise
            strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return strategy

    return make


ADAMW = {"name": "adamw", "learning_rate": 1e-3}
MUON = {"name": "muon", "learning_rate": 1e-3, "muon_learning_rate": 1e-2}
FACTORS = {"name": "adamw", "learning_rate": 1e-3, "learning_rate_factors": {"lm_head": 0.1, "fc": 2.0}}
CLIPPED = {"gradient_clip_val": 0.5}
CASES = {
    **{
        f"{name}-skipped": Case(strategy, ranks=ranks, optimizer=ADAMW, bad=True)
        for name, strategy, ranks in (
            ("one", lambda: "auto", 1),
            ("ddp", lambda: "ddp", 2),
            ("zero2", zero(2), 2),
            ("zero3", zero(3), 2),
        )
    },
    "zero2-accumulated-skipped": Case(zero(2), accumulate=2, optimizer=ADAMW, bad=True),
    "one": Case(ranks=1),
    "accumulated": Case(ranks=1, accumulate=2),
    "ddp": Case(lambda: "ddp"),
    "zero1": Case(zero(1)),
    "zero2": Case(zero(2)),
    "zero3": Case(zero(3)),
    "one-live": Case(ranks=1, live=True),
    "zero2-placed": Case(zero(2), placed=True, live=True),
    "zero2-accumulated": Case(zero(2), accumulate=2),
    "one-clipped": Case(ranks=1, options=CLIPPED),
    "accumulated-clipped": Case(ranks=1, accumulate=2, options=CLIPPED),
    "ddp-clipped": Case(lambda: "ddp", options=CLIPPED),
    "zero3-clipped": Case(zero(3), options=CLIPPED),
    "zero2-accumulated-clipped": Case(zero(2), accumulate=2, options=CLIPPED),
    "one-adamw": Case(ranks=1, optimizer=ADAMW),
    "accumulated-adamw": Case(ranks=1, accumulate=2, optimizer=ADAMW),
    "ddp-adamw": Case(lambda: "ddp", optimizer=ADAMW),
    "zero1-adamw": Case(zero(1), optimizer=ADAMW),
    "zero2-adamw": Case(zero(2), optimizer=ADAMW),
    "zero3-adamw": Case(zero(3), optimizer=ADAMW),
    "one-muon": Case(ranks=1, optimizer=MUON),
    "accumulated-muon": Case(ranks=1, accumulate=2, optimizer=MUON),
    "ddp-muon": Case(lambda: "ddp", optimizer=MUON),
    "one-factors": Case(ranks=1, optimizer=FACTORS),
    "ddp-factors": Case(lambda: "ddp", optimizer=FACTORS),
    "zero2-factors": Case(zero(2), optimizer=FACTORS),
    "zero3-factors": Case(zero(3), optimizer=FACTORS),
    "zero2-bf16-adamw": Case(zero(2), optimizer=ADAMW, options={"precision": "bf16-mixed"}),
}


class Recording(DrafterModule):
    """Keeps the loss and the gradient norm of every optimizer step, as logged, and the drafter as it would be saved."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.accepted: list[float] = []
        self.partitioned = False
        self.initial = {name: value.detach().clone() for name, value in self.drafter.served().state_dict().items()}

    def _loss(self, batch: Batch, *totals: Any) -> Any:
        loss, counts = super()._loss(batch, *totals)
        return loss * getattr(self.drafter, "multiplier", 1.0), counts

    def publish(self, values: dict[str, float]) -> None:
        super().publish(values)
        self.losses += [values["train/loss"]] if "train/loss" in values else []
        self.norms += [values["train/grad_norm"]] if "train/grad_norm" in values else []
        self.accepted += [values["acceptance_length"]] if "acceptance_length" in values else []

    def on_train_start(self) -> None:
        super().on_train_start()
        self.partitioned = all(parameter.shape == (0,) for parameter in self.drafter.parameters())

    def on_train_end(self) -> None:
        drafter = full_precision_drafter(self.trainer.strategy, self.drafter, self.target)
        self.final = {name: value.detach().clone() for name, value in drafter.state_dict().items()}
        pairs = [(self.final[name].double(), value.double()) for name, value in self.initial.items()]
        self.moved = max((final - initial).abs().max().item() for final, initial in pairs)


class Bad(LossGuard):
    """Leaves a step out whose loss on the last rank it has made NaN."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.drafter.multiplier = float("nan") if self.due(trainer) else 1.0

    def due(self, trainer: Trainer) -> bool:
        return trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1


class StopAfter(StopSignal):
    """Tells one rank to stop at a step: all of them do."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1 and trainer.is_global_zero:
            self.requested = True


def placed(directory: Path) -> Target:
    """The same target, whose layers no rank has whole."""
    model, tokenizer, engine = load_partitioned(
        lambda: (LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32), None), torch.float32
    )
    target = Target(model, tokenizer, "random")
    target.engine = engine
    weights = list(model.get_decoder().layers.parameters())
    assert all(weight.shape == (0,) for weight in weights)
    assert sum(weight.ds_tensor.numel() for weight in weights) <= sum(weight.ds_numel for weight in weights) / 2 + 100
    return target


def run(
    family: str, name: str, target: Target, output: Path, until: int = STEPS + 1, resume: Path | None = None
) -> Recording:
    """Train a case, or a part of it; its checkpoints lie in ``output``."""
    case = CASES[name]
    seed_everything(1, verbose=False)
    module = Recording(FAMILIES[family](target).train(), target, OptimizerSettings(warmup_steps=0, **case.optimizer))
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": case.ranks,
        "max_steps": STEPS,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    if case.ranks == 1:  # is trained by both, each by itself
        output = output / f"alone-{os.environ['RANK']}"
    stop = StopAfter(until)
    callbacks: list[Callback] = [stop, RunCheckpoint(output / "checkpoints", STEPS, keep=1)]
    if case.bad:
        callbacks.insert(0, Bad(output / "bad-batches", "skip"))
    if case.live:
        prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [12]]
        callbacks.append(LiveAcceptance(prompts, output / f"drafter-{os.environ['RANK']}", STEPS, 3, None, 8))
    trainer = Trainer(
        strategy=case.strategy(),
        accumulate_grad_batches=case.accumulate,
        callbacks=callbacks,
        **(options | case.options),
    )
    rows = Rows(GLOBAL_BATCH // (case.ranks * case.accumulate))
    with suppress(Interrupted):
        trainer.fit(module, rows, ckpt_path=resume, weights_only=True)
    return module


def main() -> None:
    """Run the cases; rank 0 writes a file for each."""
    output = Path(sys.argv[1])
    torch.set_num_threads(1)
    silence_warnings()
    target = Target.from_model(make_model(), name="random")
    cut = None
    for name in sys.argv[2:]:
        family, _, case = name.partition("/")
        place = output / name.replace("/", "-")
        before, _, case = case.rpartition(">")
        resume = None
        if before:
            run(family, before, target, place / "before", until=STEPS // 2)
            rank = os.environ["RANK"] if CASES[case].ranks == 1 else "0"
            alone = f"alone-{rank}" if CASES[before].ranks == 1 else ""
            resume = place / "before" / alone / "checkpoints" / "last.ckpt"
        os.environ["WORLD_SIZE"] = "2"  # which Lightning takes away after each training
        if CASES[case].placed and cut is None:
            cut = placed(output / "target")
            assert cut.identity == target.identity
        module = run(family, case, cut if CASES[case].placed and cut else target, place, resume=resume)
        if os.environ["RANK"] == "0":
            result = {name: getattr(module, name) for name in ("losses", "norms", "accepted", "partitioned", "moved")}
            torch.save(result | {"weights": module.final}, place / "result.pt")


if __name__ == "__main__":
    main()
