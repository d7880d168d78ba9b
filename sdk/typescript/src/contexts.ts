import { ConnectionLostError } from "./errors.js";
import { type ContextInfo, Execution, load, type Result } from "./models.js";
import { clean, Kept, segment, type Transport } from "./transport.js";

export interface RunCodeOptions {
  language?: string;
  context?: string;
  env?: Record<string, string>;
  /** seconds; none if not given. Code that takes longer ends with the error `Timeout`. */
  timeout?: number;
  onStdout?: (text: string) => void;
  onStderr?: (text: string) => void;
  onResult?: (result: Result) => void;
  /** leaves the code alone, which goes on; {@link Contexts.interrupt} ends it */
  signal?: AbortSignal;
}

/** `sandbox.contexts`: interpreters with state of their own, forked with the sandbox. */
export class Contexts {
  constructor(
    private readonly t: Transport,
    private readonly base: string,
  ) {}

  /** Those there are. */
  async list(): Promise<ContextInfo[]> {
    const found = await this.t.request<Record<string, unknown>[]>("GET", `${this.base}/contexts`);
    return found.map((c) => load<ContextInfo>(c));
  }

  /** Starts one: `python` (if not given), `shell`, `javascript`, `typescript`, or a driver of the image. */
  async create(
    options: { id?: string; language?: string; cwd?: string; user?: string; env?: Record<string, string> } = {},
  ): Promise<ContextInfo> {
    return load<ContextInfo>(await this.t.request("POST", `${this.base}/contexts`, { json: clean({ ...options }), once: true }));
  }

  /** Ends one and starts it again, with nothing in it. */
  async restart(id: string): Promise<ContextInfo> {
    return load<ContextInfo>(await this.t.request("POST", `${this.base}/contexts/${segment(id)}/restart`));
  }

  /** Interrupts what it evaluates, which then ends with `KeyboardInterrupt`. */
  async interrupt(id: string): Promise<void> {
    await this.t.request("POST", `${this.base}/contexts/${segment(id)}/interrupt`);
  }

  /** Ends one. */
  async remove(id: string): Promise<void> {
    await this.t.request("DELETE", `${this.base}/contexts/${segment(id)}`);
  }

  /** See {@link Sandbox.runCode}. */
  async run(code: string, options: RunCodeOptions = {}): Promise<Execution> {
    const json = clean({
      code,
      language: options.language,
      context: options.context,
      env: options.env,
      timeout_secs: options.timeout,
    });
    const done = new Execution();
    const kept = { stdout: new Kept(), stderr: new Kept() };
    for await (const event of this.t.lines("POST", `${this.base}/eval`, { json, signal: options.signal })) {
      const text = (name: string): string => String(event[name] ?? "");
      switch (event["type"]) {
        case "stdout":
          kept.stdout.add(text("text"));
          options.onStdout?.(text("text"));
          break;
        case "stderr":
          kept.stderr.add(text("text"));
          options.onStderr?.(text("text"));
          break;
        case "result": {
          const { type: _, ...raw } = event;
          const result = load<Result>({ is_main_result: false, ...raw });
          done.results.push(result);
          if (result.isMainResult) done.text = result.text ?? "";
          options.onResult?.(result);
          break;
        }
        case "error":
          done.error = { name: text("name"), value: text("value"), traceback: text("traceback") };
          break;
        case "number_of_executions":
          done.executionCount = Number(event["execution_count"] ?? 0);
          break;
        case "unexpected_end_of_execution":
        case "end_of_execution":
          if (event["type"] === "unexpected_end_of_execution" && !done.error) {
            throw new ConnectionLostError(`the execution broke off: ${text("text")}`);
          }
          done.ms = Number(event["ms"] ?? 0);
          done.exitCode = Number(event["exit_code"] ?? 0) || (done.error ? 1 : 0);
          done.stdout = String(kept.stdout);
          done.stderr = String(kept.stderr);
          return done;
      }
    }
    throw new ConnectionLostError("the execution's output broke off before its end");
  }
}
