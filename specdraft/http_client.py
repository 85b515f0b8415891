"""Servers' clients: many requests side by side, one policy of trying again, JSON in and out.

Threads send the requests. To end early, their sockets are shut down, so that no thread goes on waiting for an answer.
Several servers share the work; what one of them was doing when it died, the others do again.
"""

import json
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from typing import Any, TypeVar

import httpx

from specdraft.errors import UserError, warn

_TRY_AGAIN = {408, 409, 425, 429}  # and every 5xx
_LONGEST_WAIT = 60.0  # seconds between two attempts
_LONGEST_CONNECT = 30.0  # seconds
_SHOWN = 300  # characters of a server's message

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class RefusedError(UserError):
    """The server does not want this request, now or later."""


class LostError(UserError):
    """The server fails again and again, or nothing more is asked of it. ``reason``: in a few words."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class _TransientError(Exception):
    """A failure that may pass. ``wait``: seconds that the server asked for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class HttpClient:
    """The client of one server, made and opened by ``HttpClients``.
    Failures that may pass are tried again: 408, 409, 425, 429 (with its Retry-After), 5xx, timeouts, closed
    connections, and bodies that are no whole JSON."""

    def __init__(
        self, url: str, settings: str, expected: str, timeout: float, attempts: int, backoff: float, key: str,
    ) -> None:  # fmt: skip
        """See ``HttpClients``."""
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise UserError(f"{settings}.url is {url!r}: expected the server's address, such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.settings, self.expected = settings, expected
        self.timeout, self.attempts, self.backoff = timeout, attempts, backoff
        self._key, self._ended = key, threading.Event()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()

    def open(self, connections: int) -> None:
        """Make ready for so many requests side by side."""
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            timeout=httpx.Timeout(self.timeout, connect=min(self.timeout, _LONGEST_CONNECT), pool=None),
        )
        self.resume()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def resume(self) -> None:
        """Requests may be sent again."""
        self._ended = threading.Event()

    def sleep(self, seconds: float) -> None:
        """Wait. Raises LostError once the requests are ended."""
        if self._ended.wait(seconds):
            raise LostError("the requests were ended")

    def request(
        self, method: str, path: str, payload: Mapping[str, Any] | None = None, check: Callable[[Any], object] = bool
    ) -> Any:
        """The server's JSON; where ``check`` of it raises an error of lookup or type, it is asked for again.
        Raises RefusedError, or LostError where every attempt failed."""
        for attempt in range(1, self.attempts + 1):
            try:
                return self._request_once(method, path, payload, check)
            except _TransientError as failed:
                error = failed
            # Half of the time is chance, so that requests that failed together do not come back together.
            pause = self.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1)
            if attempt < self.attempts:
                self.sleep(min(max(pause, error.wait), _LONGEST_WAIT))
        failed_at = f"failed {self.attempts} times at {path} ({error})"
        raise LostError(
            f"the server {self.url} {failed_at}, what was done so far is kept: "
            f"expected {self.expected}; see to the server, or lower {self.settings}.concurrency, and start again",
            failed_at,
        )

    def _request_once(
        self, method: str, path: str, payload: Mapping[str, Any] | None, check: Callable[[Any], object]
    ) -> Any:
        deadline, data = time.monotonic() + self.timeout, b""
        too_late = f"no answer within {self.timeout:g} s"
        try:
            noted = {"trace": self._note_socket}
            with self._http.stream(method, self.url + path, json=payload, extensions=noted) as response:
                for part in response.iter_bytes():  # httpx's own limit is between two parts of a body
                    data += part
                    if time.monotonic() > deadline:
                        raise _TransientError(too_late)
        except httpx.TimeoutException as error:
            raise _TransientError(too_late) from error
        except httpx.HTTPError as error:
            raise _TransientError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error
        status, said = response.status_code, " ".join(data.decode(errors="replace").split())[:_SHOWN]
        if self._key:
            said = said.replace(self._key, "***")
        if status in _TRY_AGAIN or status >= 500:
            raise _TransientError(f"status {status}: {said}", _seconds(response.headers.get("Retry-After")))
        if status >= 300:
            refused = f"the server {self.url} refuses {path} with status {status} ({said})"
            mend = f"check {self.settings}.url, the model and the API key"
            raise RefusedError(f"{refused}: expected {self.expected}; {mend}")
        try:
            body = json.loads(data)
            check(body)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise _TransientError("an answer that is no whole JSON of the protocol") from error
        return body

    def _note_socket(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            with self._lock:
                self._sockets.add(info["return_value"].get_extra_info("socket"))
            if self._ended.is_set():
                self.hang_up()

    def hang_up(self) -> None:
        """End all requests under way, whatever their threads wait for."""
        self._ended.set()
        with self._lock:
            open_sockets = [each for each in self._sockets if each.fileno() >= 0]
        for each in open_sockets:
            with suppress(OSError):  # closed already
                socket.socket.shutdown(each, socket.SHUT_RDWR)


class HttpClients:
    """The clients of servers that share the work; a context manager, inside of which requests can be sent."""

    def __init__(
        self,
        url: str | Sequence[str],
        settings: str,
        expected: str,
        concurrency: int = 64,
        timeout: float = 600.0,
        attempts: int = 6,
        backoff: float = 1.0,
        api_key_variable: str | None = None,
    ) -> None:
        """Check the settings; nothing is sent yet. ``url``: of a server, or of several.

        ``settings`` names their group and ``expected`` the kind of server, for messages. Each is sent ``concurrency``
        requests side by side. ``timeout``: seconds that one request may take. ``attempts``: of one request; the k-th
        waits up to ``backoff`` * 2**k seconds for the next, or as long as the server asks, never above a minute.
        ``api_key_variable`` names the environment variable that holds the key. Raises UserError."""
        urls = [url] if isinstance(url, str) else list(url)
        if not urls or len(set(urls)) < len(urls):
            raise UserError(f"{settings}.url is {urls}: expected the address of a server, or of several different ones")
        if concurrency < 1 or attempts < 1 or timeout <= 0 or backoff < 0:
            given = f"concurrency={concurrency}, attempts={attempts}, timeout={timeout} and backoff={backoff}"
            raise UserError(f"{settings} has {given}: expected at least 1 request and attempt, and positive seconds")
        key = os.environ.get(api_key_variable, "") if api_key_variable else ""
        if api_key_variable and not key:
            given = f"{settings}.api_key_variable names {api_key_variable}"
            raise UserError(f"{given}, which is not set: export it, or choose null")
        self.concurrency = concurrency * len(urls)
        self.all = [HttpClient(each, settings, expected, timeout, attempts, backoff, key) for each in urls]
        self._lost: dict[HttpClient, LostError] = {}
        self._under_way = dict.fromkeys(self.all, 0)
        self._failure: UserError | None = None
        self._lock = threading.Lock()

    @property
    def living(self) -> list[HttpClient]:
        """Those that have not failed; there is always one."""
        return [client for client in self.all if client not in self._lost]

    def __enter__(self) -> "HttpClients":
        for client in self.all:
            client.open(self.concurrency)  # as one alone does the work of all in the end
        self._threads = ThreadPoolExecutor(self.concurrency)
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for client in self.all:
            client.close()

    def each(self, ask: Callable[[HttpClient, Item], Answer], items: Sequence[Item]) -> Iterator[tuple[int, Answer]]:
        """Yield (number of the item, ``ask(client, item)``) as the answers arrive; ``ask`` calls ``client.request``.
        An item goes to the server that has the fewest under way. What raises LostError is not asked again, and its
        items go to the others. The first other error, or the loss of the last server, is raised here and ends all
        requests, as closing the iterator does: those that wait are never sent, and those under way are hung up on."""
        self._resume()
        numbers = {self._threads.submit(self._work, ask, item): number for number, item in enumerate(items)}
        try:
            for future in as_completed(numbers):
                yield numbers[future], future.result()
        finally:
            if not all(future.done() for future in numbers):
                for future in numbers:
                    future.cancel()
                self.hang_up()
                wait(numbers)
            self._resume()

    def hang_up(self) -> None:
        """End what ``each`` is doing, in whatever thread."""
        self._fail(UserError("the requests were ended"))

    def _work(self, ask: Callable[[HttpClient, Item], Answer], item: Item) -> Answer:
        while True:
            with self._lock:
                # Checked here, because the thread that reads the futures learns of a failure after the next was sent.
                if self._failure is not None:
                    raise self._failure
                client = min(self.living, key=self._under_way.__getitem__)
                self._under_way[client] += 1
            try:
                return ask(client, item)
            except LostError as error:
                self._lose(client, error)
            except UserError as error:
                self._fail(error)
            finally:
                with self._lock:
                    self._under_way[client] -= 1

    def _lose(self, client: HttpClient, error: LostError) -> None:
        with self._lock:
            if self._failure is not None or client in self._lost:  # hung up on
                return
            self._lost[client] = error
            reasons = "; ".join(f"{each.url} {lost.reason}" for each, lost in self._lost.items())
            if last := len(self._lost) == len(self.all):
                self._lost.clear()
                mend = f"what was done so far is kept: expected {client.expected}; see to the servers, and start again"
                self._failure = error if len(self.all) == 1 else UserError(f"no server is left ({reasons}), {mend}")
        if not last:
            warn(f"the server {client.url} {error.reason}: the others do its work")
        client.hang_up()

    def _fail(self, error: UserError) -> None:
        with self._lock:
            self._failure = self._failure or error
        for client in self.all:
            client.hang_up()

    def _resume(self) -> None:
        self._failure = None
        for client in self.living:
            client.resume()


def _seconds(text: str | None) -> float:
    """Of a Retry-After header; a date counts as none."""
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
