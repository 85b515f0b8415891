"""Tree verification: in one pass every node sees its own path, whatever the architecture's layers may see.

Tiny random models in fp64 of families whose layers differ, with texts several times as long as the sliding window:
the logits behind every node equal those of a plain forward over the text and the node's path.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specdraft.decoding.tree import ROOT, DraftTree
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.masks import attention_masks
from tests.families import FAMILIES, WINDOW, V

NAMES = ["llama", "qwen3", "mistral", "gemma3", "qwen3-moe", "mixtral"]
# Deeper than the window, so that it cuts paths too; and bushy.
TREES = [
    DraftTree(torch.tensor([5, 9, 7, 7, 3, 11, 4, 8, 2, 20, 6]), torch.tensor([-1, -1, 0, 0, 1, 3, 5, 5, 7, 8, 9])),
    DraftTree(torch.tensor([13, 13, 1, 40]), torch.tensor([-1, 0, 0, 1])),
    DraftTree.empty(),
]
TEXTS = [torch.randint(V, (length,), generator=torch.Generator().manual_seed(length)) for length in (14, 9, 3)]


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def target(request, name) -> Target:
    return Target.from_model(FAMILIES[name].build(attn_implementation=request.param))


@pytest.fixture(autouse=True)
def fp64_softmax(monkeypatch):
    """Eager attention takes its softmax in fp32 whatever the weights are: an error of 1e-6 that is not ours."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim=-1, dtype=None: softmax(scores, dim=dim))


def paths(tree: DraftTree) -> list[list[int]]:
    """Behind which nodes the logits of every row are: none, then those of node 0, 1, ..."""
    found: list[list[int]] = [[]]
    for node, parent in enumerate(tree.parent_list):
        found.append([*found[0 if parent == ROOT else parent + 1], node])
    return found


def one_by_one(target: Target, text: Tensor, tree: DraftTree) -> Tensor:
    """``[N + 1, V]``: a plain forward of the model itself for every node."""
    rows = []
    for path in paths(tree):
        ids = torch.cat([text, tree.tokens[path]])[None]
        rows.append(target.model(input_ids=ids, use_cache=False).logits[0, -1])
    return torch.stack(rows)


def in_one_pass(target: Target, texts: list[Tensor], trees: list[DraftTree]) -> list[Tensor]:
    """Of every row its ``[N + 1, V]``: prefill all but the last token, then read it and the tree."""
    rows = [target.new_cache(4) for _ in texts]
    for text, row in zip(texts, rows, strict=True):
        target.step(text[None, :-1], row)
    cache = target.new_cache(0)
    cache.join(rows)
    size = 1 + max(len(tree) for tree in trees)
    longest = max(cache.lengths)
    tokens = torch.zeros((len(texts), size), dtype=torch.int64)
    positions = torch.zeros_like(tokens)
    visible = torch.zeros((len(texts), size, longest + size), dtype=torch.bool)
    for row, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        held, nodes = len(text) - 1, slice(1, 1 + len(tree))
        tokens[row, 0], tokens[row, nodes] = text[-1], tree.tokens
        positions[row] = held
        positions[row, nodes] += torch.tensor(tree.depths, dtype=torch.int64)
        visible[row, :, : held + 1] = True
        visible[row, nodes, held + 1 : held + 1 + len(tree)] = tree.ancestors()
    logits = target.logits(target.step(tokens, cache, (), positions, visible).last)
    assert cache.lengths == [len(text) - 1 + size for text in texts]
    return [logits[row, : 1 + len(tree)] for row, tree in enumerate(trees)]


def difference(target: Target, texts: list[Tensor], trees: list[DraftTree]) -> float:
    ours = in_one_pass(target, texts, trees)
    return max(
        float((row - one_by_one(target, text, tree)).abs().max())
        for row, text, tree in zip(ours, texts, trees, strict=True)
    )


@pytest.mark.parametrize("which", [0, 1, 2])
@torch.inference_mode()
def test_every_node_of_a_tree_reads_its_own_path(target, which):
    assert difference(target, TEXTS[:1], [TREES[which]]) < 1e-9


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [2, 0, 1]])
@torch.inference_mode()
def test_trees_of_rows_of_different_lengths(target, order):
    assert difference(target, [TEXTS[row] for row in order], [TREES[row] for row in order]) < 1e-9
    # The shorter the text, the larger the tree, and the other way round.
    assert difference(target, [TEXTS[row] for row in order], [TREES[row] for row in reversed(order)]) < 1e-9


@torch.inference_mode()
def test_a_node_that_sees_too_much_is_noticed(target, monkeypatch):
    monkeypatch.setattr(DraftTree, "ancestors", lambda tree: torch.ones(len(tree), len(tree)).tril().bool())
    assert difference(target, TEXTS[:1], TREES[:1]) > 1e-3


@torch.inference_mode()
def test_a_window_that_is_forgotten_is_noticed(target, name, monkeypatch):
    monkeypatch.setattr("specdraft.targets.masks._WINDOWED", {})
    forgotten = difference(target, TEXTS[:1], TREES[:1])
    assert forgotten > 1e-3 if FAMILIES[name].windowed else forgotten < 1e-9


def config(**options) -> SimpleNamespace:
    return SimpleNamespace(**{"_attn_implementation": "sdpa", "layer_types": None} | options)


def masks_of(config, length=7, nodes=3):
    """A chain of ``nodes`` behind ``length`` held tokens, of which all is visible."""
    visible = torch.ones(length + nodes, length + nodes).tril().bool()[None, length:]
    return attention_masks(config, visible, torch.arange(length, length + nodes)[None], [length], torch.float32)


def test_windows_and_chunks_by_hand():
    window = masks_of(config(sliding_window=WINDOW))
    assert window.shape == (1, 1, 3, 10)
    assert [row.nonzero()[:, 0].tolist() for row in window[0, 0]] == [[4, 5, 6, 7], [5, 6, 7, 8], [6, 7, 8, 9]]
    chunked = masks_of(config(layer_types=["chunked_attention"], attention_chunk_size=4))
    assert [row.nonzero()[:, 0].tolist() for row in chunked[0, 0]] == [[4, 5, 6, 7], [8], [8, 9]]


def test_layers_that_differ_get_a_mask_each():
    kinds = masks_of(config(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=WINDOW))
    assert set(kinds) == {"full_attention", "sliding_attention"}
    assert kinds["full_attention"].sum() == 8 + 9 + 10
    assert kinds["sliding_attention"].sum() == 3 * WINDOW
    # A window that is set but that no layer has is none.
    only_full = masks_of(config(layer_types=["full_attention"] * 2, sliding_window=WINDOW))
    assert torch.equal(only_full, kinds["full_attention"])


def test_eager_attention_adds_its_mask():
    added = masks_of(config(_attn_implementation="eager"))
    seen = masks_of(config())
    assert added.dtype == torch.float32
    assert torch.equal(added == 0, seen)
    assert (added[~seen] == torch.finfo(torch.float32).min).all()


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_that_takes_no_masks_is_refused(implementation):
    with pytest.raises(UserError, match=f"attention is '{implementation}', .*: expected .*sdpa or eager$"):
        masks_of(config(_attn_implementation=implementation))
