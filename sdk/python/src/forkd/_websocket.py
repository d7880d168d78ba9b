"""The WebSocket of a command: frames in and out, without I/O of its own."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import ProtocolError

from ._text import loads
from .errors import ConnectionLostError, refusal

PROTOCOL = "forkd.exec.v1"


class Conversation:
    """What is said over one WebSocket. Bytes that arrive go to :meth:`receive`; messages come out of ``messages``."""

    def __init__(self, url: str, path: str, token: str) -> None:
        self._ws = WSConnection(ConnectionType.CLIENT)
        self._url, self._path, self._token = url, path, token
        self._text: list[str] = []
        self._bytes = bytearray()
        self._refused: list[bytes] = []
        self._status = 0
        self.messages: deque[Any] = deque()  # bytes of a binary message, or the object of a text message
        self.open = False
        self.closed = False

    def hello(self) -> bytes:
        """The first bytes to send."""
        headers = [(b"Authorization", f"Bearer {self._token}".encode())] if self._token else []
        return self._ws.send(
            Request(host=urlsplit(self._url).netloc, target=self._path, subprotocols=[PROTOCOL], extra_headers=headers)
        )

    def text(self, message: Any) -> bytes:
        """The bytes of an object."""
        self._still_open()
        return self._ws.send(TextMessage(data=json.dumps(message, ensure_ascii=False)))

    def binary(self, data: bytes) -> bytes:
        """The bytes of a binary message."""
        self._still_open()
        return self._ws.send(BytesMessage(data=data))

    def _still_open(self) -> None:
        if self.closed:
            raise ConnectionLostError("nobody listens: the process has ended, or it was left; attach to it to go on")

    def bye(self) -> bytes:
        """The bytes of a close, if there is still somebody to be told."""
        if self.closed or not self.open:
            return b""
        self.closed = True
        return self._ws.send(CloseConnection(code=CloseReason.NORMAL_CLOSURE))

    def receive(self, data: bytes) -> bytes:
        """Takes what has arrived (nothing: the end), and returns what must be answered at once."""
        if not data:
            self.closed = True
            if not self.open:
                raise ConnectionLostError("the daemon closed the connection before it answered")
            return b""
        answer = bytearray()
        for event in self._events(data):
            match event:
                case AcceptConnection():
                    self.open = True
                case RejectConnection():
                    self._status = event.status_code
                    if not event.has_body:
                        raise refusal(event.status_code, "", self._path)
                case RejectData():
                    self._refused.append(event.data)
                    if event.body_finished:
                        raise refusal(self._status, _json(b"".join(self._refused)), self._path)
                case TextMessage():
                    self._text.append(event.data)
                    if event.message_finished:
                        self.messages.append(loads("".join(self._text).encode(), self._path))
                        self._text.clear()
                case BytesMessage():
                    self._bytes += event.data
                    if event.message_finished:
                        self.messages.append(bytes(self._bytes))
                        self._bytes.clear()
                case Ping():
                    answer += self._ws.send(event.response())
                case CloseConnection():
                    if not self.closed:
                        answer += self._ws.send(event.response())
                    self.closed = True
        return bytes(answer)

    def _events(self, data: bytes) -> Iterator[Event]:
        try:
            self._ws.receive_data(data)
            yield from self._ws.events()
        except ProtocolError as e:
            self.closed = True
            raise ConnectionLostError(f"{self._path}: this is no WebSocket of a daemon's: {e}") from e


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode("utf-8", "replace")
