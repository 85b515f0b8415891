"""What was accepted of a traffic, and its worst requests as data to train on."""

import json

import pytest

from specdraft.data.prompts import load_prompts
from specdraft.data.sources.conversations import Conversations
from specdraft.doctor import LoadedDrafter
from specdraft.doctor.traffic import length_interval, load_traffic, measure, total, write_worst
from specdraft.errors import UserError


@pytest.fixture(scope="module")
def requests(target, prompts, run):
    return measure(LoadedDrafter.load(run, target), prompts, 3, 16)


def test_every_request_is_counted(requests, prompts):
    assert [each.prompt for each in requests] == prompts
    counts = total(requests)
    assert counts.rounds == sum(each.counts.rounds for each in requests) > 0 and counts.num_draft_tokens == 3
    low, high = length_interval(requests)
    assert 1 <= low < counts.acceptance_length < high <= 4
    assert all(0 < each.answer_tokens <= 16 and each.prompt_tokens > 0 for each in requests)


def test_conversations_that_end_with_an_answer(tmp_path):
    """As they are logged, and as the doctor writes the worst: asked again without the answers at their end."""
    path = tmp_path / "chats.jsonl"
    asked = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "ç?"},
    ]
    answers = [{"role": "assistant", "content": "d"}, {"role": "assistant", "content": "e"}]
    rows = [{"messages": [*asked, *answers], "category": "chat"}, {"messages": asked}, {"prompt": "f?"}]
    rows += [{"messages": [*asked, answers[0]]}]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    found, answered = load_traffic(str(path), None)
    assert answered == 2 and [each.opening for each in found[:2]] == [tuple(asked)] * 2
    assert [each.category for each in found] == ["chat", *["uncategorized"] * 3]
    assert [each.origin for each in found] == [f"{path}:{line}" for line in (1, 3, 5, 7)]
    assert load_traffic(str(path), 3)[1] == 1 and load_traffic(str(path), 3)[0] == found[:3]
    assert load_traffic("chat", 2) == (load_prompts("chat", 2), 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"messages": [{"role": "assistant", "content": "a"}]}', ":2: the last message is the assistant's"),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}', ":2: "),
        ("{", ":2 is not JSON"),
        ("[]", ":2 is "),
    ],
)
def test_malformed_traffic_is_refused_by_its_own_name(tmp_path, text, said):
    path = tmp_path / "chats.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{text}\n')
    with pytest.raises(UserError, match=f"^{path}{said}"):
        load_traffic(str(path), None)
    with pytest.raises(UserError, match=r"nothing\.jsonl does not exist"):
        load_traffic(str(tmp_path / "nothing.jsonl"), None)


def test_prompts_without_room(target, prompts, run):
    with pytest.raises(UserError, match="leaves room for 9000 tokens"):
        measure(LoadedDrafter.load(run, target), prompts, 3, 9000)


def test_the_worst_requests_are_data_as_they_are(requests, tmp_path):
    path = tmp_path / "worst.jsonl"
    settings = write_worst(requests, 0.75, path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lengths = sorted(each.counts.acceptance_length for each in requests)
    assert [row["acceptance_length"] for row in rows] == [round(length, 3) for length in lengths[: len(rows)]]
    assert len(rows) == 9 and all(row["messages"][-1]["role"] == "assistant" for row in rows)
    said = dict(word.split("=") for word in settings.split())
    assert said["data"] == "messages" and said["data.path"] == str(path)
    source = Conversations(str(path), "messages", held_out=float(said.get("data.source.held_out", 0.05)))
    found = [conversation for split in ("train", "validation") for conversation in source.conversations(split)]
    answers = {each.answer for each in requests}
    assert found and all(conversation.response in answers for conversation in found)
    again, answered = load_traffic(str(path), None)
    openings = [each.prompt.opening for each in requests]
    assert answered == len(again) == 9 and all(each.opening in openings for each in again)


def test_bad_input(requests, tmp_path):
    with pytest.raises(UserError, match="worst_share is 0: expected a share"):
        write_worst(requests, 0, tmp_path / "worst.jsonl")
    with pytest.raises(UserError, match="1 requests are too few"):
        write_worst(requests, 0.01, tmp_path / "worst.jsonl")
