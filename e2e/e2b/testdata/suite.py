"""Every method of E2B's Python SDK against a daemon, as its documentation describes it.

Prints a line of JSON for each: {"method", "ok", "note"}. Expects E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY; the template's name
is the first argument. With "quick" as the second, those that take long are left out; with another word, those without it in
their name. Nothing of the SDK is patched.
"""

import asyncio
import base64
import datetime
import hashlib
import json
import re
import sys
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
import uuid
from importlib.metadata import version

import e2b
from e2b import AsyncSandbox, CommandExitException, NotFoundException, SandboxQuery, SandboxState
from e2b_code_interpreter import AsyncSandbox as AsyncInterpreter
from e2b_code_interpreter import Sandbox

TEMPLATE = sys.argv[1]
ONLY = sys.argv[2] if len(sys.argv) > 2 else ""
checks = []


class Absent(Exception):
    """The SDK, or the template, has no such thing."""


def check(*methods, slow=False):
    def register(f):
        checks.append((methods, f, slow))
        return f

    return register


def same(got, want):
    assert got == want, f"{got!r}, want {want!r}"


def raises(kind, f, words=""):
    try:
        result = f()
    except kind as e:
        assert words in str(e), f"{e!r} does not say {words!r}"
        return e
    raise AssertionError(f"no {kind.__name__}, but {result!r}")


def eventually(f, seconds=60):
    end = time.monotonic() + seconds
    while True:
        value = f()
        if value or time.monotonic() > end:
            assert value, "it never came to be"
            return value
        time.sleep(0.1)


def fresh(**more):
    return Sandbox.create(TEMPLATE, timeout=300, **more)


def fetch(url, data=None, headers=None, method=None):
    request = urllib.request.Request(url, data=data, headers=headers or {}, method=method)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read()


# Sandboxes.


@check("Sandbox.create", "Sandbox.sandbox_id", "Sandbox.kill")
def create(_):
    with fresh(metadata={"who": "suite"}, envs={"GREETING": "hello"}) as sb:
        same(sb.commands.run("echo $GREETING").stdout, "hello\n")
        same(sb.get_info().metadata, {"who": "suite"})
        id = sb.sandbox_id
    assert not Sandbox.kill(id), "it outlived its context manager"


@check("Sandbox.create: template missing")
def missing_template(_):
    began = time.monotonic()
    e = raises(Exception, lambda: Sandbox.create("no-such-template"), "no-such-template")
    assert "forkd build" in str(e), e
    assert time.monotonic() - began < 5


@check("Sandbox.create: wrong key")
def wrong_key(_):
    raises(e2b.AuthenticationException, lambda: Sandbox.create(TEMPLATE, api_key="e2b_" + "0" * 40))


@check("Sandbox.create: unsupported fields are refused by name")
def refused_fields(_):
    raises(Exception, lambda: fresh(mcp={"exa": {"apiKey": "x"}}), "mcp")


@check("Sandbox.get_info")
def info(sb):
    for i in (sb.get_info(), Sandbox.get_info(sb.sandbox_id)):
        same(i.sandbox_id, sb.sandbox_id)
        same(i.template_id, TEMPLATE)
        same(i.state, SandboxState.RUNNING)
        assert i.cpu_count >= 1 and i.memory_mb >= 128 and i.envd_version, i
        assert i.started_at < i.end_at, i
    raises(NotFoundException, lambda: Sandbox.get_info("sbaaaaaaaaaaaaa"))


@check("Sandbox.is_running")
def is_running(sb):
    assert sb.is_running()


@check("Sandbox.set_timeout")
def set_timeout(sb):
    sb.set_timeout(7200)
    left = sb.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)
    assert 7150 < left.total_seconds() <= 7201, left
    other = fresh()
    other.set_timeout(1)
    eventually(lambda: not other.is_running())
    raises(NotFoundException, lambda: other.set_timeout(10))
    raises(Exception, lambda: other.commands.run("true"), "not found")


@check("Sandbox.connect")
def connect(sb):
    same(Sandbox.connect(sb.sandbox_id).commands.run("echo again").stdout, "again\n")
    raises(NotFoundException, lambda: Sandbox.connect("sbaaaaaaaaaaaaa"))


