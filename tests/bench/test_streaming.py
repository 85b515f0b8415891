"""Pieces and their times; whatever fails is said once and never asked again."""

import asyncio
import re

import pytest

from specdraft.bench.streaming import Answer, Asking, Question, ask, model_of, new_client
from specdraft.errors import UserError


def answer(url: str, question: Question, **options) -> Answer:
    async def once() -> Answer:
        async with new_client(1) as client:
            return await ask(client, url, "tiny", question, Asking(**{"max_new_tokens": 8} | options))

    return asyncio.run(once())


def test_the_tokens_of_a_round_arrive_together(world, questions):
    server = world(per_round=3, length=7, pause=0.01)
    found = answer(server.url, questions[2], extra={"top_k": 1})
    assert found.error is None and found.ids == [3, 4, 5, 6, 7, 8, 9] == found.said and found.tokens == 7
    assert len(found.arrivals) == 3 and len(found.gaps) == 2 and min(found.gaps) > 0
    assert 0.01 <= found.first_token_seconds <= found.seconds
    assert found.token_seconds == pytest.approx((found.seconds - found.first_token_seconds) / 6)
    asked = server.asked[0]
    assert asked["temperature"] == 0 and asked["stream"] and asked["return_token_ids"] and asked["top_k"] == 1


def test_a_server_that_samples_by_its_own_defaults_is_not_told_how(world, questions):
    server = world()
    answer(server.url, questions[0], temperature="served")
    assert not server.asked[0].keys() & {"temperature", "top_p", "top_k"}
    with pytest.raises(UserError, match="temperature=hot: expected positive numbers, or temperature=0 or served"):
        Asking(8, "hot")


def test_plain_text_for_targets_without_a_template(world, questions):
    server = world()
    answer(server.url, questions[0], chat=False)
    assert server.asked[0]["prompt"] == "x"
    two = Question(0, 1, "a", questions[0].messages * 2)
    with pytest.raises(UserError, match="chat=false sends plain text, and prompt 0 has 2 messages"):
        answer(server.url, two, chat=False)


@pytest.mark.parametrize(
    ("trouble", "error"),
    [("stall", r"nothing for 0.3 s"), ("hang up", "RemoteProtocolError|ended early"), ("503", "status 503")],
)
def test_a_failure_is_kept_and_not_repeated(world, questions, trouble, error):
    server = world()
    server.trouble = lambda prompt, n: trouble
    found = answer(server.url, questions[0], stall=0.3)
    assert found.error is not None and re.fullmatch(error, found.error)
    assert len(server.asked) == 1


def test_an_answer_that_never_ends_is_given_up(world, questions):
    server = world(length=400, pause=0.02)
    assert answer(server.url, questions[0], timeout=0.2, max_new_tokens=400).error == "not whole after 0.2 s"


def test_what_the_server_will_never_take_is_one_sentence(world, questions):
    server = world()
    server.trouble = lambda prompt, n: "400"
    with pytest.raises(UserError, match=r"refuses prompt 1 with status 400 \(.*too long.*\): expected"):
        answer(server.url, questions[1])


def test_options_of_the_chat_template_go_with_every_conversation(questions):
    asking = Asking(8, extra={"top_k": 1, "chat_template_kwargs": {"date_string": "1 May"}})
    told = asking.with_options({"enable_thinking": False, "date_string": "2 May"}).payload("tiny", questions[0])
    assert told["chat_template_kwargs"] == {"enable_thinking": False, "date_string": "1 May"} and told["top_k"] == 1
    assert "chat_template_kwargs" not in Asking(8).with_options({}).payload("tiny", questions[0])
    assert "chat_template_kwargs" not in Asking(8, chat=False).with_options({"a": 1}).payload("tiny", questions[0])


def test_the_only_model_and_settings(world):
    assert model_of(world().url) == "tiny"
    with pytest.raises(UserError, match=r"no OpenAI-compatible server answers at http://127\.0\.0\.1:9 "):
        model_of("http://127.0.0.1:9")
    with pytest.raises(UserError, match="stall=0"):
        Asking(8, stall=0)
