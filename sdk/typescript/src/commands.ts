import { CommandFailedError, ConnectionLostError, refusal } from "./errors.js";
import { type CommandResult, load, type Output, type ProcessInfo } from "./models.js";
import { clean, Kept, segment, type Socket, type Transport } from "./transport.js";

/** A text, which `/bin/sh -c` runs, or a program and its arguments. */
export type Command = string | readonly string[];

export interface RunOptions {
  /** seconds; 30 if not given. A command that takes longer is killed, and `timedOut` set. */
  timeout?: number;
  env?: Record<string, string>;
  cwd?: string;
  user?: string;
  stdin?: string;
  tag?: string;
  /** gets each piece of output as it comes */
  onStdout?: (text: string) => void;
  onStderr?: (text: string) => void;
  /** throw {@link CommandFailedError} for a code other than 0 */
  check?: boolean;
  /** leaves the command alone, which goes on until its time is over */
  signal?: AbortSignal;
}

export interface StartOptions {
  /** seconds; no limit if not given */
  timeout?: number;
  env?: Record<string, string>;
  cwd?: string;
  user?: string;
  tag?: string;
  /** input will come */
  stdin?: boolean;
  /** end it when this program leaves */
  killOnClose?: boolean;
}

export interface ShellOptions extends Omit<StartOptions, "stdin" | "timeout"> {
  cols?: number;
  rows?: number;
  term?: string;
}

const defaultTimeout = 30;
const grace = 60; // seconds beyond a command's own time limit that its reply is waited for

function argv(cmd: Command): readonly string[] {
  return typeof cmd === "string" ? ["/bin/sh", "-c", cmd] : cmd;
}

function result(raw: Record<string, unknown>): CommandResult {
  return load({ error: "", timed_out: false, stdout: "", stderr: "", ...raw });
}

/** `sandbox.commands`. */
export class Commands {
  constructor(
    private readonly t: Transport,
    private readonly base: string,
  ) {}

  /**
   * Runs a command and returns what it printed (the first 16 MiB of each stream), and its exit code. Throws
   * {@link InvalidError} for a program that is not there and {@link WrongStateError} in a paused or suspended sandbox.
   */
  async run(cmd: Command, options: RunOptions = {}): Promise<CommandResult> {
    const json = clean({
      args: argv(cmd),
      timeout_secs: options.timeout,
      env: options.env,
      cwd: options.cwd,
      user: options.user,
      stdin: options.stdin,
      tag: options.tag,
    });
    const path = `${this.base}/exec`;
    const timeout = (options.timeout ?? defaultTimeout) + grace;
    const done =
      options.onStdout || options.onStderr
        ? await this.#stream(path, json, options)
        : result(await this.t.request("POST", path, { json, timeout, signal: options.signal }));
    if (options.check && (done.exitCode !== 0 || done.timedOut)) throw new CommandFailedError(done);
    return done;
  }

  async #stream(path: string, json: unknown, options: RunOptions): Promise<CommandResult> {
    const kept = { stdout: new Kept(), stderr: new Kept() };
    for await (const event of this.t.lines("POST", path, { json, signal: options.signal })) {
      const text = String(event["text"] ?? "");
      switch (event["type"]) {
        case "stdout":
          kept.stdout.add(text);
          options.onStdout?.(text);
          break;
        case "stderr":
          kept.stderr.add(text);
          options.onStderr?.(text);
          break;
        case "error":
          throw refusal(0, { code: event["code"], message: text }, path);
        case "exit":
          return result({ ...event, stdout: String(kept.stdout), stderr: String(kept.stderr) });
      }
    }
    throw new ConnectionLostError("the command's output broke off before its end");
  }

  /**
   * Starts a command in the background. It goes on when this program leaves, unless `killOnClose`; come back to it with
   * {@link attach}. While you are attached and do not read, it is held back.
   */
  start(cmd: Command, options: StartOptions = {}): Promise<Process> {
    return this.#open({
      args: argv(cmd),
      env: options.env,
      cwd: options.cwd,
      user: options.user,
      tag: options.tag,
      timeout_secs: options.timeout,
      stdin: options.stdin || undefined,
      kill_on_close: options.killOnClose || undefined,
    });
  }

  /** A terminal with the user's login shell, or a command, in it. */
  shell(cmd?: Command | null, options: ShellOptions = {}): Promise<Process> {
    return this.#open({
      args: cmd ? argv(cmd) : undefined,
      shell: cmd ? undefined : true,
      tty: { cols: options.cols ?? 80, rows: options.rows ?? 24, term: options.term ?? "xterm-256color" },
      env: options.env,
      cwd: options.cwd,
      user: options.user,
      tag: options.tag,
      kill_on_close: options.killOnClose || undefined,
    });
  }

  /**
   * Comes to a process that runs, by pid or tag: also one that a branch's child has inherited. What nobody was sent comes
   * first; with `replay` all that is kept. `observe` looks on from beside: nothing is taken from others.
   */
  attach(
    process: number | string,
    options: { replay?: boolean; observe?: boolean; stdin?: boolean } = {},
  ): Promise<Process> {
    return this.#open({
      attach: String(process),
      replay: options.replay || undefined,
      observe: options.observe || undefined,
      stdin: (options.stdin && !options.observe) || undefined,
    });
  }

  async #open(start: Record<string, unknown>): Promise<Process> {
    const socket = await this.t.websocket(`${this.base}/exec`);
    try {
      socket.send(clean(start));
      return await Process.begin(socket);
    } catch (e) {
      socket.close();
      throw e;
    }
  }

  /** Processes that were started from outside; with `ended` those too that can still be asked for. */
  async list(options: { ended?: boolean } = {}): Promise<ProcessInfo[]> {
    const params = { ended: options.ended ? "true" : undefined };
    const found = await this.t.request<Record<string, unknown>[]>("GET", `${this.base}/processes`, { params });
    return found.map((p) => load<ProcessInfo>(p));
  }

  /** Signals a process, by pid or tag: its group with `group`, all that came from it with `tree`. */
  async signal(
    process: number | string,
    signal: string | number = "TERM",
    options: { group?: boolean; tree?: boolean } = {},
  ): Promise<void> {
    const json = clean({ signal: String(signal), group: options.group || undefined, tree: options.tree || undefined });
    await this.t.request("POST", `${this.base}/processes/${segment(String(process))}/signal`, { json });
  }

  /** Kills a process and all that came from it. */
  kill(process: number | string): Promise<void> {
    return this.signal(process, "KILL", { tree: true });
  }
}

