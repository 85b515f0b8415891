"""Windows against sets of positions, their size by device, and one read by the host."""

import pytest
import torch

from specdraft.losses.windows import ELEMENTS, POSITIONS, Windows, window_size
from tests.losses.counting import HostReads

CUDA = torch.device("cuda", 1)


def nested(steps=4, total=60):
    """Ascending positions of some steps, as the training-time test makes them."""
    rows = torch.arange(total - steps - 2)
    for step in range(steps):
        rows = rows[torch.rand(len(rows)) < 0.8]
        yield rows + 1 + step


@pytest.mark.parametrize("size", [1, 7, 16, 60, 1000])
@pytest.mark.parametrize(
    "steps",
    [
        list(nested()),
        [torch.arange(5), torch.arange(50, 60), torch.arange(0)],
        [torch.arange(60)] * 2,
        [torch.arange(59, 60)],
        [torch.arange(0), torch.arange(0)],
    ],
)
def test_windows_hold_what_sets_say(steps, size):
    union = sorted({position for step in steps for position in step.tolist()})
    windows = Windows(steps, 60, size)
    assert windows.positions.tolist() == union and windows.size == size
    assert [windows.positions[ranks].tolist() for ranks in windows.ranks] == [step.tolist() for step in steps]
    seen = [[] for _ in steps]
    asked = []
    for window, parts in windows:
        assert window.tolist() == union[len(asked) : len(asked) + size]
        asked += window.tolist()
        for step, part, own in zip(steps, parts, seen, strict=True):
            if part is None:
                assert not set(step.tolist()) & set(window.tolist())
                continue
            assert part.low == len(own) and part.high > part.low
            own += step[part.low : part.high].tolist()
            if part.places is None:
                assert torch.equal(step[part.low : part.high], window)
            else:
                assert len(part.places) < len(window)
                assert torch.equal(window[part.places], step[part.low : part.high])
    assert asked == union and seen == [step.tolist() for step in steps]


def test_the_host_reads_once():
    steps = list(nested())
    with HostReads() as reads:
        assert sum(1 for _ in Windows(steps, 60, 7)) > 3
    assert reads.seen == ["tolist"]


def free(monkeypatch, driver, reserved=0, allocated=0):
    """A GPU with so many free bytes."""

    def of(number):
        return lambda device: number if device == CUDA else None

    monkeypatch.setattr(torch.cuda, "mem_get_info", of((driver, 80 * 2**30)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", of(reserved))
    monkeypatch.setattr(torch.cuda, "memory_allocated", of(allocated))


def test_windows_on_a_gpu_are_large(monkeypatch):
    free(monkeypatch, 40 * 2**30)
    assert window_size(32_000, CUDA) == window_size(128_256, CUDA) == POSITIONS == 2048


def test_windows_on_a_gpu_leave_memory_for_the_rest(monkeypatch):
    free(monkeypatch, 4 * 2**30)
    assert window_size(32_768, CUDA) == 2048 and window_size(131_072, CUDA) == 512
    free(monkeypatch, 2**30, reserved=5 * 2**30, allocated=2 * 2**30)  # what torch holds and does not use is free
    assert window_size(131_072, CUDA) == 512
    free(monkeypatch, 4 * 2**30 + 16 * 4 * 131_072 * 15)
    assert window_size(131_072, CUDA) == 512, "whole tiles of a product"
    free(monkeypatch, 2**20)
    assert window_size(131_072, CUDA) == 16


def test_windows_on_a_processor_hold_so_many_logits():
    cpu = torch.device("cpu")
    assert 0.9 * ELEMENTS < window_size(32_768, cpu) * 32_768 <= ELEMENTS
    assert window_size(512, cpu) * 512 == ELEMENTS and window_size(10**9, cpu) == 16
    assert all(window_size(size, cpu) % 16 == 0 for size in (4_096, 32_000, 49_152, 151_936))


def test_the_logits_of_a_window_are_memory_that_is_used_again():
    from specdraft.allocation import _BLOCK

    assert 0.99 * _BLOCK < 4 * ELEMENTS < _BLOCK - 2**12  # what the allocators add of their own
