import { find } from "./config.js";
import { type Event, load, type Token, type TreeNode, type VersionInfo } from "./models.js";
import { clean, type Fetch, type RequestOptions, Transport } from "./transport.js";

export interface ClientOptions {
  /** `unix:///path`, `http://host:port` or `https://host:port`; else FORKD_URL, FORKD_HOST, this user's daemon */
  url?: string;
  /** what the daemon wants over TCP; else FORKD_TOKEN */
  token?: string;
  /** seconds that a reply is waited for where nothing else says how long; 300 if not given */
  timeout?: number;
  /** used instead of Node's own HTTP, and in browsers the platform's */
  fetch?: Fetch;
}

/**
 * A daemon: the one that `url` names, else FORKD_URL or FORKD_HOST, else this user's, which is started if need be.
 * FORKD_CA or FORKD_FINGERPRINT say how a daemon over https is trusted.
 */
export class Client {
  readonly transport: Transport;

  constructor(options: ClientOptions = {}) {
    this.transport = new Transport(find(options.url, options.token), options.timeout ?? 300, options.fetch);
  }

  /** Who the daemon is. */
  async version(): Promise<VersionInfo> {
    return load<VersionInfo>(await this.transport.request("GET", "/version"));
  }

  /** What its host offers, check by check. */
  async host(): Promise<Record<string, unknown>> {
    return this.transport.request("GET", "/v1/host");
  }

  /** Images, snapshots and sandboxes as a family tree. */
  async tree(options: { steps?: boolean } = {}): Promise<TreeNode[]> {
    const params = { all: options.steps ? "true" : undefined };
    const found = await this.transport.request<Record<string, unknown>[]>("GET", "/v1/tree", { params });
    return found.map((n) => load<TreeNode>(n));
  }

  /**
   * What happens, as it happens: without end if `follow` (which it is if not given), else what is kept. `types` are
   * `sandbox` or `sandbox.forked`, …; `since` the sequence of the last event that you have seen, `tail` how many of
   * those before to begin with.
   */
  async *events(
    options: {
      types?: string[];
      sandbox?: string;
      snapshot?: string;
      since?: number;
      tail?: number;
      follow?: boolean;
      signal?: AbortSignal;
    } = {},
  ): AsyncGenerator<Event, void> {
    const { sandbox, snapshot, since, tail } = options;
    const params: [string, string][] = (options.types ?? []).map((t) => ["type", t]);
    for (const [name, value] of Object.entries(clean({ sandbox, snapshot, since, tail }))) params.push([name, String(value)]);
    params.push(["follow", String(options.follow ?? true)]);
    for await (const event of this.transport.lines("GET", "/v1/events", { params, signal: options.signal })) {
      yield load<Event>(event);
    }
  }

  /** What every sandbox costs its host (docs/api.md: Usage). */
  async usage(options: { labels?: Record<string, string> } = {}): Promise<Record<string, unknown>[]> {
    const params = Object.entries(options.labels ?? {}).map(([k, v]): [string, string] => ["label", `${k}=${v}`]);
    return this.transport.request("GET", "/v1/usage", { params });
  }

  /** Makes a token: of scope `read`, `use` (if not given), `manage` or `admin`; `ttl` in seconds, none: for ever. */
  async createToken(
    options: { name?: string; scope?: string; sandbox?: string; ttl?: number } = {},
  ): Promise<Token> {
    const { name, scope, sandbox, ttl } = options;
    const json = clean({ name, scope: scope ?? "use", sandbox, ttl_seconds: ttl });
    return load<Token>(await this.transport.request("POST", "/v1/tokens", { json }));
  }

  /** Any request of docs/api.md, for what has no method here. */
  async request<T = any>(method: string, path: string, options: RequestOptions = {}): Promise<T> {
    return this.transport.request<T>(method, path, options);
  }

  /** Closes its connections. */
  async close(): Promise<void> {
    await this.transport.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}

const defaults = new Map<string, Client>();

/** The client of the daemon that the environment names, one for all. */
export function defaultClient(): Client {
  const key = JSON.stringify(find());
  let client = defaults.get(key);
  if (!client) defaults.set(key, (client = new Client()));
  return client;
}
