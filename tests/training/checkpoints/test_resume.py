import os

import pytest
import torch
from omegaconf import OmegaConf

from specdraft.errors import UserError
from specdraft.training.checkpoints import resume as resuming
from specdraft.training.checkpoints.resume import check_alike, find_resume, resumed_optimizer, step_name


def make_run(directory, *steps, age=0):
    """A run's checkpoints, ``last.ckpt`` a link to the newest, ``age`` seconds old."""
    place = directory / "checkpoints"
    place.mkdir(parents=True)
    for step in steps:
        torch.save({"global_step": step, "weights": torch.arange(1000.0)}, place / step_name(step))
        os.utime(place / step_name(step), (10_000 - age, 10_000 - age))
    (place / "last.ckpt").symlink_to(step_name(steps[-1]))
    return place


def test_auto_takes_the_newest_run_that_has_a_checkpoint(tmp_path):
    notes: list[str] = []
    family = tmp_path / "family"
    assert find_resume("auto", family, notes.append) is None
    assert "starting from scratch" in notes.pop()
    new, old = (make_run(family / name, 5, age=age) for age, name in enumerate(("new", "old")))
    (family / "empty" / "checkpoints").mkdir(parents=True)
    assert find_resume("auto", family, notes.append) == new / step_name(5)
    assert find_resume(str(family / "old"), tmp_path, notes.append) == old / step_name(5)
    assert find_resume(str(old / "last.ckpt"), tmp_path, notes.append) == old / step_name(5)
    assert find_resume(None, tmp_path, notes.append) is None
    assert notes == []


def test_a_path_without_checkpoint_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"last.ckpt does not exist"):
        find_resume(str(tmp_path), tmp_path, print)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(1000.0).numpy().tobytes()) + 1234  # torch.load alone would not notice
    data[at] ^= 1
    path.write_bytes(data)
    assert torch.load(path, weights_only=True)["global_step"]


@pytest.mark.parametrize("damage", [truncate, flip_a_bit])
@pytest.mark.parametrize("resume", ["auto", "{run}", "{run}/checkpoints/last.ckpt"])
def test_instead_of_a_damaged_checkpoint_the_one_before(tmp_path, damage, resume):
    notes: list[str] = []
    place = make_run(tmp_path / "family" / "run", 8, 9, 12)
    damage(place / step_name(12))
    found = find_resume(resume.format(run=place.parent), tmp_path / "family", notes.append)
    assert found == place / step_name(9)
    (note,) = notes
    assert f"{place / step_name(12)} cannot be read to the end: resuming from {found}" in note


def test_auto_goes_back_to_an_earlier_run_and_gives_up_where_all_are_damaged(tmp_path):
    family = tmp_path / "family"
    new, old = (make_run(family / name, 5, age=age) for age, name in enumerate(("new", "old")))
    truncate(new / step_name(5))
    assert find_resume("auto", family, print) == old / step_name(5)
    truncate(old / step_name(5))
    with pytest.raises(UserError, match=r"every checkpoint below .* is damaged"):
        find_resume("auto", family, print)


@pytest.mark.parametrize(
    ("key", "was", "now"),
    [
        ("model.drafter._target_", "Eagle3", "Medusa"),
        ("quantize", None, "int8"),
        ("data.seed", 0, 1),
        ("data.sequence_length", 192, 128),
        ("data.limit", 1500, 7),
        ("data.regenerate", True, False),
        ("data.temperatures", [0.0], [0.0, 1.0]),
        ("data.max_new_tokens", 64, 65),
    ],
)
def test_what_decides_a_training_has_to_be_alike(tmp_path, monkeypatch, key, was, now):
    data = {"seed": 0, "sequence_length": 192, "limit": 1500, "regenerate": True, "temperatures": [0.0]}
    settings = {"model": {"drafter": {"_target_": "Eagle3"}}, "quantize": None, "data": data | {"max_new_tokens": 64}}
    theirs, ours = OmegaConf.create(settings), OmegaConf.create(settings)
    OmegaConf.update(theirs, key, was)
    monkeypatch.setattr(resuming, "checkpoint_config", lambda path: OmegaConf.to_container(theirs))
    check_alike(tmp_path / "last.ckpt", ours)
    OmegaConf.update(ours, key, now)
    with pytest.raises(UserError, match=r"the checkpoint .* was trained with") as error:
        check_alike(tmp_path / "last.ckpt", ours)
    assert f"{key}={was}, and this run has {now}" in str(error.value)
    if key in ("data.temperatures", "data.max_new_tokens"):  # of answers that are not written anew
        theirs.data.regenerate = ours.data.regenerate = False
        check_alike(tmp_path / "last.ckpt", ours)


def test_the_optimizer_is_that_of_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "checkpoint_optimizer", lambda path: path.stem)
    for was in ("adamw", "muon"):
        assert resumed_optimizer(tmp_path / f"{was}.ckpt", "auto", sharded=False) == was
    assert resumed_optimizer(tmp_path / "adamw.ckpt", "auto", sharded=True) == "adamw"
    with pytest.raises(UserError, match=r"model.optimizer.name=muon, and this run has adamw: resume with muon, or"):
        resumed_optimizer(tmp_path / "muon.ckpt", "adamw", sharded=False)
    with pytest.raises(UserError, match=r"trained with Muon, .* DeepSpeed cuts them: expected strategy=single or"):
        resumed_optimizer(tmp_path / "muon.ckpt", "auto", sharded=True)