@check("Sandbox.list", "SandboxPaginator.next_items", "SandboxPaginator.has_next", slow=True)
def listing(_):
    mark = uuid.uuid4().hex
    made = [fresh(metadata={"mark": mark, "odd": "b c&d=e%f", "n": str(n)}) for n in range(3)]
    try:
        def ids(**query):
            page = Sandbox.list(query=SandboxQuery(**query), limit=2)
            found = []
            pages = 0
            while page.has_next:
                found += [i.sandbox_id for i in page.next_items()]
                pages += 1
            return found, pages

        found, pages = ids(metadata={"mark": mark, "odd": "b c&d=e%f"})
        same(sorted(found), sorted(sb.sandbox_id for sb in made))
        same(pages, 2)
        same(ids(metadata={"mark": mark, "n": "1"})[0], [made[1].sandbox_id])
        same(ids(metadata={"mark": "another"})[0], [])
        made[0].pause()
        same(ids(metadata={"mark": mark}, state=[SandboxState.PAUSED])[0], [made[0].sandbox_id])
        same(len(ids(metadata={"mark": mark}, state=[SandboxState.RUNNING])[0]), 2)
        same(len(ids(metadata={"mark": mark}, state=[SandboxState.RUNNING, SandboxState.PAUSED])[0]), 3)
    finally:
        for sb in made:
            sb.kill()


@check("Sandbox.update_network", "Sandbox.create: allow_internet_access, network")
def networks(_):
    if not hasattr(Sandbox, "update_network"):
        raise Absent("this version has no update_network")
    with fresh(allow_internet_access=False) as sb:
        assert not sb.get_info().allow_internet_access
    with fresh() as sb:
        assert sb.get_info().network["allow_out"], "what the daemon allows is not shown"
        sb.update_network({"deny_out": ["0.0.0.0/0"]})
        same(sb.get_info().network, {"deny_out": ["0.0.0.0/0"]})
        raises(Exception, lambda: sb.update_network({"allow_out": ["example.com"]}), "wider")
        raises(Exception, lambda: sb.update_network({"egress_proxy": {"address": "x:1"}}), "egressProxy")


@check("Sandbox.pause", "Sandbox.connect: resumes", slow=True)
def pausing(_):
    sb = fresh()
    sb.commands.run("echo kept > /tmp/kept")
    sb.run_code("kept = 41")
    background = sb.commands.run("sleep 1000", background=True)
    assert sb.pause() is not False
    same(sb.get_info().state, SandboxState.PAUSED)
    assert not sb.is_running()
    assert not sb.pause(), "it was paused twice"
    raises(Exception, lambda: sb.commands.run("true"), "not found")
    again = sb.connect(timeout=200)
    same(again.sandbox_id, sb.sandbox_id)
    same(again.commands.run("cat /tmp/kept").stdout, "kept\n")
    same(again.run_code("kept + 1").text, "42")
    assert background.pid in [p.pid for p in again.commands.list()]
    left = again.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)
    assert 150 < left.total_seconds() <= 201, left
    again.kill()


@check("Sandbox.create: lifecycle pause and auto-resume", slow=True)
def lifecycle(_):
    try:
        sb = Sandbox.create(TEMPLATE, timeout=2, lifecycle={"on_timeout": "pause", "auto_resume": True})
    except TypeError as e:
        raise Absent(e) from e
    same(sb.get_info().lifecycle["on_timeout"], "pause")
    eventually(lambda: sb.get_info().state == SandboxState.PAUSED, 60)
    same(sb.commands.run("echo awake").stdout, "awake\n")
    sb.kill()


@check("Sandbox.fork")
def forking(_):
    if not hasattr(Sandbox, "fork"):
        raise Absent("this version has no fork")
    sb = fresh(metadata={"of": "fork"})
    sb.run_code("x = [1, 2]")
    kids = sb.fork(count=2, timeout=200)
    same(len(kids), 2)
    for n, kid in enumerate(kids):
        assert not isinstance(kid, Exception), kid
        same(kid.run_code(f"x.append({n}); x").text, str([1, 2, n]))
        same(kid.get_info().metadata, {"of": "fork"})
    same(sb.run_code("x").text, "[1, 2]")
    ids = {sb.sandbox_id, *(k.sandbox_id for k in kids)}
    same(len(ids), 3)
    tokens = {s._envd_access_token for s in (sb, *kids)} | {s.traffic_access_token for s in (sb, *kids)}
    same(len(tokens), 6)
    # One child's token opens nobody else.
    url = sb.envd_api_url + "/files?path=/etc/hostname"
    headers = {"E2b-Sandbox-Id": kids[0].sandbox_id, "E2b-Sandbox-Port": "49983"}
    assert fetch(url, headers=headers | {"X-Access-Token": kids[0]._envd_access_token})
    for wrong in (kids[1]._envd_access_token, kids[0].traffic_access_token, "x"):
        e = raises(urllib.error.HTTPError, lambda: fetch(url, headers=headers | {"X-Access-Token": wrong}))
        same(e.code, 401)
    for s in (sb, *kids):
        s.kill()


