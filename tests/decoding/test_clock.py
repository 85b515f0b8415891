"""A clock tells the seconds between two marks."""

import time

import pytest
import torch

from specdraft.decoding import compilation
from specdraft.decoding.clock import Clock, now


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("meta")])
def test_without_events_it_is_the_clock_of_the_host(device, monkeypatch):
    now = iter([1.5, 4.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = Clock(device)
    start, end = clock.mark(), clock.mark()
    assert clock.seconds(start, end) == 2.5


def test_on_cuda_events_are_recorded_and_awaited_when_asked(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = Clock(torch.device("cuda"))
    monkeypatch.setattr(compilation._spent, "seconds", 1.0)
    start = clock.mark()
    monkeypatch.setattr(compilation._spent, "seconds", 1.125)
    end = clock.mark()
    assert log == ["record", "record"]
    assert clock.seconds(start, end) == 0.125  # of the 0.25, half the device waited for a compiler
    assert log == ["record", "record", "wait"]


def test_it_stands_still_while_passes_are_compiled(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    monkeypatch.setattr(compilation._spent, "seconds", 1.5)
    clock = Clock(torch.device("cpu"))
    start = clock.mark()
    assert now() == 8.5
    monkeypatch.setattr(time, "perf_counter", lambda: 14.0)
    monkeypatch.setattr(compilation._spent, "seconds", 4.5)
    assert clock.seconds(start, clock.mark()) == 1.0
