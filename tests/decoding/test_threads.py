"""The number of threads of a decoding pass is the one that was measured to be fastest, and holds for the pass alone."""

import time

import pytest
import torch

from specdraft.decoding.decoder import Decoder
from specdraft.decoding.threads import FEW_TOKENS, fastest, limited
from specdraft.targets import Target
from tests.fakes import random_prompts, tiny_llama


@pytest.fixture(autouse=True)
def eight_threads(monkeypatch):
    monkeypatch.setattr("specdraft.decoding.threads._PAUSE", 0.0)
    with limited(8):
        yield


@pytest.mark.parametrize("best", [1, 2, 4, 8])
def test_the_fastest_number_wins(best):
    asked = []

    def run():
        asked.append(torch.get_num_threads())
        time.sleep(0.0005 if asked[-1] == best else 0.02)

    assert fastest(run) == best
    looks = 1 if best == 8 else 3
    assert asked == [8, *[1, 2, 4, 8] * 3 * looks] and torch.get_num_threads() == 8


def test_what_had_a_core_for_a_moment_does_not_decide():
    """All threads are slow until another process has ended."""
    calls = []

    def run():
        calls.append(torch.get_num_threads())
        busy = len(calls) <= 13
        time.sleep(0.02 if busy and calls[-1] == 8 else 0.0005 if calls[-1] == 8 else 0.005)

    assert fastest(run) == 8
    assert len(calls) == 1 + 2 * 12


def test_all_threads_are_among_the_choices_and_one_alone_is_not_measured():
    asked = set()
    with limited(6):
        fastest(lambda: asked.add(torch.get_num_threads()))
    assert asked == {1, 2, 4, 6}
    with limited(1):
        assert fastest(lambda: pytest.fail("measured")) == 1


def test_a_long_pass_gets_all_and_is_not_measured_again():
    calls = []

    def run():
        calls.append(1)
        time.sleep(0.3)

    assert fastest(run) == 8
    assert len(calls) == 2


def test_threads_are_as_before_also_after_an_error():
    with pytest.raises(ValueError, match="inside"), limited(3):
        raise ValueError(f"inside {torch.get_num_threads()}")
    assert torch.get_num_threads() == 8
    with limited(None):
        assert torch.get_num_threads() == 8


def test_rounds_of_few_tokens_take_what_was_measured_and_prompts_all(monkeypatch):
    target = Target.from_model(tiny_llama())
    monkeypatch.setattr(Target, "decoding_threads", 3)
    seen = []
    step = target.step

    def watched(reading, *args):
        seen.append((reading.ids.numel(), torch.get_num_threads()))
        return step(reading, *args)

    monkeypatch.setattr(target, "step", watched)
    Decoder(target).generate_batch(random_prompts(2, (9,)), 4, 2)
    assert seen == [(9, 8), (9, 8), (2, 3), (2, 3), (2, 3)]
    seen.clear()
    many = FEW_TOKENS + 1
    Decoder(target).generate_batch(random_prompts(many, (9,)), 3, many)
    assert seen[many:] == [(many, 8)] * 2
    assert torch.get_num_threads() == 8


def test_what_has_to_repeat_itself_takes_all_threads_and_measures_nothing(monkeypatch):
    target = Target.from_model(tiny_llama())
    monkeypatch.setattr(Target, "decoding_threads", property(lambda self: pytest.fail("measured")))
    seen = []
    step = target.step
    monkeypatch.setattr(target, "step", lambda *given: seen.append(torch.get_num_threads()) or step(*given))
    Decoder(target, repeatable=True).generate_batch(random_prompts(2, (9,)), 4, 2)
    assert seen == [8] * 5


def test_a_target_measures_once_and_keeps_its_answers(monkeypatch):
    target = Target.from_model(tiny_llama())
    measured = []
    monkeypatch.setattr("specdraft.targets.language_model.fastest", lambda run: measured.append(run()) or 2)
    (prompt,) = random_prompts(1, (9,))
    once, again = (Decoder(target).generate(prompt, 8).tokens for _ in range(2))
    assert once == again and len(measured) == 1


def test_no_rank_measures_where_all_take_part():
    target = Target.from_model(tiny_llama())
    target.engine = object()
    assert target.decoding_threads is None
