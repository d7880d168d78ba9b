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
    const reply = await this.send(method, path, options);
    const text = await whole(reply, path);
    if (!text) return undefined as T;
    try {
      return JSON.parse(text) as T;
    } catch (e) {
      throw new ConnectionLostError(`${path}: the daemon's reply is no JSON: ${text.slice(0, 200)}`, { cause: e });
    }
  }

  /** As {@link request}, but the reply itself, to be read within the time. */
  async send(method: string, path: string, options: RequestOptions = {}): Promise<Response> {
    const seconds = options.timeout ?? this.timeout;
    const clock = AbortSignal.timeout(Math.min(seconds * 1000, 2 ** 31 - 1));
    return this.#send(method, path, {
      ...options,
      signal: options.signal ? AbortSignal.any([clock, options.signal]) : clock,
    });
  }

  /** A reply that is read as it comes, however long that takes. */
  async stream(method: string, path: string, options: RequestOptions = {}): Promise<Response> {
    return this.#send(method, path, options);
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
      let rest = "";
      for await (const piece of pieces(reply.body, path)) {
        const parts = (rest + decoder.decode(piece, { stream: true })).split("\n");
        rest = parts.pop() ?? "";
        for (const line of parts) if (line) yield JSON.parse(line) as Record<string, any>;
      }
    } finally {
      leave.abort();
    }
  }

  async #send(method: string, path: string, options: RequestOptions): Promise<Response> {
    const headers: Record<string, string> = { ...options.headers };
    if (this.target.token) headers["Authorization"] = `Bearer ${this.target.token}`;
    if (options.once) headers["Idempotency-Key"] = options.once === true ? crypto.randomUUID() : options.once;
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
      let reply: Response;
      try {
        reply = await this.#fetch(full, { method, headers, body: body as BodyInit, signal: options.signal ?? null });
      } catch (e) {
        if (options.signal?.aborted && (options.signal.reason as Error)?.name !== "TimeoutError") throw e;
        if (e instanceof NoDaemonError && (await this.#start())) continue;
        if (e instanceof ForkdError) throw e;
        const timedOut = (e as Error).name === "TimeoutError" || options.signal?.aborted;
        if (!timedOut && again-- > 0) continue;
        const why = timedOut ? "the daemon did not answer in time" : `the connection broke: ${(e as Error).message}`;
        throw new ConnectionLostError(`${path}: ${why}`, { cause: e });
      }
      if (reply.ok) return reply;
      throw refusal(reply.status, parsed(await reply.text()), path);
    }
  }

  async #fetch(path: string, init: RequestInit): Promise<Response> {
    if (this.#node) return (await this.#node).fetch(path, init);
    const call = this.fetch ?? ((url: string, i: RequestInit) => fetch(url, i));
    const streamed = init.body && typeof init.body === "object" && Symbol.asyncIterator in init.body;
    return call(this.target.url + path, streamed ? ({ ...init, duplex: "half" } as RequestInit) : init);
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
  #error: Error | undefined;

  put(data: string | Uint8Array): void {
    this.#waiting.push(typeof data === "string" ? (JSON.parse(data) as Record<string, any>) : data);
    this.#wake?.();
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
    return this.#waiting.shift()!;
  }
}

/** The platform's own. It cannot hold the daemon back. */
class BrowserSocket implements Socket {
  readonly #mail = new Mailbox();

  private constructor(readonly ws: WebSocket) {
    ws.binaryType = "arraybuffer";
    ws.onmessage = (m: MessageEvent<string | ArrayBuffer>) =>
      this.#mail.put(typeof m.data === "string" ? m.data : new Uint8Array(m.data));
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
    this.ws.send(JSON.stringify(message));
  }

  sendBytes(data: Uint8Array): Promise<void> {
    this.ws.send(data);
    return Promise.resolve();
  }

  close(): void {
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

async function whole(reply: Response, path: string): Promise<string> {
  try {
    return await reply.text();
  } catch (e) {
    throw new ConnectionLostError(`${path}: the connection to the daemon broke: ${(e as Error).message}`, { cause: e });
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
