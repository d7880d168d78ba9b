// Drives `forkd mcp` with the official TypeScript client of the protocol, over standard input and output or over HTTP: it lists every
// tool and calls every one. Arguments: the tag of a snapshot with numpy; then a URL and a token, or the program and its arguments.
// What the tools do in detail, mcp_client.py asks.
import assert from "node:assert/strict";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";

const [tag, target, ...rest] = process.argv.slice(2);
const http = target.startsWith("http");
const env = Object.fromEntries(Object.entries(process.env).filter(([k]) => k.startsWith("FORKD_") || k === "PATH" || k === "HOME"));
const transport = http
  ? new StreamableHTTPClientTransport(new URL(target), { requestInit: { headers: { Authorization: `Bearer ${rest[0]}` } } })
  : new StdioClientTransport({ command: target, args: rest, env });

if (http) {
  const stranger = new Client({ name: "stranger", version: "0" });
  await assert.rejects(stranger.connect(new StreamableHTTPClientTransport(new URL(target))), "a client without a token");
}
const client = new Client({ name: "test", version: "0" });
await client.connect(transport);
const { tools } = await client.listTools();
const left = new Set(tools.map((t) => t.name));

async function ask(name, args, onprogress) {
  left.delete(name);
  const r = await client.callTool({ name, arguments: args }, undefined, { timeout: 600_000, onprogress });
  const text = r.content[0].text;
  assert.ok(!r.isError, `${name}: ${text}`);
  assert.deepEqual(JSON.parse(text), r.structuredContent, `${name}: text and structure are the same`);
  return r.structuredContent.result !== undefined && Object.keys(r.structuredContent).length === 1 ? r.structuredContent.result : r.structuredContent;
}

const made = [], tags = [];
try {
  const spawned = await ask("spawn_sandboxes", { snapshot_tag: tag, n: 2 });
  made.push(...spawned.map((s) => s.id));
  const [sandbox_id, other] = made;
  const has = (list, id) => assert.ok(list.some((s) => s.id === id), `${id} is not listed`);
  has(await ask("list_sandboxes", {}), sandbox_id);
  assert.equal((await ask("get_sandbox", { sandbox_id })).state, "running");
  assert.equal((await ask("ping_sandbox", { sandbox_id })).pong, true);
  assert.equal((await ask("exec_command", { sandbox_id, args: ["echo", "hi"] })).stdout, "hi\n");
  const steps = [];
  await ask("exec_command", { sandbox_id, command: "for i in 1 2 3; do echo step $i; sleep 1.1; done" }, (p) => steps.push(p.message));
  assert.ok(steps.some((s) => s.includes("step")), `progress: ${steps}`);
  const long = await ask("exec_command", { sandbox_id, command: "seq 100000" });
  const end = await ask("read_output", { output_id: long.output_id, offset: -7 });
  assert.equal(end.text, "100000\n");
  assert.equal((await ask("eval_code", { sandbox_id, code: "x = int(np.ones(3).sum()); x" })).result, "3");
  await ask("list_contexts", { sandbox_id });
  await ask("write_file", { sandbox_id, path: "/tmp/d/f", content: "grüße" });
  assert.equal((await ask("read_file", { sandbox_id, path: "/tmp/d/f" })).text, "grüße");
  assert.deepEqual((await ask("list_files", { sandbox_id, path: "/tmp/d" })).map((f) => f.path), ["/tmp/d/f"]);
  const { pid } = await ask("start_process", { sandbox_id, command: "echo READY > /tmp/log; sleep 600", tag: "bg" });
  assert.equal((await ask("wait_for_text", { sandbox_id, path: "/tmp/log", marker: "READY", timeout_secs: 60 })).found, true);
  assert.ok((await ask("list_processes", { sandbox_id })).some((p) => p.pid === pid));
  await ask("signal_process", { sandbox_id, process: "bg", signal: "KILL", tree: true });
  const copies = await ask("fork_sandbox", { sandbox_id, n: 1 });
  made.push(copies.children[0].id);
  tags.push(copies.snapshot_tag);
  assert.equal((await ask("eval_code", { sandbox_id: made[2], code: "x + 1" })).result, "4");
  tags.push("mcp-node");
  assert.equal((await ask("branch_sandbox", { sandbox_id, tag: "mcp-node" })).status, "ready");
  assert.ok((await ask("list_snapshots", {})).some((s) => s.tag === "mcp-node"));
  assert.equal((await ask("get_snapshot", { tag: "mcp-node" })).tag, "mcp-node");
  assert.ok((await ask("set_ttl", { sandbox_id, ttl_seconds: 3600 })).expires_at_unix > 0);
  assert.equal((await ask("set_egress", { sandbox_id, preset: "dns-only" })).preset, "dns-only");
  assert.equal((await ask("get_egress", { sandbox_id })).preset, "dns-only");
  await ask("list_ports", { sandbox_id });
  assert.ok(JSON.stringify(await ask("tree", {})).includes(sandbox_id));
  for (const [name, state] of [["pause_sandbox", "paused"], ["resume_sandbox", "running"], ["suspend_sandbox", "suspended"], ["wake_sandbox", "running"]]) {
    assert.equal((await ask(name, { sandbox_id: other })).state, state);
  }
  await ask("restart_context", { sandbox_id: other, context: "default" });
  await ask("sandbox_logs", { sandbox_id: other });
  tags.push("mcp-node-rootfs");
  assert.equal((await ask("create_snapshot", { tag: "mcp-node-rootfs", kernel: "", rootfs: process.env.ROOTFS })).status, "ready");

  const { resources } = await client.listResources();
  for (const uri of ["forkd://tree", "forkd://sandboxes", "forkd://snapshots", `forkd://sandboxes/${sandbox_id}`, `forkd://snapshots/${tag}`]) {
    assert.ok(resources.some((r) => r.uri === uri), `${uri} is not listed`);
    assert.ok(JSON.parse((await client.readResource({ uri })).contents[0].text));
  }
  assert.ok((await client.listResourceTemplates()).resourceTemplates.length >= 3);
  const refused = await client.callTool({ name: "exec_command", arguments: { sandbox_id: "sbnope", args: ["true"] } });
  assert.ok(refused.isError && refused.content[0].text.includes("list_sandboxes"), JSON.stringify(refused));
} finally {
  for (const sandbox_id of made) await ask("kill_sandbox", { sandbox_id });
  for (const tag of tags) await ask("delete_snapshot", { tag, cascade: true }).catch((e) => console.log(String(e)));
}
assert.deepEqual([...left], [], "tools that were not tried");
await client.close();
console.log(`ok ${tools.length}`);
