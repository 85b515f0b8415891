"""A disk that is full, and files that are cut short."""

import os

from specdraft.training.checkpoints.file import is_whole
from specdraft.training.checkpoints.resume import find_resume
from tests.training import faults_worker
from tests.training.forked import Ranks


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
