// Every method of E2B's JavaScript SDK against a daemon, as its documentation describes it. Prints a line of JSON for each:
// {method, ok, note}. Expects E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY; the template's name is the first argument. With "quick" as
// the second, those that take long are left out; with another word, those without it in their names. Nothing of the SDK is patched.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import * as e2b from "e2b";
import { Sandbox } from "@e2b/code-interpreter";

const require = createRequire(import.meta.url);
const [template, only = ""] = process.argv.slice(2);
const checks = [];

class Absent extends Error {}

function check(methods, run, slow = false) {
  checks.push({ methods, run, slow });
}

const long = true;

const same = assert.deepEqual;

async function fails(promise, kind, words = "") {
  try {
    await promise;
  } catch (e) {
    assert.ok(e instanceof kind, `${e?.constructor?.name}: ${e}, want ${kind.name}`);
    assert.ok(String(e.message).includes(words), `${e} does not say ${words}`);
    return e;
  }
  assert.fail(`no ${kind.name}`);
}

async function eventually(f, seconds = 60) {
  for (const end = Date.now() + seconds * 1000; ; await sleep(100)) {
    const value = await f();
    if (value) return value;
    assert.ok(Date.now() < end, "it never came to be");
  }
}

const fresh = (more = {}) => Sandbox.create(template, { timeoutMs: 300_000, ...more });
const unique = () => randomBytes(8).toString("hex");

async function all(paginator) {
  const list = [];
  while (paginator.hasNext) list.push(...(await paginator.nextItems()));
  return list;
}

// Sandboxes.

check(["Sandbox.create", "sandbox.kill"], async () => {
  const sb = await fresh({ metadata: { who: "suite" }, envs: { GREETING: "hello" } });
  same((await sb.commands.run("echo $GREETING")).stdout, "hello\n");
  same((await sb.getInfo()).metadata, { who: "suite" });
  same(await sb.kill(), true);
  same(await Sandbox.kill(sb.sandboxId), false);
});

check(["Sandbox.create: template missing"], async () => {
  await fails(Sandbox.create("no-such-template"), Error, "forkd build");
});

check(["Sandbox.create: wrong key"], async () => {
  await fails(fresh({ apiKey: "e2b_" + "0".repeat(40) }), e2b.AuthenticationError);
});

check(["Sandbox.create: unsupported fields are refused by name"], async () => {
  await fails(fresh({ mcp: { exa: { apiKey: "x" } } }), Error, "mcp");
});

check(["sandbox.getInfo", "Sandbox.getInfo"], async (sb) => {
  for (const i of [await sb.getInfo(), await Sandbox.getInfo(sb.sandboxId)]) {
    same(i.sandboxId, sb.sandboxId);
    same(i.templateId, template);
    same(i.state, "running");
    assert.ok(i.cpuCount >= 1 && i.memoryMB >= 128 && i.endAt > i.startedAt);
  }
  await fails(Sandbox.getInfo("sbaaaaaaaaaaaaa"), e2b.NotFoundError);
});

check(["sandbox.isRunning"], async (sb) => same(await sb.isRunning(), true));

check(["sandbox.setTimeout"], async (sb) => {
  await sb.setTimeout(7_200_000);
  const left = (await sb.getInfo()).endAt - Date.now();
  assert.ok(left > 7_150_000 && left < 7_202_000, left);
  const other = await fresh();
  await other.setTimeout(1000);
  await eventually(async () => !(await other.isRunning()));
  await fails(other.commands.run("true"), Error, "not");
});

check(["Sandbox.connect"], async (sb) => {
  same((await (await Sandbox.connect(sb.sandboxId)).commands.run("echo again")).stdout, "again\n");
  await fails(Sandbox.connect("sbaaaaaaaaaaaaa"), e2b.NotFoundError);
});

check(["Sandbox.list", "SandboxPaginator.nextItems", "SandboxPaginator.hasNext"], async () => {
  const mark = unique();
  const made = [];
  for (let n = 0; n < 3; n++) made.push(await fresh({ metadata: { mark, odd: "b c&d=e%f", n: String(n) } }));
  const ids = async (query) => (await all(Sandbox.list({ query, limit: 2 }))).map((i) => i.sandboxId).sort();
  try {
    same(await ids({ metadata: { mark, odd: "b c&d=e%f" } }), made.map((s) => s.sandboxId).sort());
    same(await ids({ metadata: { mark, n: "1" } }), [made[1].sandboxId]);
    same(await ids({ metadata: { mark: "another" } }), []);
    await made[0].pause();
    same(await ids({ metadata: { mark }, state: ["paused"] }), [made[0].sandboxId]);
    same((await ids({ metadata: { mark }, state: ["running", "paused"] })).length, 3);
  } finally {
    for (const sb of made) await sb.kill();
  }
}, long);

