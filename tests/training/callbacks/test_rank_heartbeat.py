"""Ranks that are killed, hang, or wait for each other: real processes over gloo."""

import re
import signal
import time

import pytest

from tests.training import faults_worker
from tests.training.forked import Ranks

FOR_EVER = 100_000


def test_a_killed_rank_stops_the_other_and_the_run_resumes(tmp_path, undisturbed, resumed):
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
    assert first == 6 and losses == pytest.approx(undisturbed[6:], rel=1e-5)


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


def test_ranks_in_different_collectives_are_noticed(tmp_path):
    """Both are alive, and count: neither gets on."""
    fault = faults_worker.Part(3)
    ranks = Ranks(tmp_path, 2, faults_worker.train, tmp_path, FOR_EVER, 2, None, 3.0, fault, 2.0)
    ranks.wait_for("parting")
    parted = time.monotonic()
    assert [ranks.end(rank, seconds=60) for rank in range(2)] == [2, 2]
    assert 2 < time.monotonic() - parted < 30
    (error,) = [line for line in (ranks.said(0) + ranks.said(1)).splitlines() if line.startswith("error: ")]
    assert re.match(
        r"error: no rank has made progress for \d+ seconds: rank 0 is in broadcast \(torch/distributed/", error
    )
    assert re.search(r"; rank 1 is in all_reduce \(torch/distributed/\S+py:\d+\) during step 4: they wait", error)
    assert error.endswith(
        f"resume from {tmp_path / 'checkpoints' / 'last.ckpt'}, on any number of ranks, or with resume=auto"
    )
