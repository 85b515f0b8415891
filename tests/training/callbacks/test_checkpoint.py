"""A disk that is full, and files that are cut short."""

import json
import os
import threading

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import EarlyStopping

from specdraft.training.checkpoints.file import CheckpointFile, is_whole
from specdraft.training.checkpoints.resume import find_resume
from tests.training import faults_worker
from tests.training.forked import Ranks


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoint_is_plain_and_holds_the_drafter_alone(make_run, tmp_path, asynchronous):
    trainer, module, data, *_ = make_run(max_steps=7, asynchronous=asynchronous)
    directory = tmp_path / "run" / "checkpoints"
    directory.mkdir(parents=True)
    (directory / ".step-000002.ckpt.0123abcd.tmp").touch()  # of a process that was killed while it saved
    trainer.fit(module, data)
    kept = ["best.ckpt", "last.ckpt", "step-000006.ckpt", "step-000007.ckpt"]  # of 3, 4, 6 and 7
    assert sorted(path.name for path in directory.iterdir()) == kept
    assert (directory / "last.ckpt").resolve().name == "step-000007.ckpt"
    checkpoint = torch.load(directory / "last.ckpt", weights_only=True)
    assert json.dumps(checkpoint["hyper_parameters"]) == '{"run": {"seed": 1}}'
    assert {"drafter.d2t", "drafter.t2d"} < set(checkpoint["state_dict"])
    assert not any("target" in name for name in checkpoint["state_dict"])


def test_training_goes_on_while_a_checkpoint_is_written(make_run, tmp_path, monkeypatch):
    trainer, module, data, *_ = make_run(tmp_path / "waits", max_steps=5, every=100)
    trainer.fit(module, data)
    released, write = threading.Event(), CheckpointFile.save_checkpoint

    def held_up(*args, **options):
        assert released.wait(60)
        write(*args, **options)

    class Release(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                assert not (tmp_path / "goes on" / "checkpoints" / "last.ckpt").exists()
                released.set()

    monkeypatch.setattr(CheckpointFile, "save_checkpoint", held_up)
    options = {"max_steps": 5, "every": 100, "asynchronous": True, "callbacks": [Release()]}
    trainer, module, data, *_ = make_run(tmp_path / "goes on", **options)
    trainer.fit(module, data)
    for name in ("step-000003.ckpt", "last.ckpt"):  # of step 3, although step 4 was done when it was written
        waits, goes_on = (torch.load(tmp_path / run / "checkpoints" / name) for run in ("waits", "goes on"))
        assert waits["global_step"] == goes_on["global_step"]
        assert waits["state_dict"].keys() == goes_on["state_dict"].keys()
        assert all(torch.equal(waits["state_dict"][key], value) for key, value in goes_on["state_dict"].items())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resumed_run_equals_the_undisturbed_one(make_run, tmp_path, asynchronous):
    trainer, whole, data, *_ = make_run(tmp_path / "whole", max_steps=12)
    trainer.fit(whole, data)

    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 7:
                stop.requested = True

    trainer, part, data, _, stop = make_run(
        tmp_path / "part", max_steps=12, callbacks=[Stop()], asynchronous=asynchronous
    )
    with pytest.raises(Exception, match="stopped after step 7"):
        trainer.fit(part, data)
    last = tmp_path / "part" / "checkpoints" / "last.ckpt"
    trainer, rest, data, *_ = make_run(tmp_path / "rest", max_steps=12)
    trainer.fit(rest, data, ckpt_path=last)

    assert part.losses == whole.losses[:7]
    assert rest.losses == whole.losses[7:]
    for ours, theirs in zip(rest.drafter.parameters(), whole.drafter.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_that_ends_before_its_last_step_is_measured_and_saved(make_run, tmp_path):
    trainer, whole, data, *_ = make_run(tmp_path / "whole", max_steps=12, val_check_interval=5, every=0)
    trainer.fit(whole, data)

    early = EarlyStopping("validation/loss", stopping_threshold=1e9)
    options = {"max_steps": 12, "val_check_interval": 5, "every": 0}
    trainer, part, data, live, _ = make_run(tmp_path / "part", callbacks=[early], **options)
    trainer.fit(part, data)
    assert live.measured_step == live.best_step == 5 and (tmp_path / "part" / "drafter").is_dir()
    names = sorted(path.name for path in (tmp_path / "part" / "checkpoints").iterdir())
    assert names == ["best.ckpt", "last.ckpt", "step-000003.ckpt", "step-000005.ckpt"]
    trainer, rest, data, *_ = make_run(tmp_path / "rest", **options)
    trainer.fit(rest, data, ckpt_path=tmp_path / "part" / "checkpoints" / "last.ckpt")
    assert part.losses + rest.losses == whole.losses

    trainer, epoch, data, live, _ = make_run(tmp_path / "epoch", max_epochs=1, **options)
    data.batches = 7
    trainer.fit(epoch, data)
    assert live.measured_step == 7 and trainer.current_epoch == 1
    loops = torch.load(tmp_path / "epoch" / "checkpoints" / "last.ckpt")["loops"]["fit_loop"]
    assert loops["epoch_progress"]["current"]["processed"] == 0  # as after any other batch


def test_error_inside_a_step_leaves_a_resumable_checkpoint(make_run, tmp_path):
    trainer, whole, data, *_ = make_run(tmp_path / "whole", max_steps=8)
    trainer.fit(whole, data)

    class Fail(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 5:
                raise RuntimeError("out of luck")

    trainer, part, data, *_ = make_run(tmp_path / "part", max_steps=8, callbacks=[Fail()])
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit(part, data)
    trainer, rest, data, *_ = make_run(tmp_path / "rest", max_steps=8)
    trainer.fit(rest, data, ckpt_path=tmp_path / "part" / "checkpoints" / "last.ckpt")
    assert part.losses + rest.losses == whole.losses


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, undisturbed, resumed):
    ranks = Ranks(tmp_path, 1, faults_worker.train, tmp_path, 12, 2, None, 30.0, faults_worker.FillDisk(5, 20_000))
    assert ranks.end(0) == 2
    errors = [line for line in ranks.said().splitlines() if line.startswith("error: ")]
    before, failed = (tmp_path / "checkpoints" / f"step-{step:06d}.ckpt" for step in (4, 6))
    assert errors == [
        f"error: the checkpoint {failed} cannot be written (File too large): free some space or choose another "
        f"hydra.run.dir; {before} is whole and resumes the run"
    ]
    assert is_whole(before) and sorted(path.name for path in before.parent.iterdir()) == [
        "last.ckpt",
        "step-000002.ckpt",
        "step-000004.ckpt",
    ]
    assert resumed(tmp_path) == (4, undisturbed[4:])


def test_a_truncated_checkpoint_gives_way_to_the_one_before(tmp_path):
    ranks = Ranks(tmp_path, 1, faults_worker.train, tmp_path, 12)
    assert ranks.end(0) == 0
    last = (tmp_path / "checkpoints" / "last.ckpt").resolve()
    os.truncate(last, last.stat().st_size - 100)
    notes: list[str] = []
    checkpoint = find_resume(str(tmp_path), tmp_path, notes.append)
    assert checkpoint is not None and checkpoint.name == "step-000010.ckpt"
    assert notes[0].startswith(f"{last} cannot be read to the end: resuming from {checkpoint}")
