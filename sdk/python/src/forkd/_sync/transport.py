"""HTTP and WebSockets to one daemon."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from .. import _config
from .._text import loads
from .._websocket import Conversation
from ..errors import ConnectionLostError, NoDaemonError, refusal

CONNECT_TIMEOUT = 10.0
LARGEST_READ = 1 << 18
LARGEST_LINE = 256 << 20  # of a stream: more than anything that the daemon says at once
#: Streams last, and each holds a connection: a bound on those would only make one wait for another's end.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)


class Transport:
    """Requests to one daemon. What made nothing, or can be asked for again by its key, is tried twice more."""

    def __init__(self, target: _config.Target, timeout: float) -> None:
        self.target = target
        self.timeout = timeout
        self._trust = _config.trust(target)
        path, self._fd = _config.reachable(target.socket) if target.socket else ("", None)
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=path, limits=LIMITS)
            if path
            else httpx.HTTPTransport(verify=self._trust, limits=LIMITS),
            base_url=target.url,
            headers={"Authorization": f"Bearer {target.token}"} if target.token else {},
            timeout=httpx.Timeout(timeout, connect=CONNECT_TIMEOUT),
            trust_env=False,
        )
        self._starting = threading.Lock()

    def close(self) -> None:
        self._http.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Any = None,
        headers: Mapping[str, str] | None = None,
        content: Any = None,
        timeout: float | None = None,
        once: bool | str = False,
    ) -> Any:
        """One request, and the reply's object. ``once`` (or a key of one's own) has it done once however often it is sent."""
        response = self.send(
            method, path, json=json, params=params, headers=headers, content=content, timeout=timeout, once=once
        )
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as e:
            raise ConnectionLostError(f"{path}: the daemon's reply is no JSON: {response.text[:200]!r}") from e

    def send(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Any = None,
        headers: Mapping[str, str] | None = None,
        content: Any = None,
        timeout: float | None = None,
        once: bool | str = False,
    ) -> httpx.Response:
        """As :meth:`request`, but the reply itself, read whole."""
        head = dict(headers or {})
        if once:
            head["Idempotency-Key"] = once if isinstance(once, str) else str(uuid.uuid4())
        again = 2 if once or method in ("GET", "HEAD") else 0
        while True:
            try:
                response = self._http.request(
                    method, path, json=json, params=params, headers=head, content=content, timeout=self._time(timeout)
                )
            except httpx.HTTPError as e:
                error = self._broken(e, path)
                if isinstance(error, NoDaemonError) and content is None and self._start():
                    continue
                if again > 0 and isinstance(error, ConnectionLostError):
                    again -= 1
                    continue
                raise error from e
            if response.is_success:
                return response
            raise _refused(response, path)

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Any = None,
        headers: Mapping[str, str] | None = None,
        content: Any = None,
    ) -> Iterator[httpx.Response]:
        """A reply that is read as it comes, however long that takes."""
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT)
        try:
            with self._http.stream(
                method, path, json=json, params=params, headers=headers, content=content, timeout=timeout
            ) as response:
                if not response.is_success:
                    response.read()
                    raise _refused(response, path)
                yield response
        except httpx.HTTPError as e:
            raise self._broken(e, path) from e

    def lines(
        self, method: str, path: str, *, json: Any = None, params: Any = None, content: Any = None
    ) -> Generator[Any, None, None]:
        """The objects of a reply that has one a line."""
        self.ready()
        accept = {"Accept": "application/x-ndjson"}
        with self.stream(method, path, json=json, params=params, headers=accept, content=content) as response:
            rest = bytearray()
            for piece in response.iter_bytes():
                first, *others = piece.split(b"\n")  # httpx would also split at what JSON may have in a string
                rest += first
                for other in others:
                    if rest:
                        yield loads(rest, path)
                    rest = bytearray(other)
                if len(rest) > LARGEST_LINE:
                    raise ConnectionLostError(f"{path}: the daemon's reply has no end of line in {LARGEST_LINE} bytes")

    def ready(self) -> None:
        """Returns when a daemon answers, which is started if need be."""
        if self.target.may_start and not os.path.exists(self.target.socket):
            self.request("GET", "/version")

    def websocket(self, path: str) -> WebSocket:
        """A WebSocket of the daemon's."""
        self.ready()
        ws = WebSocket(Conversation(self.target.url, path, self.target.token), self._connect())
        try:
            ws.open()
        except BaseException:
            ws.close()
            raise
        return ws

    def _connect(self) -> socket.socket:
        try:
            if self.target.socket:
                path = self.target.socket if self._fd is None else _config.reachable_at(self._fd, self.target.socket)
                local = socket.socket(socket.AF_UNIX)
                try:
                    local.connect(path)
                except OSError:
                    local.close()
                    raise
                return local
            parts = urlsplit(self.target.url)
            host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
            plain = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
            plain.settimeout(None)
            if parts.scheme != "https":
                return plain
            context = self._trust if isinstance(self._trust, ssl.SSLContext) else ssl.create_default_context()
            return context.wrap_socket(plain, server_hostname=host)
        except OSError as e:
            raise NoDaemonError(f"no daemon answers at {self.target}: {e}") from e

    def _start(self) -> bool:
        if not self.target.may_start:
            return False
        with self._starting:
            try:
                self._connect().close()
            except NoDaemonError:
                _config.start(self.target)
            self.target = _config.started(self.target)
        return True

    def _time(self, seconds: float | None) -> httpx.Timeout:
        return httpx.Timeout(self.timeout if seconds is None else seconds, connect=CONNECT_TIMEOUT)

    def _broken(self, e: httpx.HTTPError, path: str) -> Exception:
        if isinstance(e, (httpx.ConnectError, httpx.ConnectTimeout)):
            return NoDaemonError(f"no daemon answers at {self.target}: {e}")
        if isinstance(e, httpx.TimeoutException):
            return ConnectionLostError(f"{path}: the daemon did not answer in time")
        return ConnectionLostError(f"{path}: the connection to the daemon broke: {e}")


