"""Training cannot tell where the features come from: the same batches, the same losses, the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from specdraft.data.datamodule import DataModule
from specdraft.data.places import Folder
from specdraft.data.sources.stdlib import PythonStdlib
from specdraft.data.store import Store, StoredBatch, StoreWriter, describe
from specdraft.drafters.base import Drafter
from specdraft.drafters.dflash import DFlash, Domino, DSpark
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.eagle import MTP, Eagle, Eagle3, PEagle
from specdraft.drafters.hydra import Hydra
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.pard import Pard
from specdraft.drafters.redrafter import ReDrafter
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.batch import Batch
from specdraft.training.module import DrafterModule
from specdraft.training.schedule import OptimizerSettings


@pytest.fixture
def small(target: Target) -> Target:
    return Target.from_model(target.model.float(), target.tokenizer)


def make(library: Path, cache: Path, **options: Any) -> DataModule:
    settings = {"sequence_length": 128, "batch_size": 2, "limit": 30, "validation_limit": 5, "max_new_tokens": 12}
    return DataModule(PythonStdlib(root=str(library)), **settings | {"cache_dir": str(cache)} | options)


def write(target: Target, drafter: Drafter, data: DataModule, path: Path, **options: Any) -> None:
    data.prepare(target)
    about = {split: data.about(split) for split in data.packed}
    settings = {"dtype": "float32", "every_last": drafter.reads_every_last, "shard_bytes": 2**18} | options
    contents = describe(
        target, drafter.layers, data=data.packed, settings=data.preparation.settings(), about=about, **settings
    )
    writer = StoreWriter(Folder(path), contents, data.packed)
    writer.write(lambda ids, positions: target.features(ids, positions, drafter.layers), 2)


class Losses(Callback):
    def __init__(self) -> None:
        self.training: list[float] = []
        self.kinds: set[type] = set()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.training.append(outputs["loss"].item())
        self.kinds.add(type(batch))


def train(target: Target, drafter: Drafter, data: DataModule, steps: int, **options: Any) -> tuple[list[float], float]:
    data.prepare(target)
    losses = Losses()
    checkpoint = options.pop("ckpt_path", None)
    callbacks = [losses, *options.pop("callbacks", [])]
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    )
    trainer.fit(DrafterModule(drafter, target, OptimizerSettings(learning_rate=1e-3)), data, ckpt_path=checkpoint)
    assert losses.kinds == {StoredBatch if data.store_path else Batch}
    return losses.training, trainer.callback_metrics["validation/loss"].item()


def draft(target: Target, kind: type[Any], **options: Any) -> Drafter:
    torch.manual_seed(0)
    return kind.for_target(target, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Eagle3, {"layers": [1, 2, 3]}),
        (Eagle, {}),
        (Medusa, {}),
        (Hydra, {}),
        (ReDrafter, {}),
        (MTP, {}),
        (MTP, {"before_norm": True}),
        (PEagle, {"layers": [1, 2, 3]}),
        (DFlash, {"layers": [1, 2, 3], "num_layers": 1, "num_anchors": 8}),
        (DSpark, {"layers": [1, 2, 3], "num_layers": 1, "num_anchors": 8, "divergence": "ce_l1"}),
        (Domino, {"layers": [1, 2, 3], "num_layers": 1, "num_anchors": 8, "gru_size": 8}),
        (DraftModel, {"copy_layers": 1}),
        (Pard, {"copy_layers": 1, "num_drafts": 3}),
    ],
)
def test_losses_online_and_offline_are_the_same(small, library, tmp_path, kind, options):
    def drafter() -> Drafter:
        return draft(small, kind, **options)

    online, computed = make(library, tmp_path), drafter()
    expected, held_out = train(small, computed, online, 20)
    write(small, drafter(), make(library, tmp_path), tmp_path / "states")
    offline, stored = make(library, tmp_path, store=str(tmp_path / "states")), drafter()
    found, held_out_stored = train(small, stored, offline, 20)
    assert len(found) == 20
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert held_out_stored == pytest.approx(held_out, rel=1e-6, abs=1e-6)
    assert expected[0] - expected[-1] > 0.01  # it learns, so that the weights have moved
    assert torch.equal(offline.response_counts, online.response_counts)
    assert offline.describe() | {"hidden_states": "computed"} == online.describe()
    assert offline.describe()["hidden_states"] == "stored in float32"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_that_reads_the_store_resumes_exactly(small, library, tmp_path, num_workers):
    path = tmp_path / "states"
    write(small, draft(small, Eagle3), make(library, tmp_path), path, dtype="float8")

    def run(steps: int, **options: Any) -> tuple[list[float], float]:
        data = make(library, tmp_path, store=str(path), num_workers=num_workers, batch_size=1)
        return train(small, draft(small, Eagle3), data, steps, **options)

    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=5, save_top_k=-1)
    whole, held_out = run(20, callbacks=[saver])
    assert 5 < len(Store(path).data["train"]) < 15  # one place within the first epoch, one behind it
    for step in (5, 15):
        rest, again = run(20, ckpt_path=tmp_path / "saved" / f"step={step}.ckpt")
        assert rest == whole[step:]
        assert again == held_out


def test_a_store_of_more_layers_serves_drafters_of_fewer(small, library, tmp_path):
    path = tmp_path / "states"
    write(small, draft(small, Eagle3, layers=[1, 2, 3]), make(library, tmp_path), path, every_last=True)
    data = make(library, tmp_path, store=str(path))
    data.prepare(small)
    batch = next(iter(data.train_dataloader()))
    for reader in (draft(small, Eagle3, layers=[1, 3]), draft(small, Eagle3, layers=[2]), draft(small, Eagle)):
        found = batch.to("cpu").features(small, reader.layers, reader.reads_every_last)
        expected = small.features(batch.input_ids, batch.position_ids, reader.layers)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_the_store_does_not_hold_is_refused(small, library, tmp_path):
    path = tmp_path / "states"
    write(small, draft(small, Eagle3, layers=[1, 3]), make(library, tmp_path), path)
    data = make(library, tmp_path, store=str(path))
    data.prepare(small)
    batch = next(iter(data.train_dataloader()))
    data.read_for(draft(small, Eagle3, layers=[3]))
    for reader, sentence in (
        (draft(small, Eagle3, layers=[1, 2, 3]), r"reads layers \[2\] of the target, which the store .* does not hold"),
        (draft(small, Eagle), "reads last hidden states of prompts of the target"),
    ):
        with pytest.raises(UserError, match=sentence):
            data.read_for(reader)  # before training
        with pytest.raises(UserError, match=sentence):
            batch.features(small, reader.layers, reader.reads_every_last)
    writing = draft(small, DraftModel, on_policy=1.0)
    with pytest.raises(UserError, match="trains on text of its own, of which the store"):
        writing.prepare(batch, torch.Generator().manual_seed(0)).features(
            small, writing.layers, writing.reads_every_last
        )


def test_other_settings_of_the_data_are_refused(small, library, tmp_path):
    path = tmp_path / "states"
    write(small, draft(small, Eagle3), make(library, tmp_path), path)
    for options, named in (
        ({"limit": 29}, r"data\.limit=30, and this run has 29"),
        ({"seed": 1}, r"data\.generation\.seed=0, and this run has 1"),
        ({"regenerate": False}, r"data\.regenerate=True, and this run has False"),
    ):
        with pytest.raises(UserError, match=named):
            make(library, tmp_path, store=str(path), **options).prepare(small)