@check("Sandbox.create_snapshot", "Sandbox.list_snapshots", "Sandbox.delete_snapshot", slow=True)
def snapshots(_):
    if not hasattr(Sandbox, "create_snapshot"):
        raise Absent("this version has no snapshots")
    sb = fresh()
    sb.commands.run("echo before > /tmp/state")
    name = "suite-" + uuid.uuid4().hex[:12]
    snap = sb.create_snapshot(name)
    assert name in snap.snapshot_id or any(name in n for n in snap.names), snap
    sb.commands.run("echo after > /tmp/state")
    with Sandbox.create(snap.snapshot_id, timeout=100) as kid:
        same(kid.commands.run("cat /tmp/state").stdout, "before\n")
    listed = []
    page = sb.list_snapshots()
    while page.has_next:
        listed += [s.snapshot_id for s in page.next_items()]
    same(listed, [snap.snapshot_id])
    unnamed = sb.create_snapshot()
    sb.kill()
    assert Sandbox.delete_snapshot(unnamed.snapshot_id)
    assert Sandbox.delete_snapshot(snap.snapshot_id)
    assert not Sandbox.delete_snapshot(snap.snapshot_id)


@check("Sandbox.get_metrics")
def metrics(sb):
    m = sb.get_metrics()
    assert len(m) >= 1, m
    assert m[0].cpu_count >= 1 and 0 < m[0].mem_used < m[0].mem_total and 0 < m[0].disk_used < m[0].disk_total, m[0]
    hour = datetime.timedelta(hours=1)
    now = datetime.datetime.now(datetime.timezone.utc)
    same(sb.get_metrics(start=now - 2 * hour, end=now - hour), [])


@check("Sandbox.get_host")
def get_host(sb):
    host = sb.get_host(8000)
    assert host.startswith(f"8000-{sb.sandbox_id}."), host


@check("Host names: envd and code interpreter by the Host header")
def by_host_name(sb):
    for port, path, want in ((49983, "/files?path=/etc/hostname", sb.sandbox_id), (49999, "/health", "OK")):
        got = fetch(sb.envd_api_url + path, headers={
            "Host": f"{port}-{sb.sandbox_id}.example.test", "X-Access-Token": sb._envd_access_token})
        assert want.encode() in got, got


@check("Ports of sandboxes: by header and by host name, with the traffic token")
def ports(sb):
    sb.files.write("/tmp/www/index.html", "served")
    h = sb.commands.run("exec python3 -m http.server 8123 --directory /tmp/www", background=True, timeout=0)
    token = {"E2B-Traffic-Access-Token": sb.traffic_access_token}
    headers = {"E2b-Sandbox-Id": sb.sandbox_id, "E2b-Sandbox-Port": "8123"}

    def get(**more):
        try:
            return fetch(sb.envd_api_url + "/index.html", **more)
        except urllib.error.HTTPError as e:
            return e.code

    eventually(lambda: get(headers=headers | token) == b"served")
    same(get(headers={"Host": f"8123-{sb.sandbox_id}.example.test"} | token), b"served")
    same(get(headers=headers), 401)
    same(get(headers=headers | {"E2B-Traffic-Access-Token": "x"}), 401)
    same(get(headers=headers | token | {"E2b-Sandbox-Port": "8124"}), 502)
    h.kill()


