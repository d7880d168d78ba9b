"""Drives a daemon with the Controller class of the existing forkd's Python package, as it is on PyPI.

Argument: the tag of a snapshot with numpy.
"""

import sys
import time

import forkd

TAG = sys.argv[1]


def check(what, ok, seen=None):
    if not ok:
        raise SystemExit(f"controller: {what}: {seen!r}")


def refused(what, status, call, *args, **kwargs):
    try:
        seen = call(*args, **kwargs)
    except forkd.ControllerError as e:
        check(f"{what}: status", e.status == status, str(e))
        check(f"{what}: body", isinstance(e.body, dict) and e.body.get("error"), e.body)
        return
    raise SystemExit(f"controller: {what}: succeeded: {seen!r}")


def snapshot(c, tag):
    return next((s for s in c.list_snapshots() if s["tag"] == tag), None)


def fields(what, have, *names):
    for name in names:
        check(f"{what} has no {name}", name in have, have)


c = forkd.Controller()
made = []  # sandboxes and tags to remove, in this order


def spawn(*args, **kwargs):
    children = c.spawn_sandboxes(*args, **kwargs)
    made.extend(("sandbox", s["id"]) for s in children)
    return children


def branch(*args, **kwargs):
    b = c.branch_sandbox(*args, **kwargs)
    made.append(("tag", b["tag"]))
    return b


def use():
    parent = snapshot(c, TAG)
    check("the snapshot is listed, ready", parent and parent["status"] == "ready" and parent["bootable"], parent)
    fields("a snapshot", parent, "dir", "created_at_unix")

    children = spawn(TAG, n=2, per_child_netns=True, live_fork=True, prewarm=True)
    check("two children", len(children) == 2 and len({s["id"] for s in children}) == 2, children)
    a, b = (s["id"] for s in children)
    for s in children:
        fields("a sandbox", s, "snapshot_tag", "netns", "guest_addr", "created_at_unix", "pid", "memory_limit_mib", "has_branched",
               "last_branch_memory_path", "branch_count")
        check("its snapshot", s["snapshot_tag"] == TAG and s["pid"] > 0 and s["branch_count"] == 0 and not s["has_branched"], s)
    check("both are listed", {a, b} <= {s["id"] for s in c.list_sandboxes()})
    check("one is shown", c.get_sandbox(a)["id"] == a)
    limited = spawn(TAG, memory_limit_mib=256, hugepages=True, live_fork=True)[0]
    said = " ".join(limited["warnings"])
    check("what was not granted is said", "hugepages" in said and "memory_limit_mib: 256" in said, limited)
    check("a limit below the machine's memory is raised, or not held", (limited["memory_limit_mib"] or 512) >= 512, limited)

    out = c.exec_command(a, ["sh", "-c", "echo out; echo err >&2; exit 7"])
    check("exec", (out["stdout"], out["stderr"], out["exit_code"]) == ("out\n", "err\n", 7), out)
    refused("exec of what is not there", 400, c.exec_command, a, ["no-such-program"])
    began = time.monotonic()
    out = c.exec_command(a, ["sleep", "30"], timeout_secs=1)
    check("exec times out", out["exit_code"] != 0 and time.monotonic() - began < 20, out)
    out = c.eval_code(a, "int(numpy.zeros(3).sum()) + 41")
    check("eval", (out["result"], out["error"], out["exit_code"]) == ("41", None, 0), out)
    out = c.eval_code(a, "1 / 0")
    check("eval of a fault", out["result"] is None and "division by zero" in out["error"] and out["exit_code"] != 0, out)
    pong = c.ping_sandbox(a)
    check("ping", pong["pong"] is True, pong)

    c.exec_command(a, ["sh", "-c", "echo before > /root/mark"])
    s = branch(a, measure_diff=True)
    check("branch, by the names of before", s["tag"].startswith(f"branch-{a}-") and s["status"] == "ready", s)
    live = s["mode"] == "live"  # chosen by itself where the host can
    if not live:
        refused("live where the host cannot", 409, c.branch_sandbox, a, mode="live")
    for mode in ["full", "diff"] + ["live"] * live:
        s = branch(a, tag=f"compat-{mode}", mode=mode)
        check(f"branch {mode}", s["tag"] == f"compat-{mode}" and s["status"] == "ready" and s["branched_from"] == a, s)
        check(f"branch {mode}: its pause", 0 < s["pause_ms"] < 60_000, s)
        if mode == "diff":
            check("diff's sizes", 0 < s["diff_physical_bytes"] <= s["diff_logical_bytes"], s)
        s = branch(a, tag=f"compat-{mode}-later", mode=mode, wait=False)
        check(f"branch {mode}, no wait", s["status"] in ("writing", "ready"), s)
        deadline = time.monotonic() + 120
        while snapshot(c, s["tag"])["status"] == "writing":
            check(f"branch {mode}: it becomes ready", time.monotonic() < deadline)
            time.sleep(0.2)
        check(f"branch {mode}, no wait: in the end", snapshot(c, s["tag"])["status"] == "ready", snapshot(c, s["tag"]))
    s = c.get_sandbox(a)
    check("branches are counted", s["has_branched"] and s["branch_count"] == 5 + 2 * live, s)
    grandchild = spawn("compat-diff", n=1)[0]["id"]
    out = c.exec_command(grandchild, ["cat", "/root/mark"])
    check("a child of a branch", out["stdout"] == "before\n", out)

    refused("no such sandbox", 404, c.get_sandbox, "sbnope")
    refused("no such snapshot", 404, c.spawn_sandboxes, "nope")
    refused("no children", 400, c.spawn_sandboxes, TAG, n=0)
    refused("too many children", 400, c.spawn_sandboxes, TAG, n=1001)
    refused("nothing to run", 400, c.exec_command, a, [])
    refused("a mode there is not", 400, c.branch_sandbox, a, mode="sideways")
    refused("two modes", 400, c.branch_sandbox, a, mode="diff", measure_diff=True)
    refused("a tag that is taken", 409, c.branch_sandbox, a, tag=TAG)
    refused("a tag that cannot be", 400, c.branch_sandbox, a, tag="../x")
    refused("kill nothing", 404, c.kill_sandbox, "sbnope")
    refused("delete nothing", 404, c.delete_snapshot, "nope")


try:
    use()
finally:
    for kind, name in made[:]:
        if kind == "sandbox":
            c.kill_sandbox(name)
    for kind, name in reversed(made):
        if kind == "tag":
            c.delete_snapshot(name)
left = {s["id"] for s in c.list_sandboxes()} & {name for _, name in made}
check("killed", not left, left)
print("ok")
