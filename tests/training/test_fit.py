import pytest
import torch
from omegaconf import OmegaConf

from specdraft.errors import UserError
from specdraft.training.callbacks.samples import SampleTables
from specdraft.training.fit import build_callbacks, copy_best_from_resumed


def test_callbacks_keep_their_order_and_null_leaves_one_out():
    target = "specdraft.training.callbacks.samples.SampleTables"
    nodes = OmegaConf.create({"one": {"_target_": target}, "two": None, "three": {"_target_": target}})
    assert [type(each) for each in build_callbacks(nodes)] == [SampleTables, SampleTables]
    with pytest.raises(UserError, match=r"callbacks.odd makes dict: expected a lightning.Callback"):
        build_callbacks(OmegaConf.create({"odd": {"_target_": "builtins.dict"}}))


def test_the_best_head_is_copied_from_a_run_and_not_over_another(tmp_path):
    earlier, directory = tmp_path / "earlier", tmp_path / "run"
    (earlier / "checkpoints").mkdir(parents=True)
    (earlier / "drafter").mkdir()
    (earlier / "drafter" / "config.json").write_text("{}")
    torch.save({}, earlier / "checkpoints" / "best.ckpt")
    directory.mkdir()
    copy_best_from_resumed(tmp_path / "elsewhere" / "alone.ckpt", directory)
    assert list(directory.iterdir()) == []
    copy_best_from_resumed(earlier / "checkpoints" / "last.ckpt", directory)
    assert (directory / "drafter" / "config.json").read_text() == "{}"
    assert (directory / "checkpoints" / "best.ckpt").is_file()
    (directory / "drafter" / "config.json").write_text("better")
    copy_best_from_resumed(earlier / "checkpoints" / "last.ckpt", directory)
    assert (directory / "drafter" / "config.json").read_text() == "better"
