"""Templates built with E2B's Python SDK of images of a registry, against a daemon.

Prints a line of JSON for each check: {"method", "ok", "note"}. Expects E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY; the arguments are
the registry's address and a template to stand on. With "quick" as the third, what takes long is left out; with another word,
the checks without it in their name. What is copied is made beside this file, as clients look for it there.
"""

import asyncio
import json
import os
import pathlib
import sys
import time
import traceback
import uuid

import e2b
from e2b import AsyncTemplate, Sandbox, Template, wait_for_file, wait_for_port, wait_for_process, wait_for_timeout, wait_for_url

REGISTRY, PARENT = sys.argv[1:3]
ONLY = sys.argv[3] if len(sys.argv) > 3 else ""
HERE = pathlib.Path(__file__).parent
SMALL = f"{REGISTRY}/small:v1"
checks = []
made = []


def check(method, slow=True):
    def register(f):
        checks.append((method, f, slow))
        return f

    return register


def same(got, want):
    assert got == want, f"{got!r}, want {want!r}"


def name():
    made.append("made-" + uuid.uuid4().hex[:8])
    return made[-1]


def build(template, alias=None, **more):
    lines = []
    alias = alias or name()
    info = Template.build(template, alias=alias, on_build_logs=lambda e: lines.append(e), **more)
    same(info.template_id, alias)
    return alias, lines


def small():
    return Template().from_image(SMALL)


def fails(template, *words, step=None):
    """The build fails, says these words, and points at the line that made the step."""
    try:
        build(template)
    except e2b.BuildException as e:
        for word in words:
            assert word in str(e), f"{e} does not say {word!r}"
        assert ".e2b" not in str(e) and "Traceback" not in str(e), e
        if step:
            frames = [f.line for f in traceback.extract_tb(e.__traceback__)]
            assert any(step in (line or "") for line in frames), (frames, step)
        return str(e)
    raise AssertionError("it was built")


def out(sb, command, **more):
    return sb.commands.run(command, **more).stdout


@check("Template.build: from an image, with every kind of step and a start command", slow=False)
def every_step():
    (HERE / "app" / "sub").mkdir(parents=True, exist_ok=True)
    (HERE / "app" / "a.txt").write_text("a\n")
    (HERE / "app" / "sub" / "b.sh").write_text("#!/bin/bash\necho from b\n")
    os.chmod(HERE / "app" / "sub" / "b.sh", 0o755)
    (HERE / "one.txt").write_text("one\n")
    (HERE / "two words.txt").write_text("two\n")
    template = (
        small()
        .set_envs({"ONCE": uuid.uuid4().hex, "COLOUR": "blue", "ODD": 'a "b" $HOME \\ c'})
        .run_cmd("id -un > who; pwd >> who; echo $COLOUR$PROFILE$FROM_IMAGE >> who; echo some words; echo others >&2")
        .copy("app", "app")
        .copy(["one.txt", "two words.txt"], "/srv/", user="root", mode=0o600)
        .run_cmd(["mkdir -p /srv/data", "chown user /srv/data"], user="root")
        .set_workdir("/srv/data")
        .run_cmd('echo "$ODD" > odd; printf "%s|" *')
        .set_start_cmd("echo started >> /srv/data/started; exec nc -ll -p 8123 -e cat /srv/data/odd", wait_for_port(8123))
    )
    alias, lines = build(template)
    text = "\n".join(e.message for e in lines)
    assert "some words" in text and "others" in text and "odd|" in text, text
    with Sandbox.create(alias, timeout=100) as sb:
        same(out(sb, "cat /home/user/who"), "user\n/home/user\nblueread" + "yes\n")
        same(out(sb, "cat odd"), 'a "b" $HOME \\ c\n')
        same(out(sb, "cat ~/app/a.txt; ~/app/sub/b.sh; stat -c %U ~/app/a.txt"), "a\nfrom b\nuser\n")
        same(out(sb, "cat /srv/one.txt '/srv/two words.txt'; stat -c '%U %a' /srv/one.txt", user="root"), "one\ntwo\nroot 600\n")
        same(out(sb, "id -un; pwd; echo $COLOUR"), "user\n/srv/data\nblue\n")
        same(out(sb, "cat started"), "started\n")
        same(out(sb, "nc 127.0.0.1 8123 </dev/null"), 'a "b" $HOME \\ c\n')
        assert any("nc" in " ".join([p.cmd, *p.args]) for p in sb.commands.list())
    # Nothing has changed: every step is found.
    began = time.monotonic()
    _, lines = build(template, alias)
    text = "\n".join(e.message for e in lines)
    assert "[output]" not in text and "(done before)" in text, text
    return f"again in {time.monotonic() - began:.1f} s"


