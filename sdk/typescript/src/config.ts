import { ForkdError } from "./errors.js";

/** A daemon's address: a unix socket, or a URL. */
export interface Target {
  socket: string;
  url: string;
  token: string;
  ca: string;
  fingerprint: string;
  /** of a daemon to start if none answers; empty for the default */
  home: string;
  mayStart: boolean;
}

/** Environment variables, where there are any. */
export function environment(): Record<string, string | undefined> {
  return (globalThis as { process?: { env?: Record<string, string | undefined> } }).process?.env ?? {};
}

/** Whether Node's modules are there: in Node, Deno and Bun, and in no browser. */
export function hasNode(): boolean {
  return typeof (globalThis as { process?: { versions?: { node?: string } } }).process?.versions?.node === "string";
}

/** The daemon that is meant: `url`, else FORKD_URL, else FORKD_HOST, else the socket of this user's daemon. */
export function find(url?: string, token?: string): Target {
  const env = environment();
  const target: Target = {
    socket: "",
    url: "http://forkd",
    token: (token ?? env["FORKD_TOKEN"] ?? "").trim(),
    ca: env["FORKD_CA"] ?? "",
    fingerprint: env["FORKD_FINGERPRINT"] ?? "",
    home: "",
    mayStart: false,
  };
  const address = url || env["FORKD_URL"] || env["FORKD_HOST"] || "";
  if (!address) {
    if (!hasNode()) throw new ForkdError("there are no unix sockets here: give a url and a token");
    const home = env["FORKD_HOME"] ?? "";
    return { ...target, home, socket: ownSocket(env, home), mayStart: true };
  }
  if (address.startsWith("unix://")) {
    const path = address.slice("unix://".length);
    if (!path.startsWith("/")) {
      throw new ForkdError(`daemon address ${address}: the path of a unix socket is absolute: unix:///path`);
    }
    return { ...target, socket: path };
  }
  const parts = URL.canParse(address) ? new URL(address) : undefined;
  if (!parts || !/^https?:$/.test(parts.protocol) || parts.username) {
    throw new ForkdError(
      "the daemon's address is not understood: give unix:///path, http://host:port or https://host:port",
    );
  }
  if (parts.protocol === "http:" && target.token && !thisHost(parts.hostname)) {
    throw new ForkdError(`daemon address ${address}: the token would travel unencrypted; give https://`);
  }
  return { ...target, url: address.replace(/\/+$/, "") };
}

function thisHost(name: string): boolean {
  return name === "localhost" || name.endsWith(".localhost") || name.startsWith("127.") || name === "[::1]";
}

function ownSocket(env: Record<string, string | undefined>, home: string): string {
  const process = (globalThis as unknown as { process: { getuid?: () => number; cwd(): string } }).process;
  if (home) return `${home.startsWith("/") ? home : `${process.cwd()}/${home}`}/forkd.sock`;
  const uid = process.getuid?.() ?? -1;
  if (uid === 0) return "/run/forkd/forkd.sock";
  const run = env["XDG_RUNTIME_DIR"];
  return run ? `${run}/forkd/forkd.sock` : `${env["TMPDIR"] ?? "/tmp"}/forkd-${uid}/forkd.sock`;
}
