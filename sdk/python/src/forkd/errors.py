"""What can go wrong, one class for each error code of the daemon (docs/api.md), and a few of this side."""

from __future__ import annotations

import builtins
from typing import Any


class ForkdError(RuntimeError):
    """Anything that goes wrong here."""


class NoDaemonError(ForkdError):
    """Nothing answers at the daemon's address; the request was not sent."""


class ConnectionLostError(ForkdError):
    """The connection broke in the middle of a request: it may have been done or not."""


class CommandFailedError(ForkdError):
    """A command that was run with ``check=True`` ended with a code other than 0. ``result`` has its output."""

    def __init__(self, result: Any) -> None:
        self.result = result
        text = (result.error or result.stderr or result.stdout).strip()
        super().__init__(f"exit code {result.exit_code}" + (f": {text[-500:]}" if text else ""))


class ExecutionFailedError(ForkdError):
    """Code ended with an error, and ``raise_for_error`` was called. ``execution`` has what it gave until then."""

    def __init__(self, execution: Any) -> None:
        self.execution = execution
        super().__init__(f"{execution.error.name}: {execution.error.value}")


class APIError(ForkdError):
    """The daemon refused. Every code has a class of its own below this one.

    ``code`` is the daemon's word, ``message`` what happened, ``hint`` what to try (or empty), ``request_id`` what the
    daemon's log knows it by, ``console`` the end of the guest's console where that explains it (or empty), ``status`` the
    HTTP status, ``body`` the whole reply, ``url`` what was asked.
    """

    code = ""

    def __init__(self, status: int, body: Any, url: str = "") -> None:
        self.status = status
        self.body = body
        self.url = url
        known: dict[str, Any] = body if isinstance(body, dict) else {}
        self.code = str(known.get("code") or self.code)
        self.message = str(known.get("message") or known.get("error") or body or f"HTTP status {status}")
        self.hint = str(known.get("hint") or "")
        self.request_id = str(known.get("request_id") or "")
        self.console = str(known.get("console") or "")
        super().__init__(self.message + (f" (try: {self.hint})" if self.hint else ""))


class InvalidError(APIError):
    """The request itself cannot be; nothing was begun."""

    code = "invalid"


class KeyReusedError(APIError):
    """The idempotency key is another request's."""

    code = "key_reused"


class UnauthorizedError(APIError):
    """No token, or one that is not good."""

    code = "unauthorized"


class DeniedError(APIError):
    """The token's scope, or a file's mode in the sandbox, does not allow it."""

    code = "denied"


class NotFoundError(APIError):
    """No such sandbox, snapshot, file, process, context."""

    code = "not_found"


class MethodNotAllowedError(APIError):
    """The daemon has this path, but not for this method."""

    code = "method_not_allowed"


class UnacceptableError(APIError):
    """There is no form of the reply that the request would take."""

    code = "unacceptable"


class ExistsError(APIError):
    """The name is taken."""

    code = "exists"


class WrongStateError(APIError):
    """Not in this state: a paused sandbox, a snapshot that is being written."""

    code = "wrong_state"


class BusyError(APIError):
    """Something else is being done with it, or stands on it."""

    code = "busy"


class IncompatibleError(APIError):
    """Made by, or for, another host or version."""

    code = "incompatible"


class ThrottledError(APIError):
    """Too many wrong tokens, or too much at once."""

    code = "throttled"


class InternalError(APIError):
    """A fault of the daemon's; its log has more, by ``request_id``."""

    code = "internal"


class CorruptError(APIError):
    """What is stored is damaged."""

    code = "corrupt"


class UnsupportedError(APIError):
    """This daemon, host or snapshot cannot do it."""

    code = "unsupported"


class UnavailableError(APIError):
    """The host lacks something now; the message says what."""

    code = "unavailable"


class TimeoutError(APIError, builtins.TimeoutError):
    """The time given is over."""

    code = "timeout"


class NoCapacityError(APIError):
    """The host has too little memory or disk now, or as many sandboxes as it may."""

    code = "no_capacity"


class ExhaustedError(APIError):
    """A disk, memory or a limit inside the sandbox is used up."""

    code = "exhausted"


class BadGatewayError(APIError):
    """A service in the sandbox does not listen, or gives no answer that could be passed on."""

    code = "bad_gateway"


#: The class of every code.
ERRORS: dict[str, type[APIError]] = {
    c.code: c
    for c in (
        InvalidError,
        KeyReusedError,
        UnauthorizedError,
        DeniedError,
        NotFoundError,
        MethodNotAllowedError,
        UnacceptableError,
        ExistsError,
        WrongStateError,
        BusyError,
        IncompatibleError,
        ThrottledError,
        InternalError,
        CorruptError,
        UnsupportedError,
        UnavailableError,
        TimeoutError,
        NoCapacityError,
        ExhaustedError,
        BadGatewayError,
    )
}


def refusal(status: int, body: Any, url: str = "") -> APIError:
    """The exception for a reply that is no success."""
    code = str(body.get("code", "")) if isinstance(body, dict) else ""
    return ERRORS.get(code, APIError)(status, body, url)
