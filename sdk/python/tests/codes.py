"""Every error code of the daemon becomes its exception: also those that no daemon can be made to say at will.

What is not JSON, and what breaks off, is told as what it is. Needs no daemon: python codes.py SCENARIOS
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import forkd

CODES = json.loads(Path(sys.argv[1]).read_text())["codes"]
asked: list[str] = []


class Stub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked.append(self.path)
        what = self.path.rsplit("/", 1)[1]
        if what == "broken":  # an end in the middle
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"{")
            self.close_connection = True
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
finally:
    server.shutdown()
print("ok")
