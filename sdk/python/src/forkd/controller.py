"""The class Controller of the existing forkd's Python package, for programs that were written for it."""

from __future__ import annotations

from typing import Any, Literal

from ._sync.client import Client
from ._text import clean, segment
from .errors import APIError

#: The modes of a branch.
BranchMode = Literal["auto", "full", "diff", "live"]

#: What refusals are: ``status``, ``body`` and ``url`` say more, and each error code has a class below it.
ControllerError = APIError


class Controller:
    """The daemon's REST API as plain dictionaries.

    ``base_url`` (else FORKD_URL) and ``token`` (else FORKD_TOKEN) as there; without either, this user's daemon on its unix
    socket. ``timeout`` is in seconds, and a request of :meth:`exec_command` waits for its command at least. Refusals
    raise :class:`ControllerError`.

    >>> c = Controller()
    >>> [child["snapshot_tag"] for child in c.spawn_sandboxes("python-numpy", n=2)]
    ['python-numpy', 'python-numpy']
    """

    def __init__(self, base_url: str | None = None, token: str | None = None, timeout: float = 60.0) -> None:
        self.client = Client(base_url, token, timeout=timeout)
        self.base_url = self.client.transport.target.url
        self.token = self.client.transport.target.token or None
        self.timeout = timeout

    def _ask(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        return self.client.transport.request(method, path, json=body, **options)

    def list_snapshots(self) -> list[dict[str, Any]]:
        """Every snapshot.

        >>> "python-numpy" in [s["tag"] for s in Controller().list_snapshots()]
        True
        """
        reply: list[dict[str, Any]] = self._ask("GET", "/v1/snapshots")
        return reply

    def delete_snapshot(self, tag: str) -> None:
        """Removes a snapshot.

        >>> c = Controller()
        >>> tag = c.branch_sandbox(sandbox.id)["tag"]
        >>> c.delete_snapshot(tag)
        """
        self._ask("DELETE", f"/v1/snapshots/{segment(tag)}")

    def spawn_sandboxes(
        self,
        snapshot_tag: str,
        n: int = 1,
        per_child_netns: bool = False,
        memory_limit_mib: int | None = None,
        prewarm: bool = False,
        live_fork: bool = False,
        hugepages: bool = False,
    ) -> list[dict[str, Any]]:
        """Forks ``n`` children. What of the wishes is not granted is in the children's ``warnings``.

        >>> c = Controller()
        >>> [child] = c.spawn_sandboxes("python-numpy")
        >>> c.kill_sandbox(child["id"])
        """
        body = clean(
            snapshot_tag=snapshot_tag,
            n=n,
            per_child_netns=per_child_netns,
            memory_limit_mib=memory_limit_mib,
            prewarm=prewarm or None,
            live_fork=live_fork or None,
            hugepages=hugepages or None,
        )
        reply: list[dict[str, Any]] = self._ask("POST", "/v1/sandboxes", body, once=True)
        return reply

    def list_sandboxes(self) -> list[dict[str, Any]]:
        """Every sandbox.

        >>> sandbox.id in [s["id"] for s in Controller().list_sandboxes()]
        True
        """
        reply: list[dict[str, Any]] = self._ask("GET", "/v1/sandboxes")
        return reply

    def get_sandbox(self, sandbox_id: str) -> dict[str, Any]:
        """One sandbox.

        >>> Controller().get_sandbox(sandbox.id)["state"]
        'running'
        """
        reply: dict[str, Any] = self._ask("GET", f"/v1/sandboxes/{segment(sandbox_id)}")
        return reply

    def kill_sandbox(self, sandbox_id: str) -> None:
        """Ends a sandbox.

        >>> try:
        ...     Controller().kill_sandbox("none")
        ... except ControllerError as e:
        ...     print(e.status)
        404
        """
        self._ask("DELETE", f"/v1/sandboxes/{segment(sandbox_id)}")

    def branch_sandbox(
        self,
        sandbox_id: str,
        tag: str | None = None,
        diff: bool = False,
        measure_diff: bool = False,
        mode: BranchMode | None = None,
        wait: bool = True,
    ) -> dict[str, Any]:
        """Captures a sandbox, which runs on. ``diff`` is ``mode="diff"``, and gives way to a mode, as there.

        >>> c = Controller()
        >>> c.branch_sandbox(sandbox.id, tag="by-controller", wait=False)["tag"]
        'by-controller'
        """
        body = clean(
            tag=tag,
            mode=mode,
            diff=True if diff and mode is None else None,
            measure_diff=measure_diff or None,
            wait=None if wait else False,
        )
        reply: dict[str, Any] = self._ask("POST", f"/v1/sandboxes/{segment(sandbox_id)}/branch", body, once=True)
        return reply

    def exec_command(self, sandbox_id: str, args: list[str], timeout_secs: float = 30) -> dict[str, Any]:
        """Runs a command: ``stdout``, ``stderr``, ``exit_code``.

        >>> Controller().exec_command(sandbox.id, ["echo", "hi"])["stdout"]
        'hi\\n'
        """
        path, limit = f"/v1/sandboxes/{segment(sandbox_id)}/exec", max(self.timeout, timeout_secs + 60)
        reply: dict[str, Any] = self._ask("POST", path, {"args": args, "timeout_secs": timeout_secs}, timeout=limit)
        return reply

    def eval_code(self, sandbox_id: str, code: str) -> dict[str, Any]:
        """Evaluates code: ``result``, ``error``, ``exit_code``.

        >>> Controller().eval_code(sandbox.id, "6 * 7")["result"]
        '42'
        """
        reply: dict[str, Any] = self._ask("POST", f"/v1/sandboxes/{segment(sandbox_id)}/eval", {"code": code})
        return reply

    def ping_sandbox(self, sandbox_id: str) -> dict[str, Any]:
        """Asks a sandbox's agent for a sign of life.

        >>> Controller().ping_sandbox(sandbox.id)["pong"]
        True
        """
        reply: dict[str, Any] = self._ask("POST", f"/v1/sandboxes/{segment(sandbox_id)}/ping")
        return reply
