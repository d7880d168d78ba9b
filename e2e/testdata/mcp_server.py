"""Drives a daemon with the existing forkd's MCP server, as it is on PyPI, over standard input and output.

Arguments: the program of the server, the tag of a snapshot with numpy, a root file system on the daemon's host. FORKD_ADMIN_TOKEN is
the token that may name one of its files.
"""

import asyncio
import json
import os
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

SERVER, TAG, ROOTFS = sys.argv[1:]


def check(what, ok, seen=None):
    if not ok:
        raise SystemExit(f"mcp: {what}: {seen!r}")


async def drive(session):
    await session.initialize()
    tools = {t.name for t in (await session.list_tools()).tools}

    async def call(tool, **args):
        tools.discard(tool)
        r = await session.call_tool(tool, args)
        check(tool, not r.isError, [c.text for c in r.content])
        if r.structuredContent is not None and r.structuredContent.keys() == {"result"}:  # a list
            return r.structuredContent["result"]
        return json.loads(r.content[0].text)

    async def refused(tool, reason, **args):
        r = await session.call_tool(tool, args)
        check(f"{tool} is refused", r.isError and reason in r.content[0].text, [c.text for c in r.content])

    check("the snapshot is listed", TAG in {s["tag"] for s in await call("list_snapshots")})
    # It always sends a limit of memory, by default one below what a machine takes.
    child, sibling = (s["id"] for s in await call("spawn_sandboxes", snapshot_tag=TAG, n=2))
    try:
        check("both are listed", {child, sibling} <= {s["id"] for s in await call("list_sandboxes")})
        check("one is shown", (await call("get_sandbox", sandbox_id=child))["id"] == child)
        out = await call("exec_command", sandbox_id=child, args=["sh", "-c", "echo step > /root/log; echo out; exit 3"])
        check("exec", (out["stdout"], out["exit_code"]) == ("out\n", 3), out)
        out = await call("eval_code", sandbox_id=child, code="int(np.ones(3).sum())")
        check("eval", (out["result"], out["exit_code"]) == ("3", 0), out)
        out = await call("wait_for_text", sandbox_id=child, path="/root/log", marker="step", timeout_secs=20)
        check("wait for text", out["found"], out)
        check("ping", (await call("ping_sandbox", sandbox_id=child))["pong"] is True)
        for args in [{"diff": True}, {"wait": False}]:
            s = await call("branch_sandbox", sandbox_id=child, **args)
            check(f"branch {args}", s["status"] in ("ready", "writing") and s["pause_ms"] > 0, s)
        await refused("spawn_sandboxes", "404", snapshot_tag="nope")
        await refused("create_snapshot", "403", tag="mcp", kernel="", rootfs=ROOTFS)
        tools.discard("create_snapshot")
    finally:
        for s in (child, sibling):
            await call("kill_sandbox", sandbox_id=s)
    check("killed", child not in {s["id"] for s in await call("list_sandboxes")})
    check("tools that were not tried", not tools, tools)


async def administer(session):
    await session.initialize()
    r = await session.call_tool("create_snapshot", {"tag": "mcp", "kernel": "", "rootfs": ROOTFS})
    check("create_snapshot", not r.isError, [c.text for c in r.content])
    made = json.loads(r.content[0].text)
    check("what it made", (made["tag"], made["status"], made["bootable"]) == ("mcp", "ready", True), made)
    r = await session.call_tool("create_snapshot", {"tag": "mcp", "kernel": "", "rootfs": ROOTFS})
    check("a tag that is taken", r.isError and "409" in r.content[0].text, [c.text for c in r.content])
    r = await session.call_tool("create_snapshot", {"tag": "none", "kernel": "", "rootfs": SERVER})
    check("no root file system", r.isError and "400" in r.content[0].text, [c.text for c in r.content])


async def main():
    env = {name: os.environ[name] for name in ("FORKD_URL", "FORKD_TOKEN", "PATH") if name in os.environ}
    for does, token in (drive, env["FORKD_TOKEN"]), (administer, os.environ["FORKD_ADMIN_TOKEN"]):
        async with stdio_client(StdioServerParameters(command=SERVER, env=env | {"FORKD_TOKEN": token})) as (read, write):
            async with ClientSession(read, write) as session:
                await does(session)
    print("ok")


asyncio.run(main())
