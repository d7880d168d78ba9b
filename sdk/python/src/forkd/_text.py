"""Small things that requests are made of."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote


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
