import pytest
import torch

from specdraft.errors import UserError
from specdraft.training.checkpoints.file import (
    CheckpointFile,
    checkpoint_config,
    checkpoint_optimizer,
    checkpoint_step,
    is_whole,
)
from specdraft.training.schedule import OptimizerSettings


def test_what_is_written_is_read_and_whole(tmp_path):
    file, path = CheckpointFile(), tmp_path / "one.ckpt"
    run = {"hyper_parameters": {"run": {"config": {"seed": 3}}}}
    file.save_checkpoint({"global_step": 7, "weights": torch.arange(4.0)} | run, path)
    assert file.failure is None and is_whole(path) and [each.name for each in tmp_path.iterdir()] == ["one.ckpt"]
    assert torch.equal(file.load_checkpoint(path, weights_only=False)["weights"], torch.arange(4.0))
    assert checkpoint_step(path) == 7 and checkpoint_config(path) == {"seed": 3}


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_the_states_tell_their_optimizer(tmp_path, name):
    optimizer = OptimizerSettings(name=name).build(torch.nn.Linear(4, 4))
    torch.save({"global_step": 1, "optimizer_states": [optimizer.state_dict()]}, tmp_path / "one.ckpt")
    assert checkpoint_optimizer(tmp_path / "one.ckpt") == name


def test_a_file_that_cannot_be_written_is_noted_and_leaves_the_one_before(tmp_path):
    file, path = CheckpointFile(), tmp_path / "one.ckpt"
    file.save_checkpoint({"global_step": 1}, path)
    (tmp_path / "file").touch()
    file.save_checkpoint({"global_step": 2}, tmp_path / "file" / "one.ckpt")
    assert file.failure is not None and "cannot be written" in file.failure
    assert checkpoint_step(path) == 1


def test_what_is_no_checkpoint_is_one_sentence(tmp_path):
    path = tmp_path / "one.ckpt"
    path.write_bytes(b"nothing")
    assert not is_whole(path) and not is_whole(tmp_path / "absent.ckpt")
    with pytest.raises(UserError, match=r"one\.ckpt"):
        checkpoint_step(path)
    torch.save({"weights": 1}, path)
    with pytest.raises(UserError, match=r"cannot resume from .*one.ckpt .*expected a whole checkpoint of train.py"):
        checkpoint_step(path)
