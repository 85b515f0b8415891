"""A random four-layer target, random packed batches that resume, and the parts of a run around them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning import LightningDataModule, Trainer
from omegaconf import OmegaConf
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.drafters.eagle import Eagle3
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from specdraft.training.callbacks.checkpoint import RunCheckpoint
from specdraft.training.callbacks.live_acceptance import LiveAcceptance
from specdraft.training.callbacks.loss_guard import LossGuard
from specdraft.training.callbacks.stop_signal import StopSignal
from specdraft.training.checkpoints.resume import find_resume
from specdraft.training.module import DrafterModule
from specdraft.training.schedule import OptimizerSettings
from tests.training import faults_worker
from tests.training.forked import Ranks

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
VOCAB = 64
CONF = str(Path(__file__).parents[2] / "conf")


@pytest.fixture(scope="session")
def target() -> Target:
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
        initializer_range=0.3,  # else every distribution is flat and nothing can be learnt
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return Target.from_model(LlamaForCausalLM(config).float(), name="random")


class PackedRows(torch.utils.data.Dataset):
    """``count`` batches of two rows, each row one document of 24 tokens and one of 8."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(self.first + index)
        ids = torch.randint(3, VOCAB, (2, 32), generator=generator)
        positions = torch.cat([torch.arange(24), torch.arange(8)]).expand(2, 32).contiguous()
        documents = torch.tensor([0] * 24 + [1] * 8).expand(2, 32).contiguous()
        return Batch(ids, positions, documents, positions >= 4)


class RandomData(LightningDataModule):
    """Batches that depend on their number alone; a resumed run continues with the next one."""

    def __init__(self, batches: int = 1000) -> None:
        super().__init__()
        self.batches, self.consumed = batches, 0

    def train_dataloader(self) -> DataLoader:
        order = range(self.consumed, self.batches)
        return DataLoader(_Offset(PackedRows(self.batches), order), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(PackedRows(2, first=10_000), batch_size=None)

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.trainer.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.consumed = state_dict["consumed"]


class _Offset(torch.utils.data.Dataset):
    def __init__(self, rows: PackedRows, order: range) -> None:
        self.rows, self.order = rows, order

    def __len__(self) -> int:
        return len(self.rows)  # of the whole epoch, as Lightning counts on from where it was

    def __getitem__(self, index: int) -> Batch:
        if index >= len(self.order):
            raise IndexError(index)
        return self.rows[self.order[index]]


@pytest.fixture
def make_run(target, tmp_path):
    """Build (trainer, module, data, live, stop) for a run in a directory."""

    def make(
        directory: Path | None = None,
        max_steps: int = 12,
        every: int = 4,
        loss_log: list | None = None,
        guard: dict[str, Any] | None = None,
        asynchronous: bool = False,
        **options: Any,
    ):
        torch.manual_seed(1)
        directory = directory or tmp_path / "run"
        drafter = Eagle3.for_target(target, torch.arange(0, VOCAB, 2), ttt_steps=2)
        module = RecordingModule(drafter, target, OptimizerSettings(learning_rate=3e-3), {"seed": 1}, loss_log)
        prompts = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
        stop = StopSignal()
        live = LiveAcceptance(prompts, directory / "drafter", every, num_draft_tokens=3, max_new_tokens=8)
        settings = {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": max_steps,
            "log_every_n_steps": 2,
            "val_check_interval": 6,
            "check_val_every_n_epoch": None,
            "gradient_clip_val": 1.0,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            "default_root_dir": directory,
        } | options
        callbacks = [
            stop,
            LossGuard(directory / "bad-batches", **(guard or {})),
            live,
            RunCheckpoint(directory / "checkpoints", every_n_steps=3, keep=2, asynchronous=asynchronous),
        ]
        callbacks += settings.pop("callbacks", [])
        trainer = Trainer(callbacks=callbacks, **settings)
        return trainer, module, RandomData(), live, stop

    return make


class RecordingModule(DrafterModule):
    """Notes the loss of every step."""

    def __init__(self, drafter, target, optimizer, describe, losses: list | None = None) -> None:
        super().__init__(drafter, target, optimizer, describe)
        self.losses = [] if losses is None else losses

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The losses of 12 steps of ``faults_worker`` on one rank."""
    directory = tmp_path_factory.mktemp("undisturbed")
    ranks = Ranks(directory, 1, faults_worker.train, directory, 12)
    assert ranks.end(0) == 0, ranks.said()
    return torch.load(directory / "result.pt", weights_only=True)["losses"]


@pytest.fixture
def resumed():
    """(first step, losses) of a run that goes on from a directory to step 12, on another number of ranks perhaps."""

    def resume(directory: Path, world_size: int = 1) -> tuple[int, list[float]]:
        notes: list[str] = []
        checkpoint = find_resume(str(directory), directory, notes.append)
        assert notes == [] and checkpoint is not None
        again = directory / "again"
        again.mkdir()
        ranks = Ranks(again, world_size, faults_worker.train, again, 12, 2, checkpoint)
        assert [ranks.end(rank) for rank in range(world_size)] == [0] * world_size, ranks.said()
        first = torch.load(checkpoint, weights_only=True)["global_step"]
        return first, torch.load(again / "result.pt", weights_only=True)["losses"]

    return resume


@pytest.fixture
def composed():
    def build(*overrides: str):
        with initialize_config_dir(CONF, version_base=None):
            config = compose("train", list(overrides), return_hydra_config=True)
        OmegaConf.set_struct(config, True)
        return config

    return build
