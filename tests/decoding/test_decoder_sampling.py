"""The decode loop, sampled: what it emits is distributed as plain sampling from the target, whatever drafts.

Two tests of chance. The joint distribution of the first two tokens against the exact one. And whole texts: given what
came before, every token is a draw from a distribution that is known exactly, so the counts of what follows which token
have known expectations and covariances. Loops that are wrong in one place must be rejected by both.
"""

from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.passes import Riders
from specdraft.decoding.sampling import Sampling, sample
from specdraft.decoding.shapes import DynamicTree, Shape, StaticTree
from specdraft.decoding.tree import ROOT, DraftTrees
from specdraft.drafters.cascade import Cascade
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.early_exit import EarlyExit
from specdraft.drafters.ensemble import Ensemble
from specdraft.drafters.hybrid import Hybrid
from specdraft.drafters.jacobi import Jacobi
from specdraft.drafters.lookahead import Lookahead
from specdraft.drafters.ngram_cache import NgramCache
from specdraft.drafters.pard import Pard
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.redrafter import ReDrafter
from specdraft.drafters.slem import Slem
from specdraft.drafters.suffix import Suffix
from specdraft.drafters.token_recycling import TokenRecycling
from specdraft.targets import Target
from tests.chance import REJECTED, goodness_of_fit, plain_probabilities
from tests.decoding.trees import shared_out
from tests.drafters.tli.drafts import translating
from tests.drafters.tli.two_tokenizers import characters_alone, save_prose_model
from tests.fakes import TargetAsDraft, random_prompts, tiny_llama

V, LENGTH = 6, 64
SHARP = {"initializer_range": 0.5}  # of a draft
PROMPT = [1, 4, 2]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(tiny_llama(V, seed=3, initializer_range=0.25))


@pytest.fixture(scope="module")
def head(target, untrained):
    """An EAGLE-3 head that is sure of what is often wrong: most drafts are rejected, and corrections matter."""
    sure = untrained(target)
    with torch.no_grad():
        sure.lm_head.weight.mul_(3)
    return sure


def two_tokens(
    target, drafter, sampling, rule=rules.rejection_sampling, shape: Shape | int = 2, count: int = 1000
) -> Tensor:
    """The first two tokens of ``count`` generations, as first * V + second."""
    results = Decoder(target, drafter, shape, sampling, rule).generate_batch([PROMPT] * count, 2, 100)
    return torch.tensor([result.tokens for result in results]) @ torch.tensor([V, 1])


def exact_two_tokens(target, sampling) -> Tensor:
    """``[V, V]``, from the model's own forward and plain formulas."""
    logits = target.model(torch.tensor([[*PROMPT, first] for first in range(V)])).logits
    first = plain_probabilities(logits[0, -2], sampling)
    return first[:, None] * torch.stack([plain_probabilities(row[-1], sampling) for row in logits])


def texts_fit(
    target,
    drafter,
    sampling,
    rule=rules.rejection_sampling,
    shape: Shape | int = 3,
    batch_size: int = 6,
    count: int | None = None,
) -> float:
    """p-value of ``count`` texts: per token u, counts of what follows u against the sum of its exact distributions.
    One after the other they take longest, and there are fewer."""
    count = count or (24 if batch_size > 1 else 12)
    decoder = Decoder(target, drafter, shape, sampling, rule)
    prompts = random_prompts(count, [1, 2, 5, 9], V)
    before, after, exact = [], [], []
    for prompt, result in zip(prompts, decoder.generate_batch(prompts, LENGTH, batch_size), strict=True):
        text = prompt + result.tokens
        rows = target.model(torch.tensor([text])).logits[0, len(prompt) - 1 : -1]
        before += text[len(prompt) - 1 : -1]
        after += text[len(prompt) :]
        exact += [plain_probabilities(row, sampling) for row in rows]
    previous, emitted, p = torch.tensor(before), torch.tensor(after), torch.stack(exact)
    if (p.gather(1, emitted[:, None]) == 0).any():
        return 0.0
    statistic, freedom = 0.0, 0
    for token in range(V):
        here = previous == token
        rest = p[here].sum(0) < 5  # too rare to stand alone
        merged = torch.cat([p[here][:, ~rest], p[here][:, rest].sum(1, keepdim=True)], dim=1)
        counts = torch.bincount(emitted[here], minlength=V)
        counts = torch.cat([counts[~rest], counts[rest].sum()[None]])
        # All cells but the last, which the others determine.
        excess = (counts - merged.sum(0))[:-1]
        covariance = (merged.sum(0).diag() - merged.T @ merged)[:-1, :-1]
        statistic += float(excess @ torch.linalg.pinv(covariance) @ excess)
        freedom += int(torch.linalg.matrix_rank(covariance))
    return float(stats.chi2.sf(statistic, freedom))


