// What needs Node's modules: unix sockets, pinned keys, starting a daemon. Loaded only where they are there.
import { Buffer } from "node:buffer";
import { execFile } from "node:child_process";
import { createHash, randomUUID } from "node:crypto";
import { constants, createReadStream, openSync, readFileSync } from "node:fs";
import { chmod, open, realpath, rename, rm, stat } from "node:fs/promises";
import * as http from "node:http";
import * as https from "node:https";
import { basename, dirname, join } from "node:path";
import { Readable } from "node:stream";
import type { ReadableStream as NodeWebStream } from "node:stream/web";
import { pipeline } from "node:stream/promises";
import * as tls from "node:tls";

import type { Target } from "./config.js";
import { environment } from "./config.js";
import { ForkdError, NoDaemonError } from "./errors.js";

const maxSocketPath = 107;

/** Requests over Node's own HTTP, which knows unix sockets and waits as long as it takes. */
export class NodeHTTP {
  readonly #agent: http.Agent;
  readonly options: http.RequestOptions;

  constructor(readonly target: Target) {
    const secure = !target.socket && target.url.startsWith("https:");
    // Idle connections end before the daemon ends them, in the middle of a request perhaps.
    const kept = { keepAlive: true, timeout: 60_000 };
    this.#agent = secure ? new https.Agent(kept) : new http.Agent(kept);
    this.options = target.socket ? { socketPath: reachable(target.socket) } : {};
    if (!secure) return;
    if (target.fingerprint) this.options = pinned(target);
    else if (target.ca) this.options = { ca: readFileSync(target.ca) } as https.RequestOptions;
  }

  fetch(path: string, init: RequestInit & { body?: any }): Promise<Response> {
    const url = new URL(this.target.url);
    const request = url.protocol === "https:" ? https.request : http.request;
    const headers = Object.fromEntries(new Headers(init.headers));
    return new Promise((resolve, reject) => {
      const sent = request(
        {
          ...this.options,
          ...(this.options.createConnection ? {} : { agent: this.#agent }),
          hostname: url.hostname.replace(/^\[|\]$/g, ""),
          port: url.port || undefined,
          path,
          method: init.method,
          headers,
          signal: init.signal ?? undefined,
        },
        (reply) => resolve(response(reply)),
      );
      sent.on("error", (e: NodeJS.ErrnoException) => reject(fault(e, this.target)));
      send(init.body, sent).catch(reject);
    });
  }

  close(): void {
    this.#agent.destroy();
  }
}

/** An error before a connection is one after which nothing was done. */
function fault(e: NodeJS.ErrnoException, target: Target): Error {
  if (e.name === "AbortError" || e instanceof ForkdError) return e;
  const never = ["ECONNREFUSED", "ENOENT", "ENOTFOUND", "EHOSTUNREACH", "ENETUNREACH", "EACCES", "ETIMEDOUT"];
  if (e.syscall === "connect" || never.includes(e.code ?? "")) {
    const where = target.socket ? `unix://${target.socket}` : target.url;
    return new NoDaemonError(`no daemon answers at ${where}: ${e.message}`, { cause: e });
  }
  return e;
}

async function send(body: unknown, to: http.ClientRequest): Promise<void> {
  if (body === undefined || body === null) to.end();
  else if (typeof body === "string" || body instanceof Uint8Array) to.end(body);
  else if (body instanceof Blob) await pipeline(Readable.fromWeb(body.stream() as NodeWebStream), to);
  else await pipeline(Readable.from(body as AsyncIterable<Uint8Array>), to).catch(() => {}); // the reply says why
}

function response(reply: http.IncomingMessage): Response {
  const headers = new Headers();
  for (let i = 0; i + 1 < reply.rawHeaders.length; i += 2) {
    headers.append(reply.rawHeaders[i]!, reply.rawHeaders[i + 1]!);
  }
  const status = reply.statusCode ?? 500;
  const empty = status === 204 || status === 304;
  if (empty) reply.resume();
  return new Response(empty ? null : (Readable.toWeb(reply) as ReadableStream), { status, headers });
}

/** A name for a socket that the kernel takes. */
export function reachable(path: string): string {
  if (Buffer.byteLength(path) <= maxSocketPath) return path;
  const fd = openSync(dirname(path), constants.O_RDONLY | constants.O_DIRECTORY); // for as long as this program runs
  return `/proc/self/fd/${fd}/${basename(path)}`;
}

/** Connections to whoever holds the key of that fingerprint, whatever it is called. */
function pinned(target: Target): http.RequestOptions {
  const want = target.fingerprint.startsWith("sha256//")
    ? Buffer.from(target.fingerprint.slice(8), "base64")
    : Buffer.from(target.fingerprint.replace(/^sha256:/, ""), "hex");
  if (want.length !== 32) throw new ForkdError("the fingerprint is not understood: give it as the daemon prints it: sha256//…");
  const url = new URL(target.url);
  return {
    createConnection: (_options, connected) => {
      const socket = tls.connect({ host: url.hostname, port: Number(url.port || 443), rejectUnauthorized: false });
      socket.once("error", (e) => connected(e as Error, socket));
      socket.once("secureConnect", () => {
        const key = socket.getPeerX509Certificate()!.publicKey.export({ type: "spki", format: "der" });
        const got = createHash("sha256").update(key).digest();
        if (got.equals(want)) return connected(null, socket);
        const e = new ForkdError(
          `no secure connection to the daemon at ${target.url}: its fingerprint is sha256//${got.toString("base64")}`,
        );
        socket.destroy();
        return connected(e, socket);
      });
      return undefined;
    },
  };
}

/** Starts a daemon in the background and returns when it answers. */
export function start(target: Target): Promise<void> {
  const program = environment()["FORKD_BIN"] || "forkd";
  const args = [...(target.home ? ["--home", target.home] : []), "daemon", "start"];
  return new Promise((resolve, reject) => {
    execFile(program, args, { timeout: 90_000 }, (e, _out, complaint) => {
      if (!e) return resolve();
      const missing = (e as NodeJS.ErrnoException).code === "ENOENT";
      const why = missing
        ? "there is no program forkd on the PATH to start one with; install it, set FORKD_BIN to it, or set FORKD_URL and FORKD_TOKEN to a daemon elsewhere"
        : `none could be started: ${complaint.trim() || e.message}`;
      reject(new NoDaemonError(`no daemon answers, and ${why}`));
    });
  });
}

/** A file of this machine, in pieces. One that is not there is told before anything is sent. */
export async function fileOf(path: string): Promise<AsyncIterable<Uint8Array>> {
  await stat(path);
  return createReadStream(path, { highWaterMark: 1 << 18 });
}

/** Writes a file of this machine, which takes its place when it is complete; returns its size in bytes. */
export async function replace(path: string, content: AsyncIterable<Uint8Array>): Promise<number> {
  const target = await realpath(path).catch(() => path); // what a link names, and not the link
  const mode = (await stat(target).catch(() => undefined))?.mode;
  const part = join(dirname(target), `.${basename(target)}.${randomUUID().slice(0, 8)}`);
  let size = 0;
  const file = await open(part, "wx");
  try {
    for await (const piece of content) {
      await file.writeFile(piece);
      size += piece.length;
    }
    await file.close();
    if (mode !== undefined) await chmod(part, mode & 0o7777);
    await rename(part, target);
  } catch (e) {
    await file.close().catch(() => {});
    await rm(part, { force: true });
    throw e;
  }
  return size;
}
