/** Anything that goes wrong here. */
export class ForkdError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** Nothing answers at the daemon's address; the request was not sent. */
export class NoDaemonError extends ForkdError {}

/** The connection broke in the middle of a request: it may have been done or not. */
export class ConnectionLostError extends ForkdError {}

/** A command that was run with `check` ended with a code other than 0. `result` has its output. */
export class CommandFailedError extends ForkdError {
  constructor(readonly result: { exitCode: number; stdout: string; stderr: string; error: string }) {
    const text = (result.error || result.stderr || result.stdout).trim();
    super(`exit code ${result.exitCode}` + (text ? `: ${text.slice(-500)}` : ""));
  }
}

/** Code ended with an error, and `raiseForError` was called. `execution` has what it gave until then. */
export class ExecutionFailedError extends ForkdError {
  constructor(readonly execution: { error: { name: string; value: string } | null }) {
    super(`${execution.error?.name}: ${execution.error?.value}`);
  }
}

/**
 * The daemon refused. Every code has a class of its own below this one. `code` is the daemon's word, `hint` what to try
 * (or empty), `requestId` what the daemon's log knows it by, `console` the end of the guest's console where that explains
 * it, `status` the HTTP status, `body` the whole reply, `url` what was asked.
 */
export class APIError extends ForkdError {
  readonly code: string;
  readonly hint: string;
  readonly requestId: string;
  readonly console: string;

  constructor(
    readonly status: number,
    readonly body: unknown,
    readonly url: string = "",
  ) {
    const known = (typeof body === "object" && body !== null ? body : {}) as Record<string, unknown>;
    const text = (name: string): string => (typeof known[name] === "string" ? known[name] : "");
    const message = text("message") || text("error") || (typeof body === "string" && body) || `HTTP status ${status}`;
    super(message + (text("hint") ? ` (try: ${text("hint")})` : ""));
    this.code = text("code");
    this.hint = text("hint");
    this.requestId = text("request_id");
    this.console = text("console");
  }
}

/** The request itself cannot be; nothing was begun. */
export class InvalidError extends APIError {}
/** The idempotency key is another request's. */
export class KeyReusedError extends APIError {}
/** No token, or one that is not good. */
export class UnauthorizedError extends APIError {}
/** The token's scope, or a file's mode in the sandbox, does not allow it. */
export class DeniedError extends APIError {}
/** No such sandbox, snapshot, file, process, context. */
export class NotFoundError extends APIError {}
/** The daemon has this path, but not for this method. */
export class MethodNotAllowedError extends APIError {}
/** There is no form of the reply that the request would take. */
export class UnacceptableError extends APIError {}
/** The name is taken. */
export class ExistsError extends APIError {}
/** Not in this state: a paused sandbox, a snapshot that is being written. */
export class WrongStateError extends APIError {}
/** Something else is being done with it, or stands on it. */
export class BusyError extends APIError {}
/** Made by, or for, another host or version. */
export class IncompatibleError extends APIError {}
/** Too many wrong tokens, or too much at once. */
export class ThrottledError extends APIError {}
/** A fault of the daemon's; its log has more, by `requestId`. */
export class InternalError extends APIError {}
/** What is stored is damaged. */
export class CorruptError extends APIError {}
/** This daemon, host or snapshot cannot do it. */
export class UnsupportedError extends APIError {}
/** The host lacks something now; the message says what. */
export class UnavailableError extends APIError {}
/** The time given is over. */
export class TimeoutError extends APIError {}
/** The host has too little memory or disk now, or as many sandboxes as it may. */
export class NoCapacityError extends APIError {}
/** A disk, memory or a limit inside the sandbox is used up. */
export class ExhaustedError extends APIError {}
/** A service in the sandbox does not listen, or gives no answer that could be passed on. */
export class BadGatewayError extends APIError {}

/** The class of every code. */
export const errors: Readonly<Record<string, new (status: number, body: unknown, url?: string) => APIError>> = {
  invalid: InvalidError,
  key_reused: KeyReusedError,
  unauthorized: UnauthorizedError,
  denied: DeniedError,
  not_found: NotFoundError,
  method_not_allowed: MethodNotAllowedError,
  unacceptable: UnacceptableError,
  exists: ExistsError,
  wrong_state: WrongStateError,
  busy: BusyError,
  incompatible: IncompatibleError,
  throttled: ThrottledError,
  internal: InternalError,
  corrupt: CorruptError,
  unsupported: UnsupportedError,
  unavailable: UnavailableError,
  timeout: TimeoutError,
  no_capacity: NoCapacityError,
  exhausted: ExhaustedError,
  bad_gateway: BadGatewayError,
};

/** The error for a reply that is no success. */
export function refusal(status: number, body: unknown, url = ""): APIError {
  const code = typeof body === "object" && body !== null ? (body as { code?: unknown }).code : undefined;
  const Kind = (typeof code === "string" && errors[code]) || APIError;
  return new Kind(status, body, url);
}
