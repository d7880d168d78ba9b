// WebSockets in Node: of package ws, which can hold the daemon back, and knows unix sockets.
import type { RequestOptions } from "node:http";

import { WebSocket } from "ws";

import type { Target } from "./config.js";
import { ConnectionLostError, NoDaemonError, refusal } from "./errors.js";
import { left, Mailbox, parsed, type Socket } from "./transport.js";

const most = 64; // messages that wait here before the daemon must
const mostWaiting = 64 << 20; // bytes, where it cannot be made to
const closeTimeout = 1000; // ms

export class NodeSocket implements Socket {
  readonly #mail = new Mailbox();
  #closed = false;

  private constructor(readonly ws: WebSocket) {
    ws.on("message", (data: Buffer, binary) => {
      if (this.#closed) return;
      try {
        this.#mail.put(binary ? new Uint8Array(data) : data.toString());
      } catch (e) {
        this.#mail.end(e as Error);
        ws.terminate();
      }
      if (this.#mail.size >= most) this.#hold();
    });
    ws.on("close", () => this.#mail.end());
  }

  static open(target: Target, options: RequestOptions, path: string): Promise<Socket> {
    const url = options.socketPath ? `ws+unix://${options.socketPath}:${path}` : target.url.replace(/^http/, "ws") + path;
    const { socketPath: _, ...rest } = options;
    const ws = new WebSocket(url, ["forkd.exec.v1"], {
      ...rest,
      headers: { Host: "forkd", ...(target.token ? { Authorization: `Bearer ${target.token}` } : {}) },
      perMessageDeflate: false,
      handshakeTimeout: 60_000,
      maxPayload: 16 << 20,
    });
    return new Promise((resolve, reject) => {
      const made = new NodeSocket(ws);
      ws.once("open", () => resolve(made));
      ws.on("error", (e: NodeJS.ErrnoException) => {
        const lost = e.syscall === "connect" ? NoDaemonError : ConnectionLostError;
        const error = new lost(`the connection to the daemon failed: ${e.message}`, { cause: e });
        reject(error);
        made.#mail.end(error);
      });
      ws.once("unexpected-response", (_request, reply) => {
        const text: Buffer[] = [];
        reply.on("data", (piece: Buffer) => text.push(piece));
        reply.on("end", () => {
          reject(refusal(reply.statusCode ?? 0, parsed(Buffer.concat(text).toString()), path));
          ws.terminate();
        });
      });
    });
  }

  #hold(): void {
    if (typeof this.ws.pause === "function") return this.ws.pause();
    if (this.#mail.bytes <= mostWaiting) return; // Bun's has no pause.
    this.#mail.end(new ConnectionLostError("output came faster than it was read, and was left; attach to the process to go on"));
    this.close();
  }

  async receive(): Promise<Uint8Array | Record<string, any> | null> {
    const message = await this.#mail.take();
    if (this.ws.isPaused && this.#mail.size === 0) this.ws.resume();
    return message;
  }

  send(message: unknown): void {
    if (this.ws.readyState !== WebSocket.OPEN) throw left();
    this.ws.send(JSON.stringify(message));
  }

  sendBytes(data: Uint8Array): Promise<void> {
    return new Promise((resolve, reject) => {
      this.ws.send(data, (e) => (e ? reject(new ConnectionLostError(e.message, { cause: e })) : resolve()));
    });
  }

  close(): void {
    if (this.#closed) return;
    this.#closed = true;
    if (this.ws.isPaused) this.ws.resume();
    this.ws.close();
    // Whoever does not take our input, as the process does not, does not take a goodbye either.
    const late = setTimeout(() => this.ws.terminate(), closeTimeout);
    late.unref?.();
    this.ws.once("close", () => clearTimeout(late));
  }
}
