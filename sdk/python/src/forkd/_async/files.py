"""Files of a sandbox."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from .._pieces import async_pieces, replaced
from .._text import clean
from ..errors import NotFoundError, refusal
from ..models import FileEvent, FileInfo
from .transport import AsyncTransport

#: What :meth:`AsyncFiles.write` takes: text, bytes, a file that is open for reading bytes, or pieces as they come.
Content = Any
PIECE = 1 << 20


class AsyncFiles:
    """``sandbox.files``. Relative paths and ``~`` begin in the user's home; calls act with the rights of ``user``."""

    def __init__(self, transport: AsyncTransport, base: str) -> None:
        self._t, self._base = transport, f"{base}/files"

    async def read(self, path: str, *, user: str | None = None, encoding: str = "utf-8") -> str:
        """A file's text. Raises :class:`NotFoundError`, :class:`DeniedError`, :class:`InvalidError` (a directory).

        >>> info = await sandbox.files.write("greeting.txt", "hello")
        >>> await sandbox.files.read("greeting.txt")
        'hello'
        """
        return (await self.read_bytes(path, user=user)).decode(encoding)

    async def read_bytes(self, path: str, *, user: str | None = None) -> bytes:
        """A file's bytes.

        Raises what :meth:`read` does.

        >>> info = await sandbox.files.write("/tmp/bytes", b"\\0\\1")
        >>> await sandbox.files.read_bytes("/tmp/bytes")
        b'\\x00\\x01'
        """
        reply = await self._t.send("GET", self._base, params=clean(path=path, user=user))
        return reply.content

    @asynccontextmanager
    async def open(
        self, path: str, *, user: str | None = None, size: int = PIECE
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """A file's bytes in pieces, for what does not fit into memory.

        ``size`` of the pieces is in bytes. Raises what :meth:`read` does.

        >>> async with sandbox.files.open("/etc/hostname", size=4) as pieces:
        ...     sizes = [len(piece) async for piece in pieces]
        >>> sizes[0]
        4
        """
        await self._t.ready()
        async with self._t.stream("GET", self._base, params=clean(path=path, user=user)) as reply:
            yield reply.aiter_bytes(size)

    async def write(
        self,
        path: str,
        data: Content,
        *,
        mode: int | None = None,
        user: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> FileInfo:
        """Writes a file, which appears when it is complete; missing directories above it are made.

        ``data`` is text, bytes, a file open for reading bytes, or an iterator of bytes. ``mode`` are permission bits
        (``0o755``); a file that is replaced keeps its own. Raises :class:`ExhaustedError` when the disk is full.

        >>> info = await sandbox.files.write("/tmp/new/script", "#!/bin/sh\\necho hi\\n", mode=0o755)
        >>> (info.size, info.permissions)
        (18, '-rwxr-xr-x')
        >>> info = await sandbox.files.write("/tmp/pieces", (b"x" * 1000 for _ in range(3)))
        >>> info.size
        3000
        """
        params = clean(path=path, user=user, mode=None if mode is None else f"{mode:o}")
        headers = {f"X-Metadata-{k}": v for k, v in (metadata or {}).items()}
        headers["Content-Type"] = "application/octet-stream"
        content = data.encode() if isinstance(data, str) else data
        if not isinstance(content, (bytes, bytearray)):
            await self._t.ready()
            content = async_pieces(content)
        reply = await self._t.request("PUT", self._base, params=params, headers=headers, content=content)
        return FileInfo.load(reply[0])

    async def upload(self, local: str | os.PathLike[str], path: str, **options: Any) -> FileInfo:
        """Writes a file of this machine into the sandbox, in pieces. Options are those of :meth:`write`.

        >>> info = await sandbox.files.upload("/etc/hostname", "/tmp/hostname")
        >>> info.path
        '/tmp/hostname'
        """
        with open(local, "rb") as f:
            return await self.write(path, f, **options)

    async def download(self, path: str, local: str | os.PathLike[str], *, user: str | None = None) -> int:
        """Writes a file of the sandbox to this machine, in pieces; returns its size in bytes.

        The file here appears when it is complete. Raises what :meth:`read` does.

        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as local:
        ...     size = await sandbox.files.download("/etc/hostname", local.name)
        >>> size == (await sandbox.files.stat("/etc/hostname")).size
        True
        """
        size = 0
        with replaced(local) as f:
            async with self.open(path, user=user) as pieces:
                async for piece in pieces:
                    size += f.write(piece)
        return size

    async def stat(self, path: str, *, user: str | None = None) -> FileInfo:
        """Describes a file.

        Its ``size`` is in bytes. Raises :class:`NotFoundError`.

        >>> (await sandbox.files.stat("/tmp")).type
        'dir'
        """
        return FileInfo.load(await self._t.request("GET", f"{self._base}/stat", params=clean(path=path, user=user)))

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether there is such a file or directory.

        >>> await sandbox.files.exists("/nowhere")
        False
        """
        try:
            await self.stat(path, user=user)
        except NotFoundError:
            return False
        return True

    async def list(self, path: str = ".", *, depth: int = 1, user: str | None = None) -> list[FileInfo]:
        """What is in a directory, down to ``depth`` levels.

        Raises :class:`NotFoundError`, :class:`InvalidError` for what is no directory.

        >>> info = await sandbox.files.write("/tmp/listed/a", "")
        >>> [f.name for f in await sandbox.files.list("/tmp/listed")]
        ['a']
        """
        params = clean(path=path, depth=depth, user=user)
        return [FileInfo.load(f) for f in await self._t.request("GET", f"{self._base}/list", params=params)]

    async def make_dir(self, path: str, *, user: str | None = None) -> FileInfo:
        """Makes a directory, and those above it. Raises :class:`ExistsError`.

        >>> (await sandbox.files.make_dir("/tmp/made/inner")).path
        '/tmp/made/inner'
        """
        return FileInfo.load(await self._t.request("POST", f"{self._base}/mkdir", json=clean(path=path, user=user)))

    async def remove(self, path: str, *, user: str | None = None) -> None:
        """Removes a file, or a directory with all that is in it.

        Raises :class:`NotFoundError`.

        >>> info = await sandbox.files.make_dir("/tmp/away/inner")
        >>> await sandbox.files.remove("/tmp/away")
        """
        await self._t.request("POST", f"{self._base}/remove", json=clean(path=path, user=user))

    async def move(self, source: str, destination: str, *, user: str | None = None) -> FileInfo:
        """Gives a file or directory another name.

        Raises :class:`NotFoundError`.

        >>> info = await sandbox.files.write("/tmp/before", "x")
        >>> (await sandbox.files.move("/tmp/before", "/tmp/after")).path
        '/tmp/after'
        """
        body = clean(source=source, destination=destination, user=user)
        return FileInfo.load(await self._t.request("POST", f"{self._base}/move", json=body))

    @asynccontextmanager
    async def watch(
        self, path: str, *, recursive: bool = False, entries: bool = False, user: str | None = None
    ) -> AsyncIterator[AsyncIterator[FileEvent]]:
        """Changes in a directory from now on. Inside the ``with`` block it is being watched already.

        The iteration ends when the directory is removed, and raises :class:`ExhaustedError` when events were lost.

        >>> info = await sandbox.files.make_dir("/tmp/watched")
        >>> async with sandbox.files.watch("/tmp/watched") as events:
        ...     info = await sandbox.files.make_dir("/tmp/watched/new")
        ...     async for event in events:
        ...         print(event.type, event.name)
        ...         break
        create new
        """
        params = clean(
            path=path, user=user, recursive="true" if recursive else None, entries="true" if entries else None
        )
        async with aclosing(self._t.lines("GET", f"{self._base}/watch", params=params)) as lines:
            async for _ in lines:  # it says that it has begun
                break
            yield self._events(lines)

    async def _events(self, lines: AsyncIterator[Any]) -> AsyncIterator[FileEvent]:
        async for line in lines:
            if line.get("error"):
                raise refusal(0, line["error"], "watch")
            yield FileEvent.load(line)
