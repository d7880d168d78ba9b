"""Every error code of the daemon becomes its exception: also those that no daemon can be made to say at will.

What is not JSON, and what breaks off, is told as what it is. Needs no daemon: python codes.py SCENARIOS
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import socket
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import forkd

CODES = json.loads(Path(sys.argv[1]).read_text())["codes"]
asked: list[str] = []
keys: set[str] = set()
STREAMS = {"lines": '{"a": "\\u2028 \u2028"}\n\n{"b":'.encode(), "nonsense": b"{}\nnonsense\n"}


class Stub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        what = self.path.rsplit("/", 1)[1]
        if what == "broken":  # an end in the middle
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"{")
            self.close_connection = True
            return
        if self.headers.get("Idempotency-Key"):
            keys.add(self.headers["Idempotency-Key"])
        if what == "dropped" or (what == "once" and len(asked) == 1):  # no reply, though all was heard
            self.close_connection = True
            return
        if what == "once":
            self.answer(200, b"[]")
            return
        if what in STREAMS:
            self.answer(200, STREAMS[what])
            return
        if what.startswith("files"):
            missing = "path=missing" in what
            self.answer(404 if missing else 200, b'{"code": "not_found"}' if missing else b"content")
            return
        if what == "html":
            self.answer(502, b"<html>bad gateway</html>")
            return
        body = {
            "error": f"said {what}",
            "code": what,
            "message": f"said {what}",
            "hint": "try that",
            "request_id": "r1",
        }
        self.answer(400, json.dumps(body | {"console": "panic", "new": 1}).encode())

    do_POST = do_GET

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def check(what: str, ok: bool, seen: Any = None) -> None:
    if not ok:
        raise SystemExit(f"codes: {what}: {seen!r}")


def judge(code: str, e: forkd.ForkdError) -> None:
    check(code, type(e) is forkd.ERRORS[code] and e.code == code, e)
    assert isinstance(e, forkd.APIError)
    parts = (e.message, e.hint, e.request_id, e.console, e.status, e.body["new"])
    check(f"{code}: its parts", parts == (f"said {code}", "try that", "r1", "panic", 400, 1), parts)
    check(
        f"{code}: as the existing package has it", isinstance(e, forkd.ControllerError) and isinstance(e, RuntimeError)
    )


def plain(url: str) -> None:
    with forkd.Client(url, "") as client:
        for code in CODES:
            try:
                client.request("GET", f"/v1/{code}")
            except forkd.ForkdError as e:
                judge(code, e)
            else:
                check(code, False)
        for what, kind, times in (("html", forkd.APIError, 1), ("broken", forkd.ConnectionLostError, 3)):
            asked.clear()
            try:
                client.request("GET", f"/v1/{what}")
            except forkd.ForkdError as e:
                check(what, type(e) is kind and len(asked) == times, (e, asked))
            else:
                check(what, False)
        asked.clear()
        try:  # What may have been done is not done again.
            client.request("POST", "/v1/broken")
        except forkd.ConnectionLostError:
            check("a POST is sent once", len(asked) == 1, asked)
        asked.clear()
        try:
            client.request("POST", "/v1/broken", once=True)
        except forkd.ConnectionLostError:
            check("with a key it can be sent again", len(asked) == 3, asked)
        for what, once, times in (("dropped", False, 1), ("dropped", True, 3), ("once", True, 2)):
            asked.clear()
            keys.clear()
            with contextlib.suppress(forkd.ConnectionLostError):
                client.request("POST", f"/v1/{what}", json={}, once=once)
                check(what, what == "once")
            check(f"{what}: the same key, or none", len(asked) == times and len(keys) == once, (asked, keys))
        lines = list(client.transport.lines("GET", "/v1/lines"))
        check("lines", lines == [{"a": "\u2028 \u2028"}], lines)
        lines = []
        try:
            for line in client.transport.lines("GET", "/v1/nonsense"):
                lines.append(line)
        except forkd.ConnectionLostError:
            check("nonsense", lines == [{}], lines)
        sandbox = forkd.Sandbox(client, forkd.SandboxInfo(id="sb1"))
        with tempfile.TemporaryDirectory() as directory:
            mine = Path(directory, "file")
            mine.write_text("mine")
            with contextlib.suppress(forkd.NotFoundError):
                sandbox.files.download("missing", mine)
            check("a failed download leaves what is there", mine.read_text() == "mine")
            size = sandbox.files.download("there", mine)
            check("a download", size == 7 and mine.read_text() == "content" and mine.stat().st_mode & 0o777 != 0o600)
            check("nothing else is left", [f.name for f in Path(directory).iterdir()] == ["file"])
        with contextlib.suppress(forkd.ForkdError):  # no WebSocket
            sandbox.commands.start("x")
            check("no WebSocket", False)
    for bad in ("ftp://x", "unix://relative", "http://user@x", "nonsense"):
        with contextlib.suppress(forkd.ForkdError):
            forkd.Client(bad)
            check(bad, False)
    with contextlib.suppress(forkd.ForkdError):
        forkd.Client("http://elsewhere.example", "secret")
        check("no token travels unencrypted", False)


def silent() -> None:
    """A daemon that takes no input: whoever leaves is not held up by it, and what is read meanwhile is not either."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            held.append(connection)
            head = connection.recv(1 << 16).decode()
            key = next(v.split(": ", 1)[1] for v in head.splitlines() if v.lower().startswith("sec-websocket-key"))
            magic = (key.strip() + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()
            accept = base64.b64encode(hashlib.sha1(magic).digest()).decode()
            connection.sendall(
                (
                    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    f"Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: forkd.exec.v1\r\n\r\n"
                ).encode()
            )
            for text in ('{"type": "start", "pid": 7}',):
                connection.sendall(bytes([0x81, len(text)]) + text.encode())
            connection.sendall(bytes([0x89, 0]))  # a ping, which nobody's writing may hold up
            connection.sendall(bytes([0x82, 3]) + b"\x01hi")

    threading.Thread(target=serve, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with forkd.Client(url, "") as client:
        process = forkd.Sandbox(client, forkd.SandboxInfo(id="sb1")).commands.start("x", stdin=True)
        ended = threading.Event()

        def write() -> None:
            with contextlib.suppress(forkd.ConnectionLostError):
                process.write(b"x" * (64 << 20))
            ended.set()

        threading.Thread(target=write, daemon=True).start()
        check("input is held back", not ended.wait(1))
        check("output is read meanwhile", next(iter(process)).text == "hi")
        process.disconnect()
        check("who writes is woken", ended.wait(30))
        with contextlib.suppress(forkd.ConnectionLostError):
            process.write("more")
            check("nobody listens", False)

    async def alone() -> None:
        async with forkd.AsyncClient(url, "") as client:
            process = await forkd.AsyncSandbox(client, forkd.SandboxInfo(id="sb1")).commands.start("x", stdin=True)
            writing = asyncio.create_task(process.write(b"x" * (64 << 20)))
            async for output in process:
                check("output is read meanwhile", output.text == "hi" and not writing.done())
                break
            await asyncio.wait_for(process.disconnect(), 30)
            with contextlib.suppress(forkd.ConnectionLostError):
                await asyncio.wait_for(writing, 30)

    asyncio.run(alone())
    for connection in held:
        connection.close()
    listener.close()


async def with_loop(url: str) -> None:
    async with forkd.AsyncClient(url, "") as client:
        for code in CODES:
            try:
                await client.request("GET", f"/v1/{code}")
            except forkd.ForkdError as e:
                judge(code, e)
            else:
                check(code, False)
        with contextlib.suppress(forkd.ConnectionLostError):
            await client.request("GET", "/v1/broken")


check("a timeout is a timeout", issubclass(forkd.TimeoutError, TimeoutError))
server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
threading.Thread(target=server.serve_forever, daemon=True).start()
try:
    plain(f"http://127.0.0.1:{server.server_port}")
    asyncio.run(with_loop(f"http://127.0.0.1:{server.server_port}"))
    silent()
finally:
    server.shutdown()
print("ok")
