"""Long streams in constant memory: python streams.py sync|async SNAPSHOT MIB. Prints how much memory was taken meanwhile.

MIB are written as a file, read again, and printed by a process, and by a command whose output is passed on.
"""

from __future__ import annotations

import asyncio
import resource
import sys

import forkd

KIND, SNAPSHOT, MIB = sys.argv[1], sys.argv[2], int(sys.argv[3])
PIECE = b"0123456789abcde\n" * 65536  # 1 MiB
MOST_GROWTH = 96  # MiB: of which 32 are what a command's result keeps of its output, twice


def check(what: str, seen: int) -> None:
    if seen != MIB << 20:
        raise SystemExit(f"streams: {what}: {seen} bytes")


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def plain() -> None:
    with forkd.Sandbox.create(SNAPSHOT) as sb:
        check("written", sb.files.write("/tmp/long", (PIECE for _ in range(MIB))).size)
        with sb.files.open("/tmp/long") as pieces:
            check("read", sum(len(p) for p in pieces))
        with sb.commands.start(["cat", "/tmp/long"]) as process:
            check("printed", sum(len(o.data) for o in process))
        counted = [0]

        def count(text: str) -> None:
            counted[0] += len(text)

        kept = sb.commands.run("cat /tmp/long", timeout=3600, on_stdout=count)
        check("passed on", counted[0])
        if len(kept.stdout) != min(MIB, 16) << 20:
            raise SystemExit(f"streams: {len(kept.stdout)} bytes are kept")


async def with_loop() -> None:
    async with forkd.AsyncClient() as client:
        async with await forkd.AsyncSandbox.create(SNAPSHOT, client=client) as sb:
            check("written", (await sb.files.write("/tmp/long", (PIECE for _ in range(MIB)))).size)
            async with sb.files.open("/tmp/long") as pieces:
                check("read", sum([len(p) async for p in pieces]))
            async with await sb.commands.start(["cat", "/tmp/long"]) as process:
                check("printed", sum([len(o.data) async for o in process]))


before = memory()
if KIND == "async":
    asyncio.run(with_loop())
else:
    plain()
grown = memory() - before
print(f"{KIND}: {MIB} MiB each way, {grown} MiB more memory")
sys.exit(1 if grown > MOST_GROWTH else 0)
