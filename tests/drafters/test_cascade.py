"""A look-up drafts for a draft model, which drafts for the target: both verifications are exact.

By chi-square: what the middle model drafts follows its own distribution, which is the q that the target is told of; and
what the target emits follows the target's. Cascades that are wrong in one place must be rejected."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdraft.decoding import rules
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.passes import Texts
from specdraft.decoding.sampling import Chance, Sampling, sample
from specdraft.decoding.shapes import DynamicTree, ForcedPath, StaticTree
from specdraft.decoding.stopping import Confidence
from specdraft.decoding.tree import DraftTrees
from specdraft.drafters import cascade
from specdraft.drafters.cascade import Cascade
from specdraft.drafters.draft_model import DraftModel
from specdraft.drafters.early_exit import EarlyExit
from specdraft.drafters.medusa import Medusa
from specdraft.drafters.ngram_cache import NgramCache
from specdraft.drafters.pard import Pard
from specdraft.drafters.prompt_lookup import PromptLookup
from specdraft.drafters.quantization import quantize
from specdraft.drafters.suffix import Suffix
from specdraft.drafters.token_recycling import TokenRecycling
from specdraft.errors import UserError
from specdraft.targets import Features, Target
from tests.chance import REJECTED, goodness_of_fit
from tests.decoding.trees import chance
from tests.drafters.conversations import Conversations
from tests.fakes import random_prompts, tiny_llama, transformers_greedy
from tests.families import FAMILIES

V, K, DRAWS = 5, 4, 4000
PROMPT = [0, 3, 1, 4, 0, 3]
SAMPLING = Sampling(1.5, top_k=4)
NO_FEATURES = Features(torch.empty(0), torch.empty(0))


@pytest.fixture(scope="module")
def small() -> Target:
    return Target.from_model(tiny_llama(V, seed=3, initializer_range=0.25))


@pytest.fixture(scope="module")
def middle(small) -> DraftModel:
    return DraftModel.for_target(small, copy_layers=1)


@torch.inference_mode()
def after_all(model) -> list[Tensor]:
    """What a model says after ``PROMPT`` and 0 to K more tokens: distributions ``[V] * (1 + tokens)``."""
    tables = []
    for count in range(K + 1):
        paths = torch.cartesian_prod(*[torch.arange(V)] * count).view(-1, count) if count else torch.empty(1, 0).long()
        ids = torch.cat([torch.tensor(PROMPT).expand(len(paths), -1), paths], dim=1)
        tables.append(SAMPLING.probabilities(model(ids).logits[:, -1]).view([V] * (1 + count)))
    return tables


def joint(tables: list[Tensor]) -> Tensor:
    """Of the first K tokens, ``[V] * K``."""
    found = tables[0].double()
    for table in tables[1:K]:
        found = found[..., None] * table
    return found


@torch.inference_mode()
def drafted(target: Target, middle: DraftModel) -> DraftTrees:
    """A draft for each of ``DRAWS`` requests with the same text."""
    drafter = Cascade(middle, PromptLookup())
    drafter.bind(target)
    drafting = drafter.drafting(DRAWS, 16)
    told = torch.tensor(PROMPT).expand(DRAWS, -1)
    drafting.middle.advance(Texts(torch.zeros(DRAWS).long(), 0), told, torch.full((DRAWS,), 6), NO_FEATURES)
    drafting.inner.states = [drafter.inner.start(PROMPT)] * DRAWS
    return drafting.draft(Texts(torch.full((DRAWS,), 6), 6), StaticTree.chain(K), SAMPLING, chance(DRAWS))


@torch.inference_mode()
def emitted(target: Target, trees: DraftTrees) -> Tensor:
    """The first K tokens ``[DRAWS, K]``: what the rule gives, then plain sampling."""
    tables, numbers, row = after_all(target.model), chance(DRAWS), torch.arange(DRAWS)
    p = torch.stack([tables[i][tuple(trees.tokens[:, :i].T)].expand(DRAWS, -1) for i in range(K + 1)], dim=1)
    _, accepted, token = rules.rejection_sampling(trees, p, numbers.uniform(0, K + 1))
    texts = torch.nn.functional.pad(trees.tokens, (0, 1))
    texts[row, accepted] = token
    for place in range(1, K):
        plain = sample(tables[place][tuple(texts[:, :place].T)], numbers.uniform(2**22 + place, 1)[:, 0])
        texts[:, place] = torch.where(accepted < place, plain, texts[:, place])
    return texts[:, :K]


def fits(texts: Tensor, tables: list[Tensor]) -> float:
    """The least p-value that the first token, the first two and all of them are drawn from the tables."""
    exact = joint(tables)
    flat = [texts[:, :count] @ (V ** torch.arange(count).flip(0)) for count in range(1, K + 1)]
    return min(goodness_of_fit(each, exact.reshape(V**count, -1).sum(1)) for count, each in enumerate(flat, start=1))


@pytest.fixture(scope="module")
def right(small, middle) -> DraftTrees:
    return drafted(small, middle)


@torch.inference_mode()
def test_tokens_and_q_are_the_middle_models_own(middle, right):
    tables = after_all(middle.model)
    for place in range(K):
        torch.testing.assert_close(right.q[:, place], tables[place][tuple(right.tokens[:, :place].T)].expand(DRAWS, V))
    assert right.is_chain and right.alive is None
    assert fits(right.tokens, tables) > REJECTED


def test_what_the_target_emits_is_its_own(small, right):
    assert fits(emitted(small, right), after_all(small.model)) > REJECTED


def noting_accepted(monkeypatch) -> list[Tensor]:
    """How many tokens of the look-up the middle model accepted, pass by pass."""
    rule, found = rules.rejection_sampling, []

    def noting(*arguments):
        verdict = rule(*arguments)
        found.append(verdict.accepted)
        return verdict

    monkeypatch.setattr(cascade.rules, "rejection_sampling", noting)
    return found


def the_q_of_the_target(target, trees, accepted):
    tables = after_all(target.model)
    rows = [tables[place][tuple(trees.tokens[:, :place].T)].expand(DRAWS, V) for place in range(K)]
    return replace(trees, q=torch.stack(rows, dim=1))


def no_row_for_the_middle_models_own_token(target, trees, accepted):
    row, place, q = torch.arange(DRAWS), accepted[1] + 1, trees.q.clone()  # the second pass is the first that reads
    q[row, place] = q[row, place - 1]
    return replace(trees, q=q)


@pytest.mark.parametrize("fault", [the_q_of_the_target, no_row_for_the_middle_models_own_token])
def test_the_wrong_q_is_rejected(small, middle, fault, monkeypatch):
    accepted = noting_accepted(monkeypatch)
    trees = drafted(small, middle)
    monkeypatch.undo()
    assert 0.1 < (accepted[1] > 0).float().mean() < 0.9 and (accepted[1] == K - 2).any()  # corrections, bonus tokens
    with torch.inference_mode():
        wrong = fault(small, trees, accepted)
    assert fits(emitted(small, wrong), after_all(small.model)) < REJECTED / 1000


def test_levels_that_share_their_chance_are_rejected(small, middle, monkeypatch):
    monkeypatch.setattr(Chance, "apart", lambda self, number: self)
    assert fits(emitted(small, drafted(small, middle)), after_all(small.model)) < REJECTED / 1000


def test_an_inexact_inner_rule_is_rejected(small, middle, monkeypatch):
    def correction_from_p(trees, p, uniform):
        verdict = rules.greedy(trees, sample(p, uniform))
        return verdict._replace(next_token=sample(p[torch.arange(len(p)), verdict.accepted], uniform[:, -1]))

    monkeypatch.setattr(cascade.rules, "rejection_sampling", correction_from_p)
    trees = drafted(small, middle)
    monkeypatch.undo()
    assert fits(trees.tokens, after_all(middle.model)) < REJECTED / 1000
    assert fits(emitted(small, trees), after_all(small.model)) < REJECTED / 1000


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(tiny_llama(num_hidden_layers=4))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["draft_model", "early_exit"])
def test_answers_do_not_depend_on_what_is_decoded_beside(target, kind, sampling):
    prompts = [[5, 6, 7, 5, 6], *random_prompts(3, [1, 4, 9])]
    middle = DraftModel.for_target(target, copy_layers=2) if kind == "draft_model" else EarlyExit(skip_layers=[1])
    decoder = Decoder(target, Cascade(middle, PromptLookup()), 4, sampling)
    together = decoder.generate_batch(prompts, 12, 3)
    alone = [decoder.generate(prompt, 12, number) for number, prompt in enumerate(prompts)]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert [each.accepted for each in together] == [each.accepted for each in alone]
    if sampling.greedy:
        assert [each.tokens for each in together] == transformers_greedy(target.model, prompts, 12)
        uncascaded = Decoder(target, middle, 4).generate_batch(prompts, 12, 3)
        assert [each.accepted for each in together] == [each.accepted for each in uncascaded]


@pytest.mark.parametrize("inner", [PromptLookup(), Suffix(), NgramCache(min_ngram=1)], ids=lambda each: each.family)
@torch.inference_mode()
def test_greedy_drafts_are_those_of_the_middle_model_alone(inner):
    target = Target.from_model(FAMILIES["llama"].build())
    torch.manual_seed(0)
    middle = DraftModel.for_target(target, copy_layers=1).double()
    drafter = Cascade(middle, inner)
    drafter.bind(target)
    together, alone = Conversations(drafter, [0, 1, 2]), Conversations(middle, [0, 1, 2])
    for counts in ({0: 1, 1: 4, 2: 2}, {0: 3, 1: 1, 2: 1, 3: 2}):
        for _ in range(2):  # a draft leaves what is kept as it was
            expected = alone.draft(StaticTree.chain(4), Sampling())
            for number, (tokens, *_) in together.draft(StaticTree.chain(4), Sampling()).items():
                assert torch.equal(tokens, expected[number][0])
        for each in (together, alone):
            each.emit(counts)
            if 0 in each.numbers:
                each.drop(0)
                each.begin(3)


class Told(PromptLookup):
    """Proposes what it is told to, from where the draft stands."""

    def propose(self, state, length, after=()):
        return self.finds[len(after) : len(after) + length]


@torch.inference_mode()
def test_what_is_found_saves_passes_of_the_middle_model(target, monkeypatch):
    middle, told = DraftModel.for_target(target, copy_layers=1), Told()
    drafting = Decoder(target, Cascade(middle, told), 5).drafter.drafting(1, 40)
    drafting.begin(0, 3)
    one = torch.ones(1, dtype=torch.int64)
    drafting.advance(Texts(one, 1), torch.tensor([[8, 9]]), 2 * one, NO_FEATURES)
    texts, shape = Texts(3 * one, 3), StaticTree.chain(5)
    model, passes = middle.language_model, []
    step = model.step
    monkeypatch.setattr(
        model, "step", lambda reading, *rest: passes.append(reading.ids.shape[1]) or step(reading, *rest)
    )
    told.finds = []
    right = drafting.draft(texts, shape, Sampling(), None).tokens[0].tolist()
    assert passes == [1, 1, 1, 1]  # as of a draft model alone
    wrong = (right[2] + 1) % 64
    for finds, read in ((right, [4]), (right[:2], [2, 1, 1]), ([*right[:2], wrong, *right[3:]], [4, 2])):
        passes.clear()
        told.finds = finds
        assert drafting.draft(texts, shape, Sampling(), None).tokens[0].tolist() == right
        assert passes == read


def test_to_the_end_of_the_context(target):
    """Beside a request that needs many tokens, the places of one that has them all are there as well."""
    short = Target.from_model(tiny_llama(context=128, num_hidden_layers=4))
    prompts = random_prompts(3, [122, 90, 126])
    drafter = Cascade(DraftModel.for_target(short, copy_layers=1), PromptLookup())
    found = Decoder(short, drafter, 20).generate_batch(prompts, 8, 3)
    expected = [transformers_greedy(short.model, [p], n)[0] for p, n in zip(prompts, (6, 8, 2), strict=True)]
    assert [each.tokens for each in found] == expected


def test_what_both_have_in_common(target):
    middle, suffix = DraftModel.for_target(target, copy_layers=1), Suffix()
    quantize(middle, "int8")
    drafter = Cascade(middle, suffix)
    assert drafter.draws and not drafter.rates_hold and not drafter.branches and drafter.layers == ()
    assert drafter.quantization == "int8" and drafter.family == "cascade"
    Decoder(target, drafter, 3).generate([1, 2, 3], 6)
    assert suffix.kept
    drafter.forget()
    assert not suffix.kept
    exit_early = Cascade(EarlyExit(), suffix)
    exit_early.bind(target)
    assert exit_early.draws and exit_early.drafting(1, 20).shares_cache and not drafter.drafting(1, 20).shares_cache


def test_bad_parts(target, middle):
    for wrong in (Medusa.for_target(target), Pard.for_target(target, copy_layers=1, mask_token=5)):
        with pytest.raises(UserError, match=f"the middle model of a cascade is {wrong.family}: expected a draft model"):
            Cascade(wrong, PromptLookup())
    with pytest.raises(UserError, match="the inner drafter of a cascade is token_recycling: expected one that looks"):
        Cascade(middle, TokenRecycling())
    with pytest.raises(UserError, match="the middle model has a vocabulary of 5 tokens: expected the target's, of 64"):
        Decoder(target, Cascade(middle, PromptLookup()), 3)
    drafter = Cascade(EarlyExit(), PromptLookup())
    for shape in (StaticTree(((0,), (1,))), DynamicTree(2, 2, 4), StaticTree.chain(3, stop=Confidence(0.5))):
        with pytest.raises(UserError, match=r"a cascade cannot draft a .*: expected decoding/shape=chain"):
            Decoder(target, drafter, shape)
    with pytest.raises(UserError, match="a cascade cannot draft a tree that is measured"):
        drafter.drafting(1, 20).draft(Texts(torch.ones(1), 1), ForcedPath(torch.zeros(1, 2), 3), Sampling(), None)
