import { type Client, defaultClient } from "./client.js";
import { Commands } from "./commands.js";
import { Contexts, type RunCodeOptions } from "./contexts.js";
import { ConnectionLostError, ForkdError, NotFoundError, refusal } from "./errors.js";
import { Files } from "./files.js";
import { type Execution, type ImageInfo, load, type PortInfo, type SandboxInfo, type SnapshotInfo, type Token } from "./models.js";
import { tar } from "./tar.js";
import { clean, segment } from "./transport.js";

type Raw = Record<string, any>;

export interface ForkOptions {
  labels?: Record<string, string>;
  env?: Record<string, string>;
  /** seconds that it lives; until it is killed if not given */
  ttl?: number;
  /** what happens then: kill (if not given), pause, suspend */
  onTtl?: string;
  /** seconds without a call into it */
  idle?: number;
  /** what happens then: suspend (if not given), pause, kill */
  onIdle?: string;
  /** a call into it resumes or wakes it first */
  autoResume?: boolean;
  /** docs/api.md: Limits */
  limits?: Record<string, unknown>;
  /** what it may reach: a preset (none, packages, …), or more than that */
  egress?: string | Egress;
}

/** What a sandbox may reach (docs/api.md: Egress). */
export interface Egress {
  preset?: string;
  allow?: string[];
  deny?: string[];
  budgetBytes?: number;
}

function policy(e: Egress): Raw {
  return clean({ preset: e.preset, allow: e.allow, deny: e.deny, budget_bytes: e.budgetBytes });
}

export interface CreateOptions extends ForkOptions {
  idempotencyKey?: string;
  client?: Client;
  /** other fields of the request (docs/api.md: ForkRequest), by their names there */
  more?: Record<string, unknown>;
}

function wishes(o: ForkOptions): Raw {
  return clean({
    labels: o.labels,
    env: o.env,
    ttl_seconds: o.ttl,
    ttl_action: o.onTtl,
    idle_seconds: o.idle,
    idle_action: o.onIdle,
    auto_resume: o.autoResume,
    limits: o.limits,
    egress: typeof o.egress === "string" ? { preset: o.egress } : o.egress && policy(o.egress),
  });
}

/** A machine that was forked from a snapshot: commands, files, code, and branches of its own. */
export class Sandbox {
  readonly commands: Commands;
  readonly files: Files;
  readonly contexts: Contexts;
  readonly #base: string;