@check("Sandbox.download_url", "Sandbox.upload_url")
def urls(sb):
    sb.files.write("/tmp/signed.txt", "signed")
    for seconds in (None, 60):
        same(fetch(sb.download_url("/tmp/signed.txt", use_signature_expiration=seconds)), b"signed")
    same(fetch(sb.download_url("/tmp/signed.txt", user="root")), b"signed")
    boundary = uuid.uuid4().hex
    form = (f"--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"up.txt\"\r\n\r\n"
            f"uploaded\r\n--{boundary}--\r\n").encode()
    fetch(sb.upload_url("/tmp/up.txt", use_signature_expiration=60), form, {"Content-Type": f"multipart/form-data; boundary={boundary}"})
    same(sb.files.read("/tmp/up.txt"), "uploaded")
    for wrong in (
        sb.download_url("/tmp/signed.txt").replace("signature=v1_", "signature=v1_x"),
        sb.download_url("/tmp/signed.txt").replace("signed.txt", "up.txt"),
        sb.download_url("/tmp/signed.txt", use_signature_expiration=-5),
        sb.upload_url("/tmp/signed.txt"),
    ):
        e = raises(urllib.error.HTTPError, lambda: fetch(wrong))
        assert e.code in (401, 502), (wrong, e)


# Commands.


@check("commands.run")
def run(sb):
    r = sb.commands.run("echo out; echo err >&2")
    same((r.stdout, r.stderr, r.exit_code, r.error), ("out\n", "err\n", 0, None))
    out, err = [], []
    sb.commands.run("for i in 1 2 3; do echo $i; echo e$i >&2; done", on_stdout=out.append, on_stderr=err.append)
    same(("".join(out), "".join(err)), ("1\n2\n3\n", "e1\ne2\ne3\n"))
    same(sb.commands.run("pwd", cwd="/usr").stdout, "/usr\n")
    same(sb.commands.run("echo $A$B", envs={"A": "1", "B": "2"}).stdout, "12\n")
    same(sb.commands.run("id -un", user="root").stdout, "root\n")
    same(sb.commands.run("printf 'ä€😀'").stdout, "ä€😀")
    same(len(sb.commands.run("head -c 3000000 /dev/zero | tr '\\0' x").stdout), 3000000)


@check("commands.run: failures")
def run_failures(sb):
    e = raises(CommandExitException, lambda: sb.commands.run("echo some; echo why >&2; exit 7"))
    same((e.exit_code, e.stdout, e.stderr), (7, "some\n", "why\n"))
    same(raises(CommandExitException, lambda: sb.commands.run("kill -9 $$")).exit_code, -1)
    raises(e2b.InvalidArgumentException, lambda: sb.commands.run("true", cwd="/no/such"))
    raises(e2b.AuthenticationException, lambda: sb.commands.run("true", user="nobody-has-this"))
    began = time.monotonic()
    raises(e2b.TimeoutException, lambda: sb.commands.run("sleep 60", timeout=1))
    assert time.monotonic() - began < 20
    eventually(lambda: not [p for p in sb.commands.list() if "sleep 60" in p.args])


@check("commands.run: background", "CommandHandle.wait", "CommandHandle.pid")
def background(sb):
    h = sb.commands.run("echo begun; sleep 0.3; echo done; exit 0", background=True)
    assert h.pid > 0
    same(h.wait().stdout, "begun\ndone\n")
    h = sb.commands.run("exit 4", background=True)
    same(raises(CommandExitException, h.wait).exit_code, 4)


@check("CommandHandle: iteration", "CommandHandle.kill", "CommandHandle.disconnect")
def handles(sb):
    h = sb.commands.run("echo a; sleep 0.2; echo b", background=True)
    same("".join(out or "" for out, _, _ in h), "a\nb\n")
    h = sb.commands.run("sleep 1000", background=True)
    assert h.kill()
    raises(CommandExitException, h.wait)
    assert not sb.commands.kill(h.pid)
    h = sb.commands.run("sleep 1000", background=True)
    h.disconnect()
    assert h.pid in [p.pid for p in sb.commands.list()], "it ended with its connection"
    assert sb.commands.kill(h.pid)


@check("commands.connect")
def connect_process(sb):
    h = sb.commands.run("read line; echo got $line", background=True, **stdin(True))
    h.disconnect()
    again = sb.commands.connect(h.pid)
    sb.commands.send_stdin(h.pid, "it\n")
    same(again.wait().stdout, "got it\n")
    raises(NotFoundException, lambda: sb.commands.connect(999999))


def stdin(on):
    return {"stdin": on}


@check("commands.send_stdin", "commands.close_stdin")
def input(sb):
    h = sb.commands.run("cat", background=True, **stdin(True))
    sb.commands.send_stdin(h.pid, "one\n")
    sb.commands.send_stdin(h.pid, "two\n")
    if hasattr(sb.commands, "close_stdin"):
        sb.commands.close_stdin(h.pid)
        same(h.wait().stdout, "one\ntwo\n")
    else:
        sb.commands.kill(h.pid)
        raise Absent("this version cannot close standard input")
    raises(Exception, lambda: sb.commands.send_stdin(999999, "x"))


