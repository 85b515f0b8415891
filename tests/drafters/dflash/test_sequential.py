"""Slots are corrected by what was drafted before them: in training as in decoding, for each path of a tree, exactly."""

from dataclasses import replace

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.sampling import Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.drafters.alignment import align
from specdraft.drafters.dflash import DFlash, Domino, DSpark
from specdraft.drafters.dflash.sequential import Sequential, SequentialDrafting
from specdraft.targets import Features, Target
from tests.chance import REJECTED, goodness_of_fit
from tests.decoding.test_decoder_sampling import V, exact_two_tokens, two_tokens
from tests.drafters.alone import Alone
from tests.drafters.dflash.conftest import build
from tests.drafters.dflash.test_drafting import TREE, state_after
from tests.fakes import random_prompts, tiny_llama, transformers_greedy

KINDS = {"dspark": {"kind": DSpark, "markov_rank": 6}, "domino": {"kind": Domino, "gru_size": 7, "rank": 6}}
SHAPES = [StaticTree.chain(4), TREE, DynamicTree(4, 3, 12)]


@pytest.fixture(params=KINDS)
def options(request):
    return KINDS[request.param]


def training_logits(drafter: Sequential, batch, monkeypatch) -> list[torch.Tensor]:
    """What the loss compares with the target, ``[n_s, Vd]`` per drafted token."""
    seen = []
    real = drafter._weigh

    def spy(weights, teacher, steps):
        for step in steps:
            seen.append(sum(hidden @ weights[head].T for hidden, head in step.terms).detach())
        return real(weights, teacher, steps)

    monkeypatch.setattr(drafter, "_weigh", spy)
    features = drafter.target.features(batch.input_ids, batch.position_ids, drafter.layers)
    drafter.training_loss(batch, features, drafter.target)
    return seen


