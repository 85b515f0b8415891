"""Merged trees: the union of several drafts, whose verification emits what plain sampling would.

The joint distribution of three tokens, by chi-square; merging that is wrong in one place must be rejected."""

from dataclasses import replace

import pytest
import torch

from specdraft.decoding import rules
from specdraft.decoding.merging import merge
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import StaticTree
from specdraft.decoding.stopping import Confidence
from specdraft.decoding.tree import DraftTrees, empty
from tests.chance import REJECTED
from tests.decoding.markov import Markov, V
from tests.decoding.trees import plainly, repeat, tree_of

DRAWS = 20000
BUSH = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))


def nodes(trees: DraftTrees, row: int = 0) -> list[tuple[int, ...]]:
    """The paths of the drafts of a request, as tokens, siblings in their order."""
    alive = trees.beneath(torch.ones_like(trees.tokens, dtype=torch.bool))[row]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(trees.tokens[row].tolist(), trees.parents[row].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return [path for path, there in zip(paths, alive.tolist(), strict=True) if there]


def test_chosen_tokens_that_several_drafted_stay_once():
    one = tree_of([1, 2, 3, 4], [-1, -1, 0, 2])
    other = tree_of([9, 2, 5, 6, 7], [-1, -1, 1, 1, 2], alive=[False, True, True, True, True])
    third = tree_of([1, 3, 8], [-1, 0, 1])
    merged = merge([one, other, third], None)
    assert merged.q is None and merged.depth == 3 and not merged.is_chain
    assert sorted(nodes(merged)) == [(1,), (1, 3), (1, 3, 4), (1, 3, 8), (2,), (2, 5), (2, 5, 7), (2, 6)]
    best = torch.zeros(1, merged.num_nodes + 1, dtype=torch.int64)  # the target goes 1, 3, 8, 0
    for path, token in {(): 1, (1,): 3, (1, 3): 8}.items():
        best[0, 1 + nodes(merged).index(path) if path else 0] = token
    path, accepted, following = rules.greedy(merged, best)
    assert merged.tokens[0, path[0]].tolist() == [1, 3, 8] and (int(accepted), int(following)) == (3, 0)
    many = repeat(merged, 2)
    assert plainly(rules.greedy(many, best.repeat(2, 1))) == plainly(rules.greedy(merged, best)) * 2


def test_requests_are_merged_each_by_itself():
    one = DraftTrees.chains(torch.tensor([[1, 2], [3, 4]]))
    other = DraftTrees.chains(torch.tensor([[1, 5], [6, 4]]), alive=torch.tensor([[True, True], [True, False]]))
    merged = merge([one, other], None)
    assert nodes(merged) == [(1,), (1, 2), (1, 5)] and nodes(merged, 1) == [(3,), (3, 4), (6,)]


def test_drawn_tokens_stay_and_what_follows_them_is_shared():
    q = torch.rand(3, 1, 2, V)
    chains = [DraftTrees.chains(torch.tensor([pair]), q[i]) for i, pair in enumerate([[1, 2], [1, 3]])]
    merged = merge([*chains, DraftTrees.chains(torch.tensor([[4, 5]]))], V)
    assert nodes(merged) == [(1,), (1, 2), (1,), (1, 3), (4,), (4, 5)]
    assert merged.parents.tolist() == [[-1, 0, -1, 0, -1, 4]] and (merged.depth, merged.width) == (2, 3)
    points = torch.eye(V)[[4, 5]]
    assert torch.equal(merged.q[0], torch.cat([q[0, 0], q[1, 0], points]))


def test_drafts_of_nothing():
    nothing, chain = empty(1, torch.device("cpu")), DraftTrees.chains(torch.tensor([[1, 2]]))
    assert merge([nothing, nothing], None).num_nodes == 0
    assert nodes(merge([nothing, chain], None)) == [(1,), (1, 2)]
    assert torch.equal(merge([nothing, chain], V).q, torch.eye(V)[None, [1, 2]])


def drafted(number, merging=merge, apart=lambda chance, number: chance.apart(number), shape=BUSH):
    """Drafts of two models that differ, or of one and a chosen chain."""
    near, far = Markov("near", Sampling(1.0)), Markov("far", Sampling(1.0))

    def draft(chance):
        one = near.grown(shape)(apart(chance, 0))
        if number == "a chosen chain":
            other = DraftTrees.chains(torch.tensor([[2, 0, 4]]).expand(len(chance.seeds), -1))
        else:
            other = far.grown(StaticTree.chain(3))(apart(chance, 1))
        return merging([other, one], V)

    return near, draft


@pytest.mark.parametrize("number", ["a drawn chain", "a chosen chain"])
@pytest.mark.parametrize("shape", [BUSH, StaticTree.chain(3), StaticTree.chain(3, stop=Confidence(0.35))], ids=str)
def test_merged_drafts_emit_what_plain_sampling_would(number, shape):
    process, draft = drafted(number, shape=shape)
    texts, accepted = process.emit(rules.rejection_sampling, draft, DRAWS)
    assert min(process.fits(texts)) > REJECTED
    assert 0 < int(accepted.sum()) < 3 * DRAWS


def deduplicated(drafts, vocab_size):
    """A drawn token that was drafted before is left out."""
    merged = merge(drafts, vocab_size)
    same = (merged.parents[..., None] == merged.parents[:, None]) & (merged.tokens[..., None] == merged.tokens[:, None])
    first = ~(same & merged.alive[:, None]).tril(-1).any(-1)
    order = (~(merged.alive & first)).int().argsort(dim=1, stable=True)
    above = order.argsort(dim=1).gather(1, merged.parents.clamp(min=0)).where(merged.parents >= 0, -1)
    parts = (part.gather(1, order) for part in (merged.tokens, above))
    q = merged.q.gather(1, order[..., None].expand_as(merged.q))
    alive = (merged.alive & first).gather(1, order)
    return DraftTrees(*parts, q, alive, depth=merged.depth, width=merged.width)


def the_q_of_another(drafts, vocab_size):
    return merge([replace(draft, q=drafts[1].q[:, : draft.num_nodes]) for draft in drafts], vocab_size)


@pytest.mark.parametrize("merging", [deduplicated, the_q_of_another])
def test_wrong_merging_is_rejected(merging):
    process, draft = drafted("a drawn chain", merging, shape=StaticTree.chain(3))
    texts, _ = process.emit(rules.rejection_sampling, draft, DRAWS)
    assert min(process.fits(texts)) < REJECTED / 1000


def test_members_that_draw_with_the_same_chance_are_rejected():
    process, draft = drafted("a drawn chain", apart=lambda chance, _: chance)
    texts, _ = process.emit(rules.rejection_sampling, draft, DRAWS)
    assert min(process.fits(texts)) < REJECTED / 1000
