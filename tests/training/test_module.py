import csv
import time
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from specdraft.drafters.checkpoint import load_drafter
from specdraft.errors import UserError


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


def test_a_target_may_have_moved_and_not_changed_on_resume(make_run, monkeypatch):
    _, module, *_ = make_run()
    checkpoint: dict = {}
    module.on_save_checkpoint(checkpoint)
    monkeypatch.setattr(module.target, "identity", replace(module.target.identity, name="/elsewhere"))
    module.on_load_checkpoint(checkpoint)
    monkeypatch.setattr(module.target, "identity", replace(module.target.identity, weights_hash="0"))
    with pytest.raises(UserError, match="cannot resume: target weights_hash"):
        module.on_load_checkpoint(checkpoint)


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


def test_a_check_before_training_is_logged_if_it_saw_the_whole_split(make_run, tmp_path):
    for batches, steps in ((1, {1}), (-1, {0, 1})):
        logger = CSVLogger(tmp_path, name=str(batches), version="")
        options = {"max_steps": 1, "val_check_interval": 1, "num_sanity_val_steps": batches, "logger": logger}
        trainer, module, data, *_ = make_run(tmp_path / str(batches) / "run", **options)
        trainer.fit(module, data)
        rows = csv.DictReader((tmp_path / str(batches) / "metrics.csv").open())
        assert {int(row["step"]) for row in rows if row["validation/loss"]} == steps