SETTINGS = [Sampling(0.7, top_p=0.9), Sampling(1.4, top_k=4), Sampling(0.9, top_k=3, truncates_drafts=False)]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_joint_distribution_of_two_tokens(target, head, sampling):
    exact = exact_two_tokens(target, sampling)
    assert goodness_of_fit(two_tokens(target, head, sampling), exact) > REJECTED


@pytest.mark.parametrize(("sampling", "batch_size"), zip(SETTINGS, [1, 6, 4], strict=True), ids=str)
def test_whole_texts_with_sampled_drafts(target, head, sampling, batch_size):
    assert texts_fit(target, head, sampling, batch_size=batch_size) > REJECTED


PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
TREES = [StaticTree(PATHS), StaticTree(PATHS, sampled=False), DynamicTree(3, 3, 8)]


@pytest.mark.parametrize("shape", TREES, ids=str)
def test_whole_texts_with_trees_side_by_side(target, head, shape):
    assert texts_fit(target, head, Sampling(1.2, top_p=0.95), shape=shape, batch_size=4) > REJECTED


def test_trees_of_distributions_with_fewer_tokens_than_children(target, head):
    assert texts_fit(target, head, Sampling(1.4, top_k=2), shape=TREES[0], batch_size=4) > REJECTED


@pytest.mark.parametrize("shape", TREES[:2], ids=str)
def test_two_tokens_with_trees(target, head, shape):
    exact = exact_two_tokens(target, SETTINGS[1])
    assert goodness_of_fit(two_tokens(target, head, SETTINGS[1], shape=shape), exact) > REJECTED


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize(
    "drafter",
    [None, PromptLookup(), Suffix(), NgramCache(), TokenRecycling(), Jacobi(), Lookahead(3, 4, 3), TargetAsDraft()],
    ids=lambda d: type(d).__name__,
)
def test_whole_texts_with_other_drafts(target, drafter, batch_size):
    assert texts_fit(target, drafter, Sampling(1.2, top_p=0.95), batch_size=batch_size) > REJECTED


@pytest.mark.parametrize(("shape", "batch_size"), [(3, 1), (3, 5), (TREES[0], 5)], ids=str)
def test_whole_texts_of_which_some_was_looked_up(target, head, shape, batch_size):
    hybrid = Hybrid(head, PromptLookup(max_ngram=2, min_ngram=2))
    assert texts_fit(target, hybrid, Sampling(1.2, top_p=0.95), shape=shape, batch_size=batch_size) > REJECTED


def test_whole_texts_with_trees_of_recycled_tokens(target):
    assert texts_fit(target, TokenRecycling(3), Sampling(1.2, top_p=0.95), shape=TREES[0], batch_size=5) > REJECTED


def test_two_tokens_with_tokens_that_ride_along(target, monkeypatch):
    """And with drafts of what was guessed in earlier answers, if they are kept."""
    exact, beside = exact_two_tokens(target, Sampling(1.0)), Riders.beside

    def fit() -> float:
        drafter = Lookahead(5, 3, 3, keep_pool=True)
        return goodness_of_fit(two_tokens(target, drafter, Sampling(1.0), count=500), exact)

    def seen_by_drafts(riders: Riders, seen: Tensor) -> Tensor:
        both = beside(riders, seen)
        both[:, : seen.shape[1], seen.shape[1] :] = True
        return both

    assert fit() > REJECTED
    monkeypatch.setattr(Riders, "beside", seen_by_drafts)
    assert fit() < REJECTED / 100