check(["sandbox.updateNetwork", "Sandbox.create: allowInternetAccess, network"], async () => {
  if (!Sandbox.updateNetwork) throw new Absent("this version has no updateNetwork");
  let sb = await fresh({ allowInternetAccess: false });
  same((await sb.getInfo()).allowInternetAccess, false);
  await sb.kill();
  sb = await fresh();
  assert.ok((await sb.getInfo()).network.allowOut.length, "what the daemon allows is not shown");
  await sb.updateNetwork({ denyOut: ["0.0.0.0/0"] });
  const { allowOut, denyOut } = (await sb.getInfo()).network;
  same([allowOut, denyOut], [undefined, ["0.0.0.0/0"]]);
  await fails(sb.updateNetwork({ allowOut: ["example.com"] }), Error, "wider");
  await sb.kill();
}, long);

check(["sandbox.pause", "Sandbox.connect: resumes"], async () => {
  const sb = await fresh();
  await sb.runCode("kept = 41");
  assert.ok(await sb.pause());
  same((await sb.getInfo()).state, "paused");
  same(await sb.isRunning(), false);
  same(await sb.pause(), false);
  await fails(sb.commands.run("true"), Error, "not");
  const again = await sb.connect({ timeoutMs: 200_000 });
  same((await again.runCode("kept + 1")).text, "42");
  await again.kill();
}, long);

check(["Sandbox.create: lifecycle pause and auto-resume"], async () => {
  const sb = await Sandbox.create(template, { timeoutMs: 2000, lifecycle: { onTimeout: "pause", autoResume: true } });
  await eventually(async () => (await sb.getInfo()).state === "paused", 60);
  same((await sb.commands.run("echo awake")).stdout, "awake\n");
  await sb.kill();
}, long);

check(["sandbox.fork"], async () => {
  if (!Sandbox.prototype.fork) throw new Absent("this version has no fork");
  const sb = await fresh();
  await sb.runCode("x = [1, 2]");
  const kids = await sb.fork({ count: 2, timeoutMs: 200_000 });
  same(kids.length, 2);
  for (const [n, kid] of kids.entries()) {
    const child = kid.sandbox ?? kid;
    same((await child.runCode(`x.append(${n}); x`)).text, `[1, 2, ${n}]`);
    await child.kill();
  }
  same((await sb.runCode("x")).text, "[1, 2]");
  await sb.kill();
});

check(["sandbox.createSnapshot", "sandbox.listSnapshots", "Sandbox.deleteSnapshot"], async () => {
  if (!Sandbox.prototype.createSnapshot) throw new Absent("this version has no snapshots");
  const sb = await fresh();
  await sb.files.write("/tmp/state", "before");
  const snap = await sb.createSnapshot();
  await sb.files.write("/tmp/state", "after");
  const kid = await Sandbox.create(snap.snapshotId, { timeoutMs: 100_000 });
  same(await kid.files.read("/tmp/state"), "before");
  await kid.kill();
  same((await all(sb.listSnapshots())).map((s) => s.snapshotId), [snap.snapshotId]);
  await sb.kill();
  same(await Sandbox.deleteSnapshot(snap.snapshotId), true);
  same(await Sandbox.deleteSnapshot(snap.snapshotId), false);
}, long);

check(["sandbox.getMetrics"], async (sb) => {
  const [m] = await sb.getMetrics();
  assert.ok(m.cpuCount >= 1 && m.memUsed > 0 && m.memUsed < m.memTotal && m.diskUsed < m.diskTotal, JSON.stringify(m));
});

check(["sandbox.getHost"], async (sb) => {
  assert.ok(sb.getHost(8000).startsWith(`8000-${sb.sandboxId}.`));
});

check(["sandbox.downloadUrl", "sandbox.uploadUrl"], async (sb) => {
  await sb.files.write("/tmp/signed.txt", "signed");
  for (const useSignatureExpiration of [undefined, 60_000])
    same(await (await fetch(await sb.downloadUrl("/tmp/signed.txt", { useSignatureExpiration }))).text(), "signed");
  const form = new FormData();
  form.append("file", new Blob(["uploaded"]), "up.txt");
  same((await fetch(await sb.uploadUrl("/tmp/up.txt"), { method: "POST", body: form })).status, 200);
  same(await sb.files.read("/tmp/up.txt"), "uploaded");
  const wrong = (await sb.downloadUrl("/tmp/signed.txt")).replace("signed.txt", "up.txt");
  assert.ok((await fetch(wrong)).status >= 400);
});

// Commands.

check(["commands.run"], async (sb) => {
  const r = await sb.commands.run("echo out; echo err >&2");
  same([r.stdout, r.stderr, r.exitCode, r.error], ["out\n", "err\n", 0, undefined]);
  let out = "";
  await sb.commands.run("for i in 1 2 3; do echo $i; done", { onStdout: (s) => void (out += s) });
  same(out, "1\n2\n3\n");
  same((await sb.commands.run("pwd", { cwd: "/usr" })).stdout, "/usr\n");
  same((await sb.commands.run("echo $A$B", { envs: { A: "1", B: "2" } })).stdout, "12\n");
  same((await sb.commands.run("id -un", { user: "root" })).stdout, "root\n");
  same((await sb.commands.run("printf 'ä€😀'")).stdout, "ä€😀");
});

