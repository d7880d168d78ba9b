// Takes much output of a command, and a file both ways, with forkd's TypeScript SDK. Prints a line of JSON for each: how many
// bytes there were, and by how much this program's memory grew.
const [sdk, id, size, local] = process.argv.slice(2);
const { Sandbox } = await import(sdk);
const sandbox = await Sandbox.connect(id);

async function told(what, take) {
  const highest = () => process.resourceUsage().maxRSS;
  const before = highest();
  const bytes = await take();
  console.log(JSON.stringify({ what, bytes, grown: (highest() - before) * 1024 }));
}

await sandbox.commands.run("true", { onStdout: console.log });
await told("iteration", async () => {
  let bytes = 0;
  for await (const out of await sandbox.commands.start(`head -c ${size} /dev/zero`)) bytes += out.data.length;
  return bytes;
});
await told("callback", async () => {
  let bytes = 0;
  await sandbox.commands.run(`head -c ${size} /dev/zero | tr '\\0' x`, { timeout: 7200, onStdout: (text) => void (bytes += text.length) });
  return bytes;
});
await told("upload", async () => {
  await sandbox.files.upload(local, "/tmp/up");
  return (await sandbox.files.stat("/tmp/up")).size;
});
await told("download", () => sandbox.files.download("/tmp/up", `${local}.back`));
await sandbox.files.remove("/tmp/up");
process.exit(0);
