import os

import pytest

from specdraft.errors import UserError
from specdraft.training.checkpoints import find_resume


def test_auto_takes_the_newest_run_that_has_a_checkpoint(tmp_path):
    notes: list[str] = []
    assert find_resume("auto", tmp_path / "family", notes.append) is None
    assert "starting anew" in notes[0]
    for age, run in enumerate(("new", "old")):
        path = tmp_path / "family" / run / "checkpoints" / "last.ckpt"
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "family" / "empty" / "checkpoints").mkdir(parents=True)
    found = find_resume("auto", tmp_path / "family", notes.append)
    assert found == tmp_path / "family" / "new" / "checkpoints" / "last.ckpt"
    assert find_resume(str(tmp_path / "family" / "old"), tmp_path, notes.append).parent.parent.name == "old"
    assert find_resume(str(found), tmp_path, notes.append) == found
    assert find_resume(None, tmp_path, notes.append) is None


def test_a_path_without_checkpoint_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"last.ckpt does not exist"):
        find_resume(str(tmp_path), tmp_path, print)
