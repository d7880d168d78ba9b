import { NotFoundError, refusal } from "./errors.js";
import { type FileEvent, type FileInfo, load } from "./models.js";
import { clean, pieces, type Transport } from "./transport.js";

/** What {@link Files.write} takes. */
export type Content = string | Uint8Array | Blob | AsyncIterable<Uint8Array> | Iterable<Uint8Array>;

export interface WriteOptions {
  /** permission bits (0o755); a file that is replaced keeps its own */
  mode?: number;
  user?: string;
  metadata?: Record<string, string>;
}

interface As {
  /** whose rights it has; the image's user if not given */
  user?: string;
}

/** `sandbox.files`. Relative paths and `~` begin in the user's home. */
export class Files {
  readonly #base: string;

  constructor(
    private readonly t: Transport,
    base: string,
  ) {
    this.#base = `${base}/files`;
  }

  /** A file's text. Throws {@link NotFoundError}, {@link DeniedError}, {@link InvalidError} (a directory). */
  async read(path: string, options: As = {}): Promise<string> {
    return new TextDecoder().decode(await this.readBytes(path, options));
  }

  /** A file's bytes. */
  async readBytes(path: string, options: As = {}): Promise<Uint8Array> {
    return this.t.bytes("GET", this.#base, { params: { path, user: options.user } });
  }

  /** A file's bytes in pieces, for what does not fit into memory. */
  async *open(path: string, options: As & { signal?: AbortSignal } = {}): AsyncGenerator<Uint8Array, void> {
    const { user, signal } = options;
    const reply = await this.t.stream("GET", this.#base, { params: { path, user }, signal });
    if (reply.body) yield* pieces(reply.body, path);
  }

  /**
   * Writes a file, which appears when it is complete; missing directories above it are made. Throws
   * {@link ExhaustedError} when the disk is full.
   */
  async write(path: string, data: Content, options: WriteOptions = {}): Promise<FileInfo> {
    const headers: Record<string, string> = { "Content-Type": "application/octet-stream" };
    for (const [name, value] of Object.entries(options.metadata ?? {})) headers[`X-Metadata-${name}`] = value;
    const reply = await this.t.request<Record<string, unknown>[]>("PUT", this.#base, {
      params: { path, user: options.user, mode: options.mode?.toString(8) },
      headers,
      body: data,
    });
    return load<FileInfo>(reply[0]!);
  }

  /** Writes a file of this machine into the sandbox, in pieces. Not in browsers. */
  async upload(local: string, path: string, options: WriteOptions = {}): Promise<FileInfo> {
    const { fileOf } = await import("./node.js");
    return this.write(path, await fileOf(local), options);
  }

  /** Writes a file of the sandbox to this machine, in pieces; returns its size in bytes. Not in browsers. */
  async download(path: string, local: string, options: As = {}): Promise<number> {
    const { replace } = await import("./node.js");
    return replace(local, this.open(path, options));
  }

  /** Describes a file. */
  async stat(path: string, options: As = {}): Promise<FileInfo> {
    return load<FileInfo>(await this.t.request("GET", `${this.#base}/stat`, { params: { path, user: options.user } }));
  }

  /** Whether there is such a file or directory. */
  async exists(path: string, options: As = {}): Promise<boolean> {
    try {
      await this.stat(path, options);
      return true;
    } catch (e) {
      if (e instanceof NotFoundError) return false;
      throw e;
    }
  }

  /** What is in a directory, down to `depth` levels. */
  async list(path = ".", options: As & { depth?: number } = {}): Promise<FileInfo[]> {
    const params = { path, depth: options.depth ?? 1, user: options.user };
    const found = await this.t.request<Record<string, unknown>[]>("GET", `${this.#base}/list`, { params });
    return found.map((f) => load<FileInfo>(f));
  }

  /** Makes a directory, and those above it. Throws {@link ExistsError}. */
  async makeDir(path: string, options: As = {}): Promise<FileInfo> {
    return load<FileInfo>(await this.t.request("POST", `${this.#base}/mkdir`, { json: clean({ path, user: options.user }) }));
  }

  /** Removes a file, or a directory with all that is in it. */
  async remove(path: string, options: As = {}): Promise<void> {
    await this.t.request("POST", `${this.#base}/remove`, { json: clean({ path, user: options.user }) });
  }

  /** Gives a file or directory another name. */
  async move(source: string, destination: string, options: As = {}): Promise<FileInfo> {
    const json = clean({ source, destination, user: options.user });
    return load<FileInfo>(await this.t.request("POST", `${this.#base}/move`, { json }));
  }

  /**
   * Changes in a directory from now on: when this returns it is being watched. The loop ends when the directory is
   * removed, and throws {@link ExhaustedError} when events were lost; leaving it, or `return()`, ends the watch.
   */
  async watch(
    path: string,
    options: As & { recursive?: boolean; entries?: boolean; signal?: AbortSignal } = {},
  ): Promise<AsyncGenerator<FileEvent, void>> {
    const params = {
      path,
      user: options.user,
      recursive: options.recursive ? "true" : undefined,
      entries: options.entries ? "true" : undefined,
    };
    const leave = new AbortController();
    const signal = options.signal ? AbortSignal.any([leave.signal, options.signal]) : leave.signal;
    const lines = this.t.lines("GET", `${this.#base}/watch`, { params, signal });
    await lines.next(); // it says that it has begun
    return changes(lines, leave);
  }
}

/** What is not begun, or waits, can be ended as well: a generator's return would wait for its next event. */
function changes(lines: AsyncGenerator<Record<string, any>, void>, leave: AbortController): AsyncGenerator<FileEvent, void> {
  const done = { done: true as const, value: undefined };
  const end = async (): Promise<typeof done> => {
    leave.abort();
    await lines.return().catch(() => {});
    return done;
  };
  return {
    async next() {
      try {
        const { done: over, value } = await lines.next();
        if (over) return done;
        if (value["error"]) throw refusal(0, value["error"], "watch");
        return { done: false, value: load<FileEvent>(value) };
      } catch (e) {
        if (leave.signal.aborted) return done;
        await end();
        throw e;
      }
    },
    return: end,
    async throw(e) {
      await end();
      throw e;
    },
    [Symbol.asyncIterator]() {
      return this;
    },
    async [Symbol.asyncDispose]() {
      await end();
    },
  };
}
