// WebSockets in Node: of package ws, which can hold the daemon back, and knows unix sockets.
import type { RequestOptions } from "node:http";

import { WebSocket } from "ws";

import type { Target } from "./config.js";
import { ConnectionLostError, NoDaemonError, refusal } from "./errors.js";
import { Mailbox, parsed, type Socket } from "./transport.js";

const most = 64; // messages that wait here before the daemon must

export class NodeSocket implements Socket {
  readonly #mail = new Mailbox();

  private constructor(readonly ws: WebSocket) {
    ws.on("message", (data: Buffer, binary) => {
      this.#mail.put(binary ? new Uint8Array(data) : data.toString());
      if (this.#mail.size >= most) ws.pause();
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

  async receive(): Promise<Uint8Array | Record<string, any> | null> {
    const message = await this.#mail.take();
    if (this.ws.isPaused && this.#mail.size === 0) this.ws.resume();
    return message;
  }

  send(message: unknown): void {
    this.ws.send(JSON.stringify(message));
  }

  sendBytes(data: Uint8Array): Promise<void> {
    return new Promise((resolve, reject) => {
      this.ws.send(data, (e) => (e ? reject(new ConnectionLostError(e.message, { cause: e })) : resolve()));
    });
  }

  close(): void {
    this.ws.resume();
    this.ws.close();
  }
}
