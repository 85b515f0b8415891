"""A server on loopback that fails, stalls, truncates and hangs up: every answer arrives, exactly once."""

import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdraft.data.regeneration.cache import regenerate
from specdraft.data.regeneration.request import RegenerationSettings, Request
from specdraft.data.regeneration.server import Server
from specdraft.decoding.sampling import Sampling
from specdraft.errors import UserError
from specdraft.targets import Target
from specdraft.targets.chat_template import BOUND

SETTINGS = RegenerationSettings(temperatures=(0.0,), max_new_tokens=8)
KEY = "sk-very-secret"
Trouble = Callable[[str, int], str | None]


class World(ThreadingHTTPServer):
    """``trouble(key, n)`` names what goes wrong at the n-th time that a prompt is asked, or None."""

    daemon_threads = True
    request_queue_size = 64  # connections that wait; beyond them the kernel drops some for a second

    def __init__(self, answer: Callable[[str], list[int]], words: Callable[[list[int]], str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.words = answer, words
        self.trouble: Trouble = lambda key, n: None
        self.gives_ids, self.models = True, ["tiny"]
        self.seen: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.lock, self.done = threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: World

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": model} for model in self.server.models]})

    def do_POST(self) -> None:
        world = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path == "/v1/chat/completions"
        key = json.dumps(body["messages"] if chat else body["prompt"])
        with world.lock:
            world.keys.add(self.headers["Authorization"])
            if not chat and not world.gives_ids:
                return self.reply(404, {"error": "no such path"})
            if body["max_tokens"] == 1:  # what the engine asks to learn whether there are ids
                return self.reply(200, {"choices": [{"text": "", "token_ids": [1]}]})
            world.seen[key] += 1
            world.bodies.append(body)
            trouble = world.trouble(key, world.seen[key])
        ids = world.answer(key)
        choice: dict[str, Any] = {"token_ids": ids, "text": "", "finish_reason": "stop"}
        if chat:
            choice = {"message": {"role": "assistant", "content": world.words(ids)}, "finish_reason": "stop"}
        answer = {"choices": [choice]}
        if trouble is None:
            return self.reply(200, answer)
        if trouble == "stall":
            world.done.wait(20)
        elif trouble == "truncate":
            self.reply(200, answer, keep=15)
        elif trouble == "no json":
            self.reply(200, "<html>")
        elif trouble.isdigit():
            self.reply(int(trouble), {"error": f"not now, {self.headers['Authorization']}"})
        self.close_connection = True  # "hang up" does nothing else
        return None

    def reply(self, status: int, body: Any, keep: int | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "0.2")
        self.end_headers()
        self.wfile.write(data[:keep])

    def log_message(self, *args: Any) -> None:
        pass


def served(target: Target) -> Iterator[World]:
    def answer(key: str) -> list[int]:
        return [*target.tokenizer(f"sum {len(key)}", add_special_tokens=False)["input_ids"], *target.eos_token_ids]

    def words(ids: list[int]) -> str:
        return target.tokenizer.decode(ids, skip_special_tokens=True)

    server = World(answer, words)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.done.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def world(target: Target) -> Iterator[World]:
    yield from served(target)


@pytest.fixture
def other(target: Target) -> Iterator[World]:
    yield from served(target)


def engine(world: World, **options: Any) -> Server:
    return Server(**{"url": world.url, "timeout": 20.0, "backoff": 0.01, "concurrency": 8} | options)


def requests(count: int) -> list[Request]:
    ask = {"role": "user", "content": "add"}
    return [Request([7] * (n + 1), ({**ask, "content": f"add {'x' * n}"},), (), Sampling(), n, 8) for n in range(count)]


def answered(server: Server, target: Target, asked: list[Request], known: frozenset[int] = frozenset()) -> Any:
    return list(server.answers(target, asked, SETTINGS, known))


def test_token_ids_go_in_and_come_out(world: World, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    asked = requests(20)
    found = answered(engine(world, api_key_variable="THE_KEY"), target, asked, known=frozenset({3, 4}))
    assert sorted(number for number, _ in found) == [n for n in range(20) if n not in (3, 4)]
    assert all(ids == world.answer(json.dumps(asked[number].prompt)) for number, ids in found)
    assert world.keys == {f"Bearer {KEY}"} and max(world.seen.values()) == 1
    body = world.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny", 0.0, 8)
    assert body["stop_token_ids"] == sorted(target.eos_token_ids) and body["top_k"] == 0


def test_requests_say_how_to_sample_whatever_the_server_does_by_default(world: World, target: Target) -> None:
    sampling = Sampling(0.6, 20, 0.95, repetition_penalty=1.05)
    asked = [request._replace(sampling=sampling) for request in requests(2)]
    answered(engine(world), target, asked)
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "presence_penalty": 0.0}
    assert all(body | wanted | {"min_p": 0.0, "frequency_penalty": 0.0} == body for body in world.bodies)


def test_a_server_of_words_is_asked_for_no_more_than_is_needed(world: World, target: Target) -> None:
    world.gives_ids = False
    answered(engine(world), target, requests(1))
    assert not world.bodies[-1].keys() & {"top_k", "repetition_penalty", "presence_penalty", "min_p"}
    answered(engine(world), target, [requests(1)[0]._replace(sampling=Sampling(1.0, 20))])
    assert world.bodies[-1]["top_k"] == 20 and "repetition_penalty" not in world.bodies[-1]


def test_whatever_passes_is_survived(world: World, target: Target, talks: Any, tmp_path: Path) -> None:
    ills = ["500", "429", "truncate", "hang up", "no json", "503"]

    def trouble(key: str, n: int) -> str | None:
        return ills[(len(key) + n) % len(ills)] if n <= len(key) % 4 else None

    done = regenerate(target, talks(9), SETTINGS, tmp_path / "calm", 256, "train conversations", engine(world))
    calm = sum(world.seen.values())
    world.seen.clear()
    world.trouble = trouble
    again = regenerate(target, talks(9), SETTINGS, tmp_path / "storm", 256, "train conversations", engine(world))
    assert list(again.outcomes()) == list(done.outcomes())
    assert done.counts.turns == calm == len(world.seen) < sum(world.seen.values())


@pytest.mark.slow
def test_two_thousand_requests_in_a_storm_that_breaks_once(
    world: World, target: Target, talks: Any, tmp_path: Path
) -> None:
    """16 at a time, a third of the attempts fails; half way the server is gone for good, and comes back for the next
    run. Nothing is lost, and what was answered is never asked again."""
    ills = ["500", "429", "truncate", "hang up", "no json", "503"]
    gone, answered_well = threading.Event(), Counter[str]()

    def trouble(key: str, n: int) -> str | None:
        chance = zlib.crc32(f"{key}/{n}".encode())
        if gone.is_set() or sum(answered_well.values()) == 1000:
            gone.set()
            return "503"
        if n <= 3 and chance % 3 == 0:
            return ills[chance // 3 % len(ills)] if chance % 100 else "stall"
        answered_well[key] += 1
        return None

    calm = regenerate(target, talks(1000), SETTINGS, tmp_path / "calm", 256, "train conversations", engine(world))
    assert calm.counts.turns == len(world.seen) == 2000 - 1
    world.seen.clear()
    world.trouble = trouble
    ask = {"description": "train conversations", "room": 256, "cache_dir": tmp_path / "storm"}
    patient = engine(world, concurrency=16, timeout=2.0)
    with pytest.raises(UserError, match="what was done so far is kept"):
        regenerate(target, talks(1000), SETTINGS, engine=patient, **ask)
    answered_well["before the break"] = 1  # so that it does not break again
    gone.clear()
    storm = regenerate(target, talks(1000), SETTINGS, engine=patient, **ask)
    assert list(storm.outcomes()) == list(calm.outcomes())
    del answered_well["before the break"]
    assert set(answered_well) == set(world.seen) and len(world.seen) == 2000 - 1
    twice = sum(times - 1 for times in answered_well.values())
    assert twice <= 16  # those under way when it broke
    assert sum(world.seen.values()) > 2500


def test_a_server_that_stalls_is_asked_again(world: World, target: Target) -> None:
    world.trouble = lambda key, n: "stall" if n == 1 else None
    assert len(answered(engine(world, timeout=1.0), target, requests(4))) == 4
    assert min(world.seen.values()) >= 2


def test_what_lasts_ends_in_one_sentence_and_keeps_what_was_done(
    world: World, target: Target, talks: Any, tmp_path: Path
) -> None:
    bad = threading.Event()
    world.trouble = lambda key, n: "500" if len(world.seen) > 5 and not bad.is_set() else None
    ask = {"description": "train conversations", "room": 256, "cache_dir": tmp_path}
    with pytest.raises(UserError, match=r"failed 3 times at /completions \(status 500.*\), what was done so far is"):
        regenerate(target, talks(9), SETTINGS, engine=engine(world, attempts=3, concurrency=1), **ask)
    (journal,) = tmp_path.rglob("*.partial.jsonl")
    assert len(journal.read_text().splitlines()) == 5
    bad.set()
    before = sum(world.seen.values())
    done = regenerate(target, talks(9), SETTINGS, engine=engine(world), **ask)
    assert sum(world.seen.values()) - before == done.counts.turns - 5


def test_a_refusal_is_not_repeated_and_says_no_key(
    world: World, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    world.trouble = lambda key, n: "401"
    with pytest.raises(UserError, match="refuses /completions with status 401") as refused:
        answered(engine(world, api_key_variable="THE_KEY", concurrency=1), target, requests(5))
    assert KEY not in str(refused.value) and sum(world.seen.values()) == 1


def test_words_are_split_anew_where_there_are_no_ids(
    world: World, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.gives_ids = False
    asked = requests(3)
    found = dict(answered(engine(world), target, asked))
    assert found[2] == world.answer(json.dumps(list(asked[2].messages)))
    assert world.bodies[0]["messages"][0]["role"] == "user" and "prompt" not in world.bodies[0]
    assert "chat_template_kwargs" not in world.bodies[0]
    world.bodies.clear()
    monkeypatch.setattr(target.tokenizer, BOUND, {"enable_thinking": False}, raising=False)
    list(answered(engine(world), target, asked))
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in world.bodies)
    with pytest.raises(UserError, match="only answers can be asked for in words"):
        answered(engine(world), target, [asked[0]._replace(messages=())])


def test_foreign_models_and_settings_are_named(world: World, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    world.models = ["one", "two"]
    with pytest.raises(UserError, match=r"serves one, two: name one with generator\.model"):
        answered(engine(world), target, requests(1))
    world.answer = lambda key: [10**6]
    with pytest.raises(UserError, match="expected one to be that target"):
        answered(engine(world, model="one"), target, requests(1))
    monkeypatch.delenv("THE_KEY", raising=False)
    for options, message in (
        ({"url": "localhost:8000"}, r"generator\.url is 'localhost:8000'"),
        ({"api_key_variable": "THE_KEY"}, "THE_KEY, which is not set"),
        ({"attempts": 0}, "attempts=0"),
    ):
        with pytest.raises(UserError, match=message):
            engine(world, **options)


def test_stopping_early_leaves_nothing_behind(world: World, target: Target) -> None:
    world.trouble = lambda key, n: None if len(world.seen) < 3 else "stall"
    answers = engine(world, concurrency=4).answers(target, requests(8), SETTINGS)
    next(answers)
    started = time.monotonic()
    answers.close()
    assert time.monotonic() - started < 10


def test_servers_share_the_requests_and_one_may_die(world: World, other: World, target: Target) -> None:
    asked = requests(20)
    both = engine(world, url=[world.url, other.url], concurrency=2, attempts=2)
    expected = {number: world.answer(json.dumps(asked[number].prompt)) for number in range(20)}
    assert dict(answered(both, target, asked)) == expected
    assert min(sum(world.seen.values()), sum(other.seen.values())) > 2
    other.trouble = lambda key, n: "hang up"
    with pytest.warns(UserWarning, match=f"the server {other.url}/v1 failed 2 times .*: the others do its work"):
        assert dict(answered(both, target, asked)) == expected
    dead = sum(other.seen.values())
    assert dict(answered(both, target, asked)) == expected and sum(other.seen.values()) == dead
    other.models = ["another"]
    with pytest.raises(UserError, match=r"the servers serve another, tiny: name one with generator\.model"):
        answered(engine(world, url=[world.url, other.url]), target, asked)