  constructor(
    readonly client: Client,
    public info: SandboxInfo,
  ) {
    this.#base = `/v1/sandboxes/${segment(info.id)}`;
    this.commands = new Commands(client.transport, this.#base);
    this.files = new Files(client.transport, this.#base);
    this.contexts = new Contexts(client.transport, this.#base);
  }

  /** Its id, which {@link connect} takes. */
  get id(): string {
    return this.info.id;
  }

  /**
   * Forks one sandbox from a snapshot. Throws {@link NotFoundError} for a snapshot that is not there,
   * {@link NoCapacityError}.
   */
  static async create(snapshot: string, options: CreateOptions = {}): Promise<Sandbox> {
    return (await Sandbox.createMany(snapshot, 1, options))[0]!;
  }

  /** Forks `n` sandboxes at once, all or none. */
  static async createMany(snapshot: string, n: number, options: CreateOptions = {}): Promise<Sandbox[]> {
    const client = options.client ?? defaultClient();
    const json = { snapshot_tag: snapshot, n, ...options.more, ...wishes(options) };
    const once = options.idempotencyKey ?? true;
    const made = await client.transport.request<Raw[]>("POST", "/v1/sandboxes", { json, once });
    return made.filter((s) => !s["error"]).map((s) => new Sandbox(client, load(s)));
  }

  /** Forks one, calls `use` with it and kills it. */
  static async with<T>(snapshot: string, use: (s: Sandbox) => Promise<T>, options: CreateOptions = {}): Promise<T> {
    const sandbox = await Sandbox.create(snapshot, options);
    try {
      return await use(sandbox);
    } finally {
      await sandbox.kill();
    }
  }

  /** The sandbox of that id, or of the workspace of that name. Throws {@link NotFoundError}. */
  static async connect(id: string, options: { client?: Client } = {}): Promise<Sandbox> {
    const client = options.client ?? defaultClient();
    return new Sandbox(client, load(await client.transport.request("GET", `/v1/sandboxes/${segment(id)}`)));
  }

  /** All sandboxes that have these labels, are in this state, were forked from this snapshot. */
  static async list(
    options: { labels?: Record<string, string>; state?: string; snapshot?: string; client?: Client } = {},
  ): Promise<SandboxInfo[]> {
    const params = Object.entries(options.labels ?? {}).map(([k, v]): [string, string] => ["label", `${k}=${v}`]);
    if (options.state) params.push(["state", options.state]);
    if (options.snapshot) params.push(["snapshot", options.snapshot]);
    const client = options.client ?? defaultClient();
    const found = await client.transport.request<Raw[]>("GET", "/v1/sandboxes", { params });
    return found.map((s) => load<SandboxInfo>(s));
  }

  /**
   * Runs code in an interpreter that keeps its state between calls (docs/contexts.md). Errors of the code are in the
   * execution and throw nothing; see {@link Execution.raiseForError}.
   */
  runCode(code: string, options: RunCodeOptions = {}): Promise<Execution> {
    return this.contexts.run(code, options);
  }

  /**
   * Captures it as a snapshot; it runs on. `mode` is `auto` (if not given), `live`, `diff` or `full`. With `wait: false`
   * this returns when the sandbox runs again, while the snapshot is still being written. Throws {@link ExistsError} for a
   * tag that is taken, {@link IncompatibleError} for a mode that this host has not.
   */
  async branch(
    tag?: string,
    options: { mode?: string; wait?: boolean; idempotencyKey?: string } = {},
  ): Promise<Snapshot> {
    const json = clean({ tag, mode: options.mode, wait: options.wait === false ? false : undefined });
    const once = options.idempotencyKey ?? true;
    return new Snapshot(
      this.client,
      load(await this.client.transport.request("POST", `${this.#base}/branch`, { json, once })),
    );
  }

  /**
   * Branches it and forks `n` children of that instant, in one call; it runs on. The snapshot in between has the
   * children's `info.snapshotTag` and stays until it is removed.
   */
  async fork(n = 1, options: ForkOptions & { tag?: string; mode?: string } = {}): Promise<Sandbox[]> {
    const json = { ...clean({ tag: options.tag, mode: options.mode, wait: false, n }), ...wishes(options) };
    const reply = await this.client.transport.request<Raw>("POST", `${this.#base}/branch`, { json, once: true });
    const children = reply["children"] as Raw[];
    const born = children.filter((c) => !c["error"]).map((c) => new Sandbox(this.client, load(c)));
    const failed = children.find((c) => c["error"]);
    if (!failed) return born;
    await Promise.all(born.map((c) => c.kill()));
    throw refusal(0, failed["error"], "fork");
  }

  /** Asks what it is like now, and keeps that as `info`. */
  async refresh(): Promise<SandboxInfo> {
    return (this.info = load(await this.client.transport.request("GET", this.#base)));
  }

  /** Ends it; its snapshots and children stay. One that has ended already is no error. */
  async kill(): Promise<void> {
    try {
      await this.client.transport.request("DELETE", this.#base);
    } catch (e) {
      if (!(e instanceof NotFoundError)) throw e;
    }
  }

  /** Halts its CPUs; its memory stays. */
  pause(): Promise<SandboxInfo> {
    return this.#change("pause");
  }

  /** Lets a paused one run on. */
  resume(): Promise<SandboxInfo> {
    return this.#change("resume");
  }

  /** Stores it on disk and frees its memory; it keeps its id. */
  suspend(): Promise<SandboxInfo> {
    return this.#change("suspend");
  }

  /** Lets a suspended one run on. */
  wake(): Promise<SandboxInfo> {
    return this.#change("wake");
  }

  async #change(what: string): Promise<SandboxInfo> {
    return (this.info = load(await this.client.transport.request("POST", `${this.#base}/${what}`)));
  }

  /** Gives it another time to live, in seconds from now; 0: until it is killed. With `longer` never a shorter one. */
  async setTtl(ttl: number, options: { longer?: boolean } = {}): Promise<SandboxInfo> {
    const json = { ttl_seconds: ttl, longer: options.longer ?? false };
    return (this.info = load(await this.client.transport.request("PUT", `${this.#base}/ttl`, { json })));
  }

  /** Asks its agent for a sign of life. */
  ping(): Promise<Raw> {
    return this.client.transport.request("POST", `${this.#base}/ping`);
  }

  /** The newest part of its console. */
  async logs(): Promise<string> {
    return new TextDecoder().decode(await this.client.transport.bytes("GET", `${this.#base}/logs`));
  }

  /** What it uses by its own accounting (docs/api.md: Metrics). */
  metrics(): Promise<Raw> {
    return this.client.transport.request("GET", `${this.#base}/metrics`);
  }

  /** What it costs its host (docs/api.md: Usage). */
  usage(): Promise<Raw> {
    return this.client.transport.request("GET", `${this.#base}/usage`);
  }

  /** What it may reach, and what it has sent and received (docs/api.md: EgressState). */
  egress(): Promise<Raw> {
    return this.client.transport.request("GET", `${this.#base}/egress`);
  }

  /** Says what it may reach from now on; flows that it may not have any more are cut. */
  setEgress(egress: string | Egress): Promise<Raw> {
    const json = typeof egress === "string" ? { preset: egress } : policy(egress);
    return this.client.transport.request("PUT", `${this.#base}/egress`, { json });
  }

  /** What it said to whom outside, and what was refused (docs/api.md: Flow); with `follow` as it happens. */
  async *flows(options: { follow?: boolean; since?: number; signal?: AbortSignal } = {}): AsyncGenerator<Raw, void> {
    const params = { follow: String(options.follow ?? false), since: options.since };
    yield* this.client.transport.lines("GET", `${this.#base}/flows`, { params, signal: options.signal });
  }

  /** TCP ports that something in it listens on, and those that are public. */
  async ports(): Promise<PortInfo[]> {
    const reply = await this.client.transport.request<{ ports: Raw[] }>("GET", `${this.#base}/ports`);
    return reply.ports.map((p) => load<PortInfo>(p));
  }

  /** Says who may connect to a port: everybody who reaches the daemon, or who has a token (which holds at first). */
  async setPort(port: number, options: { public: boolean }): Promise<void> {
    await this.client.transport.request("PUT", `${this.#base}/ports/${port}`, { json: { public: options.public } });
  }

  /**
   * Where the daemon serves a port of its over HTTP (WebSockets, too), to who shows a token unless it is public. Throws
   * {@link ForkdError} for a daemon that serves no TCP.
   */
  async portUrl(port: number, path = "/"): Promise<string> {
    const { socket, url } = this.client.transport.target;
    const base = socket ? ((await this.client.version()).address ?? "") : url;
    if (!base) throw new ForkdError("the daemon serves no TCP; start it with --bind");
    return `${base}${this.#base}/ports/${port}/${path.replace(/^\/+/, "")}`;
  }

  /** A token that opens this sandbox and nothing else, and ends with it. */
  async createToken(options: { name?: string; scope?: string; ttl?: number } = {}): Promise<Token> {
    const json = clean({ name: options.name, scope: options.scope ?? "use", ttl_seconds: options.ttl });
    return load<Token>(await this.client.transport.request("POST", `${this.#base}/tokens`, { json }));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
  }
}

/** A frozen machine, which any number of sandboxes can be forked from. */
export class Snapshot {
  constructor(
    readonly client: Client,
    public info: SnapshotInfo,
  ) {}

  /** Its name. */
  get tag(): string {
    return this.info.tag;
  }

  /** `writing`, `ready` or `failed`, when it was last asked for. */
  get status(): string {
    return this.info.status;
  }

  /** The snapshot of that tag. Throws {@link NotFoundError}. */
  static async get(tag: string, options: { client?: Client } = {}): Promise<Snapshot> {
    const client = options.client ?? defaultClient();
    return new Snapshot(client, load(await client.transport.request("GET", `/v1/snapshots/${segment(tag)}`)));
  }

  /** All snapshots: of that status, that stand on that parent, that are branches of that sandbox. */
  static async list(
    options: { status?: string; parent?: string; branchedFrom?: string; client?: Client } = {},
  ): Promise<Snapshot[]> {
    const client = options.client ?? defaultClient();
    const params = { status: options.status, parent: options.parent, branched_from: options.branchedFrom };
    const found = await client.transport.request<Raw[]>("GET", "/v1/snapshots", { params });
    return found.map((s) => new Snapshot(client, load(s)));
  }

  /** Forks `n` sandboxes. */
  fork(n = 1, options: Omit<CreateOptions, "client"> = {}): Promise<Sandbox[]> {
    return Sandbox.createMany(this.tag, n, { ...options, client: this.client });
  }

  /** Waits until it is no longer being written, so many seconds at most. Look at `status`. */
  async wait(timeout = 300): Promise<this> {
    for (let left = timeout; ; ) {
      const once = Math.min(left, 60);
      const path = `/v1/snapshots/${segment(this.tag)}`;
      this.info = load(await this.client.transport.request("GET", path, { params: { wait: once }, timeout: once + 60 }));
      left -= once;
      if (this.status !== "writing" || left <= 0) return this;
    }
  }

  /** A snapshot of this content that stands on no other. */
  async compact(to: string): Promise<Snapshot> {
    const path = `/v1/snapshots/${segment(this.tag)}/compact`;
    return new Snapshot(
      this.client,
      load(await this.client.transport.request("POST", path, { json: { to }, once: true })),
    );
  }

  /**
   * Removes it, and returns the tags that are gone. What others stand on is {@link BusyError}, unless `cascade` (those are
   * removed as well) or `force` (those keep what they need of it).
   */
  async remove(options: { cascade?: boolean; force?: boolean } = {}): Promise<string[]> {
    const params = { cascade: options.cascade ? "true" : undefined, force: options.force ? "true" : undefined };
    const path = `/v1/snapshots/${segment(this.tag)}`;
    const reply = await this.client.transport.request<{ removed: string[] } | undefined>("DELETE", path, { params });
    return reply ? reply.removed : [this.tag];
  }
}

/** A bootable root file system, which snapshots are warmed from. */
export class Image {
  constructor(
    readonly client: Client,
    readonly info: ImageInfo,
  ) {}

  /** Its id. */
  get id(): string {
    return this.info.id;
  }

  /** All images. */
  static async list(options: { client?: Client } = {}): Promise<Image[]> {
    const client = options.client ?? defaultClient();
    const found = await client.transport.request<Raw[]>("GET", "/v1/images");
    return found.map((i) => new Image(client, load(i)));
  }

  /** Builds a recipe (its text, docs/recipes.md; `files` are those that it names) into a snapshot of that tag. */
  static async build(
    recipe: string,
    tag: string,
    options: {
      files?: Record<string, Uint8Array>;
      replace?: boolean;
      onEvent?: (event: Raw) => void;
      client?: Client;
    } = {},
  ): Promise<Snapshot> {
    const client = options.client ?? defaultClient();
    const body = tar({ "recipe.yaml": new TextEncoder().encode(recipe), ...options.files });
    const params = { tag, replace: options.replace ? "true" : undefined };
    const headers = { "Content-Type": "application/x-tar" };
    for await (const event of client.transport.lines("POST", "/v1/builds", { params, headers, body })) {
      if (event["error"]) throw refusal(0, event["error"], "/v1/builds");
      if (event["snapshot"]) return new Snapshot(client, load(event["snapshot"] as Raw));
      options.onEvent?.(event);
    }
    throw new ConnectionLostError("the build broke off before its end");
  }

  /** Removes it. Throws {@link BusyError} while snapshots need it. */
  async remove(): Promise<void> {
    await this.client.transport.request("DELETE", `/v1/images/${segment(this.id)}`);
  }
}