@check("commands.stream_input")
def stream_input(sb):
    if not hasattr(sb.commands, "stream_input"):
        raise Absent("this version has no stream_input")
    h = sb.commands.run("cat", background=True, **stdin(True))
    sb.commands.stream_input(h.pid, [b"a" * 100000, b"b\n"])
    sb.commands.close_stdin(h.pid)
    same(len(h.wait().stdout), 100002)


@check("commands.list", "commands.kill")
def list_processes(sb):
    h = sb.commands.run("sleep 1000", background=True, envs={"MARK": "m"}, cwd="/tmp")
    (p,) = [p for p in sb.commands.list() if p.pid == h.pid]
    same((p.cmd, p.args[-1], p.envs.get("MARK"), p.cwd), ("/bin/bash", "sleep 1000", "m", "/tmp"))
    assert sb.commands.kill(h.pid)
    assert not sb.commands.kill(999999)


# Terminals.


@check("pty.create", "pty.send_stdin", "pty.resize", "pty.kill")
def terminals(sb):
    seen = []
    h = sb.pty.create(e2b.PtySize(rows=24, cols=80), cwd="/tmp", envs={"WORD": "w"}, timeout=60)
    sb.pty.send_stdin(h.pid, b"stty size; pwd; echo $WORD$((3*4))\n")
    text = ""
    for _, _, data in h:
        text += (data or b"").decode()
        # At the prompt: before it the shell reads the size and writes it back, and may write back an older one.
        if re.search(r"w12\r\n.*[#$] $", text, re.DOTALL):
            assert "24 80" in text and "/tmp" in text, text
            sb.pty.resize(h.pid, e2b.PtySize(rows=30, cols=100))
            sb.pty.send_stdin(h.pid, b"stty size; exit 0\n")
            break
    h.wait(on_pty=lambda data: seen.append(data))
    assert "30 100" in b"".join(seen).decode(), seen
    h = sb.pty.create(e2b.PtySize(rows=24, cols=80))
    assert sb.pty.kill(h.pid)
    assert not sb.pty.kill(999999)


@check("pty.connect")
def pty_connect(sb):
    if not hasattr(sb.pty, "connect"):
        raise Absent("this version has no pty.connect")
    h = sb.pty.create(e2b.PtySize(rows=24, cols=80))
    h.disconnect()
    again = sb.pty.connect(h.pid)
    sb.pty.send_stdin(h.pid, b"echo w$((1+1))w; exit\n")
    seen = []
    again.wait(on_pty=seen.append)
    assert b"w2w" in b"".join(seen), seen


# Files.


@check("files.write", "files.read")
def write_read(sb):
    info = sb.files.write("/tmp/d/e/f.txt", "text ä")
    same((info.name, info.path, info.type.value), ("f.txt", "/tmp/d/e/f.txt", "file"))
    same(sb.files.read("/tmp/d/e/f.txt"), "text ä")
    data = bytes(range(256)) * 4096
    sb.files.write("/tmp/bytes", data)
    same(bytes(sb.files.read("/tmp/bytes", format="bytes")), data)
    same(b"".join(sb.files.read("/tmp/bytes", format="stream")), data)
    sb.files.write("/tmp/d/e/f.txt", "")
    same(sb.files.read("/tmp/d/e/f.txt"), "")
    same(sb.files.read("/etc/passwd", user="root")[:5], "root:")
    raises(NotFoundException, lambda: sb.files.read("/no/such"))
    raises(Exception, lambda: sb.files.read("/tmp"))


@check("files.write: streams and gzip")
def write_streams(sb):
    import io

    data = b"0123456789abcdef" * 65536
    sb.files.write("/tmp/io", io.BytesIO(data))
    same(hashlib.sha256(bytes(sb.files.read("/tmp/io", format="bytes"))).digest(), hashlib.sha256(data).digest())
    try:
        sb.files.write("/tmp/gz", data, gzip=True)
        same(bytes(sb.files.read("/tmp/gz", format="bytes", gzip=True)), data)
    except TypeError as e:
        raise Absent(e) from e


