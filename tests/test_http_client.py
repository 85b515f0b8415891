"""One client: what passes is tried again, what lasts ends everything at once."""

import json
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from specdraft.errors import UserError
from specdraft.http_client import HttpClients, RefusedError

Answer = Callable[[BaseHTTPRequestHandler, str, int], None]


class World(ThreadingHTTPServer):
    """``respond(handler, path, n)`` writes the answer when a path is asked for the n-th time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.respond: Answer = lambda handler, path, n: reply(handler, 200, path)
        self.asked: list[str] = []
        self.ended = threading.Event()

    def clients(self, *others: "World", **options: Any) -> HttpClients:
        url = [world.url for world in (self, *others)] if others else self.url
        return HttpClients(url, "group", "a server", **{"backoff": 0.01, "timeout": 20.0, "concurrency": 4} | options)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


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


def served(server: World) -> Iterator[World]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def world() -> Iterator[World]:
    yield from served(World())


@pytest.fixture
def other() -> Iterator[World]:
    yield from served(World())


def test_each_item_is_answered_once_under_its_number(world: World) -> None:
    with world.clients() as clients:
        for _ in range(2):  # the connections serve again
            found = dict(clients.each(lambda client, item: client.request("GET", f"/{item}"), range(30)))
            assert found == {number: f"/{number}" for number in range(30)}
    assert len(world.asked) == 60


def test_the_servers_own_delay_is_kept(world: World) -> None:
    world.respond = lambda handler, path, n: reply(handler, 429 if n == 1 else 200, path, Retry_After="0.3")
    with world.clients() as clients:
        started = time.monotonic()
        assert clients.all[0].request("GET", "/a") == "/a"
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
    with world.clients(timeout=0.5, attempts=2) as clients:
        started = time.monotonic()
        with pytest.raises(UserError, match=r"failed 2 times at /a \(no answer within 0\.5 s\)"):
            clients.all[0].request("GET", "/a")
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
    with world.clients(concurrency=2) as clients:
        started = time.monotonic()
        with pytest.raises(RefusedError, match=r"refuses /1 with status 403 \(.no such thing.\): expected a server"):
            list(clients.each(lambda client, item: client.request("GET", f"/{item}"), range(50)))
        assert time.monotonic() - started < 10
        assert sorted(world.asked) == ["/0", "/1"]
        world.respond = lambda handler, path, n: reply(handler, 200, path)
        assert clients.all[0].request("GET", "/again") == "/again"


def test_ending_early_does_not_wait_for_the_next_attempt(world: World) -> None:
    world.respond = lambda handler, path, n: reply(handler, 200 if path == "/0" else 503, path, Retry_After="30")
    with world.clients() as clients:
        started = time.monotonic()
        answers = clients.each(lambda client, item: client.request("GET", f"/{item}"), range(4))
        assert next(answers) == (0, "/0")
        answers.close()
        assert time.monotonic() - started < 10


def test_servers_share_the_work(world: World, other: World) -> None:
    with world.clients(other, concurrency=2) as clients:
        both = threading.Barrier(4)  # two requests at each, or nobody goes on
        world.respond = other.respond = lambda handler, path, n: (both.wait(20), reply(handler, 200, path))
        found = dict(clients.each(lambda client, item: client.request("GET", f"/{item}"), range(12)))
    assert found == {number: f"/{number}" for number in range(12)}
    assert len(world.asked) == len(other.asked) == 6


_SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        print(self.path, flush=True)
        if len(self.path) > 5:  # /v1/10 and later
            import time; time.sleep(60)
        self.send_response(200); self.end_headers(); self.wfile.write(b'"' + self.path[3:].encode() + b'"')
    def log_message(self, *args): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_the_work_of_a_killed_server_is_done_by_the_others_with_one_warning(world: World) -> None:
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        urls = [world.url, f"http://127.0.0.1:{int(process.stdout.readline())}"]

        def kill() -> None:
            assert process.stdout is not None
            while len(process.stdout.readline()) < 7:
                pass
            process.kill()

        threading.Thread(target=kill, daemon=True).start()
        clients = HttpClients(urls, "group", "a server", concurrency=3, attempts=3, backoff=0.01)
        with warnings.catch_warnings(record=True) as said, clients:
            warnings.simplefilter("always")
            for _ in range(2):  # it is not asked again
                found = dict(clients.each(lambda client, item: client.request("GET", f"/{item}"), range(40)))
                assert found == {number: f"/{number}" for number in range(40)}
                assert [client.url for client in clients.living] == [f"{world.url}/v1"]
    # Whatever is collected meanwhile may warn of what it had open.
    (line,) = [str(warning.message) for warning in said if issubclass(warning.category, UserWarning)]
    assert line.startswith(f"the server {urls[1]}/v1 failed 3 times at /") and line.endswith("the others do its work")


def test_the_loss_of_all_servers_names_each(world: World, other: World) -> None:
    world.respond = other.respond = lambda handler, path, n: reply(handler, 503, "tired")
    with world.clients(other, attempts=2) as clients:
        for _ in range(2):
            with (
                pytest.warns(UserWarning, match="the others do its work"),
                pytest.raises(UserError, match="no server is left") as failed,
            ):
                list(clients.each(lambda client, item: client.request("GET", f"/{item}"), range(9)))
            assert all(f"{each.url}/v1 failed 2 times at /" in str(failed.value) for each in (world, other))
        world.respond = other.respond = lambda handler, path, n: reply(handler, 200, path)
        assert len(list(clients.each(lambda client, item: client.request("GET", f"/{item}"), range(9)))) == 9


def test_another_thread_ends_what_waits(world: World) -> None:
    world.respond = lambda handler, path, n: world.ended.wait(20)
    with world.clients() as clients:
        threading.Timer(0.1, clients.hang_up).start()
        with pytest.raises(UserError, match="the requests were ended"):
            list(clients.each(lambda client, item: client.request("GET", f"/{item}"), range(9)))
        world.respond = lambda handler, path, n: reply(handler, 200, path)
        assert len(list(clients.each(lambda client, item: client.request("GET", f"/{item}"), range(9)))) == 9


@pytest.mark.parametrize("url", [[], ["http://a", "http://a"], ["http://a", "b:80"]])
def test_addresses_that_cannot_be(url: list[str]) -> None:
    with pytest.raises(UserError, match=r"group\.url is .*: expected the (server's )?address"):
        HttpClients(url, "group", "a server")
