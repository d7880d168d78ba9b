"""What E2B's documentation shows, page by page, in calls of our own: each gives what the documentation says. Part of suite.py."""

import asyncio
import base64
import datetime
import io
import os
import tempfile
import time
import uuid
import zipfile

import e2b
from e2b import AsyncSandbox, CommandExitException, NotFoundException, SandboxQuery, SandboxState
from e2b_code_interpreter import Sandbox


def register(suite):
    check, same, raises, eventually, fresh, fetch = (
        suite.check, suite.same, suite.raises, suite.eventually, suite.fresh, suite.fetch)
    template, absent = suite.TEMPLATE, suite.Absent

    def left(sb):
        return (sb.get_info().end_at - datetime.datetime.now(datetime.timezone.utc)).total_seconds()

    def user_of(sb):
        return sb.commands.run("id -un").stdout.strip()

    # Sandboxes.

    @check("docs: sandbox lifecycle", slow=True)
    def lifecycle(_):
        usual = Sandbox.create(template)
        assert 285 < left(usual) <= 301, left(usual)
        usual.kill()
        sb = Sandbox.create(template, timeout=60)
        assert 45 < left(sb) <= 61, left(sb)
        sb.set_timeout(30)
        assert 15 < left(sb) <= 31, left(sb)
        Sandbox.set_timeout(sb.sandbox_id, 90)
        assert 75 < left(sb) <= 91, left(sb)
        i = sb.get_info()
        same((i.sandbox_id, i.name, i.metadata), (sb.sandbox_id, template, {}))
        same(i.end_at > i.started_at, True)
        same(sb.kill(), True)
        same(sb.kill(), False)
        same(sb.is_running(), False)

    @check("docs: metadata and listing", slow=True)
    def metadata(_):
        mark = uuid.uuid4().hex
        made = [fresh(metadata={"userId": mark, "env": env}) for env in ("dev", "dev", "prod")]
        try:
            found = Sandbox.list(query=SandboxQuery(metadata={"userId": mark, "env": "dev"})).next_items()
            same({i.sandbox_id for i in found}, {sb.sandbox_id for sb in made[:2]})
            same(found[0].metadata, {"userId": mark, "env": "dev"})
            same((found[0].template_id, found[0].state), (template, SandboxState.RUNNING))
            pages = Sandbox.list(query=SandboxQuery(metadata={"userId": mark}), limit=2)
            first, second = pages.next_items(), pages.next_items()
            same((len(first), len(second), pages.has_next), (2, 1, False))
            again = Sandbox.list(query=SandboxQuery(metadata={"userId": mark}), limit=2)
            again.next_items()
            there = Sandbox.list(query=SandboxQuery(metadata={"userId": mark}), limit=2, next_token=again.next_token)
            same([i.sandbox_id for i in there.next_items()], [i.sandbox_id for i in second])
            made[2].pause()
            paused = Sandbox.list(query=SandboxQuery(metadata={"userId": mark}, state=[SandboxState.PAUSED])).next_items()
            same([i.sandbox_id for i in paused], [made[2].sandbox_id])
        finally:
            for sb in made:
                sb.kill()

    @check("docs: connect to a running sandbox", slow=True)
    def connect(sb):
        same(sb.sandbox_id in [i.sandbox_id for i in Sandbox.list(query=SandboxQuery(state=[SandboxState.RUNNING])).next_items()], True)
        other = Sandbox.connect(sb.sandbox_id)
        same((other.sandbox_id, other.commands.run("whoami").stdout.strip()), (sb.sandbox_id, user_of(sb)))

    @check("docs: environment variables, default and given", slow=True)
    def variables(_):
        with fresh(envs={"MINE": "global"}) as sb:
            same(sb.commands.run("echo $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID").stdout, f"true {sb.sandbox_id} {template}\n")
            same(sb.commands.run("echo $MINE").stdout, "global\n")
            same(sb.commands.run("echo $MINE", envs={"MINE": "of this"}).stdout, "of this\n")
            same(sb.commands.run("echo $MINE").stdout, "global\n")
            code = "import os; print(os.environ.get('MINE'), os.environ.get('E2B_SANDBOX'))"
            same("".join(sb.run_code(code).logs.stdout), "global true\n")
            same("".join(sb.run_code(code, envs={"MINE": "of code"}).logs.stdout), "of code true\n")
            same("".join(sb.run_code(code).logs.stdout), "global true\n")
            if hasattr(Sandbox, "fork"):
                (kid,) = sb.fork(count=1)
                same(kid.commands.run("echo $E2B_SANDBOX_ID $MINE").stdout, f"{kid.sandbox_id} global\n")
                kid.kill()

    @check("docs: persistence", slow=True)
    def persistence(_):
        sb = fresh(metadata={"kept": "yes"})
        sb.files.write("note.txt", "before")
        job = sb.commands.run("for i in $(seq 1000); do echo $i > /tmp/counter; sleep 0.2; done", background=True)
        sb.run_code("variable = {'a': 1}")
        eventually(lambda: sb.files.exists("/tmp/counter"))
        getattr(Sandbox, "pause", Sandbox.beta_pause)(sb.sandbox_id)
        listed = Sandbox.list(query=SandboxQuery(metadata={"kept": "yes"}, state=[SandboxState.PAUSED]))
        found = [i.sandbox_id for i in listed.next_items()]
        while listed.has_next:
            found += [i.sandbox_id for i in listed.next_items()]
        same(sb.sandbox_id in found, True)
        again = sb.connect()
        assert 270 < left(again) <= 301, left(again)
        same((again.files.read("note.txt"), again.run_code("variable['a']").text), ("before", "1"))
        same(job.pid in [p.pid for p in again.commands.list()], True)
        count = sb.files.read("/tmp/counter")
        eventually(lambda: again.files.read("/tmp/counter") not in ("", count))
        again.beta_pause()
        same(Sandbox.kill(sb.sandbox_id), True)  # also one that is paused
        raises(NotFoundException, lambda: Sandbox.connect(sb.sandbox_id))

    @check("docs: auto-pause", slow=True)
    def auto_pause(_):
        sb = Sandbox.beta_create(template, timeout=2, auto_pause=True) if hasattr(Sandbox, "beta_create") else Sandbox.create(
            template, timeout=2, lifecycle={"on_timeout": "pause"})
        eventually(lambda: sb.get_info().state == SandboxState.PAUSED, 60)
        same(Sandbox.connect(sb.sandbox_id, timeout=100).commands.run("echo back").stdout, "back\n")
        sb.kill()

    @check("docs: snapshots", slow=True)
    def snapshots(_):
        if not hasattr(Sandbox, "create_snapshot"):
            raise absent("this version has no snapshots")
        sb = fresh()
        sb.run_code("plan = ['a']")
        checkpoint = Sandbox.create_snapshot(sb.sandbox_id)
        sb.run_code("plan.append('b')")
        with Sandbox.create(checkpoint.snapshot_id, timeout=100) as one, Sandbox.create(checkpoint.snapshot_id, timeout=100) as two:
            same(one.run_code("plan.append('c'); plan").text, "['a', 'c']")
            same(two.run_code("plan").text, "['a']")
        same(sb.run_code("plan").text, "['a', 'b']")
        same(checkpoint.snapshot_id in [s.snapshot_id for s in Sandbox.list_snapshots(limit=100).next_items()], True)
        sb.kill()
        same(Sandbox.delete_snapshot(checkpoint.snapshot_id), True)

    @check("docs: metrics", slow=True)
    def metrics(sb):
        for list in (sb.get_metrics(), Sandbox.get_metrics(sb.sandbox_id)):
            m = list[-1]
            same((m.cpu_count >= 1, m.cpu_used_pct >= 0, m.mem_used < m.mem_total, m.disk_used < m.disk_total), (True,) * 4)
            assert abs((datetime.datetime.now(datetime.timezone.utc) - m.timestamp).total_seconds()) < 120, m.timestamp

    # Commands.

    @check("docs: commands", slow=True)
    def commands(sb):
        sb.files.write("/tmp/listed/one.txt", "1")
        r = sb.commands.run("ls -l /tmp/listed")
        same((r.exit_code, r.stderr, "one.txt" in r.stdout), (0, "", True))
        out, err = [], []
        r = sb.commands.run("echo first; sleep 0.2; echo second; echo oops >&2", on_stdout=out.append, on_stderr=err.append)
        same(("".join(out), "".join(err), r.stdout, r.stderr), ("first\nsecond\n", "oops\n", "first\nsecond\n", "oops\n"))
        job = sb.commands.run("echo hello; sleep 100; echo world", background=True)
        for stdout, stderr, _ in job:
            same((stdout, stderr), ("hello\n", None))
            break
        same(job.kill(), True)
        e = raises(CommandExitException, lambda: sb.commands.run("ls /no/such/directory"))
        same((e.exit_code, e.stdout, "No such file" in e.stderr), (2, "", True))
        job = sb.commands.run("exec sleep 1000", background=True)
        same(sb.commands.kill(job.pid), True)
        eventually(lambda: job.pid not in [p.pid for p in sb.commands.list()])
        same(sb.commands.run("cd /usr && pwd; cd; pwd", cwd="/tmp").stdout.split()[0], "/usr")
        try:
            r = sb.commands.run("ls | wc -l && (exit 0)", timeout=0)  # no limit
            same(r.exit_code, 0)
        finally:
            sb.files.remove("/tmp/listed")

    @check("docs: interactive terminal", slow=True)
    def terminal(sb):
        seen = bytearray()
        pty = sb.pty.create(e2b.PtySize(rows=20, cols=70), cwd="/tmp", envs={"COLOUR": "green"})
        sb.pty.send_stdin(pty.pid, b"echo in $PWD with $COLOUR and $TERM; tty; exit 3\n")
        e = raises(CommandExitException, lambda: pty.wait(on_pty=seen.extend))
        same(e.exit_code, 3)
        assert b"in /tmp with green and xterm-256color" in seen and b"/dev/pts/" in seen, seen

    # Files.

    @check("docs: files, relative to the home of the user")
    def files(sb):
        home = sb.commands.run("cd; pwd").stdout.strip()
        user = user_of(sb)
        info = sb.files.write("docs/page.txt", "Hello, world!")
        same((info.path, info.name), (f"{home}/docs/page.txt", "page.txt"))
        i = sb.files.get_info("docs/page.txt")
        same((i.name, i.type.value, i.path, i.size, i.mode, i.permissions, i.owner, i.symlink_target),
             ("page.txt", "file", f"{home}/docs/page.txt", 13, 0o644, "-rw-r--r--", user, None))
        sb.files.make_dir("docs/dir")
        i = sb.files.get_info("docs/dir")
        same((i.type.value, i.mode, i.permissions, i.group), ("dir", 0o755, "drwxr-xr-x", user))
        sb.files.write_files([{"path": "/tmp/pair/a", "data": "A"}, {"path": "docs/b", "data": b"B"}])
        same((sb.files.read("/tmp/pair/a"), sb.files.read(f"{home}/docs/b")), ("A", "B"))
        sb.files.write("docs/b", "replaced")
        same(sb.files.read("docs/b"), "replaced")
        sb.files.remove("docs")
        same(sb.files.exists("docs"), False)

    @check("docs: upload and download", slow=True)
    def transfer(sb):
        with tempfile.TemporaryDirectory() as here:
            for name in ("one.csv", "two.csv"):
                with open(os.path.join(here, name), "w") as f:
                    f.write("x,y\n" + name)
            with open(os.path.join(here, "one.csv"), "rb") as f:
                sb.files.write("/tmp/in/single.csv", f)
            batch = []
            for name in sorted(os.listdir(here)):
                with open(os.path.join(here, name), "rb") as f:
                    batch.append({"path": f"/tmp/in/{name}", "data": f.read()})
            same([w.path for w in sb.files.write_files(batch)], ["/tmp/in/one.csv", "/tmp/in/two.csv"])
            same(sb.files.read("/tmp/in/single.csv"), "x,y\none.csv")
            with open(os.path.join(here, "back"), "wb") as f:
                for piece in sb.files.read("/tmp/in/two.csv", format="stream"):
                    f.write(piece)
            with open(os.path.join(here, "back")) as f:
                same(f.read(), "x,y\ntwo.csv")
        # A form whose field has no file name, as browsers send text.
        boundary = uuid.uuid4().hex
        form = (f"--{boundary}\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nof a form\r\n--{boundary}--\r\n").encode()
        user = user_of(sb)
        fetch(sb.upload_url("signed.txt", user=user, use_signature_expiration=10_000), form,
              {"Content-Type": f"multipart/form-data; boundary={boundary}"})
        same(fetch(sb.download_url("signed.txt", user=user, use_signature_expiration=10_000)), b"of a form")
        same(sb.files.read("signed.txt"), "of a form")

    @check("docs: watch a directory")
    def watch(sb):
        sb.commands.run("rm -rf seen && mkdir seen")
        handle = sb.files.watch_dir("seen")
        sb.files.write("seen/my-file", "hello")
        told = []

        def written():
            told.extend(handle.get_new_events())
            return any(e.type == e2b.FilesystemEventType.WRITE and e.name == "my-file" for e in told)

        eventually(written)
        handle.stop()
        sb.commands.run("mkdir -p seen/sub")
        handle = sb.files.watch_dir("seen", recursive=True)
        sb.files.write("seen/sub/deep", "hello")
        told.clear()
        eventually(lambda: told.extend(handle.get_new_events()) or any(e.name == "sub/deep" for e in told))
        handle.stop()

    # Code interpreter.

    @check("docs: run code that shares its state, is indented, or calls the shell")
    def code(sb):
        sb.run_code("x = 1")
        same(sb.run_code("x+=1; x").text, "2")
        e = sb.run_code("""
            import math
            print("indented", math.floor(2.5))
            math.floor(3.5)
        """)
        same((e.error, "".join(e.logs.stdout), e.text), (None, "indented 2\n", "3"))
        e = sb.run_code("!echo from the shell")
        same((e.error, "".join(e.logs.stdout).replace("\r", "")), (None, "from the shell\n"))
        e = sb.run_code("import asyncio\nawait asyncio.sleep(0.01)\n'awaited'")
        same((e.error, e.text), (None, "'awaited'"))
        e = sb.run_code("print('Hello, world!')")
        same((e.logs.stdout, e.logs.stderr, e.results, e.text), (["Hello, world!\n"], [], [], None))
        same(e.to_json() != "", True)

    @check("docs: stream output, results and errors of code")
    def streaming(sb):
        told = []
        e = sb.run_code(
            "import sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)\nprint('last')\nraise RuntimeError('at the end')",
            on_stdout=lambda m: told.append(("out", m.line, m.error)), on_stderr=lambda m: told.append(("err", m.line, m.error)),
            on_error=lambda e: told.append(("error", e.name, e.value)))
        text = {kind: "".join(t[1] for t in told if t[0] == kind) for kind in ("out", "err")}
        same(text, {"out": "to stdout\nlast\n", "err": "to stderr\n"})
        same({t[2] for t in told if t[0] in ("out", "err") and t[0] == "err"}, {True})
        same((told[-1], e.error.name), (("error", "RuntimeError", "at the end"), "RuntimeError"))
        results = []
        sb.run_code("display('one'); display('two'); 'three'", on_result=results.append)
        same([(r.text, r.is_main_result) for r in results], [("'one'", False), ("'two'", False), ("'three'", True)])

    @check("docs: install packages", slow=True)
    def packages(sb):
        if not sb.commands.run("command -v pip || true").stdout:
            raise absent("the template has no pip")
        wheel = io.BytesIO()
        with zipfile.ZipFile(wheel, "w") as z:  # sandboxes here need not reach an index
            z.writestr("brought.py", "answer = 42\n")
            z.writestr("brought-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
            z.writestr("brought-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            z.writestr("brought-1.0.dist-info/RECORD", "")
        sb.files.write("/tmp/brought-1.0-py3-none-any.whl", wheel.getvalue())
        e = sb.run_code("%pip install --no-index /tmp/brought-1.0-py3-none-any.whl\nimport brought\nbrought.answer", timeout=300)
        same((e.error, e.text), (None, "42"))  # in the interpreter that ran already
        same(sb.commands.run("python3 -c 'import brought; print(brought.answer)'").stdout, "42\n")
        same("brought" in sb.commands.run("pip list", timeout=300).stdout, True)

    @check("docs: tables of pandas", slow=True)
    def tables(sb):
        if sb.run_code("import importlib.util as u; u.find_spec('pandas') is None").text == "True":
            raise absent("the template has no pandas")
        e = sb.run_code("import pandas as pd\npd.DataFrame([[1, 2], [3, 4]], columns=['A', 'B'])")
        r = e.results[0]
        same(("<table" in r.html, "A" in r.text, r.is_main_result), (True, True, True))
        same({k: list(v) for k, v in (r.data or {}).items()}, {"A": [1, 3], "B": [2, 4]})

    @check("docs: static and interactive charts", slow=True)
    def charts(sb):
        if sb.run_code("import importlib.util as u; u.find_spec('matplotlib') is None").text == "True":
            raise absent("the template has no matplotlib")
        (r,) = sb.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.ylabel('some')\nplt.show()").results
        same(base64.b64decode(r.png)[:4], b"\x89PNG")
        same((r.chart.type.value, r.chart.y_label), ("line", "some"))
        same([list(p) for p in r.chart.elements[0].points], [[0, 1], [1, 2], [2, 3]])
        seen = []
        sb.run_code("""
            import matplotlib.pyplot as plt
            plt.figure(figsize=(6, 4))
            plt.bar(['P', 'Q'], [10, 20], label='Sold')
            plt.xlabel('Who'); plt.ylabel('How many'); plt.title('Sales')
            plt.tight_layout()
            plt.show()
        """, on_result=seen.append)
        c = seen[0].chart
        same((c.type.value, c.title, c.x_label, c.y_label, c.x_unit, c.y_unit), ("bar", "Sales", "Who", "How many", None, None))
        same([(b.label, b.group, float(b.value)) for b in c.elements], [("P", "Sold", 10.0), ("Q", "Sold", 20.0)])
        (r,) = sb.run_code("plt.pie([1, 3], labels=['a', 'b']); plt.show()").results
        same((r.chart.type.value, [p.label for p in r.chart.elements]), ("pie", ["a", "b"]))

    @check("docs: contexts of code", slow=True)
    def contexts(sb):
        one, two = sb.create_code_context(cwd="/tmp"), sb.create_code_context(language="python")
        sb.run_code("name = 'one'", context=one)
        sb.run_code("name = 'two'", context=two)
        same((sb.run_code("name", context=one).text, sb.run_code("name", context=two).text), ("'one'", "'two'"))
        same((one.cwd, sb.run_code("import os; os.getcwd()", context=one).text), ("/tmp", "'/tmp'"))
        same({one.id, two.id} <= {c.id for c in sb.list_code_contexts()}, True)
        sb.restart_code_context(one.id)
        same(sb.run_code("name", context=one).error.name, "NameError")
        sb.remove_code_context(one.id)
        sb.remove_code_context(two)
        same({one.id, two.id} & {c.id for c in sb.list_code_contexts()}, set())

    @check("docs: bash and JavaScript", slow=True)
    def languages(sb):
        e = sb.run_code("echo 'Hello, world!'; echo wrong >&2", language="bash")
        same(("".join(e.logs.stdout), "".join(e.logs.stderr), e.error), ("Hello, world!\n", "wrong\n", None))
        if not sb.commands.run("command -v node || true").stdout:
            raise absent("the template has no node; bash is served")
        for language in ("js", "javascript"):
            same("".join(sb.run_code("console.log('Hello, world!')", language=language).logs.stdout), "Hello, world!\n")
        for language in ("ts", "typescript"):
            e = sb.run_code("""
                import path from "path";
                const name: string = path.join("a", "b");
                const later = await Promise.resolve(name + "!");
                later;
            """, language=language)
            same((e.error, e.text), (None, "'a/b!'" if e.text and e.text.startswith("'") else "a/b!"))
        e = sb.run_code("Promise.resolve(42)", language="js")
        same((e.error, e.text), (None, "42"))

    # Git.

    @check("docs: git", slow=True)
    def git(sb):
        if not hasattr(sb, "git"):
            raise absent("this version has no git")
        if not sb.commands.run("command -v git || true").stdout:
            raise absent("the template has no git")
        sb.commands.run("rm -rf /tmp/origin /tmp/work /tmp/clone")
        sb.git.configure_user("Some Body", "some@example.test")
        sb.git.init("/tmp/origin", bare=True)
        sb.git.init("/tmp/work", initial_branch="main")
        sb.git.remote_add("/tmp/work", "origin", "/tmp/origin")
        same(sb.git.remote_get("/tmp/work", "origin"), "/tmp/origin")
        sb.files.write("/tmp/work/README.md", "# work")
        s = sb.git.status("/tmp/work")
        same((s.current_branch, s.is_clean, [f.name for f in s.file_status]), ("main", False, ["README.md"]))
        sb.git.add("/tmp/work")
        same(sb.git.status("/tmp/work").has_staged, True)
        sb.git.commit("/tmp/work", "begin")
        same(sb.git.status("/tmp/work").is_clean, True)
        sb.git.create_branch("/tmp/work", "feature")
        same(sb.git.branches("/tmp/work").current_branch, "feature")
        sb.git.checkout_branch("/tmp/work", "main")
        same(sorted(sb.git.branches("/tmp/work").branches), ["feature", "main"])
        sb.git.delete_branch("/tmp/work", "feature", force=True)
        same(sb.git.branches("/tmp/work").branches, ["main"])
        sb.files.write("/tmp/work/README.md", "# changed")
        sb.git.restore("/tmp/work", paths=["README.md"], worktree=True)
        same(sb.files.read("/tmp/work/README.md"), "# work")
        sb.files.write("/tmp/work/README.md", "# changed")
        sb.git.add("/tmp/work", files=["README.md"])
        sb.git.reset("/tmp/work", mode="hard", target="HEAD")
        same(sb.git.status("/tmp/work").is_clean, True)
        sb.git.push("/tmp/work", remote="origin", branch="main", set_upstream=True)
        sb.git.clone("/tmp/origin", path="/tmp/clone", branch="main")
        same(sb.files.read("/tmp/clone/README.md"), "# work")
        sb.files.write("/tmp/work/more", "more")
        sb.git.add("/tmp/work", all=True)
        sb.git.commit("/tmp/work", "more", author_name="Else", author_email="else@example.test")
        sb.git.push("/tmp/work", remote="origin", branch="main")
        sb.git.pull("/tmp/clone")
        same(sb.files.read("/tmp/clone/more"), "more")
        sb.git.set_config("pull.rebase", "false", scope="local", path="/tmp/work")
        same(sb.git.get_config("pull.rebase", scope="local", path="/tmp/work"), "false")

    # Streams.

    @check("commands: many at once, of one AsyncSandbox", slow=True)
    def many(sb):
        async def go():
            s = await AsyncSandbox.connect(sb.sandbox_id)
            handles = await asyncio.gather(*(s.commands.run("read line; echo got $line", background=True, stdin=True) for _ in range(50)))
            same(len({h.pid for h in handles}), 50)
            await asyncio.gather(*(s.commands.send_stdin(h.pid, f"{n}\n") for n, h in enumerate(handles)))
            done = await asyncio.gather(*(h.wait() for h in handles))
            same([d.stdout for d in done], [f"got {n}\n" for n in range(50)])

        asyncio.run(go())

    @check("files.read: a stream that is left", slow=True)
    def left_alone(sb):
        sb.commands.run("head -c 50000000 /dev/zero > /tmp/much")
        began = time.monotonic()
        stream = sb.files.read("/tmp/much", format="stream")
        same(len(next(iter(stream))) > 0, True)
        getattr(stream, "close", lambda: None)()
        same(sb.files.read("/etc/hostname").strip(), sb.sandbox_id)
        assert time.monotonic() - began < 60
        sb.files.write("/tmp/much", io.BytesIO(b""))