check(["commands.run: failures"], async (sb) => {
  const e = await fails(sb.commands.run("echo some; echo why >&2; exit 7"), e2b.CommandExitError);
  same([e.exitCode, e.stdout, e.stderr], [7, "some\n", "why\n"]);
  await fails(sb.commands.run("true", { cwd: "/no/such" }), e2b.InvalidArgumentError);
  await fails(sb.commands.run("true", { user: "nobody-has-this" }), e2b.AuthenticationError);
  await fails(sb.commands.run("sleep 61", { timeoutMs: 1000 }), e2b.TimeoutError);
  await eventually(async () => !(await sb.commands.list()).some((p) => p.args.includes("sleep 61")));
});

check(["commands.run: background", "CommandHandle.wait", "CommandHandle.kill", "CommandHandle.disconnect"], async (sb) => {
  let h = await sb.commands.run("echo begun; sleep 0.3; echo done", { background: true });
  assert.ok(h.pid > 0);
  same((await h.wait()).stdout, "begun\ndone\n");
  h = await sb.commands.run("sleep 1000", { background: true });
  const gone = fails(h.wait(), e2b.CommandExitError);
  assert.ok(await h.kill());
  await gone;
  h = await sb.commands.run("sleep 1000", { background: true });
  await h.disconnect();
  assert.ok((await sb.commands.list()).some((p) => p.pid === h.pid), "it ended with its connection");
  assert.ok(await sb.commands.kill(h.pid));
});

check(["commands.connect", "commands.sendStdin", "commands.closeStdin"], async (sb) => {
  let h = await sb.commands.run("read line; echo got $line", { background: true, stdin: true });
  await h.disconnect();
  const again = await sb.commands.connect(h.pid);
  await sb.commands.sendStdin(h.pid, "it\n");
  same((await again.wait()).stdout, "got it\n");
  await fails(sb.commands.connect(999999), e2b.NotFoundError);
  h = await sb.commands.run("cat", { background: true, stdin: true });
  await sb.commands.sendStdin(h.pid, "one\n");
  if (!sb.commands.closeStdin) {
    await h.kill();
    throw new Absent("this version cannot close standard input");
  }
  await sb.commands.closeStdin(h.pid);
  same((await h.wait()).stdout, "one\n");
});

check(["CommandHandle.sendStdin", "CommandHandle.closeStdin"], async (sb) => {
  const h = await sb.commands.run("cat", { background: true, stdin: true });
  if (!h.closeStdin) {
    await h.kill();
    throw new Absent("this version's handles take no input");
  }
  await h.sendStdin("two\n");
  await h.closeStdin();
  same((await h.wait()).stdout, "two\n");
  same([h.exitCode, h.stdout, h.stderr, h.error], [0, "two\n", "", undefined]);
}, long);

check(["commands.list", "commands.kill"], async (sb) => {
  const h = await sb.commands.run("sleep 1000", { background: true, envs: { MARK: "m" }, cwd: "/tmp" });
  const p = (await sb.commands.list()).find((p) => p.pid === h.pid);
  same([p.cmd, p.args.at(-1), p.envs.MARK, p.cwd], ["/bin/bash", "sleep 1000", "m", "/tmp"]);
  const gone = fails(h.wait(), e2b.CommandExitError);
  same(await sb.commands.kill(h.pid), true);
  await gone;
  same(await sb.commands.kill(999999), false);
});

// Terminals.

