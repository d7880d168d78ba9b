"""Small things that requests are made of."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from .errors import ConnectionLostError

#: Bytes of a stream that a result keeps, as the daemon does where it answers in one piece. All of it goes by on the way.
MOST_KEPT = 16 << 20


def clean(**fields: Any) -> dict[str, Any]:
    """A request's object: what is not given is left out, as the daemon wants it."""
    return {k: v for k, v in fields.items() if v is not None and v != {}}


def argv(cmd: str | Sequence[str]) -> list[str]:
    """A text is for the shell, a list is a program and its arguments."""
    return ["/bin/sh", "-c", cmd] if isinstance(cmd, str) else list(cmd)


def segment(text: str) -> str:
    """Text as one part of a path."""
    return quote(text, safe="")


class Decoder:
    """Text of pieces that may cut a character in two."""

    def __init__(self) -> None:
        self._d = codecs.getincrementaldecoder("utf-8")("replace")

    def text(self, data: bytes) -> str:
        return self._d.decode(data)

    def rest(self) -> str:
        return self._d.decode(b"", True)


def loads(line: bytes | bytearray, path: str) -> Any:
    """The object of a line."""
    try:
        return json.loads(line)
    except ValueError as e:
        raise ConnectionLostError(f"{path}: the daemon's reply is no JSON: {bytes(line[:200])!r}") from e


class Kept:
    """The beginning of a text that comes in pieces."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._room = MOST_KEPT
        self.lost = 0  #: bytes that were left out

    def add(self, text: str) -> None:
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > self._room:
            text = text.encode("utf-8", "surrogatepass")[: self._room].decode("utf-8", "ignore")
            self.lost += size - self._room
        self._room = max(0, self._room - size)
        if text:
            self._pieces.append(text)

    def __str__(self) -> str:
        return "".join(self._pieces)
