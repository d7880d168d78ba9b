// Runs smoke.mjs in a browser, on a page of another origin than the daemon's: node browser.mjs PACKAGE ESBUILD CHROMIUM SNAPSHOT
// PORT, with FORKD_URL and FORKD_TOKEN. The daemon must name the origin http://127.0.0.1:PORT. Without CHROMIUM ("") the bundle is only made.
import { execFile, spawn } from "node:child_process";
import { mkdir, mkdtemp, readFile, rm, symlink, writeFile } from "node:fs/promises";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const [pkg, esbuild, chromium, snapshot, port] = process.argv.slice(2);
const dir = await mkdtemp(join(tmpdir(), "forkd-browser-"));
const options = { url: process.env.FORKD_URL, token: process.env.FORKD_TOKEN, snapshot };
await mkdir(join(dir, "node_modules"));
await symlink(resolve(pkg), join(dir, "node_modules", "forkd"));
await writeFile(
  join(dir, "page.mjs"),
  `import * as forkd from "forkd";
import { smoke } from ${JSON.stringify(fileURLToPath(new URL("smoke.mjs", import.meta.url)))};
smoke(forkd, ${JSON.stringify(options)})
  .catch((e) => e.name + ": " + e.message + "\\n" + e.stack)
  .then((text) => fetch("/result", { method: "POST", body: text }));`,
);
await promisify(execFile)(esbuild, ["--bundle", "--platform=browser", "--format=esm", `--outfile=${dir}/bundle.js`, join(dir, "page.mjs")]);
const bundle = await readFile(join(dir, "bundle.js"), "utf8");
const wrong = bundle.match(/(import|require)\s*\(?\s*["'](node:[\w/]+|ws)["']/);
if (wrong) throw new Error(`the bundle asks for ${wrong[2]}`);
let said = "ok";
let end = () => {};
if (chromium) {
  said = await new Promise((told, failed) => {
    const server = createServer((request, reply) => {
      const path = request.url;
      if (path === "/result") {
        let text = "";
        request.on("data", (piece) => (text += piece));
        request.on("end", () => told(text));
        return reply.end();
      }
      reply.setHeader("Content-Type", path === "/bundle.js" ? "text/javascript" : "text/html");
      return reply.end(path === "/bundle.js" ? bundle : '<!doctype html><script type="module" src="/bundle.js"></script>');
    });
    server.listen(Number(port), "127.0.0.1", () => {
      const args = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", `--user-data-dir=${dir}/profile`, "--remote-debugging-port=0", `http://127.0.0.1:${port}/`];
      const browser = spawn(chromium, args, { stdio: "ignore", detached: true }); // a group of its own: it is several processes
      const ended = new Promise((resolve) => browser.on("exit", resolve));
      ended.then((code) => failed(new Error(`the browser ended: ${code}`)));
      end = () => {
        try {
          process.kill(-browser.pid, "SIGKILL");
        } catch {
          // it has ended already
        }
        return ended;
      };
      setTimeout(() => failed(new Error("the page says nothing")), 200_000);
    });
  }).catch((e) => e.message);
}
await end();
await rm(dir, { recursive: true, force: true, maxRetries: 5 }).catch(() => {});
console.log(said);
process.exit(said === "ok" ? 0 : 1);