check(["pty.create", "pty.sendInput", "pty.resize", "pty.kill"], async (sb) => {
  let text = "";
  const h = await sb.pty.create({ cols: 80, rows: 24, cwd: "/tmp", envs: { WORD: "w" }, onData: (d) => void (text += Buffer.from(d).toString()) });
  const type = (s) => sb.pty.sendInput(h.pid, new TextEncoder().encode(s));
  await type("stty size; pwd; echo $WORD$((3*4))\n");
  // At the prompt: before it the shell reads the size and writes it back, and may write back an older one.
  await eventually(() => /w12\r\n.*[#$] $/s.test(text));
  assert.ok(text.includes("24 80") && text.includes("/tmp"), text);
  await sb.pty.resize(h.pid, { cols: 100, rows: 30 });
  await type("stty size; exit 0\n");
  await h.wait();
  assert.ok(text.includes("30 100"), text);
  const other = await sb.pty.create({ cols: 80, rows: 24, onData: () => {} });
  const gone = other.wait().catch(() => {});
  same(await sb.pty.kill(other.pid), true);
  await gone;
  same(await sb.pty.kill(999999), false);
});

check(["pty.connect"], async (sb) => {
  if (!sb.pty.connect) throw new Absent("this version has no pty.connect");
  const h = await sb.pty.create({ cols: 80, rows: 24, onData: () => {} });
  await h.disconnect();
  let text = "";
  const again = await sb.pty.connect(h.pid, { onData: (d) => void (text += Buffer.from(d).toString()) });
  await sb.pty.sendInput(h.pid, new TextEncoder().encode("echo w$((1+1))w; exit\n"));
  await again.wait();
  assert.ok(text.includes("w2w"), text);
});

// Files.

check(["files.write", "files.read"], async (sb) => {
  const info = await sb.files.write("/tmp/d/e/f.txt", "text ä");
  same([info.name, info.path], ["f.txt", "/tmp/d/e/f.txt"]);
  same(await sb.files.read("/tmp/d/e/f.txt"), "text ä");
  const data = randomBytes(1 << 20);
  await sb.files.write("/tmp/bytes", new Blob([data]));
  assert.ok(data.equals(Buffer.from(await sb.files.read("/tmp/bytes", { format: "bytes" }))));
  same((await sb.files.read("/tmp/bytes", { format: "blob" })).size, data.length);
  let size = 0;
  for await (const part of await sb.files.read("/tmp/bytes", { format: "stream" })) size += part.length;
  same(size, data.length);
  await sb.files.write("/tmp/bytes2", data.buffer.slice(data.byteOffset, data.byteOffset + data.length));
  assert.ok(data.equals(Buffer.from(await sb.files.read("/tmp/bytes2", { format: "bytes" }))));
  await sb.files.write("/tmp/empty", "");
  same(await sb.files.read("/tmp/empty"), "");
  await fails(sb.files.read("/no/such"), e2b.NotFoundError);
  const many = await sb.files.write([{ path: "/tmp/many/a", data: "a" }, { path: "/tmp/many/b", data: "b" }]);
  same(many.map((i) => i.path), ["/tmp/many/a", "/tmp/many/b"]);
});

check(["files.writeFiles"], async (sb) => {
  const many = await sb.files.writeFiles([{ path: "/tmp/more/a", data: "a" }, { path: "/tmp/more/b", data: new Blob(["b"]) }]);
  same(many.map((i) => i.path), ["/tmp/more/a", "/tmp/more/b"]);
  same(await sb.files.read("/tmp/more/b"), "b");
}, long);

check(["files.list"], async (sb) => {
  await sb.commands.run("mkdir -p /tmp/tree/a/b && touch /tmp/tree/x /tmp/tree/a/b/c");
  same((await sb.files.list("/tmp/tree")).map((e) => [e.name, e.type]).sort(), [["a", "dir"], ["x", "file"]]);
  same((await sb.files.list("/tmp/tree", { depth: 3 })).length, 4);
  await fails(sb.files.list("/no/such"), e2b.NotFoundError);
});

check(["files.exists", "files.getInfo", "files.makeDir", "files.rename", "files.remove"], async (sb) => {
  await sb.files.write("/tmp/here", "12345");
  same([await sb.files.exists("/tmp/here"), await sb.files.exists("/tmp/nowhere")], [true, false]);
  const i = await sb.files.getInfo("/tmp/here");
  same([i.name, i.path, i.size, i.mode, i.permissions], ["here", "/tmp/here", 5, 0o644, "-rw-r--r--"]);
  await sb.commands.run("rm -rf /tmp/made /tmp/moved");
  same([await sb.files.makeDir("/tmp/made/deep"), await sb.files.makeDir("/tmp/made/deep")], [true, false]);
  same((await sb.files.rename("/tmp/made", "/tmp/moved")).path, "/tmp/moved");
  await sb.files.remove("/tmp/moved");
  same(await sb.files.exists("/tmp/moved"), false);
});

check(["files.watchDir", "WatchHandle.stop"], async (sb) => {
  await sb.commands.run("rm -rf /tmp/watched; mkdir -p /tmp/watched/sub");
  const seen = [];
  const h = await sb.files.watchDir("/tmp/watched", (e) => void seen.push(`${e.name} ${e.type}`), { recursive: true });
  await sb.files.write("/tmp/watched/new.txt", "x");
  await sb.commands.run("echo y > /tmp/watched/sub/deep; rm /tmp/watched/new.txt");
  await eventually(() => ["new.txt create", "new.txt remove", "sub/deep write"].every((e) => seen.includes(e))).catch(() => assert.fail(seen.join()));
  await h.stop();
  await fails(sb.files.watchDir("/no/such", () => {}), e2b.NotFoundError);
});

// Code interpreter.

check(["runCode", "Execution.text", "Execution.logs", "Execution.results"], async (sb) => {
  await sb.runCode("x = 20");
  const e = await sb.runCode("print('out'); import sys; print('err', file=sys.stderr); x + 22");
  same([e.text, e.logs.stdout.join(""), e.logs.stderr.join(""), e.error], ["42", "out\n", "err\n", undefined]);
  assert.ok(e.results[0].isMainResult && e.executionCount > 0);
  let out = "";
  await sb.runCode("print(1)", { onStdout: (m) => void (out += m.line) });
  same(out, "1\n");
  same((await sb.runCode("import os; os.environ['LETTER']", { envs: { LETTER: "q" } })).text, "'q'");
});

check(["runCode: errors"], async (sb) => {
  const e = await sb.runCode("1/0");
  same([e.error.name, e.error.value], ["ZeroDivisionError", "division by zero"]);
  const began = Date.now();
  await fails(sb.runCode("import time; time.sleep(60)", { timeoutMs: 2000 }), e2b.TimeoutError);
  same((await sb.runCode("7")).text, "7");
  assert.ok(Date.now() - began < 30_000, "code that nobody waits for any more was not interrupted");
}, long);

check(["runCode: rich results"], async (sb) => {
  const e = await sb.runCode(`
class Rich:
    def _repr_html_(self): return "<b>h</b>"
    def _repr_png_(self): return b"\\x89PNG"
    def _repr_json_(self): return {"k": [1]}
    def __repr__(self): return "rich"
display(Rich())
Rich()`);
  same(e.results.length, 2);
  same([e.results[1].text, e.results[1].html, e.results[1].json], ["rich", "<b>h</b>", { k: [1] }]);
  assert.ok(e.results[1].formats().includes("png"));
});

check(["runCode: charts"], async (sb) => {
  if ((await sb.runCode("import importlib.util as u; u.find_spec('matplotlib') is None")).text === "True") throw new Absent("the template has no matplotlib");
  const [r] = (await sb.runCode("import matplotlib.pyplot as plt; plt.plot([1, 2], [3, 4]); plt.title('T'); plt.show()")).results;
  assert.ok(r.png);
  same([r.chart.type, r.chart.title], ["line", "T"]);
});

check(["runCode: languages"], async (sb) => {
  same((await sb.runCode("echo $((6*7))", { language: "bash" })).logs.stdout.join(""), "42\n");
  if ((await sb.commands.run("command -v node || true")).stdout === "") throw new Absent("the template has no node; bash is served");
  same((await sb.runCode("const a = 6; a * 7", { language: "javascript" })).text, "42");
  same((await sb.runCode("const b: number = 6; b * 7", { language: "typescript" })).text, "42");
}, long);

check(["createCodeContext", "listCodeContexts", "restartCodeContext", "removeCodeContext"], async (sb) => {
  const c = await sb.createCodeContext({ cwd: "/tmp", language: "python" });
  await sb.runCode("y = 5", { context: c });
  same((await sb.runCode("import os; (y, os.getcwd())", { context: c })).text, "(5, '/tmp')");
  assert.ok((await sb.listCodeContexts()).some((x) => x.id === c.id));
  await sb.restartCodeContext(c);
  same((await sb.runCode("'y' in globals()", { context: c })).text, "False");
  await sb.removeCodeContext(c);
  assert.ok(!(await sb.listCodeContexts()).some((x) => x.id === c.id));
}, long);

// Templates.

check(["Template.exists"], async () => {
  const exists = e2b.Template.exists ?? e2b.Template.aliasExists;
  same([await exists(template), await exists("no-such-" + unique())], [true, false]);
});

check(["Template.build"], async () => {
  const name = "built-" + unique().slice(0, 8);
  const t = e2b.Template().fromTemplate(template).setEnvs({ COLOUR: "blue" }).runCmd("echo made > /tmp/made.txt").setWorkdir("/tmp");
  const build = await e2b.Template.build(t, { alias: name });
  const sb = await Sandbox.create(name, { timeoutMs: 100_000 });
  same((await sb.commands.run("cat /tmp/made.txt; pwd; echo $COLOUR")).stdout, "made\n/tmp\nblue\n");
  await sb.kill();
  await Sandbox.deleteSnapshot(build.templateId);
}, long);

// What E2B's documentation shows, page by page, in calls of our own: each gives what the documentation says.
function examples() {
  const left = async (sb) => ((await sb.getInfo()).endAt - Date.now()) / 1000;
  const around = (seconds, want) => assert.ok(seconds > want - 15 && seconds < want + 1, `${seconds} s are left of ${want}`);
  const out = async (sb, cmd, options) => (await sb.commands.run(cmd, options)).stdout;
  const printed = (e) => e.logs.stdout.join("");

  // Sandboxes.

  check(["docs: sandbox lifecycle"], async () => {
    const usual = await Sandbox.create(template);
    around(await left(usual), 300);
    await usual.kill();
    const sb = await Sandbox.create(template, { timeoutMs: 60_000 });
    around(await left(sb), 60);
    await sb.setTimeout(30_000);
    around(await left(sb), 30);
    const i = await sb.getInfo();
    same([i.sandboxId, i.name, i.metadata], [sb.sandboxId, template, {}]);
    same([await sb.kill(), await sb.kill(), await sb.isRunning()], [true, false, false]);
  }, long);

  check(["docs: metadata and listing"], async () => {
    const userId = randomBytes(8).toString("hex");
    const made = [];
    for (const env of ["dev", "dev", "prod"]) made.push(await fresh({ metadata: { userId, env } }));
    try {
      const found = await Sandbox.list({ query: { metadata: { userId, env: "dev" } } }).nextItems();
      same(found.map((i) => i.sandboxId).sort(), made.slice(0, 2).map((s) => s.sandboxId).sort());
      same([found[0].metadata, found[0].state], [{ userId, env: "dev" }, "running"]);
      const pages = Sandbox.list({ query: { metadata: { userId } }, limit: 2 });
      same([(await pages.nextItems()).length, (await pages.nextItems()).length, pages.hasNext], [2, 1, false]);
      await made[2].pause();
      const paused = await all(Sandbox.list({ query: { metadata: { userId }, state: ["paused"] } }));
      same(paused.map((i) => i.sandboxId), [made[2].sandboxId]);
    } finally {
      for (const sb of made) await sb.kill();
    }
  }, long);

  check(["docs: environment variables, default and given"], async () => {
    const sb = await fresh({ envs: { MINE: "global" } });
    same(await out(sb, "echo $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID $MINE"), `true ${sb.sandboxId} ${template} global\n`);
    same(await out(sb, "echo $MINE", { envs: { MINE: "of this" } }), "of this\n");
    const code = "import os; print(os.environ.get('MINE'))";
    same(printed(await sb.runCode(code, { envs: { MINE: "of code" } })), "of code\n");
    same(printed(await sb.runCode(code)), "global\n");
    await sb.kill();
  }, long);

  check(["docs: persistence"], async () => {
    const sb = await fresh();
    await sb.files.write("note.txt", "before");
    const job = await sb.commands.run("sleep 1000", { background: true });
    const gone = job.wait().catch(() => {});
    await sb.runCode("variable = {'a': 1}");
    same(await Sandbox.pause(sb.sandboxId), true);
    const again = await sb.connect();
    around(await left(again), 300);
    same([await again.files.read("note.txt"), (await again.runCode("variable['a']")).text], ["before", "1"]);
    assert.ok((await again.commands.list()).some((p) => p.pid === job.pid), "the process is gone");
    await again.pause();
    same(await Sandbox.kill(sb.sandboxId), true);
    await fails(Sandbox.connect(sb.sandboxId), e2b.NotFoundError);
    await gone;
  }, long);

  check(["docs: snapshots"], async () => {
    if (!Sandbox.createSnapshot) throw new Absent("this version has no snapshots");
    const sb = await fresh();
    await sb.runCode("plan = ['a']");
    const checkpoint = await Sandbox.createSnapshot(sb.sandboxId);
    await sb.runCode("plan.append('b')");
    const one = await Sandbox.create(checkpoint.snapshotId, { timeoutMs: 100_000 });
    same([(await one.runCode("plan")).text, (await sb.runCode("plan")).text], ["['a']", "['a', 'b']"]);
    await one.kill();
    await sb.kill();
    same(await Sandbox.deleteSnapshot(checkpoint.snapshotId), true);
  }, long);

  check(["docs: metrics"], async (sb) => {
    for (const list of [await sb.getMetrics(), await Sandbox.getMetrics(sb.sandboxId)]) {
      const m = list.at(-1);
      assert.ok(m.cpuCount >= 1 && m.cpuUsedPct >= 0 && m.memUsed < m.memTotal && m.diskUsed < m.diskTotal, JSON.stringify(m));
      assert.ok(Math.abs(Date.now() - m.timestamp) < 120_000, String(m.timestamp));
    }
  }, long);

  // Commands.

  check(["docs: commands"], async (sb) => {
    await sb.files.write("/tmp/listed/one.txt", "1");
    const listed = await sb.commands.run("ls -l /tmp/listed");
    same([listed.exitCode, listed.stderr, listed.stdout.includes("one.txt")], [0, "", true]);
    let stdout = "";
    let stderr = "";
    const r = await sb.commands.run("echo first; sleep 0.2; echo second; echo oops >&2", {
      onStdout: (s) => void (stdout += s), onStderr: (s) => void (stderr += s),
    });
    same([stdout, stderr, r.stdout, r.stderr], ["first\nsecond\n", "oops\n", "first\nsecond\n", "oops\n"]);
    let heard = "";
    const job = await sb.commands.run("echo hello; sleep 100; echo world", { background: true, onStdout: (s) => void (heard += s) });
    const gone = fails(job.wait(), e2b.CommandExitError);
    await eventually(() => heard === "hello\n");
    same(await job.kill(), true);
    await gone;
    const e = await fails(sb.commands.run("ls /no/such/directory"), e2b.CommandExitError);
    same([e.exitCode, e.stdout, e.stderr.includes("No such file")], [2, "", true]);
    await sb.files.remove("/tmp/listed");
  }, long);

  check(["docs: interactive terminal"], async (sb) => {
    let text = "";
    const pty = await sb.pty.create({ cols: 70, rows: 20, cwd: "/tmp", envs: { COLOUR: "green" }, onData: (d) => void (text += Buffer.from(d)) });
    await sb.pty.sendInput(pty.pid, new TextEncoder().encode("echo in $PWD with $COLOUR and $TERM; exit 3\n"));
    same((await fails(pty.wait(), e2b.CommandExitError)).exitCode, 3);
    assert.ok(text.includes("in /tmp with green and xterm-256color"), text);
  }, long);

  // Files.

  check(["docs: files, relative to the home of the user"], async (sb) => {
    const home = (await out(sb, "cd; pwd")).trim();
    const user = (await out(sb, "whoami")).trim();
    same((await sb.files.write("docs/page.txt", "Hello, world!")).path, `${home}/docs/page.txt`);
    let i = await sb.files.getInfo("docs/page.txt");
    same([i.name, i.type, i.path, i.size, i.mode, i.permissions, i.owner], ["page.txt", "file", `${home}/docs/page.txt`, 13, 0o644, "-rw-r--r--", user]);
    await sb.files.makeDir("docs/dir");
    i = await sb.files.getInfo("docs/dir");
    same([i.type, i.mode, i.permissions, i.group], ["dir", 0o755, "drwxr-xr-x", user]);
    await sb.files.write([{ path: "/tmp/pair/a", data: "A" }, { path: "docs/b", data: "B" }]);
    same([await sb.files.read("/tmp/pair/a"), await sb.files.read(`${home}/docs/b`)], ["A", "B"]);
    await sb.files.remove("docs");
    same(await sb.files.exists("docs"), false);
  });

  check(["docs: upload and download by signed URLs"], async (sb) => {
    const form = new FormData();
    form.append("file", "of a form"); // a field without a file's name
    const up = await fetch(await sb.uploadUrl("signed.txt", { useSignatureExpiration: 10_000 }), { method: "POST", body: form });
    same(up.status, 200);
    same(await (await fetch(await sb.downloadUrl("signed.txt", { useSignatureExpiration: 10_000 }))).text(), "of a form");
    same(await sb.files.read("signed.txt"), "of a form");
  }, long);

  check(["docs: watch a directory"], async (sb) => {
    await sb.commands.run("rm -rf seen && mkdir -p seen/sub");
    const told = [];
    const handle = await sb.files.watchDir("seen", (e) => void told.push(e), { recursive: true });
    await sb.files.write("seen/my-file", "hello");
    await sb.files.write("seen/sub/deep", "hello");
    const wrote = (name) => told.some((e) => e.type === e2b.FilesystemEventType.WRITE && e.name === name);
    await eventually(() => wrote("my-file") && wrote("sub/deep"));
    await handle.stop();
  }, long);

  // Code interpreter.

  check(["docs: run code that shares its state, is indented, or calls the shell"], async (sb) => {
    await sb.runCode("x = 1");
    same((await sb.runCode("x+=1; x")).text, "2");
    let e = await sb.runCode(`
      import math
      print("indented", math.floor(2.5))
      math.floor(3.5)
    `);
    same([e.error, printed(e), e.text], [undefined, "indented 2\n", "3"]);
    e = await sb.runCode("!echo from the shell");
    same([e.error, printed(e)], [undefined, "from the shell\n"]);
    e = await sb.runCode("print('Hello, world!')");
    same([e.logs, e.results, e.text], [{ stdout: ["Hello, world!\n"], stderr: [] }, [], undefined]);
  });

  check(["docs: stream output, results and errors of code"], async (sb) => {
    const told = [];
    const e = await sb.runCode("import sys\nprint('to stdout')\nprint('to stderr', file=sys.stderr)\nprint('last')\nraise RuntimeError('at the end')", {
      onStdout: (m) => void told.push(["out", m.line, m.error]),
      onStderr: (m) => void told.push(["err", m.line, m.error]),
      onError: (e) => void told.push(["error", e.name, e.value]),
    });
    const text = (kind) => told.filter((t) => t[0] === kind).map((t) => t[1]).join("");
    same([text("out"), text("err"), told.at(-1), e.error.name], ["to stdout\nlast\n", "to stderr\n", ["error", "RuntimeError", "at the end"], "RuntimeError"]);
    const results = [];
    await sb.runCode("display('one'); display('two'); 'three'", { onResult: (r) => void results.push([r.text, r.isMainResult]) });
    same(results, [["'one'", false], ["'two'", false], ["'three'", true]]);
  }, long);

  check(["docs: static and interactive charts"], async (sb) => {
    if ((await sb.runCode("import importlib.util as u; u.find_spec('matplotlib') is None")).text === "True") throw new Absent("the template has no matplotlib");
    const [r] = (await sb.runCode(`
      import matplotlib.pyplot as plt
      plt.bar(['P', 'Q'], [10, 20], label='Sold')
      plt.xlabel('Who'); plt.ylabel('How many'); plt.title('Sales')
      plt.show()
    `)).results;
    assert.ok(Buffer.from(r.png, "base64").subarray(1, 4).equals(Buffer.from("PNG")));
    same([r.chart.type, r.chart.title, r.chart.x_label, r.chart.y_label, r.chart.x_unit], ["bar", "Sales", "Who", "How many", null]);
    same(r.chart.elements.map((b) => [b.label, b.group, Number(b.value)]), [["P", "Sold", 10], ["Q", "Sold", 20]]);
  }, long);

  check(["docs: contexts of code"], async (sb) => {
    const [one, two] = [await sb.createCodeContext({ cwd: "/tmp" }), await sb.createCodeContext({ language: "python" })];
    await sb.runCode("name = 'one'", { context: one });
    await sb.runCode("name = 'two'", { context: two });
    same([(await sb.runCode("name", { context: one })).text, (await sb.runCode("name", { context: two })).text], ["'one'", "'two'"]);
    await sb.restartCodeContext(one.id);
    same((await sb.runCode("name", { context: one })).error.name, "NameError");
    for (const c of [one, two]) await sb.removeCodeContext(c);
    assert.ok(!(await sb.listCodeContexts()).some((c) => c.id === one.id || c.id === two.id));
  }, long);

  check(["docs: bash and JavaScript"], async (sb) => {
    const bash = await sb.runCode("echo 'Hello, world!'; echo wrong >&2", { language: "bash" });
    same([printed(bash), bash.logs.stderr.join(""), bash.error], ["Hello, world!\n", "wrong\n", undefined]);
    if ((await out(sb, "command -v node || true")) === "") throw new Absent("the template has no node; bash is served");
    same(printed(await sb.runCode("console.log('Hello, world!')", { language: "js" })), "Hello, world!\n");
    const ts = await sb.runCode('import path from "path";\nconst name: string = path.join("a", "b");\nawait Promise.resolve(name.length);', { language: "ts" });
    same([ts.error, ts.text], [undefined, "3"]);
  }, long);

  // Git.

  check(["docs: git"], async (sb) => {
    if (!sb.git) throw new Absent("this version has no git");
    if ((await out(sb, "command -v git || true")) === "") throw new Absent("the template has no git");
    await sb.commands.run("rm -rf /tmp/jorigin /tmp/jwork /tmp/jclone");
    await sb.git.configureUser("Some Body", "some@example.test");
    await sb.git.init("/tmp/jorigin", { bare: true });
    await sb.git.init("/tmp/jwork", { initialBranch: "main" });
    await sb.git.remoteAdd("/tmp/jwork", "origin", "/tmp/jorigin");
    await sb.files.write("/tmp/jwork/README.md", "# work");
    same((await sb.git.status("/tmp/jwork")).isClean, false);
    await sb.git.add("/tmp/jwork");
    await sb.git.commit("/tmp/jwork", "begin");
    same((await sb.git.status("/tmp/jwork")).isClean, true);
    await sb.git.createBranch("/tmp/jwork", "feature");
    same((await sb.git.branches("/tmp/jwork")).currentBranch, "feature");
    await sb.git.checkoutBranch("/tmp/jwork", "main");
    await sb.git.deleteBranch("/tmp/jwork", "feature", { force: true });
    await sb.git.push("/tmp/jwork", { remote: "origin", branch: "main", setUpstream: true });
    await sb.git.clone("/tmp/jorigin", { path: "/tmp/jclone", branch: "main" });
    same(await sb.files.read("/tmp/jclone/README.md"), "# work");
    same(await sb.git.remoteGet("/tmp/jwork", "origin"), "/tmp/jorigin");
    await sb.files.write("/tmp/jwork/README.md", "# changed");
    await sb.git.restore("/tmp/jwork", { paths: ["README.md"], worktree: true });
    same(await sb.files.read("/tmp/jwork/README.md"), "# work");
    await sb.files.write("/tmp/jwork/README.md", "# changed");
    await sb.git.add("/tmp/jwork", { files: ["README.md"] });
    await sb.git.reset("/tmp/jwork", { mode: "hard", target: "HEAD" });
    same((await sb.git.status("/tmp/jwork")).isClean, true);
    await sb.files.write("/tmp/jwork/more", "more");
    await sb.git.add("/tmp/jwork", { all: true });
    await sb.git.commit("/tmp/jwork", "more", { authorName: "Else", authorEmail: "else@example.test" });
    await sb.git.push("/tmp/jwork", { remote: "origin", branch: "main" });
    await sb.git.pull("/tmp/jclone");
    same(await sb.files.read("/tmp/jclone/more"), "more");
    await sb.git.setConfig("pull.rebase", "false", { scope: "local", path: "/tmp/jwork" });
    same(await sb.git.getConfig("pull.rebase", { scope: "local", path: "/tmp/jwork" }), "false");
  }, long);
}

examples();

console.log(JSON.stringify({ versions: Object.fromEntries(["e2b", "@e2b/code-interpreter"].map((p) => {
  const main = require.resolve(p);
  const root = main.slice(0, main.lastIndexOf(`node_modules/${p}/`)) + `node_modules/${p}/package.json`;
  return [p, require(root).version];
})) }));
const sb = await Sandbox.create(template, { timeoutMs: 3_600_000 });
let failed = false;
try {
  for (const { methods, run, slow } of checks) {
    if (only === "quick" ? slow : !methods.join().includes(only)) continue;
    const began = Date.now();
    let result = { ok: true, note: "" };
    try {
      await run(sb);
    } catch (e) {
      if (e instanceof Absent) result = { ok: true, absent: true, note: e.message };
      else {
        failed = true;
        result = { ok: false, note: e.stack };
      }
    }
    result.seconds = (Date.now() - began) / 1000;
    for (const method of methods) console.log(JSON.stringify({ method, ...result }));
  }
} finally {
  await sb.kill();
}
process.exit(failed ? 1 : 0);
