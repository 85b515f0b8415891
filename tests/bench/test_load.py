"""So many at a time, or by chance at a rate."""

import zlib
from collections import Counter

import pytest

from specdraft.bench import load as module
from specdraft.bench.load import Load, send
from specdraft.bench.streaming import Asking, Question
from specdraft.errors import UserError


@pytest.fixture
def under_way(monkeypatch):
    """How many requests were under way at each one's start, as who sends them sees it: on a busy machine a server still
    ends some whose answer has arrived, or of which nobody waits for one any more."""
    ask, now, seen = module.ask, set(), []

    async def counted(*words):
        mark = object()
        now.add(mark)
        seen.append(len(now))
        try:
            return await ask(*words)
        finally:
            now.remove(mark)

    monkeypatch.setattr(module, "ask", counted)
    return seen


def test_no_more_than_so_many_at_a_time(world, questions, under_way):
    server = world(pause=0.01)
    answers, seconds = send(server.url, "tiny", questions, Load("concurrency", 2), Asking(8))
    assert max(under_way) == 2 and server.most_at_once >= 2 and seconds > 0
    assert [each.question for each in answers] == questions  # in their order, each once
    assert len(server.asked) == 6


def test_requests_at_a_rate_come_whether_or_not_the_engine_keeps_up(world, questions):
    server, load = world(pause=0.1), Load("rate", 1000.0)
    send(server.url, "tiny", questions, load, Asking(2))
    assert server.most_at_once > 3
    times = load.arrivals(4000, seed=1)
    assert times == load.arrivals(4000, seed=1) != load.arrivals(4000, seed=2)
    assert times[0] == 0 and times == sorted(times) and times[-1] == pytest.approx(4.0, rel=0.1)


def test_blocks_hold_every_question_once(questions):
    for load, number in ((Load("concurrency", 1), 1), (Load("concurrency", 4), 1), (Load("rate", 2.0), 1)):
        assert len(load.blocks(questions, 0)) == number
    blocks = Load("concurrency", 1).blocks(questions * 3, 0)
    assert [len(block) for block in blocks] == [5, 5, 4, 4]
    numbers = sorted(question.number for block in blocks for question in block)
    assert numbers == sorted(question.number for question in questions * 3)


def test_a_refused_request_ends_all(world, questions):
    server = world(pause=0.05)
    server.trouble = lambda prompt, n: "400" if prompt == "xx" else None
    with pytest.raises(UserError, match="refuses prompt 1"):
        send(server.url, "tiny", questions, Load("concurrency", 1), Asking(8))
    assert len(server.asked) == 2


@pytest.mark.slow
def test_two_thousand_requests_of_which_some_fail(world, under_way):
    """16 at a time: each is sent once, and is whole, or says what failed."""
    ills = {"429": "status 429", "500": "status 500", "hang up": "ended early", "stall": "nothing for 2 s"}
    said = {"hang up": {"ended early", "RemoteProtocolError", "ReadError"}}

    def trouble(prompt, n):
        chance = zlib.crc32(prompt.encode())
        return list(ills)[chance // 20 % 3] if chance % 20 == 0 else "stall" if chance % 200 == 1 else None

    server = world()
    server.trouble = trouble
    asked = [Question(n, 0, "ab"[n % 2], ({"role": "user", "content": f"question {n}"},)) for n in range(2000)]
    answers, _ = send(server.url, "tiny", asked, Load("concurrency", 16), Asking(8, stall=2.0))
    assert [each.question for each in answers] == asked
    assert set(server.times.values()) == {1} and len(server.asked) == 2000 and max(under_way) == 16
    kinds = Counter()
    for each in answers:
        ill = trouble(each.question.messages[0]["content"], 1)
        kinds[ill] += 1
        assert each.error in said.get(ill, {ills.get(ill)})
        length = len(each.question.messages[0]["content"])
        assert ill or (each.ids == [(length + i) % 50 for i in range(6)] and each.tokens == 6)
    assert set(kinds) == {None, *ills} and kinds[None] > 1800


@pytest.mark.parametrize(("kind", "value"), [("concurrency", 0), ("concurrency", 1.5), ("rate", 0)])
def test_loads_that_cannot_be(kind, value):
    with pytest.raises(UserError, match=f"{kind} holds"):
        Load(kind, value)
