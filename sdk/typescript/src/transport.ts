import { type Target, hasNode } from "./config.js";
import { ConnectionLostError, ForkdError, NoDaemonError, refusal } from "./errors.js";
import type { NodeHTTP } from "./node.js";

/** What a request can have. */
export interface RequestOptions {
  json?: unknown;
  params?: Record<string, string | number | undefined> | [string, string][];
  headers?: Record<string, string>;
  body?: unknown;
  /** seconds; none: the client's */
  timeout?: number;
  /** done once however often it is sent; a text is a key of one's own */
  once?: boolean | string;
  signal?: AbortSignal;
}

const longestLine = 256 << 20; // of a stream: more than anything that the daemon says at once
const mostWaiting = 64 << 20; // bytes for who does not read, where the daemon cannot be held back
const mostKept = 16 << 20; // bytes

/** The beginning of a text that comes in pieces: as much as the daemon keeps where it answers in one. */
export class Kept {
  #pieces: string[] = [];
  #room = mostKept;

  add(text: string): void {
    if (this.#room <= 0 || !text) return;
    const bytes = new TextEncoder().encode(text);
    if (bytes.length <= this.#room) this.#pieces.push(text);
    else this.#pieces.push(new TextDecoder().decode(bytes.subarray(0, this.#room), { stream: true }));
    this.#room -= bytes.length;
  }

  toString(): string {
    return this.#pieces.join("");
  }
}

/** The fetch that is used where there is no Node. */
export type Fetch = (url: string, init: RequestInit) => Promise<Response>;

/** HTTP and WebSockets to one daemon. What made nothing, or can be asked for again by its key, is tried twice more. */
export class Transport {
  #node: Promise<NodeHTTP> | undefined;
  #starting: Promise<void> | undefined;
  #mayStart: boolean;

  constructor(
    readonly target: Target,
    readonly timeout: number,
    readonly fetch?: Fetch,
  ) {
    this.#mayStart = target.mayStart;
    if (!fetch && hasNode()) this.#node = import("./node.js").then((m) => new m.NodeHTTP(target));
    this.#node?.catch(() => {}); // told by the first request
  }

  async close(): Promise<void> {
    (await this.#node)?.close();
  }

  /** One request, and the reply's object; undefined if it has none. */
  async request<T = any>(method: string, path: string, options: RequestOptions = {}): Promise<T> {
    const text = await this.#timed(method, path, options, (reply) => reply.text());
    return (text ? object(text, path) : undefined) as T;
  }

  /** As {@link request}, but what the reply has, whatever that is. */
  async bytes(method: string, path: string, options: RequestOptions = {}): Promise<Uint8Array> {
    return this.#timed(method, path, options, async (reply) => new Uint8Array(await reply.arrayBuffer()));
  }

  #timed<T>(method: string, path: string, options: RequestOptions, read: (reply: Response) => Promise<T>): Promise<T> {
    const seconds = options.timeout ?? this.timeout;
    const clock = AbortSignal.timeout(Math.min(seconds * 1000, 2 ** 31 - 1));
    const signal = options.signal ? AbortSignal.any([clock, options.signal]) : clock;
    return this.#send(method, path, { ...options, signal }, read);
  }

  /** A reply that is read as it comes, however long that takes. */
  async stream(method: string, path: string, options: RequestOptions = {}): Promise<Response> {
    return this.#send(method, path, options, (reply) => Promise.resolve(reply));
  }

  /** The objects of a reply that has one a line. Leaving the loop ends the request. */
  async *lines(method: string, path: string, options: RequestOptions = {}): AsyncGenerator<Record<string, any>, void> {
    const leave = new AbortController();
    const signal = options.signal ? AbortSignal.any([leave.signal, options.signal]) : leave.signal;
    const headers = { ...options.headers, Accept: "application/x-ndjson" };
    try {
      const reply = await this.stream(method, path, { ...options, headers, signal });
      if (!reply.body) return;
      const decoder = new TextDecoder();
      let begun: string[] = []; // pieces of a line whose end has not come
      let size = 0;
      for await (const piece of pieces(reply.body, path)) {
        const [first = "", ...others] = decoder.decode(piece, { stream: true }).split("\n");
        begun.push(first);
        size += first.length;
        if (size > longestLine) throw new ConnectionLostError(`${path}: the daemon's reply has no end of line in ${size} characters`);
        for (const other of others) {
          const line = begun.join("");
          if (line) yield object(line, path) as Record<string, any>;
          begun = [other];
          size = other.length;
        }
      }
    } finally {
      leave.abort();
    }
  }

  async #send<T>(
    method: string,
    path: string,
    options: RequestOptions,
    read: (reply: Response) => Promise<T>,
  ): Promise<T> {
    const headers: Record<string, string> = { ...options.headers };
    if (this.target.token) headers["Authorization"] = `Bearer ${this.target.token}`;
    if (options.once) headers["Idempotency-Key"] = options.once === true ? key() : options.once;
    let body = options.body;
    if (options.json !== undefined) {
      headers["Content-Type"] = "application/json";
      body = JSON.stringify(options.json);
    }
    const query = new URLSearchParams();
    const params = Array.isArray(options.params) ? options.params : Object.entries(options.params ?? {});
    for (const [name, value] of params) if (value !== undefined) query.append(name, String(value));
    const full = query.size > 0 ? `${path}?${query}` : path;
    let again = options.once || method === "GET" || method === "HEAD" ? 2 : 0;
    for (;;) {
      try {
        const reply = await this.#fetch(full, { method, headers, body: body as BodyInit, signal: options.signal ?? null });
        if (!reply.ok) throw refusal(reply.status, parsed(await reply.text()), path);
        return await read(reply);
      } catch (e) {
        if (options.signal?.aborted && (options.signal.reason as Error)?.name !== "TimeoutError") throw e;
        if (e instanceof NoDaemonError && (await this.#start())) continue;
        if (e instanceof ForkdError) throw e;
        const timedOut = (e as Error).name === "TimeoutError" || options.signal?.aborted;
        if (!timedOut && again-- > 0) continue;
        const why = timedOut ? "the daemon did not answer in time" : `the connection broke: ${(e as Error).message}`;
        throw new ConnectionLostError(`${path}: ${why}`, { cause: e });
      }
    }
  }

  async #fetch(path: string, init: RequestInit): Promise<Response> {
    if (this.#node) return (await this.#node).fetch(path, init);
    const call = this.fetch ?? ((url: string, i: RequestInit) => fetch(url, i));
    return call(this.target.url + path, { ...init, body: await sendable(init.body) });
  }

  async #start(): Promise<boolean> {
    if (!this.#mayStart) return false;
    this.#starting ??= import("./node.js").then((m) => m.start(this.target));
    await this.#starting;
    this.#mayStart = false; // once is enough to show that it does not stay
    return true;
  }

  /** A WebSocket of the daemon's. */
  async websocket(path: string): Promise<Socket> {
    if (this.#node && this.#mayStart) await this.request("GET", "/version");
    if (!this.#node) return BrowserSocket.open(this.target, path);
    const { NodeSocket } = await import("./socket.js");
    return NodeSocket.open(this.target, (await this.#node).options, path);
  }
}

const mostBuffered = 1 << 20; // bytes of input that wait to be sent

/** What is said to a process that does not listen. */
export function left(): ConnectionLostError {
  return new ConnectionLostError("nobody listens: the process has ended, or it was left; attach to it to go on");
}

/** One WebSocket: messages are bytes or objects. */
export interface Socket {
  /** The next message, or null after the last. */
  receive(): Promise<Uint8Array | Record<string, any> | null>;
  send(message: unknown): void;
  sendBytes(data: Uint8Array): Promise<void>;
  close(): void;
}

/** Messages that wait for who asks for them. */
export class Mailbox {
  readonly #waiting: (Uint8Array | Record<string, any>)[] = [];
  #wake: (() => void) | undefined;
  #ended = false;
  #bytes = 0;
  #error: Error | undefined;

  put(data: string | Uint8Array): void {
    this.#waiting.push(typeof data === "string" ? (object(data, "exec") as Record<string, any>) : data);
    this.#bytes += data.length;
    this.#wake?.();
  }

  get bytes(): number {
    return this.#bytes;
  }

  end(error?: Error): void {
    this.#ended = true;
    this.#error ??= error;
    this.#wake?.();
  }

  get size(): number {
    return this.#waiting.length;
  }

  async take(): Promise<Uint8Array | Record<string, any> | null> {
    while (this.#waiting.length === 0) {
      if (this.#error) throw this.#error;
      if (this.#ended) return null;
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
    const message = this.#waiting.shift()!;
    if (message instanceof Uint8Array) this.#bytes -= message.length;
    if (this.#waiting.length === 0) this.#bytes = 0;
    return message;
  }
}

/** The platform's own. It cannot hold the daemon back. */
class BrowserSocket implements Socket {
  readonly #mail = new Mailbox();
  #closed = false;

  private constructor(readonly ws: WebSocket) {
    ws.binaryType = "arraybuffer";
    ws.onmessage = (m: MessageEvent<string | ArrayBuffer>) => {
      if (this.#closed) return;
      this.#mail.put(typeof m.data === "string" ? m.data : new Uint8Array(m.data));
      if (this.#mail.bytes <= mostWaiting) return;
      this.#mail.end(new ConnectionLostError("output came faster than it was read, and was left; attach to the process to go on"));
      this.close();
    };
    ws.onclose = () => this.#mail.end();
  }

  static open(target: Target, path: string): Promise<Socket> {
    const protocols = ["forkd.exec.v1", ...(target.token ? [`forkd.token.${target.token}`] : [])];
    const ws = new WebSocket(target.url.replace(/^http/, "ws") + path, protocols);
    return new Promise((resolve, reject) => {
      const made = new BrowserSocket(ws);
      ws.onopen = () => resolve(made);
      ws.onerror = () => reject(new ConnectionLostError("the daemon refused the WebSocket, or does not answer"));
    });
  }

  receive(): Promise<Uint8Array | Record<string, any> | null> {
    return this.#mail.take();
  }

  send(message: unknown): void {
    if (this.ws.readyState !== WebSocket.OPEN) throw left();
    this.ws.send(JSON.stringify(message));
  }

  async sendBytes(data: Uint8Array): Promise<void> {
    for (;;) {
      if (this.ws.readyState !== WebSocket.OPEN) throw left();
      if (this.ws.bufferedAmount < mostBuffered) break;
      await new Promise((resolve) => setTimeout(resolve, 20)); // nothing says when there is room again
    }
    this.ws.send(data);
  }

  close(): void {
    this.#closed = true;
    this.ws.close();
  }
}

/** A body's pieces; what breaks off is told as what it is. */
export async function* pieces(body: ReadableStream<Uint8Array>, path: string): AsyncGenerator<Uint8Array, void> {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((e: unknown) => {
        if ((e as Error).name === "AbortError") throw e;
        throw new ConnectionLostError(`${path}: the connection to the daemon broke: ${(e as Error).message}`, { cause: e });
      });
      if (done) return;
      yield value;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/** What any fetch takes: browsers send no streams to who speaks HTTP/1, so those are put together first. */
async function sendable(body: unknown): Promise<BodyInit | null> {
  if (body === undefined || body === null) return null;
  if (typeof body === "string" || body instanceof Uint8Array || body instanceof Blob) return body as BodyInit;
  const parts: BlobPart[] = [];
  for await (const piece of body as AsyncIterable<Uint8Array<ArrayBuffer>>) parts.push(piece);
  return new Blob(parts);
}

/** A key that nobody else has. Pages of http: lack crypto.randomUUID. */
function key(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");
}

function object(text: string, path: string): unknown {
  try {
    return JSON.parse(text) as unknown;
  } catch (e) {
    throw new ConnectionLostError(`${path}: the daemon's reply is no JSON: ${text.slice(0, 200)}`, { cause: e });
  }
}

export function parsed(text: string): unknown {
  try {
    return JSON.parse(text) as unknown;
  } catch {
    return text.slice(0, 2000);
  }
}

/** A request's object: what is not given is left out, as the daemon wants it. */
export function clean(fields: Record<string, unknown>): Record<string, any> {
  return Object.fromEntries(Object.entries(fields).filter(([, v]) => v !== undefined && v !== null));
}

/** Text as one part of a path. */
export function segment(text: string): string {
  return encodeURIComponent(text);
}
