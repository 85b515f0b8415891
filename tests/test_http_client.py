"""One client: what passes is tried again, what lasts ends everything at once."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from specdraft.errors import UserError
from specdraft.http_client import HttpClient, RefusedError

Answer = Callable[[BaseHTTPRequestHandler, str, int], None]


class World(ThreadingHTTPServer):
    """``respond(handler, path, n)`` writes the answer when a path is asked for the n-th time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.respond: Answer = lambda handler, path, n: reply(handler, 200, path)
        self.asked: list[str] = []
        self.ended = threading.Event()

    def client(self, **options: Any) -> HttpClient:
        url = f"http://127.0.0.1:{self.server_port}"
        return HttpClient(url, "group", "a server", **{"backoff": 0.01, "timeout": 20.0, "concurrency": 4} | options)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: World

    def do_GET(self) -> None:
        path = self.path.removeprefix("/v1")
        self.server.asked.append(path)
        self.server.respond(self, path, self.server.asked.count(path))

    def log_message(self, *args: Any) -> None:
        pass


def reply(handler: BaseHTTPRequestHandler, status: int, body: Any, **headers: str) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)


@pytest.fixture
def world() -> Iterator[World]:
    server = World()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_each_item_is_answered_once_under_its_number(world: World) -> None:
    with world.client() as client:
        for _ in range(2):  # the connections serve again
            found = dict(client.each(lambda item: client.request("GET", f"/{item}"), range(30)))
            assert found == {number: f"/{number}" for number in range(30)}
    assert len(world.asked) == 60


def test_the_servers_own_delay_is_kept(world: World) -> None:
    world.respond = lambda handler, path, n: reply(handler, 429 if n == 1 else 200, path, Retry_After="0.3")
    with world.client() as client:
        started = time.monotonic()
        assert client.request("GET", "/a") == "/a"
        assert 0.3 <= time.monotonic() - started < 10


def test_a_body_that_trickles_takes_too_long_as_a_whole(world: World) -> None:
    def trickle(handler: BaseHTTPRequestHandler, path: str, n: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        while not world.ended.wait(0.1):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return

    world.respond = trickle
    with world.client(timeout=0.5, attempts=2) as client:
        started = time.monotonic()
        with pytest.raises(UserError, match=r"failed 2 times at /a \(no answer within 0\.5 s\)"):
            client.request("GET", "/a")
        assert time.monotonic() - started < 10


def test_the_first_refusal_ends_what_waits_and_hangs_up_on_what_is_under_way(world: World) -> None:
    stalled = threading.Event()

    def respond(handler: BaseHTTPRequestHandler, path: str, n: int) -> None:
        if path == "/0":
            stalled.set()
            world.ended.wait(20)
        else:
            stalled.wait(20)
            reply(handler, 403, "no such thing")

    world.respond = respond
    with world.client(concurrency=2) as client:
        started = time.monotonic()
        with pytest.raises(RefusedError, match=r"refuses /1 with status 403 \(.no such thing.\): expected a server"):
            list(client.each(lambda item: client.request("GET", f"/{item}"), range(50)))
        assert time.monotonic() - started < 10
        assert sorted(world.asked) == ["/0", "/1"]
        world.respond = lambda handler, path, n: reply(handler, 200, path)
        assert client.request("GET", "/again") == "/again"


def test_ending_early_does_not_wait_for_the_next_attempt(world: World) -> None:
    world.respond = lambda handler, path, n: reply(handler, 200 if path == "/0" else 503, path, Retry_After="30")
    with world.client() as client:
        started = time.monotonic()
        answers = client.each(lambda item: client.request("GET", f"/{item}"), range(4))
        assert next(answers) == (0, "/0")
        answers.close()
        assert time.monotonic() - started < 10