/** A process that runs in a sandbox. Iterate over it for its output, or {@link wait} for its end. */
export class Process implements AsyncIterable<Output> {
  pid = 0;
  /** bytes of output that are missing here */
  lost = 0;
  #end: Record<string, unknown> | undefined;
  #first: Output | undefined;

  private constructor(private readonly socket: Socket) {}

  /** @internal */
  static async begin(socket: Socket): Promise<Process> {
    const made = new Process(socket);
    while (made.pid === 0 && !made.#end && !made.#first) made.#first = await made.#next();
    return made;
  }

  /** The next output, or undefined when something else was said: the start, the end. */
  async #next(): Promise<Output | undefined> {
    const message = await this.socket.receive();
    if (message === null) {
      throw new ConnectionLostError("the connection ended before the process; attach to it to go on");
    }
    if (message instanceof Uint8Array) {
      return { stream: message[0] === 2 ? "stderr" : "stdout", data: message.subarray(1) };
    }
    switch (message["type"]) {
      case "start":
        this.pid = Number(message["pid"]);
        break;
      case "lost":
        this.lost += Number(message["bytes"] ?? 0);
        break;
      case "error":
      case "refused":
        throw refusal(0, { code: message["code"], message: message["text"] }, "exec");
      case "exit":
        this.#end = message;
        this.socket.close();
    }
    return undefined;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Output, void> {
    if (this.#first) {
      const first = this.#first;
      this.#first = undefined;
      yield first;
    }
    while (!this.#end) {
      const output = await this.#next();
      if (output) yield output;
    }
  }

  /** Reads what is still to come and returns it (the first 16 MiB of each stream) with the exit code. */
  async wait(options: Pick<RunOptions, "onStdout" | "onStderr"> = {}): Promise<CommandResult> {
    const decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
    const kept = { stdout: new Kept(), stderr: new Kept() };
    for await (const { stream, data } of this) {
      const text = decoders[stream].decode(data, { stream: true });
      kept[stream].add(text);
      (stream === "stdout" ? options.onStdout : options.onStderr)?.(text);
    }
    for (const stream of ["stdout", "stderr"] as const) kept[stream].add(decoders[stream].decode());
    return result({ ...this.#end, stdout: String(kept.stdout), stderr: String(kept.stderr) });
  }

  /** Its exit code, once its end was read. */
  get exitCode(): number | undefined {
    return this.#end && Number(this.#end["exit_code"]);
  }

  /** Writes to its standard input, or types at its terminal. */
  async write(data: string | Uint8Array): Promise<void> {
    const bytes = typeof data === "string" ? new TextEncoder().encode(data) : data;
    for (let at = 0; at < bytes.length; at += 1 << 16) {
      const piece = bytes.subarray(at, at + (1 << 16));
      const message = new Uint8Array(piece.length + 1);
      message.set(piece, 1);
      await this.socket.sendBytes(message);
    }
  }

  /** Ends its standard input. */
  closeStdin(): void {
    this.socket.send({ type: "eof" });
  }

  /** Gives its terminal another size. */
  resize(cols: number, rows: number): void {
    this.socket.send({ type: "resize", cols, rows });
  }

  /** Signals it, or its process group. */
  signal(signal: string | number = "TERM", options: { group?: boolean } = {}): void {
    this.socket.send(clean({ type: "signal", signal: String(signal), group: options.group || undefined }));
  }

  /** Kills its process group. */
  kill(): void {
    this.signal("KILL");
  }

  /** Leaves it alone; it goes on, unless it was started with `killOnClose`. */
  disconnect(): void {
    this.socket.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    this.disconnect();
    return Promise.resolve();
  }
}
