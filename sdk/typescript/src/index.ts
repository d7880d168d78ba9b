/// <reference lib="esnext.disposable" preserve="true" />
/**
 * Fork warm microVMs: sandboxes, branches and snapshots of a forkd daemon. Without FORKD_URL the daemon of this user is
 * meant, which is started if none answers. Times that are given are in seconds.
 *
 * @packageDocumentation
 */
export * from "./client.js";
export * from "./commands.js";
export * from "./contexts.js";
export * from "./controller.js";
export * from "./errors.js";
export * from "./files.js";
export * from "./sandbox.js";
export type { Fetch, RequestOptions, Transport } from "./transport.js";
export {
  type CommandResult,
  type ContextInfo,
  type Event,
  Execution,
  type ExecutionError,
  type FileEvent,
  type FileInfo,
  type ImageInfo,
  type Model,
  type Output,
  type PortInfo,
  type ProcessInfo,
  type Result,
  type SandboxInfo,
  type SnapshotInfo,
  type Token,
  type TreeNode,
  type VersionInfo,
} from "./models.js";
