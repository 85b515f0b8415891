"""The way by device, and that what differs from torch is not taken."""

import builtins
import importlib.util
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from specdraft.losses import comparison
from specdraft.losses.divergence import DIVERGENCES, divergence, forward_kl
from specdraft.losses.eager import Eager

VD = 12
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def own(draft, target):
    """A divergence that is not the project's."""
    return forward_kl(draft, target)


def test_a_gpu_with_triton_takes_the_kernel(monkeypatch):
    made = SimpleNamespace(Fused=lambda divergence: ("kernel", divergence))
    monkeypatch.setitem(sys.modules, "specdraft.losses.fused", made)
    monkeypatch.setattr(comparison, "Eager", lambda *given: "eager")
    found = dict.fromkeys(["triton"], object())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found.get(name))

    monkeypatch.setattr(comparison, "agrees", lambda *_: True)

    def taken(divergence=forward_kl, dtype=torch.float32, device=CUDA):
        return comparison.comparison(divergence, 4, VD, dtype, device)

    assert taken() == ("kernel", forward_kl)
    assert taken(own) == taken(dtype=torch.float64) == taken(device=CPU) == "eager"
    found.clear()
    assert taken() == "eager"


def test_a_processor_compiles_where_there_is_much_to_compare(monkeypatch):
    monkeypatch.setattr(comparison, "agrees", lambda *_: True)

    def taken(divergence=forward_kl, dtype=torch.float32, size=comparison.MANY // 1024):
        return type(comparison.comparison(divergence, size, 1024, dtype, CPU)).__name__

    assert taken() == taken(divergence("jsd")) == "Compiled"
    assert taken(own) == taken(dtype=torch.float64) == taken(size=comparison.MANY // 1024 - 1) == "Eager"


def test_a_processor_does_not_look_for_triton(monkeypatch):
    imported, real = [], builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: imported.append(name) or real(name, *rest))
    compare = comparison.comparison(forward_kl, 4, VD, torch.float32, CPU)
    assert isinstance(compare, Eager) and not any("triton" in name or "fused" in name for name in imported)


class Wrong(Eager):
    """A kernel with one fault."""

    def draft(self, z, target, index, keep):
        found = super().draft(z, target, index, keep)
        return found._replace(alpha=found.alpha + 0.01)


class Broken(Eager):
    """A kernel that does not compile."""

    def target(self, logits, draft_ids, label):
        raise AssertionError("no backend")


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(("kernel", "amiss"), [(Eager, ""), (Wrong, "it differs by 0.01"), (Broken, "no backend")])
def test_a_kernel_that_says_something_else_is_not_used(monkeypatch, name, kernel, amiss):
    monkeypatch.setattr(comparison, "_agreeing", {})
    asked = divergence(name)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            assert comparison.agrees(kernel(asked, 7, 150, torch.float32, CPU), asked, CPU) == (not amiss)
    assert [amiss in str(each.message) for each in warned] == [True] * bool(amiss)
