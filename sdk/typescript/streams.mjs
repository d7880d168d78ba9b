// Long streams in constant memory: node streams.mjs MODULE SNAPSHOT MIB. Prints how much memory was taken meanwhile.
const [module, snapshot, size] = process.argv.slice(2);
const forkd = await import(module);
const mib = Number(size);
const piece = new TextEncoder().encode("0123456789abcde\n".repeat(65536)); // 1 MiB
const mostGrowth = 160; // MiB: a collector takes its time

function check(what, seen) {
  if (seen !== mib << 20 && seen !== mib * 2 ** 20) throw new Error(`streams: ${what}: ${seen} bytes`);
}

let most = 0;
const memory = () => process.memoryUsage().rss / 2 ** 20;
const clock = setInterval(() => (most = Math.max(most, memory())), 50);
const before = memory();
await forkd.Sandbox.with(snapshot, async (sb) => {
  async function* content() {
    for (let i = 0; i < mib; i++) yield piece;
  }
  check("written", (await sb.files.write("/tmp/long", content())).size);
  let seen = 0;
  for await (const part of sb.files.open("/tmp/long")) seen += part.length;
  check("read", seen);
  seen = 0;
  for await (const { data } of await sb.commands.start(["cat", "/tmp/long"])) seen += data.length;
  check("printed", seen);
  seen = 0;
  const kept = await sb.commands.run("cat /tmp/long", { timeout: 3600, onStdout: (text) => (seen += text.length) });
  check("passed on", seen);
  if (kept.stdout.length !== Math.min(mib, 16) << 20) throw new Error(`streams: ${kept.stdout.length} bytes are kept`);
});
clearInterval(clock);
const grown = Math.round(most - before);
console.log(`typescript: ${mib} MiB each way, ${grown} MiB more memory`);
process.exit(grown > mostGrowth ? 1 : 0);