@check("Template.build: a step that fails", slow=False)
def failing_step():
    text = fails(small().run_cmd("true").run_cmd("echo nearly; echo why >&2; exit 3"), "exit status 3", "nearly", "why", step="echo nearly")
    assert "forkd run" in text, text


@check("Template.build: what is asked for and cannot be had")
def refused():
    fails(Template().from_image(f"{REGISTRY}/small:none"), "small:none")
    fails(Template().from_image(f"{REGISTRY}/small:bare").run_cmd("true"), "no /bin/bash")
    fails(Template().from_image(SMALL, username="me", password="secret"), "fromImageRegistry")
    fails(Template().from_template("no-such"), "no-such")
    fails(small().run_cmd("true", user="nobody-has-this"), "nobody-has-this", step="nobody-has-this")
    fails(small().set_start_cmd("sleep 1000", wait_for_url("http://localhost:80/")), "needs curl")
    fails(small().set_start_cmd("echo so much; exit 4", wait_for_port(80)), "so much", "exit status 4")
    for more, word in (({"cpu_count": 1000}, "cpuCount"), ({"memory_mb": 1}, "memoryMB"), ({"tags": ["a", "b"]}, "tags")):
        try:
            build(small(), **more)
        except TypeError:
            pass  # an older client has no tags
        except e2b.BuildException as e:
            assert word in str(e), e
        else:
            raise AssertionError(f"{more} was taken")
    (HERE / "ghost").mkdir(exist_ok=True)
    try:
        build(small().copy("no-such-file", "/"))
    except Exception as e:
        assert "no-such-file" in str(e), e
    else:
        raise AssertionError("what is not there was copied")


@check("Template.build: ready commands")
def ready():
    for start, wait in (
        ("sleep 1; touch /tmp/up; exec sleep 1000", wait_for_file("/tmp/up")),
        ("exec nc -ll -p 80 -e true", wait_for_process("nc")),
        ("exec sleep 1000", wait_for_timeout(1000)),
        ("sleep 0.5; echo yes > /tmp/mine; exec sleep 1000", "grep -q yes /tmp/mine"),
    ):
        alias, _ = build(small().set_user("root").set_start_cmd(start, wait))
        with Sandbox.create(alias, timeout=100) as sb:
            assert any("sleep 1000" in " ".join(p.args) or "nc" in " ".join([p.cmd, *p.args]) for p in sb.commands.list())
    alias, _ = build(small().set_user("root").run_cmd("(sleep 2; touch /tmp/late) &").set_ready_cmd("test -d /tmp"))
    assert Sandbox.create(alias, timeout=100).kill()


@check("Template.build: files")
def files():
    (HERE / "tree").mkdir(exist_ok=True)
    for n in range(30):
        (HERE / "tree" / f"{n}.py").write_text(f"{n}")
    (HERE / "tree" / "not.md").write_text("x")
    link = HERE / "tree" / "link"
    if not link.is_symlink():
        link.symlink_to("3.py")
    data = os.urandom(1 << 20) * 30
    (HERE / "large").write_bytes(data)
    (HERE / ".dockerignore").write_text("**/*.md\n")
    try:
        alias, _ = build(
            small().copy("tree", "/srv/tree", user="root").copy("tree/*.py", "/srv/some/", user="root").copy("tree", "/srv/followed", user="root", resolve_symlinks=True)
            .copy("large", "/srv/large", user="user", mode=0o644).copy("large", "/srv/plain", user="root")
            .make_dir("/tmp/deep/er", mode=0o700).make_symlink("/srv/large", "/tmp/to-large").rename("/tmp/deep", "/tmp/moved").remove("/srv/plain", user="root"))
    finally:
        (HERE / ".dockerignore").unlink()
    with Sandbox.create(alias, timeout=100) as sb:
        same(out(sb, "ls /srv/tree | wc -l; ls /srv/some | wc -l; readlink /srv/tree/link; readlink /srv/followed/link || echo a file").split(), ["31", "30", "3.py", "a", "file"])
        same(bytes(sb.files.read("/srv/large", format="bytes")), data)
        same(out(sb, "stat -c '%U %a' /srv/large /tmp/moved/er; readlink /tmp/to-large; ls /srv"), "user 644\nuser 700\n/srv/large\nfollowed\nlarge\nsome\ntree\n")


@check("Template.build: cache")
def cache():
    stamp = "head -c 8 /proc/sys/kernel/random/uuid > /tmp/stamp-"
    template = lambda: small().run_cmd(stamp + "1").run_cmd(stamp + "2")  # noqa: E731
    read = lambda alias: out(Sandbox.create(alias, timeout=100), "cat /tmp/stamp-*")  # noqa: E731
    first, _ = build(template())
    second, _ = build(template())
    same(read(second), read(first))
    third, _ = build(template(), skip_cache=True)
    assert read(third)[:8] != read(first)[:8], "skip_cache changed nothing"
    fourth, _ = build(small().run_cmd(stamp + "1").skip_cache().run_cmd(stamp + "2"))
    assert read(fourth)[8:] != read(first)[8:], "skip_cache() changed nothing"