@pytest.mark.parametrize(("shape", "batch_size"), [(3, 1), (TREES[0], 5)], ids=str)
def test_whole_texts_with_all_tokens_from_one_pass(target, shape, batch_size):
    draft = Pard.for_target(target, copy_layers=1, mask_token=5, num_drafts=3)
    assert texts_fit(target, draft, Sampling(1.2, top_p=0.95), shape=shape, batch_size=batch_size) > REJECTED


@pytest.mark.parametrize(("shape", "batch_size"), [(3, 5), (TREES[0], 5)], ids=str)
def test_whole_texts_with_another_tokenizer(target, shape, batch_size):
    """A draft that knows four of six tokens, and is often sure of the wrong one."""
    draft = translating(target, 20, **SHARP)
    assert len(draft.shared.draft_ids) == 4
    assert texts_fit(target, draft, Sampling(1.2, top_p=0.95), shape=shape, batch_size=batch_size) > REJECTED


def test_whole_texts_with_drafts_as_text(target, tmp_path):
    read = Target.from_model(target.model, characters_alone("abcdef"))
    drafter = Slem(save_prose_model(tmp_path, characters_alone("fedcbaghijklmnopqrstu"), **SHARP))
    assert texts_fit(read, drafter, Sampling(1.2, top_p=0.95), batch_size=5, count=12) > REJECTED
    assert texts_fit(read, drafter, Sampling(1.0), p_a_row_late, count=12) < REJECTED / 100


def q_of_the_next_token(trees, p, uniform):
    return rules.rejection_sampling(replace(trees, q=trees.q.roll(1, -1)), p, uniform)


def q_that_is_not_renormalised(trees, p, uniform):
    """As if tokens that are not shared had kept their part."""
    return rules.rejection_sampling(replace(trees, q=trees.q * 0.6), p, uniform)


@pytest.mark.parametrize("fault", [q_of_the_next_token, q_that_is_not_renormalised])
def test_whole_texts_with_another_tokenizer_reject_wrong_maps(target, fault):
    draft = translating(target, 20, **SHARP)
    assert texts_fit(target, draft, Sampling(1.0), fault, batch_size=6) < REJECTED / 100


