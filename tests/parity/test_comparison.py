"""The comparison sees every kind of difference; the real engine is run by ``make parity``."""

import re
from dataclasses import replace

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.drafters.eagle import Eagle3
from specdraft.drafters.suffix import Suffix
from specdraft.targets import Target
from tests.fakes import tiny_llama
from tests.parity.comparison import Run, decode, differences, rate_difference, table

TOKENS = [[1, 2, 3, 4, 5, 6, 7], [8, 9]]
OURS = Run(
    TOKENS,
    [[2, 2, 2], [2]],
    [[2, 1, 2], [0]],
    {"rounds": 4, "drafted": 8, "accepted": 5, "accepted_per_position": [3, 2]},
)
PLAIN = Run(TOKENS, [], [], {})


def test_equal_runs():
    assert differences(OURS, PLAIN, OURS, 1.8) == []
    printed = table(OURS, PLAIN, OURS)
    assert "2.2500" in printed and "3 2" in printed and "2/2" in printed


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tokens": [[1, 2, 3, 4, 5, 6, 7], [8, 1]]}, "prompt 1: the engine with the drafter .* from token 1 on"),
        ({"tokens": [[1, 2, 3, 4, 5, 6], [8, 9]]}, "from token 6 on"),
        ({"accepted_per_round": [[2, 2, 1], [0]]}, "prompt 0: round 2 differ"),
        ({"accepted_per_round": [[2, 1], [0]]}, "prompt 0: round 3 differ"),
        ({"drafted_per_round": [[2, 2, 2], [1]]}, "prompt 1: the drafted lengths differ"),
        ({"counts": OURS.counts | {"accepted_per_position": [4, 1]}}, "accepted_per_position"),
        ({"counts": OURS.counts | {"drafted": 9}}, "drafted: 8 by our decoder, 9 by the engine"),
    ],
)
def test_every_difference_is_found(change, expected):
    assert any(re.search(expected, line) for line in differences(OURS, PLAIN, replace(OURS, **change), 1.8))


def test_our_tokens_are_compared_too():
    ours = replace(OURS, tokens=[[1], [8, 9]])
    assert any("our decoder and the engine without" in line for line in differences(ours, PLAIN, OURS, 1.8))


def test_equality_of_a_useless_head_is_not_parity():
    nothing = replace(OURS, counts={"rounds": 4, "drafted": 8, "accepted": 0, "accepted_per_position": [0, 0]})
    found = differences(nothing, PLAIN, nothing, 1.8)
    assert len(found) == 1 and "acceptance length is 1.000" in found[0]


def test_our_half():
    target = Target.from_model(tiny_llama(num_hidden_layers=4))
    head = Eagle3.for_target(target).eval()
    ours = decode(Decoder(target, head, 3), [[5, 6], [7, 8, 9]], 12)
    assert [len(tokens) for tokens in ours.tokens] == [12, 12]
    assert ours.counts["rounds"] == sum(map(len, ours.drafted_per_round))
    assert ours.counts["accepted"] == sum(map(sum, ours.accepted_per_round))
    assert isinstance(ours.counts["accepted_per_position"], list) and len(ours.counts["accepted_per_position"]) == 3


def test_rounds_without_a_draft_are_left_out_as_engines_do():
    decoder = Decoder(Target.from_model(tiny_llama()), Suffix(), 3)
    prompts = [[5, 6, 7], [7, 8, 9]]
    all_rounds = [decoder.generate(prompt, 24).drafted for prompt in prompts]
    decoder.drafter.forget()
    ours = decode(decoder, prompts, 24)
    assert ours.drafted_per_round == [[each for each in rounds if each] for rounds in all_rounds]
    assert ours.drafted_per_round != all_rounds
    assert ours.counts["rounds"] == sum(map(len, ours.accepted_per_round))


def test_rates_above_temperature_0_are_compared_over_prompts():
    def run(rate, seed):
        generator = torch.Generator().manual_seed(seed)
        rounds = [(torch.rand(40, generator=generator) < rate).long().tolist() for _ in range(32)]
        return Run([[]] * 32, [], rounds, {"rounds": 32 * 40, "accepted": sum(map(sum, rounds))})

    gap, (low, high) = rate_difference(run(0.3, 0), run(0.3, 1))
    assert low < 0 < high and abs(gap) < 0.1
    gap, (low, high) = rate_difference(run(0.3, 0), run(0.5, 1))
    assert 0 < low < gap < high and gap == pytest.approx(0.2, abs=0.1)
