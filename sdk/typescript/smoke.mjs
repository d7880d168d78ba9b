// What works wherever the package does, also in browsers: smoke(FORKD, {url, token, snapshot}) with the imported package.
function check(what, ok, seen) {
  if (!ok) throw new Error(`${what}: ${JSON.stringify(seen)}`);
}

export async function smoke(forkd, { url, token, snapshot }) {
  const client = new forkd.Client({ url, token });
  const stranger = new forkd.Client({ url, token: "fkd_tk00000000_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" });
  const refused = await stranger.request("GET", "/v1/sandboxes").catch((e) => e);
  check("a wrong token", refused instanceof forkd.UnauthorizedError && refused.requestId, refused.message);
  await forkd.Sandbox.with(
    snapshot,
    async (sb) => {
      const told = [];
      let done = await sb.commands.run("echo out; echo err >&2; exit 3", { onStdout: (text) => told.push(text) });
      check("a command", done.stdout === "out\n" && done.stderr === "err\n" && done.exitCode === 3 && told.join("") === "out\n", done);

      async function* content() {
        for (let i = 0; i < 3; i++) yield new Uint8Array(100_000).fill(65 + i);
      }
      const file = await sb.files.write("/tmp/f", content(), { metadata: { origin: "smoke" } });
      check("a file in pieces", file.size === 300_000 && file.metadata.origin === "smoke", file);
      let size = 0;
      for await (const piece of sb.files.open("/tmp/f")) size += piece.length;
      check("it comes in pieces", size === 300_000, size);

      const process = await sb.commands.start("read x; echo got $x; cat >&2", { stdin: true });
      await process.write("abc\nrest");
      process.closeStdin();
      done = await process.wait();
      check("a process", done.stdout === "got abc\n" && done.stderr === "rest" && done.exitCode === 0, done);
      const none = await sb.commands.start(["no-such-program"]).catch((e) => e);
      check("no such program", none instanceof forkd.InvalidError, none.message);

      const changes = await sb.files.watch("/tmp");
      const first = changes.next();
      await sb.files.makeDir("/tmp/made");
      check("a change", (await first).value.name === "made", await first);
      const waiting = changes.next(); // ended while it waits
      await changes.return();
      check("a watch is ended", (await waiting).done === true, await waiting);

      const code = await sb.runCode("x = 6\nx * 7");
      check("code", code.text === "42" && code.error === null, code);
      const follow = new AbortController();
      for await (const event of client.events({ sandbox: sb.id, tail: 1, signal: follow.signal })) {
        check("an event", event.sandboxId === sb.id, event);
        break;
      }
      const left = await sb.commands.run("sleep 30", { signal: AbortSignal.timeout(300), onStdout: () => {} }).catch((e) => e);
      check("a call that is left", left instanceof Error && /abort|timed? ?out|in time/i.test(`${left.name} ${left.message}`), `${left.name} ${left.message}`);
    },
    { client, labels: { suite: "smoke" } },
  );
  check("it is gone", (await forkd.Sandbox.list({ client, labels: { suite: "smoke" } })).length === 0);
  await client.close();
  await stranger.close();
  return "ok";
}

// By itself: RUNTIME smoke.mjs MODULE SNAPSHOT, with FORKD_URL and FORKD_TOKEN.
if (globalThis.process?.argv?.[1]?.endsWith("smoke.mjs")) {
  const { FORKD_URL: url, FORKD_TOKEN: token } = globalThis.process.env;
  console.log(await smoke(await import(globalThis.process.argv[2]), { url, token, snapshot: globalThis.process.argv[3] }));
  globalThis.process.exit(0);
}
