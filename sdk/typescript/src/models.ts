import { ExecutionFailedError } from "./errors.js";

/** What the daemon tells (docs/api.md), with names as this language has them; `raw` is the object as it came. */
export interface Model {
  raw: Record<string, unknown>;
}

/** A sandbox as the daemon knows it. Times are seconds since 1970, sizes bytes. */
export interface SandboxInfo extends Model {
  id: string;
  snapshotTag: string;
  /** running, paused, suspended, failed */
  state: string;
  reason?: string;
  index: number;
  count: number;
  createdAtUnix: number;
  /** absent: never */
  expiresAtUnix?: number;
  pid: number;
  hostname: string;
  labels?: Record<string, string>;
  cpus: number;
  memoryBytes: number;
  memoryOwnBytes: number;
  memorySharedBytes?: number;
  diskOwnBytes?: number;
  diskSharedBytes?: number;
  accelerator: string;
  readyMs: number;
  branchCount: number;
  latestBranch?: string;
  workspace?: string;
  warnings?: string[];
  /** how long it waited for its turn */
  waitedMs?: number;
  /** docs/api.md: Egress */
  egress?: Record<string, unknown>;
}

/** A frozen machine. Sizes are bytes. */
export interface SnapshotInfo extends Model {
  tag: string;
  id: string;
  /** writing, ready, failed */
  status: string;
  createdAtUnix: number;
  parent?: string;
  image: string;
  recipe: string;
  warm: string[];
  cpus: number;
  memoryBytes: number;
  memoryOwnBytes: number;
  diskOwnBytes: number;
  storedBytes: number;
  hot: boolean;
  sandboxes: number;
  branchedFrom?: string;
  /** of a branch: live, diff, full */
  mode?: string;
  modeReason?: string;
  pauseMs?: number;
  progress?: number;
  error?: string;
  chainDepth?: number;
  ancestors?: string[];
  dependents?: string[];
}

/** A bootable root file system. Sizes are bytes. */
export interface ImageInfo extends Model {
  id: string;
  name: string;
  base: string;
  packages: number;
  createdAtUnix: number;
  diskBytes: number;
  ownBytes: number;
  storedBytes: number;
  snapshots: string[];
}

/** An image, snapshot or sandbox in the family tree. */
export interface TreeNode extends Model {
  kind: string;
  name: string;
  state?: string;
  ownBytes: number;
  children?: TreeNode[];
}

/** Something that has happened: `sandbox.forked`, `snapshot.ready`, … */
export interface Event extends Model {
  sequence: number;
  time: string;
  type: string;
  sandboxId?: string;
  snapshotTag?: string;
  labels?: Record<string, string>;
  reason?: string;
  lost?: number;
}

/** How a command ended. `exitCode` is as a shell reports it: 128 and the signal's number if that ended it. */
export interface CommandResult extends Model {
  stdout: string;
  stderr: string;
  exitCode: number;
  /** why it was ended, e.g. that its time was over; empty otherwise */
  error: string;
  timedOut: boolean;
}

/** A process that was started from outside. */
export interface ProcessInfo extends Model {
  pid: number;
  command: string;
  args?: string[];
  tag?: string;
  env?: Record<string, string>;
  cwd?: string;
  user?: string;
  tty?: boolean;
  ageMs: number;
  attached: number;
  outputBytes: number;
  running: boolean;
  exitCode?: number;
  signal?: number;
  status?: string;
  timedOut?: boolean;
}

/** A piece of what a process printed. `stream` is `stdout` (a terminal's is all that) or `stderr`. */
export interface Output {
  stream: "stdout" | "stderr";
  data: Uint8Array;
}

/** A file or directory of a sandbox. */
export interface FileInfo extends Model {
  name: string;
  path: string;
  /** file, dir, symlink (to nothing), other */
  type: string;
  size: number;
  mode: number;
  permissions: string;
  owner: string;
  group: string;
  modifiedTime: string;
  symlinkTarget?: string;
  metadata?: Record<string, string>;
}

/** A change below a watched directory: create, write, remove, rename, chmod. `name` is relative to the directory. */
export interface FileEvent extends Model {
  name: string;
  type: string;
  entry?: FileInfo;
}

/** A TCP port of a sandbox that something listens on, or that is public. */
export interface PortInfo extends Model {
  port: number;
  /** that a service listens on; absent: nobody does */
  address?: string;
  pid?: number;
  process?: string;
  /** reached without a token */
  public: boolean;
  /** below which the daemon serves it */
  path: string;
  /** as which the daemon serves it, where it has a domain */
  host?: string;
}

/** A stateful interpreter. */
export interface ContextInfo extends Model {
  id: string;
  language: string;
  version?: string;
  cwd: string;
  user?: string;
  pid: number;
  alive: boolean;
  busy?: boolean;
  ended?: string;
  evals: number;
}

/** A value in every representation that it has; `png`, `jpeg` and `pdf` in base64. */
export interface Result extends Model {
  text?: string;
  html?: string;
  markdown?: string;
  svg?: string;
  png?: string;
  jpeg?: string;
  pdf?: string;
  latex?: string;
  json?: unknown;
  javascript?: string;
  data?: unknown;
  chart?: unknown;
  extra?: Record<string, unknown>;
  isMainResult: boolean;
  omitted?: { format: string; bytes: number; limit: number }[];
}

/** How code failed: the interpreter's own name, value and traceback. */
export interface ExecutionError {
  name: string;
  value: string;
  traceback: string;
}

/** What code gave: output, results in order, and perhaps an error. */
export class Execution {
  /** what a prompt would print of the last value */
  text: string | null = null;
  stdout = "";
  stderr = "";
  results: Result[] = [];
  error: ExecutionError | null = null;
  executionCount = 0;
  exitCode = 0;
  /** inside the guest */
  ms = 0;

  /** This execution; throws {@link ExecutionFailedError} if there was an error. */
  raiseForError(): this {
    if (this.error) throw new ExecutionFailedError(this);
    return this;
  }
}

/** Who the daemon is. */
export interface VersionInfo extends Model {
  version: string;
  api: string;
  pid: number;
  home: string;
  socket: string;
  address?: string;
  fingerprint?: string;
}

/** A token; `token` itself is told once, when it is made. */
export interface Token extends Model {
  id: string;
  name: string;
  scope: string;
  sandbox?: string;
  token?: string;
  createdAtUnix: number;
  expiresAtUnix?: number;
}

/** Keys whose objects have names of the user's. */
const foreign = new Set(["labels", "env", "metadata", "json", "data", "chart", "extra", "engine", "config", "egress"]);

function camel(name: string): string {
  return name.replace(/_([a-z0-9])/g, (_, c: string) => c.toUpperCase());
}

function convert(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(convert);
  if (typeof value !== "object" || value === null) return value;
  return load(value as Record<string, unknown>);
}

/** The API's object with names as this language has them. */
export function load<T extends Model>(raw: Record<string, unknown>): T {
  const made: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(raw)) {
    made[camel(name)] = foreign.has(name) ? value : convert(value);
  }
  Object.defineProperty(made, "raw", { value: raw, enumerable: false });
  return made as unknown as T;
}
