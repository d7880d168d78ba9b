"""Contents of an upload, piece by piece."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

PIECE = 1 << 20


def pieces(data: Any) -> Iterator[bytes]:
    """The bytes of an open file or an iterable."""
    if not hasattr(data, "read"):
        yield from data
        return
    while piece := data.read(PIECE):
        yield piece.encode() if isinstance(piece, str) else piece


async def async_pieces(data: Any) -> AsyncIterator[bytes]:
    """As :func:`pieces`; files are read on another thread. What is iterated asynchronously is taken as well."""
    if hasattr(data, "__aiter__"):
        async for piece in data:
            yield piece
        return
    whole = pieces(data)
    while (piece := await asyncio.to_thread(next, whole, b"")) != b"":
        yield piece


def recipe_tar(recipe: str, files: Mapping[str, bytes]) -> bytes:
    """A build's request: the recipe first, then the files that it names."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in {"recipe.yaml": recipe.encode(), **files}.items():
            head = tarfile.TarInfo(name)
            head.size, head.mode = len(data), 0o644
            tar.addfile(head, io.BytesIO(data))
    return out.getvalue()
