"""Bytes, operations and host reads of a loss, held as numbers: they are the same on every device.

R = positions, S = steps, H = hidden size, V = vocabulary, c = positions of a window."""

import pytest
import torch

from specdraft.losses import chunked
from specdraft.losses.chunked import Step, Teacher, distillation_loss
from specdraft.losses.divergence import DIVERGENCES, Compared, Distribution, divergence
from specdraft.losses.eager import CACHED
from tests.losses.counting import Counted, HostReads, size

R, S, H, V, C = 512, 3, 256, 1024, 128  # in the proportions of a head of 4,096 and windows of 2,048


@pytest.fixture(autouse=True)
def where_products_are_added_in_place(monkeypatch):
    """As on every device but some processors, whose library is slow at it (``specdraft/onednn.py``)."""
    monkeypatch.setattr(chunked, "is_faster", lambda: False)


class Kernel:
    """What ``fused.py`` moves, without its arithmetic: of the target's logits one pass, or two where a part is chosen;
    of a chunk three passes over z, two over the target's and the gradient written once."""

    def __init__(self) -> None:
        self.bytes = 0

    def target(self, logits, draft_ids, label):
        self.bytes += size(logits)
        if draft_ids is not None:
            logits = logits.index_select(-1, draft_ids)
            self.bytes += size(logits)
        rows = logits.new_zeros(len(logits))
        return Distribution(logits, rows, rows, rows.long(), None)

    def draft(self, z, target, index, keep):
        self.bytes += 6 * size(z)
        rows = z.new_zeros(len(z))
        return Compared(rows, rows, rows.long(), z)


def problem(rows=R, steps=S, vocabulary=V, pruned=False):
    """Of the target all, of the draft all or half."""
    projection, last = torch.randn(vocabulary, H), torch.randn(rows, H)
    ids = torch.arange(0, vocabulary, 2) if pruned else None
    teacher = Teacher(last, lambda hidden: hidden @ projection.T, ids, torch.randint(vocabulary, (rows,)))
    weight = torch.randn(vocabulary // 2 if pruned else vocabulary, H, requires_grad=True)
    hiddens = [torch.randn(rows, H, requires_grad=True) for _ in range(steps)]
    return weight, teacher, [Step(hidden, torch.arange(rows), 1.0) for hidden in hiddens]


def cost(monkeypatch=None, name="forward_kl", **sizes):
    """Bytes and operations of forward and backward: by the kernel where it is to take torch's place."""
    weight, teacher, steps = problem(**sizes)
    kernel = Kernel()
    if monkeypatch is not None:
        monkeypatch.setattr(chunked, "comparison", lambda *_: kernel)
    with Counted() as counted:
        distillation_loss(weight, teacher, steps, divergence(name), C)[0].backward()
    return counted.bytes + kernel.bytes, counted.operations


def limit(vocabulary=V, drafts=V):
    """Bytes that have to move: operands and results of the products, the weight's gradient read and written by each
    chunk; of a chunk's logits the draft's and the target's read and the gradient written, once."""
    windows = R // C
    target = C * H + vocabulary * H + C * vocabulary + C * vocabulary
    chosen = 2 * C * drafts if drafts < vocabulary else 0
    project = C * H + drafts * H + C * drafts
    compare = 3 * C * drafts
    to_hidden = C * drafts + drafts * H + C * H
    to_weight = C * drafts + C * H + 2 * drafts * H
    once = 3 * drafts * H  # the gradient is made, and scaled in backward
    return 4 * (windows * (target + chosen + S * (project + compare + to_hidden + to_weight)) + once)


@pytest.mark.parametrize("pruned", [False, True])
def test_a_kernels_loss_moves_little_more_than_it_must(monkeypatch, pruned):
    moved, _ = cost(monkeypatch, pruned=pruned)
    least = limit(drafts=V // 2 if pruned else V)
    assert least < moved < 1.5 * least


@pytest.mark.parametrize("by_torch", [False, True])
def test_bytes_are_linear_in_positions_steps_and_vocabulary(monkeypatch, by_torch):
    def moved(**sizes):
        return cost(None if by_torch else monkeypatch, **sizes)[0]

    for key, one in (("rows", R), ("steps", S), ("vocabulary", V)):
        first, second, fourth = (moved(**{key: times * one}) for times in (1, 2, 4))
        assert fourth - second == pytest.approx(2 * (second - first), rel=0.02), key
        assert second < 2.05 * first, key


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("forward_kl", 18),
        ("reverse_kl", 31),
        ("jsd", 38),
        ("total_variation", 25),
        ("lk_hybrid", 36),
        ("cross_entropy", 15),
    ],
)
def test_torch_passes_over_a_chunk_so_often(name, passes):
    more, less = (cost(name=name, steps=steps)[0] for steps in (S + 1, S))
    products = 4 * (R // C) * (3 * C * H + 3 * C * V + 4 * V * H)
    assert more - less - products < (passes + 0.5) * 4 * R * V


def test_each_chunk_costs_few_operations(monkeypatch):
    assert CACHED // V >= C, "torch takes a chunk in one block"
    for kernel, most in ((monkeypatch, 8), (None, 29)):
        chunks = (R // C, 2 * R // C)
        less, more = (cost(kernel, rows=C * windows)[1] for windows in chunks)
        assert (more - less) / ((chunks[1] - chunks[0]) * S) < most


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("steps", [1, 5])
def test_the_host_reads_once(name, pruned, steps):
    weight, teacher, made = problem(pruned=pruned, steps=steps)
    with HostReads() as reads:
        distillation_loss(weight, teacher, made, divergence(name), C)[0].backward()
    assert reads.seen == ["tolist"]


def test_reads_are_seen():
    with HostReads() as reads:
        values = torch.arange(3)
        assert bool(values[0] == 0) and int(values[1]) == 1 and values.tolist() and values[values > 1].item() == 2
        torch.tensor([1]).nonzero()
    assert reads.seen == ["__bool__", "__int__", "tolist", "__getitem__", "item", "tensor", "nonzero"]


def test_bytes_are_seen():
    with Counted() as counted:
        values = torch.zeros(4)
        values.view(2, 2).add_(torch.empty(2, 2))
        torch.mm(torch.empty(2, 3), torch.empty(3, 5), out=torch.empty(2, 5))
        torch.empty(100, 8)[torch.empty(2, dtype=torch.long).zero_()]
    assert counted.operations == 5
    assert counted.bytes == 16 + 3 * 16 + 4 * (6 + 15 + 10) + 16 + (64 + 16 + 64)
