"""What goes wrong for real: killed and hanging ranks, signals, a full disk, two runs in one directory."""

import os
import re
import signal
import time

import pytest
import torch

from specdraft.errors import UserError
from specdraft.training.checkpoints.file import is_whole
from specdraft.training.checkpoints.resume import find_resume
from specdraft.training.run_lock import acquire_run_lock
from tests.training import faults_worker
from tests.training.forked import Ranks

FOR_EVER = 100_000


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of 12 steps on one rank."""
    directory = tmp_path_factory.mktemp("undisturbed")
    ranks = Ranks(directory, 1, faults_worker.train, directory, 12)
    assert ranks.end(0) == 0, ranks.said()
    return torch.load(directory / "result.pt", weights_only=True)["losses"]


def resumed(directory, world_size=1):
    """(first step, losses) of a run that goes on from there to step 12, on another number of ranks perhaps."""
    notes: list[str] = []
    checkpoint = find_resume(str(directory), directory, notes.append)
    assert notes == []
    again = directory / "again"
    again.mkdir()
    ranks = Ranks(again, world_size, faults_worker.train, again, 12, 2, checkpoint)
    assert [ranks.end(rank) for rank in range(world_size)] == [0] * world_size, ranks.said()
    first = torch.load(checkpoint, weights_only=True)["global_step"]
    return first, torch.load(again / "result.pt", weights_only=True)["losses"]


def test_a_killed_rank_stops_the_other_and_the_run_resumes(tmp_path, undisturbed):
    ranks = Ranks(
        tmp_path, 2, faults_worker.train, tmp_path, 12, 2, None, 30.0, faults_worker.Signal(8, signal.SIGKILL)
    )
    assert ranks.end(1) == -signal.SIGKILL
    killed = time.monotonic()
    assert ranks.end(0) == 2
    assert time.monotonic() - killed < 60
    said = ranks.said()
    assert re.search(r"^error: rank 0 has lost its connection to another one: it was killed", said, re.MULTILINE)
    assert f"resume from {tmp_path / 'checkpoints' / 'last.ckpt'}" in said
    first, losses = resumed(tmp_path)
    assert first == 6 and losses == pytest.approx(undisturbed[6:], abs=1e-6)


@pytest.mark.parametrize("hanging", [0, 1])
def test_a_hanging_rank_is_noticed(tmp_path, hanging):
    """Its connections stay open, and nothing that waits for it returns: so does a machine that is gone."""
    ranks = Ranks(tmp_path, 2, faults_worker.train, tmp_path, FOR_EVER, FOR_EVER, None, 3.0)
    ranks.wait_for("step 3.")
    ranks.kill(hanging, signal.SIGSTOP)
    try:
        assert ranks.end(1 - hanging, seconds=60) == 2
    finally:
        ranks.kill(hanging, signal.SIGKILL)
    pattern = rf"^error: rank {hanging} has not been heard of for 3 seconds: it was killed, hangs"
    assert re.search(pattern, ranks.said(1 - hanging), re.MULTILINE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_stops_all_at_the_end_of_a_step(tmp_path, number, undisturbed):
    fault = faults_worker.Signal(4, number)
    ranks = Ranks(tmp_path, 2, faults_worker.train, tmp_path, 12, FOR_EVER, None, 30.0, fault)
    assert [ranks.end(rank) for rank in range(2)] == [0, 0], ranks.said()
    first, losses = resumed(tmp_path, world_size=2)
    assert first == 4 and losses == pytest.approx(undisturbed[4:], abs=1e-6)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, undisturbed):
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


def test_a_directory_belongs_to_one_process_until_it_ends(tmp_path):
    holder = Ranks(tmp_path / "logs", 1, faults_worker.hold, tmp_path)
    holder.wait_for("claimed")
    pid = holder.processes[0].pid
    with pytest.raises(UserError, match=rf"another run writes into {tmp_path} \(process {pid} on .*\): wait for it"):
        acquire_run_lock(tmp_path)
    holder.kill(0, signal.SIGKILL)
    assert holder.end(0) == -signal.SIGKILL
    acquire_run_lock(tmp_path)


@pytest.mark.parametrize("trained", ["drafter/config.json", "checkpoints/step-000003.ckpt"])
def test_a_directory_that_holds_a_run_is_not_written_over(tmp_path, trained):
    acquire_run_lock(tmp_path)
    acquire_run_lock(tmp_path)  # a run that ended before it had trained anything is begun again
    (tmp_path / trained).parent.mkdir()
    (tmp_path / trained).touch()
    with pytest.raises(
        UserError, match=rf"{tmp_path} holds a run: choose another .* or continue it with resume={tmp_path}"
    ):
        acquire_run_lock(tmp_path)
    with pytest.raises(UserError, match="holds a run"):
        acquire_run_lock(tmp_path, tmp_path.parent / "checkpoints" / "step-000003.ckpt")
    acquire_run_lock(tmp_path, tmp_path / "checkpoints" / "step-000003.ckpt")
