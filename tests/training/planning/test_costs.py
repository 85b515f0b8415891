import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdraft.drafters.objective import DraftHead
from specdraft.losses import chunked, windows
from specdraft.losses.chunked import Correction, Step, Teacher, distillation_loss
from specdraft.training.planning import costs
from specdraft.training.planning.costs import state_bytes

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(autouse=True)
def where_products_are_added_in_place(monkeypatch):
    """As on most devices; what AMD's processors move besides, they move within their caches."""
    monkeypatch.setattr(chunked, "is_faster", lambda: False)


def test_zero_stages_shard_what_they_say():
    def held(*settings, mixed):
        found = state_bytes(100, *settings, mixed=mixed)
        assert list(found) == ["drafter weights", "drafter gradients", "optimizer states"]
        return tuple(found.values())

    assert held(None, 4, mixed=False) == (400, 400, 800)
    assert held(None, 4, mixed=True) == (600, 400, 800)
    assert held(1, 4, mixed=False) == (400, 400, 200)
    assert held(2, 4, mixed=True) == (200, 50, 300)
    assert held(3, 4, mixed=True) == (50, 50, 300)


class Traffic(TorchDispatchMode):
    """Bytes of what every operator reads and writes; views and memory that is only taken move none."""

    bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.removeprefix("aten::")
        if not operator.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            read = args[1:] if name == "gather" else args  # which reads only as much as it writes
            leaves = tree_leaves((read, kwargs, result))
            self.bytes += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return result


@pytest.mark.parametrize(
    ("hidden", "vocabulary", "draft_vocabulary", "steps"),
    [(8, 4096, 1024, 3), (8, 4096, 1024, 6), (8, 8192, 1024, 3), (64, 4096, 2048, 3), (256, 4096, 1024, 4)],
)
def test_the_loss_moves_as_many_bytes_as_planned(monkeypatch, hidden, vocabulary, draft_vocabulary, steps):
    tokens, chunk = 512, 64
    drafter = nn.Sequential(DraftHead(hidden, draft_vocabulary, bias=False))
    drafter.ttt_steps = steps  # type: ignore[assignment]
    head = torch.randn(vocabulary, hidden)
    teacher = Teacher(torch.randn(tokens, hidden), lambda last: last @ head.T, torch.arange(draft_vocabulary))
    inputs = [torch.randn(tokens - k, hidden, requires_grad=True) for k in range(steps)]
    each = [Step(hidden, torch.arange(k, tokens), 1 / steps) for k, hidden in enumerate(inputs)]
    distillation_loss(drafter[0].weight, teacher, each[:1])  # what is imported by the first call
    with Traffic() as counted:
        distillation_loss(drafter[0].weight, teacher, each, size=chunk)
    monkeypatch.setattr(windows, "ELEMENTS", chunk * draft_vocabulary)
    shape = (hidden, vocabulary, draft_vocabulary)
    planned = costs.loss_traffic(drafter, tokens, shape, 4, gpus=False)
    assert math.isclose(planned, counted.bytes, rel_tol=0.1), planned / counted.bytes
    assert costs.loss_traffic(drafter, tokens, shape, 4, gpus=True) < 0.6 * planned


def test_large_windows_on_a_cpu_are_compiled_and_move_less(monkeypatch):
    drafter = nn.Sequential(DraftHead(8, 32_000, bias=False))

    def planned():
        traffic = costs.loss_traffic(drafter, 512, (8, 32_000, 32_000), 4, gpus=False)
        return traffic, costs.loss_bytes(drafter, 512, 32_000, 32_000, None)

    traffic, held = planned()
    monkeypatch.setattr(costs, "MANY", math.inf)
    plain_traffic, plain_held = planned()
    window = windows.fitting(32_000, None) * 32_000 * 4  # bytes
    assert plain_held - held == 3 * window
    assert plain_traffic - traffic == 16 * 512 * 32_000 * 4


def test_a_correction_moves_its_own_projection_and_spares_that_of_a_frozen_base(monkeypatch):
    tokens, chunk, hidden, rank, vocabulary, draft_vocabulary = 512, 64, 256, 32, 4096, 1024
    drafter = nn.Sequential(
        DraftHead(hidden, draft_vocabulary, bias=False), DraftHead(rank, draft_vocabulary, bias=False)
    )
    drafter[0].weight.requires_grad_(False)
    drafter.ttt_steps = 3  # type: ignore[assignment]
    head = torch.randn(vocabulary, hidden)
    teacher = Teacher(torch.randn(tokens, hidden), lambda last: last @ head.T, torch.arange(draft_vocabulary))
    steps = []
    for k in range(3):
        base, added = (torch.randn(tokens - k, width, requires_grad=True) for width in (hidden, rank))
        steps.append(Step(base, torch.arange(k, tokens), 1 / 3, correction=Correction(added, 1)))
    weights = [drafter[0].weight, drafter[1].weight]
    distillation_loss(weights, teacher, steps[:1])  # what is imported by the first call
    with Traffic() as counted:
        distillation_loss(weights, teacher, steps, size=chunk)
    monkeypatch.setattr(windows, "ELEMENTS", chunk * draft_vocabulary)
    planned = costs.loss_traffic(drafter, tokens, (hidden, vocabulary, draft_vocabulary), 4, gpus=False)
    assert math.isclose(planned, counted.bytes, rel_tol=0.1), planned / counted.bytes