@check("Template.build: on another template, and in place of the older one")
def stacked():
    first, _ = build(small().set_envs({"A": "1", "B": "1"}).set_workdir("/srv").run_cmd("echo first > /tmp/f"))
    second, _ = build(Template().from_template(first).set_envs({"B": "2"}).run_cmd("echo second >> /tmp/f; pwd >> /tmp/f; id -un >> /tmp/f"))
    with Sandbox.create(second, timeout=100) as sb:
        same(out(sb, "cat /tmp/f; echo $A$B"), "first\nsecond\n/srv\nuser\n12\n")
    build(small().run_cmd("echo third > /tmp/f"), second)
    with Sandbox.create(second, timeout=100) as sb:
        same(out(sb, "cat /tmp/f"), "third\n")
    assert Template.alias_exists(second)


@check("Template.build: on a warm snapshot of this daemon's own")
def warm():
    alias, _ = build(Template().from_template(PARENT).run_cmd("echo more > /tmp/more"))
    with Sandbox.create(alias, timeout=100) as sb:
        same(out(sb, "cat /tmp/more"), "more\n")


@check("Template.build: from a Dockerfile, and from what E2B's clients call the base image")
def from_elsewhere():
    (HERE / "one.txt").write_text("one\n")
    alias, _ = build(Template().from_dockerfile(f"""FROM {SMALL}
ENV COLOUR=green
WORKDIR /srv
RUN echo $COLOUR > colour && pwd >> colour
COPY one.txt /srv/one.txt
"""))
    with Sandbox.create(alias, timeout=100) as sb:
        same(out(sb, "cat /srv/colour /srv/one.txt; pwd; echo $COLOUR"), "green\n/srv\none\n/srv\ngreen\n")
    if not Template.alias_exists("base"):
        return "there is no template base here"
    alias, _ = build(Template().from_base_image().run_cmd("id -un > /tmp/who"))
    with Sandbox.create(alias, timeout=100) as sb:
        same(out(sb, "cat /tmp/who; pwd; sudo -n id -un; git --version | cut -c1-3"), "user\n/home/user\nroot\ngit\n")


@check("Template.build_in_background")
def background():
    alias = name()
    info = Template.build_in_background(small().run_cmd("for i in $(seq 250); do echo line $i; done"), alias=alias)
    seen, status = [], None
    end = time.monotonic() + 300
    while time.monotonic() < end:
        status = Template.get_build_status(info, logs_offset=len(seen))
        seen += [e.message for e in status.log_entries]
        if status.status.value not in ("building", "waiting") and not status.log_entries:
            break
        time.sleep(0.05)
    same(status.status.value, "ready")
    same([s.split("] ")[-1] for s in seen if "line " in s and "seq" not in s], [f"line {n}" for n in range(1, 251)])


@check("Sandbox.fork: what a user has named like its snapshots stays")
def named():
    sb = Sandbox.create(PARENT, timeout=100)
    mine = "e2b-fork-" + uuid.uuid4().hex[:8]
    sb.create_snapshot(mine)
    for kid in sb.fork(count=1):
        assert kid.kill()
    listed, page = [], sb.list_snapshots()
    while page.has_next:
        listed += [s.snapshot_id for s in page.next_items()]
    same(listed, [mine])
    sb.kill()
    assert Sandbox.delete_snapshot(mine)


@check("AsyncTemplate.build")
def asynchronous():
    async def go():
        alias = name()
        lines = []
        await AsyncTemplate.build(AsyncTemplate().from_image(SMALL).run_cmd("echo async > /tmp/a").copy("one.txt", "/tmp/"), alias=alias, on_build_logs=lines.append)
        assert lines
        assert await AsyncTemplate.alias_exists(alias)

    (HERE / "one.txt").write_text("one\n")
    asyncio.run(go())


def main():
    failed = False
    for method, f, slow in checks:
        if slow if ONLY == "quick" else ONLY not in f.__name__:
            continue
        began = time.monotonic()
        result = {"ok": True, "note": ""}
        try:
            result["note"] = f() or ""
        except Exception:
            failed = True
            result = {"ok": False, "note": traceback.format_exc()}
        print(json.dumps({"method": method, **result, "seconds": round(time.monotonic() - began, 2)}), flush=True)
    for alias in reversed(made):
        try:
            Sandbox.delete_snapshot(alias)
        except Exception as e:
            print(f"{alias} stays: {e}", file=sys.stderr)
    sys.exit(1 if failed else 0)


main()