def test_training_logits_equal_decoding_logits(options, target, packed, monkeypatch):
    drafter = build(target, **options)
    trained = training_logits(drafter, packed, monkeypatch)
    aligned = align(packed, drafter.num_drafts)
    features = target.features(packed.input_ids, packed.position_ids, drafter.layers)
    checked = 0
    for row in aligned.supervised[0].tolist():
        first = max(start for start in aligned.documents.table[1].tolist() if start <= row)
        state = Alone(drafter, int(aligned.tokens[first]))
        state.advance(
            aligned.tokens[first + 1 : row + 2],
            Features(*(part.flatten(0, 1)[None, first : row + 1] for part in features)),
        )
        for step, decoded in enumerate(state.along(aligned.tokens[row + 2 : row + 1 + drafter.num_drafts].tolist())):
            place = (aligned.supervised[step] == row).nonzero()[:, 0]
            if len(place):
                torch.testing.assert_close(decoded, trained[step][place[0]], rtol=1e-6, atol=1e-6)
                checked += 1
    assert checked == sum(map(len, aligned.supervised)) > 60


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_draft_costs_one_pass_and_each_node_follows_its_own_path(options, target, packed, shape, monkeypatch):
    drafter = build(target, **options)
    state, passes = state_after(drafter, packed), []
    read = drafter.read
    monkeypatch.setattr(drafter, "read", lambda *given: passes.append(len(given[0])) or read(*given))
    state.draft(shape)
    assert passes == [shape.depth + drafter.first_slot]
    levels = state.read.copy()
    paths = [[[]]]  # of every level's nodes, the tokens
    for level, logits in levels[1:]:
        above = [paths[-1][parent] for parent in level.parents[0].tolist()]
        paths.append([[*path, token] for path, token in zip(above, level.tokens[0].tolist(), strict=True)])
        for path, found in zip(paths[-1], logits[0], strict=True):
            torch.testing.assert_close(state.along(path)[-1], found, rtol=1e-9, atol=1e-9)
    widest = max((logits[0] for _, logits in levels[1:]), key=len)
    assert len(widest) == 1 or not torch.allclose(widest[0], widest[-1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_decoding_says_what_the_target_says(options, target, shape):
    prompts = random_prompts(3, [3, 9, 17], 97)
    decoder = Decoder(target, build(target, **options), shape, Sampling())
    assert [each.tokens for each in decoder.generate_batch(prompts, 16, 3)] == transformers_greedy(
        target.model, prompts, 16
    )


def test_sampled_drafts_tell_their_conditional_distribution(options, target, packed):
    drafter = build(target, **options)
    state, sampling = state_after(drafter, packed), Sampling(0.8, top_k=9)
    tree = state.draft(StaticTree.chain(4), sampling, seed=3)
    logits = torch.cat([state.read[0][1], *(logits[:, 0] for _, logits in state.read[1:])])
    expected = drafter.vocabulary.scatter_to_target(sampling.probabilities(logits))
    torch.testing.assert_close(tree.q[0], expected)
    torch.testing.assert_close(state.along(tree.tokens[0, :-1].tolist()), logits)
    marginal = drafter.vocabulary.scatter_to_target(sampling.probabilities(state.drafting._logits[0]))
    assert (tree.q[0] - marginal).abs().sum(-1).min() > 0.01


# --- what is emitted is distributed as the target's own samples -------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    return Target.from_model(tiny_llama(V, seed=3, initializer_range=0.25))


def sure(small, options) -> Sequential:
    """A drafter whose second token hangs on the first, and is often wrong."""
    drafter = build(small, None, **options | {"layers": [1], "num_layers": 1, "block_size": 3})
    with torch.no_grad():
        drafter.projection.weight.normal_(generator=torch.Generator().manual_seed(2)).mul_(1.5)
    return drafter


class Marginal(SequentialDrafting):
    """Says of its tokens what their slots say without a prefix."""

    def draft(self, texts, shape, sampling, chance):
        trees = super().draft(texts, shape, sampling, chance)
        return replace(trees, q=self.vocabulary.scatter_to_target(sampling.probabilities(self._logits)))


@pytest.mark.parametrize("shape", [StaticTree.chain(2), StaticTree(((0,), (1,), (0, 0), (1, 0)))])
def test_two_tokens_are_distributed_as_the_targets_own(options, small, shape):
    sampling = Sampling(1.0)
    found = two_tokens(small, sure(small, options), sampling, shape=shape, count=600)
    assert goodness_of_fit(found, exact_two_tokens(small, sampling)) > REJECTED


def test_with_the_marginal_distribution_they_would_not_be(options, small, monkeypatch):
    drafter, sampling = sure(small, options), Sampling(1.0)
    monkeypatch.setattr(type(drafter), "drafting", lambda self, rows, capacity: Marginal(self, rows, capacity))
    found = two_tokens(small, drafter, sampling, shape=StaticTree.chain(2), count=600)
    assert goodness_of_fit(found, exact_two_tokens(small, sampling)) < REJECTED


def test_corrections_cost_what_is_counted(options):
    """The planner's figures beside what a step really computes (FLOPs of its products)."""
    from torch.utils.flop_counter import FlopCounterMode

    from tests.drafters.drafts import whole

    one = Target.from_model(tiny_llama(97, 128, num_hidden_layers=4))
    batch = whole(torch.randint(0, 97, (96,), generator=torch.Generator().manual_seed(0)).tolist())
    drafter = options["kind"].for_target(one, **{"num_layers": 2} | {k: v for k, v in options.items() if k != "kind"})
    drafter.progress = 0.5
    features = one.features(batch.input_ids, batch.position_ids, drafter.layers)
    with FlopCounterMode(display=False) as counter:
        drafter.train().training_loss(batch, features, one).loss.backward()
    counted = counter.get_total_flops() / 96 - 2.0 * one.head.weight.numel()
    assert sum(drafter.training_flops(96)) == pytest.approx(counted, rel=0.25)
    plain = DFlash.for_target(one, num_layers=2, block_size=8)
    assert plain.activation_bytes(96, 4) < drafter.activation_bytes(96, 4) < 1.5 * plain.activation_bytes(96, 4)