@check("files.write_files")
def write_files(sb):
    infos = sb.files.write_files([{"path": f"/tmp/many/{n}.txt", "data": f"n{n}"} for n in range(5)])
    same([i.path for i in infos], [f"/tmp/many/{n}.txt" for n in range(5)])
    same(sb.files.read("/tmp/many/3.txt"), "n3")
    same(sb.files.write_files([]), [])


@check("files.write: metadata")
def metadata(sb):
    try:
        sb.files.write("noted.txt", "x", metadata={"author": "me"})
    except TypeError as e:
        raise Absent(e) from e
    same(sb.files.get_info("noted.txt").metadata, {"author": "me"})


@check("files.list")
def list_files(sb):
    sb.commands.run("mkdir -p /tmp/tree/a/b && touch /tmp/tree/x /tmp/tree/a/b/c && ln -s x /tmp/tree/l")
    same(sorted((e.name, e.type.value) for e in sb.files.list("/tmp/tree"))[:3:2], [("a", "dir"), ("x", "file")])
    same(sorted(e.path for e in sb.files.list("/tmp/tree", depth=3)),
         ["/tmp/tree/a", "/tmp/tree/a/b", "/tmp/tree/a/b/c", "/tmp/tree/l", "/tmp/tree/x"])
    raises(NotFoundException, lambda: sb.files.list("/no/such"))
    raises(e2b.InvalidArgumentException, lambda: sb.files.list("/tmp/tree", depth=0))


@check("files.exists", "files.get_info")
def stat(sb):
    sb.files.write("/tmp/here", "12345")
    assert sb.files.exists("/tmp/here") and not sb.files.exists("/tmp/nowhere")
    i = sb.files.get_info("/tmp/here")
    user = sb.commands.run("id -un").stdout.strip()
    same((i.name, i.path, i.size, i.mode, i.permissions, i.owner, i.group), ("here", "/tmp/here", 5, 0o644, "-rw-r--r--", user, user))
    assert abs(i.modified_time.timestamp() - time.time()) < 60, i.modified_time
    sb.commands.run("ln -sf /tmp/here /tmp/link")
    same(sb.files.get_info("/tmp/link").symlink_target, "/tmp/here")
    raises(NotFoundException, lambda: sb.files.get_info("/tmp/nowhere"))


@check("files.make_dir", "files.rename", "files.remove")
def change_files(sb):
    sb.commands.run("rm -rf /tmp/made /tmp/moved")
    assert sb.files.make_dir("/tmp/made/deep")
    assert not sb.files.make_dir("/tmp/made/deep")
    same(sb.files.rename("/tmp/made", "/tmp/moved").path, "/tmp/moved")
    assert sb.files.exists("/tmp/moved/deep")
    sb.files.remove("/tmp/moved")
    assert not sb.files.exists("/tmp/moved")
    raises(NotFoundException, lambda: sb.files.rename("/tmp/made", "/tmp/x"))


@check("files.watch_dir", "WatchHandle.get_new_events", "WatchHandle.stop")
def watching(sb):
    sb.commands.run("rm -rf /tmp/watched; mkdir -p /tmp/watched/sub")
    h = sb.files.watch_dir("/tmp/watched", recursive=True)
    sb.files.write("/tmp/watched/new.txt", "x")
    sb.commands.run("echo y > /tmp/watched/sub/deep; rm /tmp/watched/new.txt")
    seen = []

    def told():
        seen.extend((e.name, e.type.value) for e in h.get_new_events())
        return ("new.txt", "create") in seen and ("new.txt", "remove") in seen and ("sub/deep", "write") in seen

    try:
        eventually(told, 10)
    except AssertionError as e:
        raise AssertionError(f"{seen}") from e
    h.stop()
    raises(Exception, h.get_new_events)
    raises(NotFoundException, lambda: sb.files.watch_dir("/no/such"))


# Git, where the template has it.


@check("git")
def git(sb):
    if not hasattr(sb, "git"):
        raise Absent("this version has no git")
    if "git" not in sb.commands.run("command -v git || true").stdout:
        raise Absent("the template has no git")
    sb.git.init("/tmp/repo")
    sb.git.configure_user("A", "a@example.test")
    sb.files.write("/tmp/repo/a.txt", "a")
    sb.git.add("/tmp/repo")
    sb.git.commit("/tmp/repo", "first")
    assert sb.git.status("/tmp/repo").is_clean
    sb.git.create_branch("/tmp/repo", "other")
    same(sb.git.branches("/tmp/repo").current_branch, "other")


