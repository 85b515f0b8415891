"""Nothing is answered twice."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specdraft.data.bucket import Bucket
from specdraft.data.regeneration import cache
from specdraft.data.regeneration.request import RegenerationSettings
from specdraft.data.sources.base import Conversation
from specdraft.data.tokenization.chat import Example
from specdraft.errors import UserError
from specdraft.targets import Target
from tests.data.regeneration.answering import SETTINGS, TEMPLATES, files, run


def examples(done: cache.Regeneration) -> list[Example]:
    """All that is to be learned, in the order of the conversations."""
    return [example for outcome in done.outcomes() for example in outcome.as_examples()]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CONVERSATIONS_PER_SHARD", 8)


def test_every_turn_is_answered_once_and_found_again(target: Target, talks: Any, engine: Any, tmp_path: Path) -> None:
    conversations = talks(20)
    done = run(target, conversations, tmp_path, engine)
    assert len(engine.asked) == done.counts.turns == sum(len(c.messages) // 2 for c in conversations)
    outcomes = list(done.outcomes())
    assert [outcome.id for outcome in outcomes] == [c.id for c in conversations]
    assert sum(len(ids) for outcome in outcomes for ids in outcome.answers) == done.counts.tokens
    assert {request.sampling.temperature for request in engine.asked} == {0.0, 1.0}
    engine.asked.clear()
    again = run(target, (c for c in conversations), tmp_path, engine)  # lazily, and from the cache
    assert not engine.asked and list(again.outcomes()) == outcomes and again.counts == done.counts
    assert sum(sum(e.loss_mask) for e in examples(again)) == done.counts.tokens
    assert len(done.shards) == 3 and all(name.endswith((".jsonl", ".json")) for name in files(tmp_path))
    manifest = json.loads(done.manifest.read_text())
    assert [shard["conversations"] for shard in manifest["shards"]] == [8, 8, 4]
    assert {shard["engine"] for shard in manifest["shards"]} == {"scripted"}


def test_more_conversations_reuse_the_shards_before_them(
    target: Target, talks: Any, engine: Any, tmp_path: Path
) -> None:
    run(target, talks(16), tmp_path, engine)
    before = len(engine.asked)
    run(target, talks(24), tmp_path, engine)
    assert len(engine.asked) - before == sum(len(c.messages) // 2 for c in talks(24)[16:])


def test_other_settings_conversations_or_targets_are_answered_anew(
    target: Target, talks: Any, engine: Any, tmp_path: Path
) -> None:
    run(target, talks(4), tmp_path, engine)
    torch.manual_seed(9)
    other = Target.from_model(LlamaForCausalLM(target.model.config).double(), target.tokenizer)
    for each, conversations, settings, room in (
        (target, talks(4)[::-1], SETTINGS, 256),
        (target, talks(4), replace(SETTINGS, max_new_tokens=5), 256),
        (target, talks(4), replace(SETTINGS, seed=6), 256),
        (target, talks(4), SETTINGS, 255),
        (other, talks(4), SETTINGS, 256),
    ):
        engine.asked.clear()
        run(each, conversations, tmp_path, engine, settings, room)
        assert engine.asked
    engine.asked.clear()
    run(target, talks(4), tmp_path, engine, replace(SETTINGS, batch_size=7))  # decides nothing but speed
    assert not engine.asked


def test_what_has_no_room_is_counted_or_refused(target: Target, talks: Any, engine: Any, tmp_path: Path) -> None:
    long = Conversation("long", "c", ({"role": "user", "content": "add left " * 300},))
    done = run(target, [*talks(3), long], tmp_path, engine)
    assert done.counts.left_out == 1 and done.counts.conversations == 4
    done = run(target, talks(3), tmp_path, engine)
    assert done.counts.left_out == 0 and isinstance(done.outcomes(), Iterator) and len(examples(done)) >= 3
    with pytest.raises(UserError, match="none of the 1 train conversations fits 256 tokens with 8 of them"):
        run(target, [long], tmp_path, engine)


def test_nothing_is_asked_after_an_answer_that_was_cut(target: Target, talks: Any, engine: Any, tmp_path: Path) -> None:
    conversations = talks(9)  # of one, two and three turns
    done = run(target, conversations, tmp_path, engine, replace(SETTINGS, max_new_tokens=1))
    assert len(engine.asked) == done.counts.turns == done.counts.unfinished == 9
    assert done.counts.dropped == 3 * (0 + 1 + 2) and done.counts.shortened == 0
    assert all(sum(example.loss_mask) == 1 and example.loss_mask[-1] for example in examples(done))


def test_what_the_template_refuses_is_counted_up_to_a_limit(
    target: Target, talks: Any, engine: Any, tmp_path: Path
) -> None:
    """Some templates want users and assistants in turns; shared conversations often break off and go on."""
    strict = copy.copy(target)
    strict.tokenizer = copy.deepcopy(target.tokenizer)
    strict.tokenizer.chat_template = (TEMPLATES / "mistral.jinja").read_text()
    ask, reply = {"role": "user", "content": "add left"}, {"role": "assistant", "content": "total"}
    at_once = Conversation("at once", "c", (ask, ask))
    later = Conversation("later", "c", (ask, reply, ask, ask))
    asked = [*talks(3), at_once, later, *talks(9)]
    with pytest.raises(UserError, match=r"2 of the first 8 train conversations are refused .* \(at once, later\), "):
        run(strict, asked, tmp_path, engine)
    with pytest.raises(UserError, match=r"max_malformed is 1: mend them or raise it; the first: .* roles user, user"):
        run(strict, asked, tmp_path, engine, max_refused=1)
    before = len(engine.asked)
    done = run(strict, asked, tmp_path, engine, max_refused=2)
    assert (done.counts.refused, done.counts.left_out, done.counts.conversations) == (2, 0, 14)
    assert [name for name, _ in done.refused] == ["at once", "later"]
    assert [len(outcome.answers) for outcome in done.outcomes() if outcome.refused] == [0, 1]
    assert len(engine.asked) - before == 12  # of the second shard alone: the first one stayed
    with pytest.raises(UserError, match="1 of the first 1 train conversations"):
        run(strict, [at_once], tmp_path, engine)
    for limit in (2, 100):  # the template is at fault, not the room
        with pytest.raises(UserError, match=r"^the target's chat template cannot render the roles user, user"):
            run(strict, [at_once, replace(at_once, id="again")], tmp_path, engine, max_refused=limit)
    assert run(strict, [later], tmp_path, engine, max_refused=1).counts.turns == 1  # what came before is kept
    long = Conversation("long", "c", ({"role": "user", "content": "add left " * 300},))
    with pytest.raises(UserError, match="none of the 1 train conversations fits 256 tokens"):
        run(strict, [at_once, long], tmp_path, engine, max_refused=1)


def test_machines_share_answers_through_a_bucket(
    target: Target, talks: Any, engine: Any, tmp_path: Path, bucket_url: str
) -> None:
    alone = run(target, talks(20), tmp_path / "alone", engine)
    engine.asked.clear()
    run(target, talks(12), tmp_path / "first", engine, share=f"{bucket_url}/answers")
    engine.asked.clear()
    answers = Bucket(f"{bucket_url}/answers/{next((tmp_path / 'first' / 'responses').iterdir()).name}")
    answers._put(f".{answers.names()[0].removesuffix('.jsonl')}.claim", "killed once the shard was whole 3")
    second = run(target, talks(20), tmp_path / "second", engine, share=f"{bucket_url}/answers/")
    assert not [name for name in answers._listed() if name.endswith(".claim")]
    assert len(engine.asked) == sum(len(talk.messages) // 2 for talk in talks(20)[8:])
    assert list(second.outcomes()) == list(alone.outcomes()) and second.counts == alone.counts
    engine.asked.clear()
    third = run(target, talks(20), tmp_path / "third", engine, share=f"{bucket_url}/answers")
    assert not engine.asked and list(third.outcomes()) == list(alone.outcomes())
    assert third.manifest.read_bytes() == second.manifest.read_bytes()


def test_answers_of_before_are_brought_to_the_bucket(
    target: Target, talks: Any, engine: Any, tmp_path: Path, bucket_url: str
) -> None:
    run(target, talks(16), tmp_path / "first", engine)
    run(target, talks(16), tmp_path / "first", engine, share=bucket_url)
    engine.asked.clear()
    run(target, talks(16), tmp_path / "second", engine, share=bucket_url)
    assert not engine.asked


def test_served_answers_are_those_of_the_settings_in_force(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other generation settings of the same weights: other answers, and not those that are in the cache."""
    keys = []
    for top_k in (2, 20):
        monkeypatch.setattr(target.model.generation_config, "top_k", top_k)
        keys.append(cache.cache_key(target, RegenerationSettings(temperatures=(0.0, "served")), 64))
    assert len({*keys, cache.cache_key(target, RegenerationSettings(temperatures=(0.0, 1.0)), 64)}) == 3