@pytest.mark.parametrize(("shape", "batch_size"), [(3, 1), (TREES[0], 5), (TREES[2], 4)], ids=str)
def test_whole_texts_with_a_recurrent_state(target, shape, batch_size):
    torch.manual_seed(0)
    drafter = ReDrafter.for_target(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    assert texts_fit(target, drafter, Sampling(1.0), shape=shape, batch_size=batch_size) > REJECTED


@pytest.mark.parametrize(("shape", "batch_size"), [(3, 1), (3, 5), (TREES[0], 5)], ids=str)
def test_whole_texts_drafted_by_some_of_the_targets_layers(target, shape, batch_size):
    drafter = EarlyExit(skip_layers=[1])
    assert texts_fit(target, drafter, Sampling(1.2, top_p=0.95), shape=shape, batch_size=batch_size) > REJECTED
    if batch_size == 1:
        assert texts_fit(target, drafter, Sampling(1.0), correction_from_p, count=36) < REJECTED / 100
        exact = exact_two_tokens(target, SETTINGS[1])
        assert goodness_of_fit(two_tokens(target, drafter, SETTINGS[1]), exact) > REJECTED


def test_whole_texts_drafted_by_several(target, head):
    ensemble = Ensemble([head, PromptLookup(), DraftModel.for_target(target, copy_layers=1)])
    assert texts_fit(target, ensemble, Sampling(1.2, top_p=0.95), shape=TREES[0], batch_size=8) > REJECTED


def test_whole_texts_drafted_by_two_levels(target):
    drafter = Cascade(DraftModel.for_target(target, copy_layers=1), PromptLookup())
    assert texts_fit(target, drafter, Sampling(1.2, top_p=0.95), batch_size=8) > REJECTED


def ends(trees: DraftTrees, verdict: rules.Verdict) -> tuple[Tensor, Tensor]:
    """The row of p that tells of the last accepted node, and whether other nodes were drafted after it, ``[B]``."""
    last = verdict.path.gather(1, (verdict.accepted - 1).clamp(min=0)[:, None])[:, 0]
    end = torch.where(verdict.accepted > 0, last, ROOT)
    return end + 1, (trees.parents == end[:, None]).any(1)


def correction_from_p(trees, p, uniform):
    verdict = rules.rejection_sampling(trees, p, uniform)
    end, corrected = ends(trees, verdict)
    plain = sample(p[torch.arange(len(p)), end], shared_out(uniform)[1])
    return verdict._replace(next_token=torch.where(corrected, plain, verdict.next_token))


def p_a_row_late(trees, p, uniform):
    return rules.rejection_sampling(trees, torch.cat([p[:, 1:], p[:, -1:]], dim=1), uniform)


def accepts_everything(trees, p, uniform):
    path = torch.arange(trees.depth).expand(len(p), -1)
    return rules.Verdict(path, torch.full((len(p),), trees.depth), sample(p[:, -1], uniform[:, -1]))


def the_p_of_another_request(trees, p, uniform):
    return rules.rejection_sampling(trees, p.roll(1, 0), uniform)


@pytest.mark.parametrize("fault", [correction_from_p, p_a_row_late, accepts_everything])
def test_whole_texts_reject_wrong_rules(target, head, fault):
    assert texts_fit(target, head, Sampling(1.0), fault) < REJECTED / 100


def test_guesses_reject_a_wrong_rule(target):
    assert texts_fit(target, Jacobi(), Sampling(1.0), p_a_row_late) < REJECTED / 100


def takes_the_first_sibling(trees, p, uniform):
    """Whichever was accepted."""
    verdict = rules.rejection_sampling(trees, p, uniform)
    return verdict._replace(path=torch.zeros_like(verdict.path), accepted=verdict.accepted.clamp(max=1))


FAULTS = [correction_from_p, takes_the_first_sibling, p_a_row_late, the_p_of_another_request]


@pytest.mark.parametrize("fault", FAULTS)
def test_whole_texts_reject_wrong_rules_for_trees(target, head, fault):
    assert texts_fit(target, head, Sampling(1.0), fault, TREES[0], batch_size=4) < REJECTED / 100


def test_two_tokens_reject_a_wrong_rule(target, head):
    exact = exact_two_tokens(target, SETTINGS[1])
    assert goodness_of_fit(two_tokens(target, head, SETTINGS[1], correction_from_p), exact) < REJECTED / 100


def test_a_draft_by_the_target_itself_gives_k_plus_one(target):
    result = Decoder(target, TargetAsDraft(), 3, Sampling(1.0)).generate(PROMPT, LENGTH)
    assert result.accepted == result.drafted == [3] * 16


def test_seeds_reproduce_and_leave_the_global_generator_alone(target, head):
    decoder = Decoder(target, head, 3, Sampling(1.0))
    before = torch.get_rng_state()
    texts = [decoder.generate(PROMPT, LENGTH, seed=seed).tokens for seed in (0, 1, 0, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert texts[0] == texts[2]
    assert len({tuple(text) for text in texts}) == 3


def test_end_of_text_ends_sampled_texts(untrained):
    model = tiny_llama(V, seed=3, initializer_range=0.25)
    model.generation_config.eos_token_id = [2, 5]
    target = Target.from_model(model)
    decoder = Decoder(target, untrained(target), 4, Sampling(1.0))
    for seed in range(30):
        tokens = decoder.generate(PROMPT, LENGTH, seed).tokens
        assert not {2, 5} & set(tokens[:-1])
        assert tokens[-1] in (2, 5) or len(tokens) == LENGTH
