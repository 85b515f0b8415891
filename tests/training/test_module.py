import csv
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from lightning import Callback
from lightning.pytorch.loggers import CSVLogger

from specdraft.decoding.metrics import AcceptanceCounts
from specdraft.decoding.sampling import Sampling
from specdraft.drafters.checkpoint import load_drafter, read_config
from specdraft.errors import UserError
from specdraft.training.callbacks.live_acceptance import LiveAcceptance, Measurement
from specdraft.training.checkpoints.file import CheckpointFile
from specdraft.training.fit import copy_best_from_resumed


def test_trains_logs_and_keeps_the_target_out(make_run, tmp_path):
    logger = CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=1)
    trainer, module, data, live, _ = make_run(max_steps=40, every=20, logger=logger)
    before = module.target.head.weight.clone()
    trainer.fit(module, data)

    assert sum(module.losses[-5:]) < 0.9 * sum(module.losses[:5])
    assert torch.equal(before, module.target.head.weight) and not module.target.head.weight.requires_grad
    assert all(name.startswith("drafter.") for name in module.state_dict())

    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    names = {name for row in rows for name, value in row.items() if value}
    assert names >= {
        "train/loss",
        "train/loss_step_0",
        "train/loss_step_1",
        "train/alpha_0",
        "train/alpha_1",
        "train/match_0",
        "train/teacher_forced_acceptance_length",
        "train/learning_rate",
        "train/grad_norm",
        "train/tokens_per_second",
        "validation/loss",
        "validation/teacher_forced_acceptance_length",
        "acceptance_length",
        "draft_acceptance_rate",
        "conditional_acceptance_rate_1",
    }
    first = next(row for row in rows if row["train/loss"])
    assert first["step"] == "2" and float(first["train/loss"]) == pytest.approx(sum(module.losses[:2]) / 2, rel=1e-5)
    survival = [float(first[f"train/match_{step}"]) for step in range(2)]
    assert float(first["train/teacher_forced_acceptance_length"]) == pytest.approx(1 + sum(survival))
    measured = [row for row in rows if row["acceptance_length"]]
    assert [row["step"] for row in measured] == ["20", "40"]

    drafter, config = load_drafter(tmp_path / "run")
    best = max(float(row["acceptance_length"]) for row in measured)
    assert config["extra"]["training"]["live_acceptance_length"] == pytest.approx(best) == pytest.approx(live.best)
    if live.best_step == 40:
        assert torch.equal(drafter.fc.weight, module.drafter.fc.weight)


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


def resumed(make_run, tmp_path, monkeypatch, found, move=lambda run: run / "checkpoints" / "last.ckpt", **options):
    """The best length and step of a run whose first 8 steps measure 2.5 and 2.0, resumed with ``found`` at step 12."""

    def told(live, trainer, module, drafter):
        length = (2.5, 2.0, found)[trainer.global_step // live.every_n_steps - 1]
        return Measurement(AcceptanceCounts(live.num_draft_tokens, rounds=100, accepted=round(100 * (length - 1))), {})

    monkeypatch.setattr(LiveAcceptance, "_decode", told)
    trainer, module, data, live, _ = make_run(tmp_path / "part", max_steps=8)
    trainer.fit(module, data)
    assert (live.best, live.best_step) == (2.5, 4)
    trainer, module, data, live, _ = make_run(tmp_path / "rest", max_steps=12)
    for name, value in options.items():
        setattr(live, name, value)
    checkpoint = move(tmp_path / "part")
    copy_best_from_resumed(checkpoint.resolve(), tmp_path / "rest")
    trainer.fit(module, data, ckpt_path=checkpoint)
    head = read_config(tmp_path / "rest" / "drafter")["extra"]["training"]
    assert (head["live_acceptance_length"], head["step"]) == (live.best, live.best_step)
    assert (tmp_path / "rest" / "checkpoints" / "best.ckpt").is_file()
    return live.best, live.best_step


def alone(run: Path) -> Path:
    """The checkpoint moved to a folder where someone else's head lies."""
    (run.parent / "else" / "files").mkdir(parents=True)
    shutil.copytree(run / "drafter", run.parent / "else" / "drafter")
    return shutil.copy(run / "checkpoints" / "last.ckpt", run.parent / "else" / "files" / "moved.ckpt")


def without_its_head(run: Path) -> Path:
    shutil.rmtree(run / "drafter")
    return run / "checkpoints" / "last.ckpt"


def test_the_best_head_of_a_resumed_run_stays_until_it_is_beaten(make_run, tmp_path, monkeypatch):
    assert resumed(make_run, tmp_path / "worse", monkeypatch, 2.25) == (2.5, 4)
    assert resumed(make_run, tmp_path / "better", monkeypatch, 2.75) == (2.75, 12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_draft_tokens": 2}, "measured with other prompts or settings"),
        ({"sampling": Sampling(1.0)}, "measured with other prompts or settings"),
        ({"prompts": [[5, 6]]}, "measured with other prompts or settings"),
        ({"move": alone}, "is not beside the checkpoint"),
        ({"move": without_its_head}, "is not beside the checkpoint"),
    ],
)
def test_a_best_that_cannot_be_compared_or_is_not_there_is_no_rival(make_run, tmp_path, monkeypatch, options, reason):
    with pytest.warns(UserWarning, match=reason):
        assert resumed(make_run, tmp_path, monkeypatch, 2.25, **options) == (2.25, 12)


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


def test_draft_vocabulary_is_verified_on_resume(make_run, tmp_path):
    trainer, module, data, *_ = make_run(max_steps=3)
    trainer.fit(module, data)
    trainer, module, data, *_ = make_run(tmp_path / "other", max_steps=6)
    module.drafter.set_draft_vocabulary(torch.arange(1, 64, 2))
    with pytest.raises(UserError, match="cannot resume: draft vocabulary hash"):
        trainer.fit(module, data, ckpt_path=tmp_path / "run" / "checkpoints" / "last.ckpt")


def test_a_clock_that_goes_backwards_breaks_no_curve(make_run, tmp_path, monkeypatch):
    now = iter(range(2_000_000_000, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    logger = CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=1)
    trainer, module, data, *_ = make_run(max_steps=8, every=4, logger=logger)
    trainer.fit(module, data)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(steps) and steps[-1] == 8
    names = ("train/tokens_per_second", "live_acceptance_seconds")
    rates = [float(row[name]) for row in rows for name in names if row[name]]
    assert len(rates) == 6 and all(rate > 0 for rate in rates)
