// Every error code of the daemon becomes its error, what is not JSON and what breaks off is told as what it is, and nothing is asked
// for twice that may have been done. Needs no daemon, and Node, Deno or Bun: node codes.mjs MODULE SCENARIOS
import { Buffer } from "node:buffer";
import { mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { rmSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import process from "node:process";

const [module, path] = process.argv.slice(2);
const forkd = await import(module);
const { codes } = JSON.parse(await readFile(path, "utf8"));

let dir = "";
let asked = [];
let keys = new Set();
const server = createServer((request, reply) => {
  asked.push(request.url);
  if (request.headers["idempotency-key"]) keys.add(request.headers["idempotency-key"]);
  const what = request.url.split("?")[0].split("/").pop();
  request.resume();
  const say = (status, text) => reply.writeHead(status, { "Content-Length": Buffer.byteLength(text) }).end(text);
  switch (what) {
    case "broken": // an end in the middle
      reply.writeHead(200, { "Content-Length": "100" });
      reply.write("{");
      return setTimeout(() => request.socket.destroy(), 20);
    case "dropped": // no reply at all, though all was heard
      return request.on("end", () => request.socket.destroy());
    case "once": // a reply that is lost once
      if (asked.length === 1) return request.on("end", () => request.socket.destroy());
      return say(200, "[]");
    case "html":
      return say(502, "<html>bad gateway</html>");
    case "lines":
      return say(200, '{"a": "\\u2028 \u2028"}\n\n{"b":');
    case "nonsense":
      return say(200, "{}\nnonsense\n");
    case "files":
      return request.url.includes("path=missing") ? say(404, JSON.stringify({ code: "not_found", message: "none" })) : say(200, "content");
  }
  const body = { error: `said ${what}`, code: what, message: `said ${what}`, hint: "try that", request_id: "r1", console: "panic", new: 1 };
  say(400, JSON.stringify(body));
});
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));

function check(what, ok, seen) {
  if (ok) return;
  console.error(`codes: ${what}:`, seen);
  if (dir) rmSync(dir, { recursive: true });
  process.exit(1);
}

async function failure(call) {
  asked = [];
  keys = new Set();
  try {
    await call();
  } catch (e) {
    return e;
  }
  return undefined;
}

const client = new forkd.Client({ url: `http://127.0.0.1:${server.address().port}`, token: "" });
const { transport } = client;
for (const code of codes) {
  const e = await failure(() => client.request("GET", `/v1/${code}`));
  check(code, e?.constructor === forkd.errors[code] && e.code === code && e instanceof forkd.ControllerError, e);
  const parts = [e.message, e.hint, e.requestId, e.console, e.status, e.body.new];
  check(`${code}: its parts`, parts.join() === [`said ${code} (try: try that)`, "try that", "r1", "panic", 400, 1].join(), parts);
}
let e = await failure(() => client.request("GET", "/v1/html"));
check("html", e?.constructor === forkd.APIError && e.status === 502 && asked.length === 1, e);
for (const what of ["broken", "dropped"]) {
  e = await failure(() => client.request("GET", `/v1/${what}`));
  check(`${what}: a GET is tried three times`, e?.constructor === forkd.ConnectionLostError && asked.length === 3, [e, asked]);
  e = await failure(() => client.request("POST", `/v1/${what}`, { json: {} }));
  check(`${what}: a POST is sent once`, e?.constructor === forkd.ConnectionLostError && asked.length === 1, [e, asked]);
  e = await failure(() => client.request("POST", `/v1/${what}`, { json: {}, once: true }));
  check(`${what}: with a key it is sent again, with the same`, asked.length === 3 && keys.size === 1, [asked, keys]);
}
e = await failure(() => client.request("POST", "/v1/once", { json: {}, once: true }));
check("a lost reply is asked for again", e === undefined && asked.length === 2 && keys.size === 1, [e, asked, keys]);

const lines = [];
e = await failure(async () => {
  for await (const line of transport.lines("GET", "/v1/lines")) lines.push(line);
});
check("lines", e === undefined && lines.length === 1 && lines[0].a === "\u2028 \u2028", [e, lines]);
e = await failure(async () => {
  for await (const line of transport.lines("GET", "/v1/nonsense")) lines.push(line);
});
check("nonsense", e?.constructor === forkd.ConnectionLostError && lines.length === 2, [e, lines]);
const stopped = AbortSignal.abort();
e = await failure(() => client.request("GET", "/v1/x", { signal: stopped }));
check("a request that is given up", e?.name === "AbortError", e);

const sandbox = new forkd.Sandbox(client, { id: "sb1" });
dir = await mkdtemp(join(tmpdir(), "forkd-codes-"));
await writeFile(join(dir, "file"), "mine");
e = await failure(() => sandbox.files.download("missing", join(dir, "file")));
check("a failed download leaves what is there", e?.code === "not_found" && (await readFile(join(dir, "file"), "utf8")) === "mine", e);
check("a download", (await sandbox.files.download("there", join(dir, "file"))) === 7 && (await readFile(join(dir, "file"), "utf8")) === "content");
check("nothing else is left", (await readdir(dir)).join() === "file", await readdir(dir));
e = await failure(() => sandbox.files.upload(join(dir, "none"), "x"));
check("an upload of what is not there", e?.code === "ENOENT" && asked.length === 0, [e, asked]);
e = await failure(() => sandbox.commands.start("x"));
check("no WebSocket", e instanceof forkd.ForkdError, e);
e = await failure(() => new forkd.Client({ url: "http://127.0.0.1:1", token: "" }).version());
check("nobody answers", e?.constructor === forkd.NoDaemonError, e);
for (const url of ["ftp://x", "unix://relative", "http://user@x", "nonsense"]) {
  e = await failure(() => new forkd.Client({ url }));
  check(url, e?.constructor === forkd.ForkdError, e);
}
e = await failure(() => new forkd.Client({ url: "http://elsewhere.example", token: "secret" }));
check("no token travels unencrypted", e?.constructor === forkd.ForkdError && !e.message.includes("secret"), e);

await rm(dir, { recursive: true });
await client.close();
server.closeAllConnections();
server.close();
console.log("ok");
process.exit(0);
