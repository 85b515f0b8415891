"""So many at a time, or by chance at a rate."""

import pytest

from specdraft.bench.load import Load, send
from specdraft.bench.streaming import Asking
from specdraft.errors import UserError


def test_no_more_than_so_many_at_a_time(world, questions):
    server = world(pause=0.01)
    answers, seconds = send(server.url, "tiny", questions, Load("concurrency", 2), Asking(8))
    assert server.most_at_once == 2 and seconds > 0
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


@pytest.mark.parametrize(("kind", "value"), [("concurrency", 0), ("concurrency", 1.5), ("rate", 0)])
def test_loads_that_cannot_be(kind, value):
    with pytest.raises(UserError, match=f"{kind} holds"):
        Load(kind, value)
