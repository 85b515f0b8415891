"""What was accepted of a traffic, and its worst requests as data to train on."""

import json

import pytest

from specdraft.data.prompts import load_prompts
from specdraft.data.sources.conversations import Conversations
from specdraft.doctor import LoadedDrafter
from specdraft.doctor.traffic import length_interval, measure, total, write_worst
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
    again = load_prompts(str(path), logged=True)
    openings = [each.prompt.opening for each in requests]
    assert len(again) == 9 and all(each.answered and each.opening in openings for each in again)


def test_bad_input(requests, tmp_path):
    with pytest.raises(UserError, match="worst_share is 0: expected a share"):
        write_worst(requests, 0, tmp_path / "worst.jsonl")
    with pytest.raises(UserError, match="1 requests are too few"):
        write_worst(requests, 0.01, tmp_path / "worst.jsonl")