def _refused(response: httpx.Response, path: str) -> Exception:
    try:
        body = response.json()
    except ValueError:
        body = response.text[:2000]
    return refusal(response.status_code, body, path)


class WebSocket:
    """One WebSocket. What is not asked for is not read, so a slow reader holds back who writes.

    Input may come from another thread than the one that reads. That one must go on reading while input waits to be
    taken, or both ends wait for each other: so what was said is one lock, and sending it another.
    """

    def __init__(self, said: Conversation, connection: socket.socket) -> None:
        self._said, self._socket = said, connection
        self._saying = threading.Lock()
        self._sending = threading.Lock()
        self._owed = bytearray()  # answers to what was read, for whoever sends next

    def open(self) -> None:
        self._write(self._said.hello)
        while not self._said.open:
            self._more()

    def receive(self) -> Any:
        """The next message: bytes, an object, or None after the last."""
        while not self._said.messages:
            if self._said.closed:
                return None
            self._more()
        return self._said.messages.popleft()

    def send(self, message: Any) -> None:
        self._write(lambda: self._said.text(message))

    def send_bytes(self, data: bytes) -> None:
        self._write(lambda: self._said.binary(data))

    def close(self) -> None:
        # Whoever does not take our input, as the process does not, does not take a goodbye either: it is not waited for.
        with self._saying:
            bye = self._said.bye()
        if self._sending.acquire(blocking=False):
            try:
                with suppress(OSError):
                    self._socket.settimeout(0)
                    self._socket.send(bye)
            finally:
                self._sending.release()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who reads or writes on another thread
        self._socket.close()

    def _more(self) -> None:
        try:
            data = self._socket.recv(LARGEST_READ)
        except OSError as e:
            raise ConnectionLostError(f"the connection to the daemon broke: {e}") from e
        with self._saying:
            self._owed += self._said.receive(data)
        self._pay()

    def _pay(self) -> None:
        """Sends the answers that are owed, unless somebody is sending, who will."""
        while self._owed and self._sending.acquire(blocking=False):
            try:
                self._send(lambda: b"")
            finally:
                self._sending.release()

    def _write(self, made: Callable[[], bytes]) -> None:
        with self._sending:
            self._send(made)
        self._pay()

    def _send(self, made: Callable[[], bytes]) -> None:
        with self._saying:  # frames go out in the order in which they were made
            data = bytes(self._owed) + made()
            self._owed.clear()
        try:
            self._socket.sendall(data)
        except OSError as e:
            raise ConnectionLostError(f"the connection to the daemon broke: {e}") from e
