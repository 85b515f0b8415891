"""As many tokens as pay, by what was accepted lately."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.pacing import Goodput, Rounds, _chances, acceptance_rate, costs_of_tokens
from specdraft.decoding.requests import Requests
from specdraft.decoding.shapes import StaticTree
from specdraft.errors import UserError

COSTS = (0.3, 0.15)


def rounds(*pairs):
    return Rounds(pairs)


def test_as_long_as_what_was_accepted_lately_pays():
    stop, many = Goodput(COSTS), 24
    assert stop.tokens([rounds(*[(6, 6)] * many)], 6) == 6
    assert stop.tokens([rounds(*[(6, 0)] * many)], 6) == 0
    assert 1 <= stop.tokens([rounds(*[(6, 2)] * many)], 6) <= 3
    assert stop.tokens([rounds(*[(6, 6)] * many)], 3) == 3
    # The newest rounds count most, and old ones next to nothing.
    bad, good = [(6, 0)] * many, [(6, 6)] * many
    assert stop.tokens([rounds(*bad, *good)], 6) > stop.tokens([rounds(*good, *bad)], 6)
    assert stop.tokens([rounds(*bad, *good * 9)], 6) == stop.tokens([rounds(*good * 9)], 6)


def test_a_draft_tells_nothing_of_tokens_behind_its_end():
    """Short drafts that were accepted whole are no reason to draft short ones."""
    assert Goodput(COSTS).tokens([rounds(*[(2, 2)] * 24)], 6) > 2


def test_newer_rounds_count_more_however_many_there_were():
    """Beside counts that fade one by one. Three hundred rounds are more than a unit of counts is kept for."""
    chance, known = random.Random(5), Rounds()
    own, shared = np.zeros((2, 4)), np.zeros((5, 4))
    for _ in range(300):
        drafted, sure = chance.randint(0, 4), [chance.random() for _ in range(4)]
        accepted = chance.randint(0, drafted)
        known.note(drafted, accepted, sure)
        tried = (np.arange(4) < min(drafted, accepted + 1)).astype(float)
        hit = (np.arange(4) < accepted).astype(float)
        own, seen = own * 0.85 + [tried, hit], np.array(sure) * tried
        shared = shared * 0.97 + [tried, hit, seen, seen * sure, hit * sure]
        totals = [[0.0] * 5 for _ in range(4)]
        known.add_to(totals)
        np.testing.assert_allclose(np.array(totals).T, shared, rtol=1e-9)
        np.testing.assert_allclose(known.counts(4), [own, shared[:2]], rtol=1e-9)


def test_what_drafts_are_worth_is_counted_over_all_requests():
    one, other = Rounds(), Rounds()
    one.note(3, 1, [0.9, 0.5, 0.2])
    other.note(2, 2, [0.7, 0.6])
    weighed = Goodput((0.1,), expected=0.5).weigh([one, other], 3)
    assert weighed.tries == [2.0, 2.0, 0.0] and weighed.sure == pytest.approx([1.6, 1.1, 0.0])
    assert weighed.chances == pytest.approx([(2 + 2) / 6, (1 + 2) / 6, 2 / 4])  # beside four that are expected


@pytest.mark.parametrize("sure_of", [0.2, 0.9])
def test_what_certainty_tells_is_the_slope_of_hits_over_it(sure_of):
    """Least squares within each token, of what would go in proportion, beside a spread of one and a slope of one."""
    chance, requests = random.Random(3), []
    judged = [[(sure_of * chance.random(), chance.random()) for _ in range(3)] for _ in range(40)]
    for tokens in judged:
        right = [draw < sure for sure, draw in tokens]
        requests.append(Rounds())
        requests[-1].note(3, [*right, False].index(False), [sure for sure, _ in tokens])
    weighed = Goodput((0.1,)).weigh(requests, 3)
    together = spread = 1.0
    for token in range(3):
        if not (seen := [row for row in judged if all(draw < sure for sure, draw in row[:token])]):
            break
        sure = np.array([row[token][0] for row in seen])
        hits = np.array([row[token][1] < row[token][0] for row in seen], dtype=float)
        told = weighed.chances[token] * sure / sure.mean()
        together += ((told - told.mean()) * (hits - hits.mean())).sum()
        spread += ((told - told.mean()) ** 2).sum()
    assert weighed.tells == pytest.approx(together / spread) and abs(together / spread - 1) > 0.01
    assert sure_of > 0.5 or (weighed.tries[1] > 1 and weighed.sure[1] < 1)  # little that was judged tells as well


def test_an_easy_request_is_easy_on_all_levels():
    """By hand: of two tokens one request had both, of one round each; 16 rounds count of what all of them tell."""
    known = np.array([each.counts(2) for each in (rounds((2, 2)), rounds((2, 0)))])
    shared = [0.6, 0.5]
    middle = (2 + 4 * 0.3) / (3 + 4)  # tokens that were right, of those judged, beside four that are expected
    likely = []
    for hits, tries in ((2, [1, 1]), (0, [1, 0])):
        own = (hits + 16 * middle) / (sum(tries) + 16) / middle
        each = [(hits / 2 + 16 * min(own * s, 1.0)) / (t + 16) for s, t in zip(shared, tries, strict=True)]
        likely.append([each[0], each[0] * each[1]])
    assert _chances(known, shared, 0.3) == pytest.approx(np.mean(likely, axis=0))


def test_free_tokens_are_all_drafted_and_dear_ones_are_not():
    often = [rounds(*[(6, 3)] * 24)]
    assert Goodput((0.0, 0.0)).tokens(often, 6) == 6
    assert Goodput((9.0, 9.0)).tokens(often, 6) == 0
    assert Goodput((2.0, 0.0)).tokens([rounds(*[(6, 1)] * 24)], 6) == 0  # to begin is too dear, though the rest is free
    assert Goodput((0.1, 0.0, 0.0, 9.0, 0.0)).tokens(often, 6) == 3  # where a device computes four in the time of two
    assert Goodput((0.1,)).tokens(often, 6) == Goodput((0.1,) * 6).tokens(often, 6)  # the last holds for all further


def test_a_round_without_a_draft_takes_its_time_too():
    seldom = [rounds(*[(1, 1), (1, 0), (1, 0), (1, 0)] * 24)]
    assert Goodput((0.3,)).tokens(seldom, 6) == 0 and Goodput((0.3,), idle=0.12).tokens(seldom, 6) == 1
    assert Goodput((0.3,), idle=9.0).weigh(seldom, 6).costs[:2] == pytest.approx([0.3, 0.3])  # at most that of a draft
    assert Goodput((9.0,), idle=0.25).weigh([rounds(*[(1, 0)] * 24)], 6).worth == pytest.approx(1 / 1.25)
    with pytest.raises(UserError, match=r"without a draft takes -0\.1 plain steps more: expected at least 0"):
        Goodput((0.3,), idle=-0.1)


def test_costs_by_requests_side_by_side():
    often = rounds(*[(6, 3)] * 24)
    stop = Goodput({16: [1.5, 1.5], 1: [0.0]})
    assert stop == Goodput({"1": (0.0,), "16": (1.5, 1.5)}) == replace(stop) and hash(stop)  # as JSON has them
    lengths = [stop.tokens([often] * count, 6) for count in (1, 2, 4, 8, 16, 99)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 6 and lengths[-1] == lengths[-2] == 0
    assert lengths[3] == Goodput([1.5 * 7 / 15]).tokens([often] * 8, 6)  # between those measured


def test_of_many_requests_the_mean_decides():
    sure, lost = rounds(*[(4, 4)] * 24), rounds(*[(4, 0)] * 24)
    lengths = [Goodput(COSTS).tokens([sure] * n + [lost] * (8 - n), 4) for n in range(9)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] == 4 and lengths[1] == 0


def test_what_nobody_drafts_is_tried_again():
    """Counts get old: a request whose drafts failed drafts nothing for some rounds, not for ever."""
    told = [(6, 0)] * 24
    assert Goodput(COSTS).tokens([rounds(*told)], 6) == 0
    while not Goodput(COSTS).tokens([rounds(*told)], 6):
        told.append((0, 0))
        assert len(told) <= 24 + 48


def test_before_anything_is_known_all_is_drafted():
    assert Goodput().tokens([rounds((6, 0))], 6) == 6 and Goodput(COSTS).tokens([], 6) == 6
    assert Goodput(COSTS).tokens([Rounds()], 6) > 1
    assert Goodput().lacks and not Goodput(COSTS).lacks and hash(Goodput([1, 2])) == hash(Goodput((1.0, 2.0)))


def test_what_is_expected_decides_before_anything_is_known():
    lengths = [Goodput(COSTS, rate).tokens([Rounds()], 6) for rate in (0.0, 0.3, 0.6, 0.9)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] == 6
    assert acceptance_rate([(4, 4), (4, 2), (4, 0), (0, 0)]) == pytest.approx(6 / 8)
    assert acceptance_rate([(4, 4), (4, 3), (4, 2)]) == pytest.approx(9 / 11)
    assert acceptance_rate([]) == acceptance_rate([(3, 0)]) == 0.0
    assert Goodput(COSTS, 1.0).tokens([Rounds()], 6) == 6
    assert Goodput((0.5,), 0.5).weigh([Rounds()], 1).best == 0  # it brings no more than its time
    with pytest.raises(UserError, match=r"accepted with 1\.5"):
        Goodput(COSTS, 1.5)


@pytest.mark.parametrize("costs", [[], [0.1, -0.2], [0.1, math.nan], {}, {1: []}, {1: [0.1], 4: [-1.0]}])
def test_bad_costs_are_refused(costs):
    with pytest.raises(UserError, match="numbers of at least 0, in plain steps"):
        Goodput(costs)


def test_costs_of_each_token():
    assert costs_of_tokens(2.0, {1: 3.0, 3: 3.8, 4: 5.6}) == pytest.approx((0.5, 0.2, 0.2, 0.9))
    assert costs_of_tokens(1.0, {2: 1.7, 4: 2.1}) == pytest.approx((0.5, 0.2, 0.2, 0.2))
    assert costs_of_tokens(1.0, {4: 1.8}) == pytest.approx((0.2,) * 4)
    assert costs_of_tokens(1.0, {1: 0.9, 2: 0.8}) == (0.0, 0.0)
    assert costs_of_tokens(1.0, {1: 1.5, 2: 1.4, 3: 1.6}) == pytest.approx((0.5, 0.0, 0.1))  # chance makes none cheaper


@pytest.mark.parametrize("requests", [1, 4, 16])
@pytest.mark.parametrize("stays", [0.5, 0.97])
def test_it_is_about_as_fast_as_the_best_fixed_length_and_faster_where_text_has_easy_and_hard_parts(requests, stays):
    """Simulated: a token is right with probability 0.9 in easy parts and 0.2 in hard ones; a part goes on with
    probability ``stays`` after every round. Tokens in the time of a plain step."""

    def rate(length_of, count=4000 // requests):
        chance = random.Random(1)
        hard = [chance.random() < 0.5 for _ in range(requests)]
        known = [Rounds() for _ in range(requests)]
        tokens = seconds = 0.0
        for _ in range(count):
            drafted = length_of(known)
            seconds += 1 + (COSTS[0] + COSTS[1] * (drafted - 1) if drafted else 0.0)
            for row, each in enumerate(known):
                right = [chance.random() < (0.2 if hard[row] else 0.9) for _ in range(8)]
                accepted = ([*right, False].index(False)) if drafted else 0
                each.note(drafted, min(accepted, drafted))
                tokens += 1 + min(accepted, drafted)
                if chance.random() > stays:
                    hard[row] = chance.random() < 0.5
        return tokens / seconds

    fixed = {k: rate(lambda _, k=k: k) for k in range(9)}
    ours = rate(lambda known: Goodput(COSTS).tokens(known, 8))
    gain = {1: 1.15, 4: 1.02, 16: 1.0}[requests] if stays > 0.9 else 0.98
    assert ours >= gain * max(fixed.values())
    assert fixed[1] < 0.9 * max(fixed.values())  # lengths do matter here


def test_the_tokens_are_the_targets_own(target, answers, untrained):
    shape = StaticTree.chain(6, stop=Goodput((0.1, 0.05)))
    for batch_size in (1, 5):
        found = Decoder(target, untrained(target), shape).generate_batch(answers.prompts[:12], 24, batch_size)
        assert [each.tokens for each in found] == [tokens[:24] for tokens in answers.continuations[:12]]
        assert len({drafted for each in found for drafted in each.drafted}) > 1


def test_where_nothing_pays_nothing_is_drafted(target, untrained, monkeypatch):
    head = untrained(target)
    batch = Requests(Decoder(target, head, StaticTree.chain(6, stop=Goodput((9.0, 9.0)))), 1, 64)
    with torch.inference_mode():
        batch.begin(0, [1, 2, 3], 16, 0)
        monkeypatch.setattr(type(batch.drafting), "draft", None)  # a call would fail
        batch.round()
    assert batch.under_way[0].result.drafted == [0]
