"""Blocks' attention beside one dense mask over all slots of all anchors: values, gradients, chunks of any size."""

import pytest
import torch

from specdraft.drafters.alignment import Documents
from specdraft.drafters.dflash import block_attention
from specdraft.drafters.dflash.block_attention import Blocks

DOCUMENTS = [7, 1, 9, 5]
ANCHORS = torch.tensor([0, 3, 6, 9, 11, 16, 17, 21])
SLOTS, HEADS, KV_HEADS, SIZE = 3, 4, 2, 8


def documents() -> Documents:
    bounds = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
    return Documents(bounds.expand(2, -1), max(DOCUMENTS), sum(DOCUMENTS))


def given():
    g = torch.Generator().manual_seed(0)
    slots = len(ANCHORS) * SLOTS
    shapes = [(slots, HEADS, SIZE)] + [(sum(DOCUMENTS), KV_HEADS, SIZE)] * 2 + [(slots, KV_HEADS, SIZE)] * 2
    return [torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes]


def dense(query, key, value, own_key, own_value, causal):
    """Every slot against every context key and every slot of every block, one query at a time."""
    document = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
    outputs = []
    for index in range(len(query)):
        anchor, slot = ANCHORS[index // SLOTS], index % SLOTS
        place = torch.arange(len(key))
        context = (place <= anchor) & (document == document[anchor])
        block = torch.zeros(len(own_key), dtype=torch.bool)
        first = index // SLOTS * SLOTS
        block[first : first + (slot + 1 if causal else SLOTS)] = True
        keys, values = (
            torch.cat(pair) for pair in ((key[context], own_key[block]), (value[context], own_value[block]))
        )
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
        weights = (torch.einsum("hd,khd->hk", query[index], keys) * SIZE**-0.5).softmax(-1)
        outputs.append(torch.einsum("hk,khd->hd", weights, values))
    return torch.stack(outputs)


@pytest.mark.parametrize("scores", [1, 2000, 2**24], ids=["an anchor each", "a few", "one chunk"])
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_are_those_of_a_dense_mask(causal, scores, monkeypatch):
    monkeypatch.setattr(block_attention, "SCORES", scores)
    one, other = given(), given()
    blocks = Blocks(ANCHORS, documents(), SLOTS, causal)
    output = blocks.attend(one[0], (one[1], one[2]), (one[3], one[4]))
    expected = dense(*other, causal)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-11)


def test_chunks_hold_all_anchors_once_and_no_more_scores_than_allowed(monkeypatch):
    monkeypatch.setattr(block_attention, "SCORES", 800)
    chunks = Blocks(ANCHORS, documents(), SLOTS, causal=False).chunks(HEADS)
    assert [place for chunk in chunks for place in range(*chunk.anchors.indices(99))] == list(range(len(ANCHORS)))
    assert len(chunks) > 2
    for anchors, keys in chunks:
        count = anchors.stop - anchors.start
        assert count == 1 or count * HEADS * SLOTS * (keys.stop - keys.start + SLOTS) <= 800
        assert keys.start == Blocks(ANCHORS, documents(), SLOTS, False).begins[anchors.start]
        assert keys.stop == ANCHORS[anchors.stop - 1] + 1


def test_what_is_computed_grows_with_what_is_seen_and_not_with_all_that_there_is():
    """Counted in the elements of all products' outputs: a dense mask would have them for every pair."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(anchors: int, length: int) -> int:
        bounds = torch.tensor([0, length]).int().expand(2, -1)
        at = torch.arange(0, length, length // anchors)[:anchors]
        blocks = Blocks(at, Documents(bounds, length, length), SLOTS, causal=False)
        query, own = torch.zeros(anchors * SLOTS, HEADS, SIZE), torch.zeros(anchors * SLOTS, KV_HEADS, SIZE)
        context = torch.zeros(length, KV_HEADS, SIZE)
        with FlopCounterMode(display=False) as counter:
            blocks.attend(query, (context, context), (own, own))
        return counter.get_total_flops()

    # Two products of SIZE for every pair of a query and a key.
    pairs = lambda anchors, length: 4 * SIZE * HEADS * SLOTS * anchors * (length + SLOTS)  # noqa: E731
    assert flops(64, 64) <= pairs(64, 64)
    assert flops(64, 1024) <= pairs(64, 1024)


def test_half_precision_is_added_up_in_fp32():
    parts = [each.detach().bfloat16() for each in given()]
    wide = [each.double() for each in parts]
    blocks = Blocks(ANCHORS, documents(), SLOTS, causal=False)
    found = blocks.attend(parts[0], (parts[1], parts[2]), (parts[3], parts[4]))
    expected = blocks.attend(wide[0], (wide[1], wide[2]), (wide[3], wide[4]))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
