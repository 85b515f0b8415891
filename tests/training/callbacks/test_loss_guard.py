"""Steps whose loss is not finite or jumps: named, written out, and left out or the end of the run."""

import csv

import pytest
import torch
from lightning import Callback
from lightning.pytorch.loggers import CSVLogger
from safetensors import safe_open

from specdraft.errors import UserError
from specdraft.training.callbacks.loss_guard import LossGuard


class Scale(Callback):
    """Multiplies the loss of some steps."""

    def __init__(self, by, *steps):
        self.by, self.steps = by, steps

    def setup(self, trainer, pl_module, stage):
        loss = pl_module._loss

        def scaled(*args):
            value, counts = loss(*args)
            return value * (self.by if trainer.global_step in self.steps else 1.0), counts

        pl_module._loss = scaled


class Snapshots(Callback):
    """The weights and the optimizer's moments after every step."""

    def __init__(self):
        self.after = {}

    def on_train_batch_end(self, trainer, pl_module, *args):
        (optimizer,) = trainer.optimizers
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        tensors = [*pl_module.drafter.parameters(), *moments]
        self.after[trainer.global_step] = [tensor.detach().clone() for tensor in tensors]


def alike(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_run_stops_before_the_update(make_run, tmp_path, bad):
    seen = Snapshots()
    trainer, module, data, *_ = make_run(max_steps=8, callbacks=[Scale(bad, 4), seen])
    with pytest.raises(
        UserError, match=r"training loss is (nan|inf) at step 4 \(batch 4\), expected a finite"
    ) as error:
        trainer.fit(module, data)
    assert alike(list(module.drafter.parameters()), seen.after[4][: len(list(module.drafter.parameters()))])
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 4 and all(torch.isfinite(value).all() for value in state["state_dict"].values())
    path = tmp_path / "run" / "bad-batches" / "step-000004-rank-0.safetensors"
    assert str(path) in str(error.value)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"step": "4", "rank": "0", "batches": "[4]"}
        assert torch.equal(file.get_tensor("input_ids"), data.train_dataloader().dataset[4].input_ids)
        assert not torch.isfinite(file.get_tensor("losses")).any()


def test_a_step_is_left_out(make_run, tmp_path, capsys):
    seen, logger = Snapshots(), CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=1)
    options = {"callbacks": [Scale(float("nan"), 4, 5), seen], "logger": logger}
    trainer, module, data, *_ = make_run(max_steps=8, guard={"on_bad_loss": "skip"}, **options)
    trainer.fit(module, data)
    assert alike(seen.after[4], seen.after[5]) and alike(seen.after[5], seen.after[6])
    assert not alike(seen.after[6], seen.after[7])
    assert capsys.readouterr().out.count("the step is left out") == 2
    rows = {
        row["step"]: float(row["train/loss"])
        for row in csv.DictReader((tmp_path / "metrics.csv").open())
        if row["train/loss"]
    }
    assert list(rows) == ["2", "4", "8"]  # of 5 and 6 there is nothing to log
    assert rows["8"] == pytest.approx(sum(module.losses[-2:]) / 2, rel=1e-5)


def test_after_too_many_it_stops(make_run):
    bad = Scale(float("nan"), *range(2, 8))
    trainer, module, data, *_ = make_run(max_steps=8, callbacks=[bad], guard={"on_bad_loss": "skip", "max_skipped": 2})
    with pytest.raises(UserError, match=r"at step 4 .* after 2 steps were left out"):
        trainer.fit(module, data)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_spike_is_measured_against_the_median(make_run, tmp_path, accumulate):
    guard = {"on_bad_loss": "skip", "spike_factor": 3.0}
    seen = Snapshots()
    callbacks = [Scale(10.0, 5, 18), seen]  # too early to tell, and not
    options = {"accumulate_grad_batches": accumulate, "callbacks": callbacks}
    trainer, module, data, *_ = make_run(max_steps=20, every=0, guard=guard, **options)
    trainer.fit(module, data)
    assert not alike(seen.after[5], seen.after[6])
    assert alike(seen.after[18], seen.after[19]) and not alike(seen.after[19], seen.after[20])
    (path,) = (tmp_path / "run" / "bad-batches").iterdir()
    with safe_open(path, "pt") as file:
        assert len(file.get_tensor("losses")) == accumulate and len(file.get_tensor("input_ids")) == 2 * accumulate


def test_what_was_seen_survives_a_checkpoint(tmp_path):
    one, other = (LossGuard(tmp_path, spike_factor=2.0) for _ in range(2))
    one.losses.extend([1.0] * 20)
    one.skipped = 3
    other.load_state_dict(one.state_dict())
    assert other.skipped == 3 and other._reason(1.9) is None
    assert other._reason(2.1) == "expected at most 2 times the median of the last 20, 1"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"on_bad_loss": "ignore"}, "expected stop or skip"), ({"spike_factor": 1.0}, "expected a number above 1")],
)
def test_bad_settings(tmp_path, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        LossGuard(tmp_path, **settings)
