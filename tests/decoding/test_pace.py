"""How long drafts go on: what is asked, what it is worth, and that the distribution stays exact."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specdraft.decoding import rules
from specdraft.decoding.decoder import Decoder
from specdraft.decoding.pace import Pace
from specdraft.decoding.pacing import Goodput, Rounds, Weighed
from specdraft.decoding.requests import Requests
from specdraft.decoding.sampling import Chance, Sampling
from specdraft.decoding.shapes import DynamicTree, StaticTree
from specdraft.decoding.stopping import Confidence
from specdraft.decoding.tree import DraftTrees, empty
from tests.chance import REJECTED
from tests.decoding.markov import Markov
from tests.decoding.trees import chance

DRAWS = 6000
COSTS = (0.3, 0.15)
ASKED = SimpleNamespace(draws=True, rates_hold=True)


def told(sure=0.5, accepted=(0, 4, 2, 1, 6, 3, 0, 2, 5, 1), drafted=6):
    """What many rounds tell in which the draft was always so sure of a token."""
    known = Rounds()
    for _ in range(8):
        for each in accepted:
            known.note(drafted, each, [sure] * drafted)
    return known


def test_only_a_rule_that_tells_what_drafts_are_worth_has_a_pace():
    for shape in (None, StaticTree.chain(3), StaticTree.chain(3, stop=Confidence()), DynamicTree()):
        assert Pace.of(shape, ASKED) is None
    paced = StaticTree.chain(3, stop=Goodput(COSTS))
    assert Pace.of(paced, None) is None and Pace.of(paced, ASKED).rule == Goodput(COSTS)


@pytest.mark.parametrize("drafter", [(False, True), (True, False)])
def test_what_has_no_distribution_of_each_token_is_told_a_length(drafter):
    draws, rates_hold = drafter
    pace = Pace(StaticTree.chain(6, False, Goodput(COSTS)), SimpleNamespace(draws=draws, rates_hold=rates_hold))
    tokens = Goodput(COSTS).tokens([told()], 6)
    assert 0 < tokens < 6 and pace.shape([told()], 6) == StaticTree.chain(tokens, False)
    assert pace.shape([told()], 1) == StaticTree.chain(1, False) and pace.sure(0, 1) == []
    assert pace.shape([told(accepted=(0,))], 6) is None


def test_what_is_not_measured_ends_nothing():
    pace = Pace(StaticTree.chain(6, stop=Goodput()), ASKED)
    assert pace.shape([told()], 6) == StaticTree.chain(6) and pace.shape([told()], 2) == StaticTree.chain(2)


def length(pace, greatest, requests):
    """How many tokens are drafted if the draft is so sure of each, level by level."""
    shape = pace.shape(requests, 6)
    for level, each in enumerate(greatest):
        if shape.stop.ends(torch.tensor(each)):
            return level + 1
    return len(greatest) + 1


def test_a_draft_goes_on_where_it_is_surer_than_usual():
    pace = Pace(StaticTree.chain(6, stop=Goodput(COSTS)), ASKED)
    usual = 0.6
    lengths = [length(pace, [[sure]] * 6, [told(usual)]) for sure in (0.35, 0.6, 0.95)]
    assert lengths[0] < lengths[1] < lengths[2] == 6
    assert lengths[1] == Goodput(COSTS).tokens([told()], 6)  # as sure as ever: what earlier rounds say
    # A token of which it is not quite sure is worth its time for those behind it, and not where it is a guess.
    assert length(pace, [[0.95], [0.95], [0.35], [0.95]], [told(usual)]) == 5
    assert length(pace, [[0.95], [0.95], [0.01], [0.95]], [told(usual)]) == 3


def test_a_draft_goes_on_if_the_tokens_behind_the_next_one_pay():
    """By hand: a second token brings 0.5 for 0.2 steps, it and a third one 0.9 for 0.3, at 1.2 tokens a step."""
    pace = Pace(StaticTree.chain(3, stop=Goodput(COSTS)), ASKED)
    assert [each.depth for each in (*pace._fixed, *pace._asked)] == [1, 2, 3] * 2
    chances, tries, sure = [0.9, 0.5, 0.8], [8.0, 8.0, 8.0], [4.0, 4.0, 4.0]
    pace._weighed = Weighed([0.0, 0.3, 0.5, 0.6], 3, 1.2, chances, tries, sure, tells=1.0)
    least = 1.2 * 0.3 / 0.9
    assert pace._least(1) == pytest.approx(least) and pace._least(2) == pytest.approx(1.2 * 0.1 / 0.8)

    def ends(*reached):  # of requests that are as sure as ever
        pace._sure, pace._reached = [], [each / 0.9 for each in reached]
        return pace.ends(torch.full((len(reached),), 0.5))

    assert ends(0.39) and not ends(0.41) and ends(0.2, 0.58) and not ends(0.2, 0.62)
    pace._sure, pace._reached = [], [0.9, 0.2]  # surer than ever of both, which no chance is more than certain for
    pace.ends(torch.tensor([1.0, 1.0]))
    assert pace._reached == pytest.approx([0.9, 0.2])
    pace._sure, pace._reached, pace._least = [], [0.5], lambda drafted: 0.5 * 0.9
    assert pace.ends(torch.tensor([0.5]))  # what brings no more than its time is not drafted


def test_all_requests_go_on_or_none_by_what_they_bring_together():
    pace = Pace(StaticTree.chain(6, stop=Goodput(COSTS)), ASKED)
    requests = [told(0.6)] * 4
    lengths = [length(pace, [[0.95] * n + [0.34] * (4 - n)] * 6, requests) for n in range(5)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[4]
    pace.shape(requests, 6).stop.ends(torch.tensor([0.9, 0.4, 0.5, 0.6]))
    assert pace.sure(1, 1) == pytest.approx([0.4])
    assert pace.sure(1, 0) == []


def test_how_much_certainty_tells_is_learned_from_what_was_judged():
    luck = random.Random(0)

    def known(chance_of):
        found = Rounds()
        for _ in range(400):
            sure = [luck.choice((0.3, 0.9)) for _ in range(6)]
            accepted = [*(luck.random() < chance_of(each) for each in sure), False].index(False)
            found.note(6, accepted, sure)
        return found

    told_all, told_nothing, misled = (known(each) for each in (lambda c: c, lambda c: 0.6, lambda c: 1.2 - c))
    tells = [Goodput(COSTS).weigh([each], 6).tells for each in (told_all, told_nothing, misled)]
    assert tells[0] == pytest.approx(1.0, abs=0.2) and tells[1] == pytest.approx(0.0, abs=0.25) and tells[2] == 0.0
    pace = Pace(StaticTree.chain(6, stop=Goodput(COSTS)), ASKED)
    lengths = [[length(pace, [[sure]] * 6, [each]) for sure in (0.3, 0.9)] for each in (told_all, misled)]
    assert lengths[0][0] < lengths[0][1] and lengths[1][0] == lengths[1][1]


def test_before_anything_is_known_the_draft_itself_is_the_measure():
    pace = Pace(StaticTree.chain(6, stop=Goodput(COSTS, 0.8)), ASKED)
    assert length(pace, [[0.5], [0.5], [0.9]], [Rounds()]) == 4


@pytest.mark.parametrize("requests", [1, 4, 16])
def test_it_is_faster_than_every_fixed_length_where_the_draft_knows_what_is_easy(requests):
    """Simulated: a token is right with probability 0.95 or 0.3, and the draft says which. Tokens in a plain step's
    time, beside those of fixed lengths and of what earlier rounds tell alone."""

    def rate(shape_of, count=3000 // requests):
        luck = random.Random(1)
        known, tokens, seconds = [Rounds() for _ in range(requests)], 0.0, 0.0
        for _ in range(count):
            right = [[0.95 if luck.random() < 0.6 else 0.3 for _ in range(8)] for _ in range(requests)]
            drafted, sure = shape_of(known, right)
            seconds += 1 + (COSTS[0] + COSTS[1] * (drafted - 1) if drafted else 0.0)
            for row, each in enumerate(known):
                hits = [luck.random() < chance_of_it for chance_of_it in right[row]]
                accepted = min([*hits, False].index(False), drafted)
                each.note(drafted, accepted, sure(row, drafted))
                tokens += 1 + accepted
        return tokens / seconds

    def asked(pace):
        def shape_of(known, right):
            shape = pace.shape(known, 8)
            if shape is None:
                return 0, pace.sure
            if not isinstance(shape.stop, Pace):
                return shape.depth, pace.sure
            for level in range(7):
                if shape.stop.ends(torch.tensor([each[level] for each in right])):
                    return level + 1, pace.sure
            return 8, pace.sure

        return shape_of

    def nothing(row, drafted):
        return ()

    shape = StaticTree.chain(8, stop=Goodput(COSTS))
    ours = rate(asked(Pace(shape, ASKED)))
    fixed = max(rate(lambda known, right, k=k: (k, nothing)) for k in range(1, 9))
    history = rate(asked(Pace(shape, SimpleNamespace(draws=True, rates_hold=False))))
    gain = {1: 1.05, 4: 1.01, 16: 0.99}[requests]
    assert ours > gain * fixed and ours > gain * history


@pytest.mark.parametrize("sampled", [True, False])
def test_what_is_emitted_is_what_plain_sampling_would(sampled):
    """Two requests side by side, whose drafts end together, and which know of other rounds."""
    markov, right = Markov("far", Sampling(1.0)), drawn(sampled)
    texts, accepted = markov.emit(rules.rejection_sampling, right, DRAWS)
    assert min(markov.fits(texts)) > REJECTED and int(accepted.sum()) > 0
    trees = right(chance(400))
    lengths = set(trees.beneath(torch.ones(400, 1, dtype=torch.bool)).sum(-1).tolist())
    assert not sampled or len(lengths) > 1  # chosen tokens are always the same ones
    if sampled:  # the same test, of a rule that looks at what was drawn: it drops what the draft finds unlikely

        def wrong(numbers):
            trees = right(numbers)
            likely = trees.q.gather(2, trees.tokens[..., None])[..., 0] >= 0.5
            return replace(trees, alive=likely & trees.alive)

        assert min(markov.fits(markov.emit(rules.rejection_sampling, wrong, DRAWS)[0])) < REJECTED / 1000


def drawn(sampled):
    """Drafts of pairs of requests."""
    markov = Markov("far", Sampling(1.0))
    pace = Pace(StaticTree.chain(3, sampled, Goodput((0.3, 0.3))), ASKED)
    known = [told(0.5, (3, 1, 2, 0), 3), told(0.7, (1, 3, 0), 3)]

    def draft(numbers):
        parts = []
        for first in range(0, len(numbers.seeds), 2):
            pair = Chance(numbers.seeds[first : first + 2], numbers.lengths[first : first + 2])
            shape = pace.shape(known, 3)
            trees = empty(2, torch.device("cpu")) if shape is None else markov.grown(shape)(pair)
            every = trees.alive if trees.alive is not None else torch.ones_like(trees.tokens, dtype=torch.bool)
            parts.append(padded(replace(trees, alive=every), sampled))
        return DraftTrees.join(parts)

    return draft


def padded(trees, sampled):
    """Three nodes of each, so that all can be verified together: those that there are not are not alive."""
    missing = 3 - trees.num_nodes
    pad = torch.nn.functional.pad
    given = torch.zeros((2, 0, 6)) if trees.q is None else trees.q
    rows = pad(given, (0, 0, 0, missing), value=1 / 6) if sampled else None
    return DraftTrees.chains(pad(trees.tokens, (0, missing)), rows, pad(trees.alive, (0, missing)))


@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_tokens_are_the_targets_own_and_rounds_know_how_sure_drafts_were(target, answers, untrained, batch_size):
    shape = StaticTree.chain(6, stop=Goodput((0.1, 0.05)))
    found = Decoder(target, untrained(target), shape).generate_batch(answers.prompts[:12], 24, batch_size)
    assert [each.tokens for each in found] == [tokens[:24] for tokens in answers.continuations[:12]]
    assert len({drafted for each in found for drafted in each.drafted}) > 1
    batch = Requests(Decoder(target, untrained(target), shape), batch_size, 64)
    with torch.inference_mode():
        for row in range(batch_size):
            batch.begin(row, answers.prompts[row], 16, row)
        batch.round()
    drafted = batch.under_way[0].result.drafted[0]
    assert drafted > 0 and shape.stop.weigh([batch.under_way[0].rounds], 6).sure[0] > 0
