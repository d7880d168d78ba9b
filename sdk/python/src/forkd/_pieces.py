"""Contents of an upload, piece by piece."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

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


@contextmanager
def replaced(local: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file that takes its place when it is complete; until then what is there stays, and nothing is left of a failure."""
    target = Path(local).resolve()  # what a link names, and not the link
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as f:
        try:
            yield f
            f.flush()
            os.chmod(f.fileno(), target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~_umask())
            os.replace(f.name, target)
        except BaseException:
            os.unlink(f.name)
            raise


def _umask() -> int:
    try:  # os.umask would change it, for all threads
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0o077
    return next((int(line.split()[1], 8) for line in lines if line.startswith("Umask:")), 0o077)


def recipe_tar(recipe: str, files: Mapping[str, bytes]) -> bytes:
    """A build's request: the recipe first, then the files that it names."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in {"recipe.yaml": recipe.encode(), **files}.items():
            head = tarfile.TarInfo(name)
            head.size, head.mode = len(data), 0o644
            tar.addfile(head, io.BytesIO(data))
    return out.getvalue()
