"""Tree verification: in one pass every node sees its own path, whatever the architecture's layers may see.

Tiny random models in fp64 of families whose layers differ, with texts several times as long as the sliding window:
the logits behind every node equal those of a plain forward over the text and the node's path.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specdraft.decoding import passes
from specdraft.decoding.passes import Pass
from specdraft.decoding.tree import ROOT, DraftTrees, empty, with_root
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.masks import attention_masks
from tests.families import FAMILIES, WINDOW, V

NAMES = ["llama", "qwen3", "mistral", "gemma3", "qwen3-moe", "mixtral"]


def tree_of(tokens: list[int], parents: list[int], depth: int) -> DraftTrees:
    return DraftTrees(torch.tensor([tokens]), torch.tensor([parents]), depth=depth, width=2)


# Deeper than the window, so that it cuts paths too; and bushy.
TREES = [
    tree_of([5, 9, 7, 7, 3, 11, 4, 8, 2, 20, 6], [-1, -1, 0, 0, 1, 3, 5, 5, 7, 8, 9], depth=7),
    tree_of([13, 13, 1, 40], [-1, 0, 0, 1], depth=3),
    empty(1, torch.device("cpu")),
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


def paths(tree: DraftTrees) -> list[list[int]]:
    """Behind which nodes the logits of every row are: none, then those of node 0, 1, ..."""
    found: list[list[int]] = [[]]
    for node, parent in enumerate(tree.parents[0].tolist()):
        found.append([*found[0 if parent == ROOT else parent + 1], node])
    return found


def one_by_one(target: Target, text: Tensor, tree: DraftTrees) -> Tensor:
    """``[N + 1, V]``: a plain forward of the model itself for every node."""
    rows = []
    for path in paths(tree):
        ids = torch.cat([text, tree.tokens[0, path]])[None]
        rows.append(target.model(input_ids=ids, use_cache=False).logits[0, -1])
    return torch.stack(rows)


def in_one_pass(target: Target, texts: list[Tensor], trees: list[DraftTrees]) -> list[Tensor]:
    """Of every row its ``[N + 1, V]``: prefill all but the last token, then read it and the tree."""
    cache = target.new_cache(len(texts), 40)
    for row, text in enumerate(texts):
        target.step(Pass.prompt(text[:-1].tolist(), target.device), cache, (), row)
    lengths = torch.tensor([len(text) - 1 for text in texts])
    last = torch.stack([text[-1] for text in texts])
    reading = Pass.trees(last, DraftTrees.join(trees), lengths, int(lengths.max()), target.max_length)
    logits = target.logits(target.step(reading, cache).last)
    return [logits[row, : 1 + tree.num_nodes] for row, tree in enumerate(trees)]


def difference(target: Target, texts: list[Tensor], trees: list[DraftTrees]) -> float:
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
    monkeypatch.setattr(passes, "with_root", lambda seen: with_root(torch.ones_like(seen).tril()))
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
    places = torch.arange(length, length + nodes)[None]
    return attention_masks(config, visible, places, places, torch.float32)


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


def test_without_places_the_keys_are_those_of_the_positions_themselves():
    """Packed documents, of 5 and 6 tokens: their positions begin again, and so does the window."""
    positions = torch.tensor([[*range(5), *range(6)]])
    visible = torch.block_diag(torch.ones(5, 5), torch.ones(6, 6)).tril().bool()[None]
    found = attention_masks(config(sliding_window=3), visible, positions, None, torch.float32)[0, 0]
    assert [row.nonzero()[:, 0].tolist() for row in found[[1, 4, 5, 10]]] == [[0, 1], [2, 3, 4], [5], [8, 9, 10]]


def test_a_window_counts_positions_and_not_places():
    """Two children of one node lie one behind the other, and are as far from the text."""
    places, positions = torch.tensor([[4, 5, 6]]), torch.tensor([[4, 5, 5]])
    visible = torch.ones(1, 3, 7, dtype=torch.bool)
    visible[0, 2, 5] = False
    found = attention_masks(config(sliding_window=3), visible, positions, places, torch.float32)[0, 0]
    assert [row.nonzero()[:, 0].tolist() for row in found[1:]] == [[3, 4, 5, 6], [3, 4, 6]]