# Code interpreter.


@check("run_code", "Execution.text", "Execution.logs", "Execution.results")
def run_code(sb):
    sb.run_code("x = 20")
    e = sb.run_code("print('out'); import sys; print('err', file=sys.stderr); x + 22")
    same((e.text, "".join(e.logs.stdout), "".join(e.logs.stderr), e.error), ("42", "out\n", "err\n", None))
    assert e.execution_count and e.results[0].is_main_result
    out, err, results = [], [], []
    sb.run_code("print(1); print(2, file=sys.stderr); 3", on_stdout=lambda m: out.append(m.line), on_stderr=lambda m: err.append(m.line),
                on_result=results.append)
    same(("".join(out), "".join(err), results[0].text), ("1\n", "2\n", "3"))
    same(sb.run_code("import os; os.environ['LETTER']", envs={"LETTER": "q"}).text, "'q'")


@check("run_code: errors", "Execution.error", slow=True)
def code_errors(sb):
    errors = []
    e = sb.run_code("1/0", on_error=errors.append)
    same((e.error.name, e.error.value), ("ZeroDivisionError", "division by zero"))
    assert "1/0" in e.error.traceback and errors, e.error
    raises(e2b.TimeoutException, lambda: sb.run_code("import time; time.sleep(60)", timeout=2))
    same(sb.run_code("7").text, "7")


@check("run_code: rich results")
def rich(sb):
    e = sb.run_code("""
class Rich:
    def _repr_html_(self): return "<b>h</b>"
    def _repr_markdown_(self): return "*m*"
    def _repr_svg_(self): return "<svg/>"
    def _repr_png_(self): return b"\\x89PNG"
    def _repr_latex_(self): return "$l$"
    def _repr_json_(self): return {"k": [1]}
    def _repr_javascript_(self): return "js()"
    def __repr__(self): return "rich"
display(Rich())
Rich()""")
    same(len(e.results), 2)
    r = e.results[1]
    same((r.text, r.html, r.markdown, r.svg, r.latex, r.json, r.javascript),
         ("rich", "<b>h</b>", "*m*", "<svg/>", "$l$", {"k": [1]}, "js()"))
    same(base64.b64decode(r.png), b"\x89PNG")
    assert "html" in list(r.formats()), list(r.formats())


@check("run_code: charts")
def charts(sb):
    if "ok" not in sb.run_code("import importlib.util as u; 'ok' if u.find_spec('matplotlib') else 'no'").text:
        raise Absent("the template has no matplotlib")
    e = sb.run_code("import matplotlib.pyplot as plt; plt.bar(['a', 'b'], [1, 2]); plt.title('T'); plt.show()")
    (r,) = e.results
    assert r.png and r.chart.type.value == "bar" and r.chart.title == "T", r
    same([(b.label, b.value) for b in r.chart.elements], [("a", "1"), ("b", "2")] if isinstance(r.chart.elements[0].value, str) else [("a", 1), ("b", 2)])


@check("run_code: languages")
def languages(sb):
    same("".join(sb.run_code("echo $((6*7))", language="bash").logs.stdout), "42\n")
    raises(Exception, lambda: sb.run_code("1", language="cobol"))


@check("create_code_context", "list_code_contexts", "restart_code_context", "remove_code_context", slow=True)
def contexts(sb):
    c = sb.create_code_context(cwd="/tmp", language="python")
    same(c.language, "python")
    sb.run_code("y = 5", context=c)
    same(sb.run_code("import os; (y, os.getcwd())", context=c).text, "(5, '/tmp')")
    same(sb.run_code("'y' in globals()").text, "False")
    assert c.id in [x.id for x in sb.list_code_contexts()]
    sb.restart_code_context(c)
    same(sb.run_code("'y' in globals()", context=c).text, "False")
    sb.remove_code_context(c)
    assert c.id not in [x.id for x in sb.list_code_contexts()]
    raises(Exception, lambda: sb.run_code("1", context=c))
    raises(Exception, lambda: sb.remove_code_context("no-such"))


# Templates.


@check("Template.exists", "Template.alias_exists")
def template_exists(_):
    from e2b import Template

    exists = getattr(Template, "exists", None) or Template.alias_exists
    assert exists(TEMPLATE)
    assert not exists("no-such-" + uuid.uuid4().hex)


