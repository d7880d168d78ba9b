import { Client, type ClientOptions } from "./client.js";
import { APIError } from "./errors.js";
import { clean, segment } from "./transport.js";

type Raw = Record<string, any>;

/** The modes of a branch. */
export type BranchMode = "auto" | "full" | "diff" | "live";

/** What refusals are: `status`, `body` and `url` say more, and each error code has a class below it. */
export const ControllerError = APIError;
export type ControllerError = APIError;

/** The class Controller of the existing forkd's package: the REST API as plain objects, by their names there. */
export class Controller {
  readonly client: Client;

  constructor(options: Omit<ClientOptions, "timeout" | "url"> & { baseUrl?: string; timeoutMs?: number } = {}) {
    const { baseUrl, timeoutMs, ...rest } = options;
    this.client = new Client({ ...rest, url: baseUrl, timeout: (timeoutMs ?? 60_000) / 1000 });
  }

  listSnapshots(): Promise<Raw[]> {
    return this.client.request("GET", "/v1/snapshots");
  }

  async deleteSnapshot(tag: string): Promise<void> {
    await this.client.request("DELETE", `/v1/snapshots/${segment(tag)}`);
  }

  spawnSandboxes(options: {
    snapshotTag: string;
    n?: number;
    perChildNetns?: boolean;
    memoryLimitMib?: number;
    prewarm?: boolean;
    liveFork?: boolean;
    hugepages?: boolean;
  }): Promise<Raw[]> {
    const json = clean({
      snapshot_tag: options.snapshotTag,
      n: options.n ?? 1,
      per_child_netns: options.perChildNetns ?? false,
      memory_limit_mib: options.memoryLimitMib,
      prewarm: options.prewarm,
      live_fork: options.liveFork,
      hugepages: options.hugepages,
    });
    return this.client.request("POST", "/v1/sandboxes", { json, once: true });
  }

  listSandboxes(): Promise<Raw[]> {
    return this.client.request("GET", "/v1/sandboxes");
  }

  getSandbox(id: string): Promise<Raw> {
    return this.client.request("GET", `/v1/sandboxes/${segment(id)}`);
  }

  async killSandbox(id: string): Promise<void> {
    await this.client.request("DELETE", `/v1/sandboxes/${segment(id)}`);
  }

  branchSandbox(
    id: string,
    options: { tag?: string; mode?: BranchMode; diff?: boolean; measure_diff?: boolean; wait?: boolean } = {},
  ): Promise<Raw> {
    const json = clean({
      tag: options.tag,
      mode: options.mode,
      diff: options.diff && !options.mode ? true : undefined,
      measure_diff: options.measure_diff || undefined,
      wait: options.wait === false ? false : undefined,
    });
    return this.client.request("POST", `/v1/sandboxes/${segment(id)}/branch`, { json, once: true });
  }

  execCommand(id: string, args: string[], options: { timeoutSecs?: number } = {}): Promise<Raw> {
    const seconds = options.timeoutSecs ?? 30;
    const timeout = Math.max(this.client.transport.timeout, seconds + 60);
    return this.client.request("POST", `/v1/sandboxes/${segment(id)}/exec`, {
      json: { args, timeout_secs: seconds },
      timeout,
    });
  }

  evalCode(id: string, code: string): Promise<Raw> {
    return this.client.request("POST", `/v1/sandboxes/${segment(id)}/eval`, { json: { code } });
  }

  pingSandbox(id: string): Promise<Raw> {
    return this.client.request("POST", `/v1/sandboxes/${segment(id)}/ping`);
  }
}
