"""Contenders in turns, second turns, failures, and engines that die."""

from types import SimpleNamespace

import pytest

from specdraft.bench.load import Load
from specdraft.bench.streaming import Asking
from specdraft.bench.turns import Bench, Place, percentile
from specdraft.data.prompts import Prompt
from specdraft.errors import UserError

METER = SimpleNamespace(read=lambda: 2.5)
BAR = SimpleNamespace(update=lambda: None)


def bench(*worlds, **options) -> Bench:
    names = ("plain", "head")
    places = {name: Place(world.url, "tiny") for name, world in zip(names, worlds, strict=False)}
    return Bench(places, Asking(8, stall=1.0), METER, **options)


def test_the_first_place_rotates_and_counters_are_of_the_block(world, questions):
    plain, head = world(), world(per_round=3, length=7)
    found = bench(plain, head)
    found.warm_up(questions)
    assert found.cache_tokens == {"plain": 1600, "head": 1400}
    loads = [Load("concurrency", 1), Load("concurrency", 2)]
    blocks = list(found.run(questions, loads, 2, BAR))
    assert len(blocks) == found.count(questions, loads, 2) == 8
    assert [b.contender for b in blocks] == ["plain", "head", "head", "plain"] * 2
    # 6 answers of 7 tokens: one of the prompt's pass, then two rounds of three.
    assert all(
        b.counters.rounds == 12 and b.counters.per_position == (12.0, 12.0) for b in blocks if b.contender == "head"
    )
    assert all(b.counters.rounds == 0 and b.joules == 2.5 for b in blocks if b.contender == "plain")
    assert [a.question for a in blocks[0].answers] == [a.question for a in blocks[1].answers]


def test_second_turns_follow_the_first_contenders_answers(world):
    plain, head = world(length=2), world(length=3)
    prompts = [
        Prompt("0", "a", ({"role": "user", "content": "x"},), ("more", "still")),
        Prompt("1", "b", ({"role": "user", "content": "xx"},)),
    ]
    found = bench(plain, head).questions(prompts, 4)
    assert [(each.number, each.turn) for each in found] == [(0, 0), (1, 0), (0, 1), (0, 2)]
    said = [message["content"] for message in found[3].messages]
    assert said == ["x", " 1 2", "more", " 4 5", "still"] and not head.asked


def test_what_fails_is_kept_apart_and_a_first_failure_ends_the_measurement(world, questions):
    plain, head = world(), world()
    head.trouble = lambda prompt, n: "stall" if prompt == "xxx" else None
    blocks = list(bench(plain, head).run(questions, [Load("concurrency", 6)], 1, BAR))
    errors = [answer.error for answer in blocks[1].answers if answer.error]
    assert errors == ["nothing for 1 s"] and len(head.asked) == 6
    head.trouble = lambda prompt, n: "503"
    with pytest.raises(UserError, match=r"2 of the first 2 requests to head failed \(status 503\)"):
        bench(plain, head).warm_up(questions)


def test_an_engine_of_ours_that_dies_ends_the_measurement(world, questions):
    def died() -> None:
        raise UserError("the engine died")

    found = bench(world())
    found.places["plain"].server = SimpleNamespace(check=died)
    with pytest.raises(UserError, match="the engine died"):
        list(found.run(questions, [Load("concurrency", 1)], 1, BAR))


def test_percentiles():
    assert percentile([], 0.5) is None and percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5 and percentile([1.0, 2.0], 0.95) == pytest.approx(1.95)
