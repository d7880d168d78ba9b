"""Drives `forkd mcp` with the official client of the protocol, over standard input and output or over HTTP.

Arguments: the tag of a snapshot with numpy; then a URL and a token, or the program and its arguments. With short after a token
only some of the tools are called.
"""

import asyncio
import json
import os
import sys

import httpx2
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

TAG, *REST = sys.argv[1:]


def check(what, ok, seen=None):
    if not ok:
        raise SystemExit(f"mcp: {what}: {seen!r}")


async def drive(session):
    await session.initialize()
    listed = (await session.list_tools()).tools
    tools = {t.name for t in listed}
    for t in listed:
        check(f"{t.name} says what it does", t.description and t.input_schema["type"] == "object", t)

    async def ask(tool, args, **options):
        return await session.call_tool(tool, args, **options)

    async def call(tool, progress=None, **args):
        tools.discard(tool)
        r = await ask(tool, args, progress_callback=progress)
        check(tool, not r.is_error, [getattr(c, "text", "") for c in r.content])
        check(f"{tool}: text and structure are the same", json.loads(r.content[0].text) == r.structured_content)
        value = r.structured_content
        return value["result"] if value.keys() == {"result"} else value

    async def refused(tool, *reasons, **args):
        r = await ask(tool, args)
        text = r.content[0].text
        check(f"{tool} is refused: {reasons}", r.is_error and all(reason in text for reason in reasons), text)

    if "short" in REST:
        (child,) = await call("spawn_sandboxes", snapshot_tag=TAG)
        out = await call("eval_code", sandbox_id=child["id"], code="6 * 7")
        check("eval", out["result"] == "42", out)
        await call("kill_sandbox", sandbox_id=child["id"])
        return
    check("the snapshot is listed", TAG in {s["tag"] for s in await call("list_snapshots")})
    check("it is described", (await call("get_snapshot", tag=TAG))["tag"] == TAG)
    # By the names and arguments of the existing forkd's server.
    one, two = (s["id"] for s in await call("spawn_sandboxes", snapshot_tag=TAG, n=2, memory_limit_mib=256, per_child_netns=True))
    made, tags = {one, two}, []
    try:
        check("both are listed", {one, two} <= {s["id"] for s in await call("list_sandboxes")})
        check("one is shown", (await call("get_sandbox", sandbox_id=one))["id"] == one)
        check("ping", (await call("ping_sandbox", sandbox_id=one))["pong"] is True)

        out = await call("exec_command", sandbox_id=one, args=["sh", "-c", "echo out; echo err >&2; exit 3"])
        check("exec", (out["stdout"], out["stderr"], out["exit_code"]) == ("out\n", "err\n", 3), out)
        out = await call("exec_command", sandbox_id=one, command="cat; pwd; echo $X", stdin="in\n", cwd="/tmp", env={"X": "y"})
        check("exec of a line", out["stdout"] == "in\n/tmp\ny\n", out)
        out = await call("exec_command", sandbox_id=one, command="sleep 60", timeout_secs=1)
        check("exec times out", out["timed_out"] and out["exit_code"] != 0, out)

        out = await call("exec_command", sandbox_id=one, command="seq 100000")
        whole = "".join(f"{i}\n" for i in range(1, 100001))
        check("long output is cut", out["stdout"] == whole[: len(out["stdout"])] and out["stdout_bytes"] == len(whole), out)
        check("its end is shown", out["stdout_tail"] == whole[-len(out["stdout_tail"]) :] and len(json.dumps(out)) < 40000)
        text, offset = out["stdout"], len(out["stdout"])
        while offset:
            part = await call("read_output", output_id=out["output_id"], offset=offset)
            text, offset = text + part["text"], part.get("next_offset")
        check("the rest can be read", text == whole, len(text))
        part = await call("read_output", output_id=out["output_id"], offset=-7)
        check("from its end too", part["text"] == "100000\n", part)
        await refused("read_output", "out999", output_id="out999")

        told = []

        async def progress(done, total, message):
            told.append((done, message))

        await call("exec_command", progress, sandbox_id=one, command="for i in 1 2 3; do echo step $i; sleep 1.1; done")
        check("progress of a command", len(told) >= 2 and told == sorted(told) and "step" in told[0][1], told)

        out = await call("eval_code", sandbox_id=one, code="x = int(np.ones(3).sum()); print('hi')\nx")
        check("eval", (out["result"], out["stdout"], out["error"], out["exit_code"]) == ("3", "hi\n", None, 0), out)
        out = await call("eval_code", sandbox_id=one, code="1 / 0")
        check("eval of a fault", "division by zero" in out["error"] and "Traceback" in out["traceback"] and out["exit_code"] == 1, out)
        picture = "import base64\nclass P:\n def _repr_png_(self): return base64.b64decode('iVBORw0KGgo=')\nP()"
        r = await ask("eval_code", {"sandbox_id": one, "code": picture})
        check("a picture", [c.type for c in r.content] == ["text", "image"] and r.content[1].mime_type == "image/png", r)
        check("contexts", "default" in {c["id"] for c in await call("list_contexts", sandbox_id=one)})

        await call("write_file", sandbox_id=one, path="/tmp/d/f.txt", content="grüße\n" * 10000)
        part = await call("read_file", sandbox_id=one, path="/tmp/d/f.txt")
        text = part["text"]
        while part.get("next_offset"):
            part = await call("read_file", sandbox_id=one, path="/tmp/d/f.txt", offset=part["next_offset"], limit=32768)
            text += part["text"]
        check("a file, in parts", text == "grüße\n" * 10000, len(text))
        await call("write_file", sandbox_id=one, path="/tmp/d/b", content="AAH/", encoding="base64")
        check("bytes", (await call("read_file", sandbox_id=one, path="/tmp/d/b"))["base64"] == "AAH/")
        files = await call("list_files", sandbox_id=one, path="/tmp/d")
        check("files", [f["path"] for f in files] == ["/tmp/d/b", "/tmp/d/f.txt"], files)
        check("a file of the kernel's", "Linux" in (await call("read_file", sandbox_id=one, path="/proc/version"))["text"])

        p = await call("start_process", sandbox_id=one, command="sleep 1; echo READY > /tmp/log; sleep 600", tag="bg")
        out = await call("wait_for_text", sandbox_id=one, path="/tmp/log", marker="READY", timeout_secs=20)
        check("wait for text", out["found"], out)
        out = await call("wait_for_text", sandbox_id=one, path="/tmp/log", marker="never", timeout_secs=0.5)
        check("wait in vain", not out["found"] and "READY" in out["last_excerpt"], out)
        check("it runs", p["pid"] in {q["pid"] for q in await call("list_processes", sandbox_id=one)})
        await call("signal_process", sandbox_id=one, process="bg", signal="KILL", tree=True)

        copies = await call("fork_sandbox", sandbox_id=one, n=2, labels={"test": "mcp"})
        made |= {s["id"] for s in copies["children"]}
        tags.append(copies["snapshot_tag"])
        for s in copies["children"]:
            out = await call("eval_code", sandbox_id=s["id"], code="x")
            check("a copy has the variables", out["result"] == "3", out)
        told.clear()
        b = await call("branch_sandbox", progress, sandbox_id=one, tag="mcp-branch")
        tags.append("mcp-branch")
        check("branch", b["status"] == "ready" and b["pause_ms"] > 0, b)
        check("progress of a branch", told and "ready" in told[-1][1], told)
        await call("branch_sandbox", sandbox_id=two, tag="mcp-later", diff=True, wait=False)
        tags.append("mcp-later")
        check("a time to live", (await call("set_ttl", sandbox_id=two, ttl_seconds=3600))["expires_at_unix"] > 0)
        check("no way out", (await call("get_egress", sandbox_id=one))["preset"] == "none")
        check("a way out", (await call("set_egress", sandbox_id=one, preset="dns-only"))["preset"] == "dns-only")
        await refused("set_egress", "400 invalid", sandbox_id=one, preset="sideways")
        await call("list_ports", sandbox_id=one)
        check("tree", TAG in json.dumps(await call("tree")))

        check("paused", (await call("pause_sandbox", sandbox_id=two))["state"] == "paused")
        await refused("exec_command", "409 wrong_state", "resume_sandbox", sandbox_id=two, args=["true"])
        await call("resume_sandbox", sandbox_id=two)
        check("suspended", (await call("suspend_sandbox", sandbox_id=two))["state"] == "suspended")
        check("awake", (await call("wake_sandbox", sandbox_id=two))["state"] == "running")
        await call("restart_context", sandbox_id=two, context="default")
        await call("sandbox_logs", sandbox_id=two)

        uris = {str(r.uri) for r in (await session.list_resources()).resources}
        check("resources", {f"forkd://sandboxes/{one}", f"forkd://snapshots/{TAG}", "forkd://tree"} <= uris, uris)
        for uri in [f"forkd://sandboxes/{one}", f"forkd://snapshots/{TAG}", "forkd://tree", "forkd://sandboxes", "forkd://snapshots"]:
            content = (await session.read_resource(uri)).contents[0]
            check(uri, json.loads(content.text), content)
        check("console", (await session.read_resource(f"forkd://sandboxes/{one}/logs")).contents)
        templates = (await session.list_resource_templates()).resource_templates
        check("templates", len(templates) >= 3, templates)

        await refused("spawn_sandboxes", "404 not_found", "list_snapshots", snapshot_tag="nope")
        await refused("get_sandbox", "404 not_found", "list_sandboxes", sandbox_id="sbnope")
        await refused("exec_command", "nothing to run", sandbox_id=one)
        await refused("exec_command", "sandbox_id")
        await refused("read_file", "404 not_found", sandbox_id=one, path="/nope")
        await refused("branch_sandbox", "409 exists", "another name", sandbox_id=one, tag=TAG)
        await refused("create_snapshot", "/nope", tag="x", kernel="/nope", rootfs="/nope.ext4")
        tools.discard("create_snapshot")
        if rootfs := os.environ.get("ROOTFS"):
            tags.append("mcp-rootfs")
            made_of = await call("create_snapshot", tag="mcp-rootfs", kernel="", rootfs=rootfs)
            check("create_snapshot", (made_of["tag"], made_of["status"]) == ("mcp-rootfs", "ready"), made_of)
    finally:
        for s in made:
            check("killed", (await call("kill_sandbox", sandbox_id=s))["killed"])
        for t in tags:
            await session.call_tool("delete_snapshot", {"tag": t, "cascade": True})
    tools.discard("delete_snapshot")
    check("gone", not made & {s["id"] for s in await call("list_sandboxes")})
    check("tools that were not tried", not tools, tools)


async def over_http(url, token):
    async with httpx2.AsyncClient(timeout=30) as bare:
        check("no token", (await bare.post(url, json={})).status_code == 401)
        wrong = await bare.post(url, json={}, headers={"Authorization": "Bearer fkd_tk00000000_x"})
        check("a wrong token", wrong.status_code == 401, wrong.status_code)
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=120) as http:
        async with streamable_http_client(url, http_client=http) as (read, write, *_):
            async with ClientSession(read, write) as session:
                await drive(session)


async def over_stdio(program):
    env = {k: v for k, v in os.environ.items() if k.startswith("FORKD_") or k in ("PATH", "HOME")}
    async with stdio_client(StdioServerParameters(command=program[0], args=program[1:], env=env)) as (read, write):
        async with ClientSession(read, write) as session:
            await drive(session)


asyncio.run(over_http(*REST[:2]) if REST[0].startswith("http") else over_stdio(REST))
print("ok")
