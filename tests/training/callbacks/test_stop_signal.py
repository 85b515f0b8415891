"""Ctrl-C and SIGTERM, to ranks that get on and to ranks that do not."""

import re
import signal
import time
from contextlib import nullcontext

import pytest
from lightning import Callback

from tests.training import faults_worker
from tests.training.forked import Ranks

FOR_EVER = 100_000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_stops_all_at_the_end_of_a_step(tmp_path, number, undisturbed, resumed):
    fault = faults_worker.Signal(4, number)
    ranks = Ranks(tmp_path, 2, faults_worker.train, tmp_path, 12, FOR_EVER, None, 30.0, fault)
    assert [ranks.end(rank) for rank in range(2)] == [0, 0], ranks.said()
    first, losses = resumed(tmp_path, world_size=2)
    # Two ranks sum in another order than one, and Adam carries that on.
    assert first == 4 and losses == pytest.approx(undisturbed[4:], rel=1e-5)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_ranks_that_are_stuck(tmp_path, number, twice):
    """After the time of grace, or at the second signal; they wait where no Python runs."""
    grace = 1000.0 if twice else 1.0
    ranks = Ranks(
        tmp_path, 2, faults_worker.train, tmp_path, FOR_EVER, 2, None, 30.0, faults_worker.Part(3), 600.0, grace
    )
    ranks.wait_for("parting", rank=0)
    ranks.wait_for("parting", rank=1)
    time.sleep(0.3)
    for _ in range(1 + twice):
        for rank in range(2):
            ranks.kill(rank, number)
        time.sleep(0.3)
    assert [ranks.end(rank, seconds=60) for rank in range(2)] == [130, 130]
    said = ranks.said(0) + ranks.said(1)  # a rank that finds the other gone meanwhile leaves without a sentence
    pattern = r"^interrupted: rank (0 was in broadcast|1 was in all_reduce) \(\S+:\d+\) during step 4, and is left"
    assert re.search(pattern, said, re.MULTILINE) and "error" not in said, said


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_are_given_back(make_run, fails):
    def handlers():
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    class Look(Callback):
        def on_train_batch_end(self, *_):
            seen.append(handlers())
            if fails:
                raise RuntimeError("out of luck")

    before, seen = handlers(), []
    trainer, module, data, *_, stop = make_run(max_steps=1, every=0, callbacks=[Look()])
    with pytest.raises(RuntimeError, match="out of luck") if fails else nullcontext():
        trainer.fit(module, data)
    assert seen == [[stop._request] * 2] and handlers() == before
    assert signal.set_wakeup_fd(-1) == -1
