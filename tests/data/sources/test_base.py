"""Conversations, their digests, and selections that read them one at a time."""

import numpy as np
import pytest

from specdraft.data.sources.base import Conversation, Selection, check_request, digest, refusals
from specdraft.errors import UserError

ASK = {"role": "user", "content": "ask"}


def test_messages_are_those_of_the_prompt_and_the_answer_with_its_extras() -> None:
    answered = Conversation("a", "c", (ASK,), "say", {"reasoning_content": "because"})
    assert answered.messages == (ASK, {"role": "assistant", "content": "say", "reasoning_content": "because"})
    assert Conversation("a", "c", (ASK,)).messages == (ASK,)
    assert Conversation("a", "c", (), "a document").messages == ()


def test_a_digest_is_of_the_content_alone() -> None:
    first = Conversation("a", "c", (ASK,), "say")
    assert digest(first) == digest(Conversation("elsewhere", "other", (ASK,), "say"))
    others = [
        Conversation("a", "c", (ASK,), "say more"),
        Conversation("a", "c", (ASK, ASK), "say"),
        Conversation("a", "c", (ASK,), "say", {"reasoning_content": "because"}),
        Conversation("a", "c", (ASK,), "say", tools=({"name": "add"},)),
        Conversation("a", "c", (), "say"),
    ]
    assert len({digest(conversation) for conversation in (first, *others)}) == 6
    assert len(digest(first)) == 16


def test_a_selection_reads_what_is_asked_for_and_knows_its_order() -> None:
    conversations = [Conversation(str(n), "c", (ASK,), str(n)) for n in range(5)]
    read: list[int] = []

    def take(place: int) -> Conversation:
        read.append(place)
        return conversations[place]

    def select(places: list[int]) -> Selection:
        digests = np.frombuffer(b"".join(digest(conversations[place]) for place in places), np.uint8).reshape(-1, 16)
        return Selection(take, np.array(places), digests)

    found = select([3, 0, 4])
    assert len(found) == 3 and not read
    assert found[1] is conversations[0] and found[1:] == [conversations[0], conversations[4]]
    assert read == [0, 0, 4]
    assert found.fingerprint == select([3, 0, 4]).fingerprint
    assert found.fingerprint not in (select([0, 3, 4]).fingerprint, select([3, 0]).fingerprint)


def test_many_ids_are_listed_in_part_and_bad_requests_are_refused() -> None:
    assert refusals([("a", "why"), ("b", "so")], "9 are odd") == "2 of 9 are odd (a, b): why"
    many = refusals([(str(n), "why") for n in range(21)], "the first 30 are odd", limit=20)
    assert "19 and more), and data.source.max_malformed is 20: mend them or raise it; the first: why" in many
    check_request("test", 1)
    for request, message in ((("dev", None), "expected one of train, validation, test"), (("train", 0), "is 0")):
        with pytest.raises(UserError, match=message):
            check_request(*request)