@check("Template.build", "Template.build_in_background", "Template.get_build_status", slow=True)
def template_build(_):
    from e2b import Template

    name = "built-" + uuid.uuid4().hex[:8]
    template = (Template().from_template(TEMPLATE).set_envs({"COLOUR": "blue"}).run_cmd("echo made > /tmp/made.txt")
                .set_workdir("/tmp").make_dir("/tmp/data"))
    lines = []
    build = Template.build(template, alias=name, on_build_logs=lambda e: lines.append(str(e)))
    assert lines, "no logs"
    with Sandbox.create(name, timeout=100) as sb:
        same(sb.commands.run("cat /tmp/made.txt; pwd; echo $COLOUR").stdout, "made\n/tmp\nblue\n")
        assert sb.files.exists("/tmp/data")
    assert Template.alias_exists(name)
    Sandbox.delete_snapshot(build.template_id)
    broken = Template().from_template(TEMPLATE).run_cmd("echo nearly; exit 3")
    raises(e2b.BuildException, lambda: Template.build(broken, alias=name + "x"))


# The same, asynchronously.


@check("AsyncSandbox: create, info, list, kill")
def async_sandbox(_):
    async def go():
        sb = await AsyncSandbox.create(TEMPLATE, timeout=100, metadata={"a": "sync"})
        same((await sb.get_info()).metadata, {"a": "sync"})
        page = AsyncSandbox.list(query=SandboxQuery(metadata={"a": "sync"}))
        same([i.sandbox_id for i in await page.next_items()], [sb.sandbox_id])
        assert await sb.is_running()
        await sb.set_timeout(50)
        assert await sb.get_metrics()
        assert await sb.kill()

    asyncio.run(go())


@check("AsyncSandbox: commands, pty, files, watch", slow=True)
def async_use(sb):
    async def go():
        s = await AsyncSandbox.connect(sb.sandbox_id)
        same((await s.commands.run("echo hi")).stdout, "hi\n")
        out = []
        h = await s.commands.run("echo a; sleep 0.2; echo b", background=True, on_stdout=out.append)
        await h.wait()
        same("".join(out), "a\nb\n")
        many = await asyncio.gather(*(s.commands.run(f"echo {n}") for n in range(10)))
        same([r.stdout for r in many], [f"{n}\n" for n in range(10)])
        events = []
        await s.commands.run("rm -rf /tmp/aw; mkdir /tmp/aw")
        w = await s.files.watch_dir("/tmp/aw", on_event=events.append)
        await s.files.write("/tmp/aw/f", "x")
        for _ in range(100):
            if any(e.name == "f" for e in events):
                break
            await asyncio.sleep(0.1)
        assert any(e.name == "f" for e in events), events
        await w.stop()
        same(await s.files.read("/tmp/aw/f"), "x")
        seen = []
        t = await s.pty.create(e2b.PtySize(rows=24, cols=80), on_data=seen.append)
        await s.pty.send_stdin(t.pid, b"echo z$((4+4))z; exit\n")
        await t.wait()
        assert b"z8z" in b"".join(seen), seen

    asyncio.run(go())


@check("AsyncSandbox: run_code", slow=True)
def async_code(sb):
    async def go():
        s = await AsyncInterpreter.connect(sb.sandbox_id)
        same((await s.run_code("6*7")).text, "42")
        c = await s.create_code_context()
        same((await s.run_code("1", context=c)).text, "1")
        await s.remove_code_context(c)

    asyncio.run(go())


def main():
    print(json.dumps({"versions": {p: version(p) for p in ("e2b", "e2b-code-interpreter")}}), flush=True)
    sb = Sandbox.create(TEMPLATE, timeout=3600)
    failed = False
    try:
        for methods, f, slow in checks:
            if slow if ONLY == "quick" else not any(ONLY in name for name in (f.__name__, *methods)):
                continue
            began = time.monotonic()
            result = {"ok": True, "note": ""}
            try:
                f(sb)
            except Absent as e:
                result = {"ok": True, "absent": True, "note": str(e)}
            except Exception:
                failed = True
                result = {"ok": False, "note": traceback.format_exc()}
            result["seconds"] = round(time.monotonic() - began, 2)
            for m in methods:
                print(json.dumps({"method": m, **result}), flush=True)
    finally:
        sb.kill()
    sys.exit(1 if failed else 0)


sys.dont_write_bytecode = True  # what is beside this is no package
import examples  # noqa: E402

examples.register(sys.modules[__name__])
main()
