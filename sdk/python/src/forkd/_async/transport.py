"""HTTP and WebSockets to one daemon."""

from __future__ import annotations

import asyncio
import os
import ssl
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
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
CLOSE_TIMEOUT = 1.0  # for the goodbye to a daemon that does not read
#: Streams last, and each holds a connection: a bound on those would only make one wait for another's end.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)


class AsyncTransport:
    """Requests to one daemon. What made nothing, or can be asked for again by its key, is tried twice more."""

    def __init__(self, target: _config.Target, timeout: float) -> None:
        self.target = target
        self.timeout = timeout
        self._trust = _config.trust(target)
        path, self._fd = _config.reachable(target.socket) if target.socket else ("", None)
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=path, limits=LIMITS)
            if path
            else httpx.AsyncHTTPTransport(verify=self._trust, limits=LIMITS),
            base_url=target.url,
            headers={"Authorization": f"Bearer {target.token}"} if target.token else {},
            timeout=httpx.Timeout(timeout, connect=CONNECT_TIMEOUT),
            trust_env=False,
        )
        self._starting = asyncio.Lock()

    async def aclose(self) -> None:
        await self._http.aclose()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    async def request(
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
        response = await self.send(
            method, path, json=json, params=params, headers=headers, content=content, timeout=timeout, once=once
        )
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as e:
            raise ConnectionLostError(f"{path}: the daemon's reply is no JSON: {response.text[:200]!r}") from e

    async def send(
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
                response = await self._http.request(
                    method, path, json=json, params=params, headers=head, content=content, timeout=self._time(timeout)
                )
            except httpx.HTTPError as e:
                error = self._broken(e, path)
                if isinstance(error, NoDaemonError) and content is None and await self._start():
                    continue
                if again > 0 and isinstance(error, ConnectionLostError):
                    again -= 1
                    continue
                raise error from e
            if response.is_success:
                return response
            raise _refused(response, path)

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Any = None,
        headers: Mapping[str, str] | None = None,
        content: Any = None,
    ) -> AsyncIterator[httpx.Response]:
        """A reply that is read as it comes, however long that takes."""
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT)
        try:
            async with self._http.stream(
                method, path, json=json, params=params, headers=headers, content=content, timeout=timeout
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refused(response, path)
                yield response
        except httpx.HTTPError as e:
            raise self._broken(e, path) from e

    async def lines(
        self, method: str, path: str, *, json: Any = None, params: Any = None, content: Any = None
    ) -> AsyncGenerator[Any, None]:
        """The objects of a reply that has one a line."""
        await self.ready()
        accept = {"Accept": "application/x-ndjson"}
        async with self.stream(method, path, json=json, params=params, headers=accept, content=content) as response:
            rest = bytearray()
            async for piece in response.aiter_bytes():
                first, *others = piece.split(b"\n")  # httpx would also split at what JSON may have in a string
                rest += first
                for other in others:
                    if rest:
                        yield loads(rest, path)
                    rest = bytearray(other)
                if len(rest) > LARGEST_LINE:
                    raise ConnectionLostError(f"{path}: the daemon's reply has no end of line in {LARGEST_LINE} bytes")

    async def ready(self) -> None:
        """Returns when a daemon answers, which is started if need be."""
        if self.target.may_start and not os.path.exists(self.target.socket):
            await self.request("GET", "/version")

    async def websocket(self, path: str) -> AsyncWebSocket:
        """A WebSocket of the daemon's."""
        await self.ready()
        reader, writer = await self._connect()
        ws = AsyncWebSocket(Conversation(self.target.url, path, self.target.token), reader, writer)
        try:
            await ws.open()
        except BaseException:
            await ws.aclose()
            raise
        return ws

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            if self.target.socket:
                path = self.target.socket if self._fd is None else _config.reachable_at(self._fd, self.target.socket)
                return await asyncio.wait_for(asyncio.open_unix_connection(path), CONNECT_TIMEOUT)
            parts = urlsplit(self.target.url)
            secure: Any = None
            if parts.scheme == "https":
                secure = self._trust if isinstance(self._trust, ssl.SSLContext) else ssl.create_default_context()
            port = parts.port or (443 if secure else 80)
            return await asyncio.wait_for(
                asyncio.open_connection(
                    parts.hostname, port, ssl=secure, server_hostname=parts.hostname if secure else None
                ),
                CONNECT_TIMEOUT,
            )
        except (OSError, asyncio.TimeoutError) as e:
            raise NoDaemonError(f"no daemon answers at {self.target}: {e}") from e

    async def _start(self) -> bool:
        if not self.target.may_start:
            return False
        async with self._starting:
            try:
                reader, writer = await self._connect()
            except NoDaemonError:
                await asyncio.get_running_loop().run_in_executor(None, _config.start, self.target)
            else:
                writer.close()
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


class AsyncWebSocket:
    """One WebSocket. What is not asked for is not read, so a slow reader holds back who writes."""

    def __init__(self, said: Conversation, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._said, self._reader, self._writer = said, reader, writer

    async def open(self) -> None:
        await self._write(self._said.hello())
        while not self._said.open:
            await self._more()

    async def receive(self) -> Any:
        """The next message: bytes, an object, or None after the last."""
        while not self._said.messages:
            if self._said.closed:
                return None
            await self._more()
        return self._said.messages.popleft()

    async def send(self, message: Any) -> None:
        await self._write(self._said.text(message))

    async def send_bytes(self, data: bytes) -> None:
        await self._write(self._said.binary(data))

    async def aclose(self) -> None:
        # Whoever does not take our input, as the process does not, does not take a goodbye either: it is not waited for.
        self._writer.write(self._said.bye())
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_TIMEOUT)
        except (OSError, ssl.SSLError, asyncio.TimeoutError):
            pass
        finally:
            self._writer.transport.abort()

    async def _more(self) -> None:
        try:
            data = await self._reader.read(LARGEST_READ)
        except OSError as e:
            raise ConnectionLostError(f"the connection to the daemon broke: {e}") from e
        # Without drain: while input waits to be taken, output must be read on.
        self._writer.write(self._said.receive(data))

    async def _write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as e:
            raise ConnectionLostError(f"the connection to the daemon broke: {e}") from e
