# Made of _async/sandbox.py by scripts/unasync.py. Change that one.
"""Sandboxes, snapshots and images."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, TypeVar

from .._text import clean, segment
from ..errors import ForkdError
from ..models import Execution, ImageInfo, PortInfo, Result, SandboxInfo, SnapshotInfo, Token
from .client import Client, default
from .commands import Commands
from .contexts import Contexts
from .files import Files

S = TypeVar("S", bound="Sandbox")


def _bounds(
    labels: Mapping[str, str] | None,
    env: Mapping[str, str] | None,
    ttl: float | None,
    on_ttl: str | None,
    idle: float | None,
    on_idle: str | None,
    auto_resume: bool | None,
    limits: Mapping[str, Any] | None,
    egress: str | Mapping[str, Any] | None,
) -> dict[str, Any]:
    return clean(
        labels=dict(labels or {}),
        env=dict(env or {}),
        ttl_seconds=ttl,
        ttl_action=on_ttl,
        idle_seconds=idle,
        idle_action=on_idle,
        auto_resume=auto_resume,
        limits=dict(limits or {}),
        egress={"preset": egress} if isinstance(egress, str) else egress,
    )


class Sandbox:
    """A machine that was forked from a snapshot: commands, files, code, and branches of its own.

    As a context manager it is killed at the end of the ``with`` block.
    """

    def __init__(self, client: Client, info: SandboxInfo) -> None:
        self._setup(client, info)

    def _setup(self, client: Client, info: SandboxInfo) -> None:
        self.client = client
        self.info = info
        self._base = f"/v1/sandboxes/{segment(info.id)}"
        self.commands = Commands(client.transport, self._base)
        self.files = Files(client.transport, self._base)
        self.contexts = Contexts(client.transport, self._base)

    @classmethod
    def _of(cls: type[S], client: Client, info: SandboxInfo) -> S:
        made = cls.__new__(cls)
        made._setup(client, info)
        return made

    @property
    def id(self) -> str:
        """Its id, which :meth:`connect` takes."""
        return self.info.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.info.snapshot_tag}>"

    @classmethod
    def create(
        cls: type[S],
        snapshot: str,
        *,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        ttl: float | None = None,
        on_ttl: str | None = None,
        idle: float | None = None,
        on_idle: str | None = None,
        auto_resume: bool | None = None,
        limits: Mapping[str, Any] | None = None,
        egress: str | Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        client: Client | None = None,
        **more: Any,
    ) -> S:
        """Forks one sandbox from a snapshot.

        ``ttl`` is its time to live in seconds (none: until it is killed), ``on_ttl`` what happens then: ``kill``,
        ``pause`` or ``suspend``. ``idle`` and ``on_idle`` are the same for the time without a call into it; with
        ``auto_resume`` a call resumes or wakes it first. ``egress`` is what it may reach: a preset (``none``,
        ``packages``, …) or an object with ``preset``, ``allow``, ``deny``, ``budget_bytes``. ``limits`` are those of
        docs/api.md, ``more`` other fields of that request. Raises :class:`NotFoundError` for a snapshot that is not there,
        :class:`NoCapacityError`.

        >>> sandbox = Sandbox.create("python-numpy", ttl=600)
        """
        made = cls.create_many(
            snapshot,
            1,
            labels=labels,
            env=env,
            ttl=ttl,
            on_ttl=on_ttl,
            idle=idle,
            on_idle=on_idle,
            auto_resume=auto_resume,
            limits=limits,
            egress=egress,
            idempotency_key=idempotency_key,
            client=client,
            **more,
        )
        return made[0]

    @classmethod
    def create_many(
        cls: type[S],
        snapshot: str,
        n: int,
        *,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        ttl: float | None = None,
        on_ttl: str | None = None,
        idle: float | None = None,
        on_idle: str | None = None,
        auto_resume: bool | None = None,
        limits: Mapping[str, Any] | None = None,
        egress: str | Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        client: Client | None = None,
        **more: Any,
    ) -> builtins.list[S]:
        """Forks ``n`` sandboxes at once, all or none. Options are those of :meth:`create`.

        >>> made = Sandbox.create_many("python-numpy", 2)
        >>> [one.kill() for one in made]
        [None, None]
        """
        client = client or default()
        body = {"snapshot_tag": snapshot, "n": n, **more}
        body |= _bounds(labels, env, ttl, on_ttl, idle, on_idle, auto_resume, limits, egress)
        made = client.transport.request("POST", "/v1/sandboxes", json=body, once=idempotency_key or True)
        return [cls._of(client, SandboxInfo.load(s)) for s in made if not s.get("error")]

    @classmethod
    def connect(cls: type[S], id: str, *, client: Client | None = None) -> S:
        """The sandbox of that id, or of the workspace of that name. Raises :class:`NotFoundError`.

        >>> (Sandbox.connect(sandbox.id)).info.state
        'running'
        """
        client = client or default()
        return cls._of(client, SandboxInfo.load(client.transport.request("GET", f"/v1/sandboxes/{segment(id)}")))

    @classmethod
    def list(
        cls,
        *,
        labels: Mapping[str, str] | None = None,
        state: str | None = None,
        snapshot: str | None = None,
        client: Client | None = None,
    ) -> builtins.list[SandboxInfo]:
        """All sandboxes that have these labels, are in this state, were forked from this snapshot.

        >>> sandbox.id in [info.id for info in Sandbox.list(state="running")]
        True
        """
        params: builtins.list[tuple[str, str]] = [("label", f"{k}={v}") for k, v in (labels or {}).items()]
        params += list(clean(state=state, snapshot=snapshot).items())
        found = (client or default()).transport.request("GET", "/v1/sandboxes", params=params)
        return [SandboxInfo.load(s) for s in found]

    def run_code(
        self,
        code: str,
        *,
        language: str | None = None,
        context: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        on_result: Callable[[Result], Any] | None = None,
    ) -> Execution:
        """Runs code in an interpreter that keeps its state between calls (docs/contexts.md).

        ``timeout`` is in seconds (none if not given); code that takes longer ends with the error ``Timeout``. Errors of
        the code are in the execution and raise nothing; see :meth:`Execution.raise_for_error`.

        >>> execution = sandbox.run_code("x = 20; print('set')")
        >>> execution.stdout
        'set\\n'
        >>> (sandbox.run_code("x + 22")).text
        '42'
        """
        return self.contexts.run(
            code,
            language=language,
            context=context,
            env=env,
            timeout=timeout,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            on_result=on_result,
        )

    def branch(
        self,
        tag: str | None = None,
        *,
        mode: str | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
    ) -> Snapshot:
        """Captures it as a snapshot; it runs on. ``mode`` is ``auto``, ``live``, ``diff`` or ``full``.

        With ``wait=False`` it returns when the sandbox runs again; the snapshot's ``status`` is ``writing`` until it is
        ``ready`` (see :meth:`Snapshot.wait`), and can be forked meanwhile. Raises :class:`ExistsError` for a tag that
        is taken, :class:`IncompatibleError` for a mode that this host has not.

        >>> execution = sandbox.run_code("x = 1")
        >>> branch = sandbox.branch()
        >>> branch.status
        'ready'
        >>> branch.remove() == [branch.tag]
        True
        """
        body = clean(tag=tag, mode=mode, wait=None if wait else False)
        reply = self.client.transport.request("POST", f"{self._base}/branch", json=body, once=idempotency_key or True)
        return Snapshot(self.client, SnapshotInfo.load(reply))

    def fork(
        self,
        n: int = 1,
        *,
        tag: str | None = None,
        mode: str | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        ttl: float | None = None,
        on_ttl: str | None = None,
        idle: float | None = None,
        on_idle: str | None = None,
        auto_resume: bool | None = None,
        limits: Mapping[str, Any] | None = None,
        egress: str | Mapping[str, Any] | None = None,
    ) -> builtins.list[Sandbox]:
        """Branches it and forks ``n`` children of that instant, in one call; it runs on.

        The snapshot in between has the children's ``info.snapshot_tag`` and stays until it is removed.

        Raises :class:`NoCapacityError`, :class:`WrongStateError`.

        >>> execution = sandbox.run_code("kept = 7")
        >>> [copy] = sandbox.fork()
        >>> (copy.run_code("kept")).text
        '7'
        >>> copy.kill()
        """
        body = clean(tag=tag, mode=mode, wait=False, n=n)
        body |= _bounds(labels, env, ttl, on_ttl, idle, on_idle, auto_resume, limits, egress)
        reply = self.client.transport.request("POST", f"{self._base}/branch", json=body, once=True)
        return _born(self.client, reply["children"])

    def refresh(self) -> SandboxInfo:
        """Asks what it is like now, and keeps that as ``info``.

        >>> (sandbox.refresh()).state
        'running'
        """
        self.info = SandboxInfo.load(self.client.transport.request("GET", self._base))
        return self.info

    def kill(self) -> None:
        """Ends it; its snapshots and children stay. One that has ended already is no error.

        >>> brief = Sandbox.create("python-numpy")
        >>> brief.kill()
        """
        from ..errors import NotFoundError

        try:
            self.client.transport.request("DELETE", self._base)
        except NotFoundError:
            return

    def pause(self) -> SandboxInfo:
        """Halts its CPUs; its memory stays.

        Raises :class:`WrongStateError` for one that does not run.

        >>> (sandbox.pause()).state
        'paused'
        >>> (sandbox.resume()).state
        'running'
        """
        return self._change("pause")

    def resume(self) -> SandboxInfo:
        """Lets a paused one run on.

        Raises :class:`WrongStateError` for one that is not paused.

        >>> info = sandbox.pause()
        >>> (sandbox.resume()).state
        'running'
        """
        return self._change("resume")

    def suspend(self) -> SandboxInfo:
        """Stores it on disk and frees its memory; it keeps its id.

        Raises :class:`WrongStateError`, :class:`NoCapacityError` when the disk is full.

        >>> (sandbox.suspend()).state
        'suspended'
        >>> (sandbox.wake()).state
        'running'
        """
        return self._change("suspend")

    def wake(self) -> SandboxInfo:
        """Lets a suspended one run on.

        Raises :class:`WrongStateError` for one that is not suspended, :class:`NoCapacityError`.

        >>> info = sandbox.suspend()
        >>> (sandbox.wake()).state
        'running'
        """
        return self._change("wake")

    def _change(self, what: str) -> SandboxInfo:
        self.info = SandboxInfo.load(self.client.transport.request("POST", f"{self._base}/{what}"))
        return self.info

    def set_ttl(self, ttl: float, *, longer: bool = False) -> SandboxInfo:
        """Gives it another time to live, in seconds from now; 0: until it is killed. With ``longer`` never a shorter one.

        Raises :class:`InvalidError` for less than 0.

        >>> (sandbox.set_ttl(3600)).expires_at_unix > 0
        True
        """
        body = {"ttl_seconds": ttl, "longer": longer}
        self.info = SandboxInfo.load(self.client.transport.request("PUT", f"{self._base}/ttl", json=body))
        return self.info

    def ping(self) -> dict[str, Any]:
        """Asks its agent for a sign of life.

        Raises :class:`WrongStateError` for one that does not run, :class:`TimeoutError`.

        >>> (sandbox.ping())["pong"]
        True
        """
        reply: dict[str, Any] = self.client.transport.request("POST", f"{self._base}/ping")
        return reply

    def logs(self) -> str:
        """The newest part of its console.

        >>> isinstance(sandbox.logs(), str)
        True
        """
        return (self.client.transport.send("GET", f"{self._base}/logs")).text

    def metrics(self) -> dict[str, Any]:
        """What it uses by its own accounting (docs/api.md: Metrics).

        >>> (sandbox.metrics())["cpus"]
        1
        """
        reply: dict[str, Any] = self.client.transport.request("GET", f"{self._base}/metrics")
        return reply

    def usage(self) -> dict[str, Any]:
        """What it costs its host (docs/api.md: Usage).

        >>> (sandbox.usage())["id"] == sandbox.id
        True
        """
        reply: dict[str, Any] = self.client.transport.request("GET", f"{self._base}/usage")
        return reply

    def egress(self) -> dict[str, Any]:
        """What it may reach, and what it has sent and received (docs/api.md: EgressState).

        >>> (sandbox.egress())["preset"]
        'none'
        """
        reply: dict[str, Any] = self.client.transport.request("GET", f"{self._base}/egress")
        return reply

    def set_egress(
        self,
        preset: str | None = None,
        *,
        allow: Sequence[str] = (),
        deny: Sequence[str] = (),
        budget_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Says what it may reach from now on; flows that it may not have any more are cut.

        Raises :class:`InvalidError`, and :class:`DeniedError` for who may not let it reach more.

        >>> (sandbox.set_egress("none", budget_bytes=1 << 20))["preset"]
        'none'
        """
        body = clean(preset=preset, allow=list(allow) or None, deny=list(deny) or None, budget_bytes=budget_bytes)
        reply: dict[str, Any] = self.client.transport.request("PUT", f"{self._base}/egress", json=body)
        return reply

    def flows(self, *, follow: bool = False, since: int | None = None) -> Iterator[dict[str, Any]]:
        """What it said to whom outside, and what was refused (docs/api.md: Flow); with ``follow`` as it happens.

        >>> [flow for flow in sandbox.flows()]
        []
        """
        params = clean(follow="true" if follow else "false", since=since)
        with closing(self.client.transport.lines("GET", f"{self._base}/flows", params=params)) as lines:
            for flow in lines:
                yield flow

    def ports(self) -> builtins.list[PortInfo]:
        """TCP ports that something in it listens on, and those that are public.

        >>> sandbox.set_port(8080, public=True)
        >>> [(p.port, p.public) for p in sandbox.ports() if p.port == 8080]
        [(8080, True)]
        """
        reply = self.client.transport.request("GET", f"{self._base}/ports")
        return [PortInfo.load(p) for p in reply["ports"]]

    def set_port(self, port: int, *, public: bool) -> None:
        """Says who may connect to a port: everybody who reaches the daemon, or who has a token (which holds at first).

        >>> sandbox.set_port(8080, public=False)
        """
        self.client.transport.request("PUT", f"{self._base}/ports/{port}", json={"public": public})

    def port_url(self, port: int, path: str = "/") -> str:
        """Where the daemon serves a port of its over HTTP (WebSockets, too), to who shows a token unless it is public.

        Raises :class:`ForkdError` for a daemon that serves no TCP.

        >>> try:
        ...     url = sandbox.port_url(8080, "/health")
        ... except ForkdError as e:
        ...     print(e)
        the daemon serves no TCP; start it with --bind
        """
        url = self.client.transport.target.url
        if self.client.transport.target.socket:
            url = (self.client.version()).address
        if not url:
            raise ForkdError("the daemon serves no TCP; start it with --bind")
        return f"{url}{self._base}/ports/{port}/{path.lstrip('/')}"

    def create_token(self, name: str = "", *, scope: str = "use", ttl: float | None = None) -> Token:
        """A token that opens this sandbox and nothing else, and ends with it.

        ``ttl`` is in seconds. Raises :class:`DeniedError`.

        >>> (sandbox.create_token(ttl=60)).sandbox == sandbox.id
        True
        """
        body = clean(name=name or None, scope=scope, ttl_seconds=ttl)
        return Token.load(self.client.transport.request("POST", f"{self._base}/tokens", json=body))

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _born(client: Client, children: list[dict[str, Any]]) -> list[Sandbox]:
    """The children of a reply; if one failed the others are ended, and its error is raised."""
    from ..errors import refusal

    born = [Sandbox._of(client, SandboxInfo.load(c)) for c in children if not c.get("error")]
    failed = [c["error"] for c in children if c.get("error")]
    if not failed:
        return born
    for child in born:
        child.kill()
    raise refusal(0, failed[0], "fork")


class Snapshot:
    """A frozen machine, which any number of sandboxes can be forked from."""

    def __init__(self, client: Client, info: SnapshotInfo) -> None:
        self.client = client
        self.info = info

    @property
    def tag(self) -> str:
        """Its name."""
        return self.info.tag

    @property
    def status(self) -> str:
        """``writing``, ``ready`` or ``failed``, when it was last asked for."""
        return self.info.status

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tag}: {self.status}>"

    @classmethod
    def get(cls, tag: str, *, client: Client | None = None) -> Snapshot:
        """The snapshot of that tag. Raises :class:`NotFoundError`.

        >>> (Snapshot.get("python-numpy")).status
        'ready'
        """
        client = client or default()
        return cls(client, SnapshotInfo.load(client.transport.request("GET", f"/v1/snapshots/{segment(tag)}")))

    @classmethod
    def list(
        cls,
        *,
        status: str | None = None,
        parent: str | None = None,
        branched_from: str | None = None,
        client: Client | None = None,
    ) -> builtins.list[Snapshot]:
        """All snapshots: of that status, that stand on that parent, that are branches of that sandbox.

        >>> "python-numpy" in [s.tag for s in Snapshot.list(status="ready")]
        True
        """
        client = client or default()
        params = clean(status=status, parent=parent, branched_from=branched_from)
        found = client.transport.request("GET", "/v1/snapshots", params=params)
        return [cls(client, SnapshotInfo.load(s)) for s in found]

    def fork(
        self,
        n: int = 1,
        *,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        ttl: float | None = None,
        on_ttl: str | None = None,
        idle: float | None = None,
        on_idle: str | None = None,
        auto_resume: bool | None = None,
        limits: Mapping[str, Any] | None = None,
        egress: str | Mapping[str, Any] | None = None,
        **more: Any,
    ) -> builtins.list[Sandbox]:
        """Forks ``n`` sandboxes. Options are those of :meth:`Sandbox.create`.

        >>> snapshot = Snapshot.get("python-numpy")
        >>> [one] = snapshot.fork(env={"GREETING": "hi"})
        >>> (one.commands.run("echo $GREETING")).stdout
        'hi\\n'
        >>> one.kill()
        """
        return Sandbox.create_many(
            self.tag,
            n,
            labels=labels,
            env=env,
            ttl=ttl,
            on_ttl=on_ttl,
            idle=idle,
            on_idle=on_idle,
            auto_resume=auto_resume,
            limits=limits,
            egress=egress,
            client=self.client,
            **more,
        )

    def wait(self, timeout: float = 300.0) -> Snapshot:
        """Waits until it is no longer being written, so many seconds at most. Look at ``status``.

        >>> branch = sandbox.branch(wait=False)
        >>> (branch.wait(60)).status
        'ready'
        >>> branch.remove() == [branch.tag]
        True
        """
        left = timeout
        while True:
            once = min(left, 60.0)
            path = f"/v1/snapshots/{segment(self.tag)}"
            reply = self.client.transport.request("GET", path, params={"wait": once}, timeout=once + 60)
            self.info = SnapshotInfo.load(reply)
            left -= once
            if self.status != "writing" or left <= 0:
                return self

    def compact(self, to: str) -> Snapshot:
        """A snapshot of this content that stands on no other.

        Raises :class:`ExistsError`, :class:`WrongStateError` while it is being written.

        >>> branch = sandbox.branch()
        >>> alone = branch.compact("stands-alone")
        >>> branch.remove() == [branch.tag], alone.remove()
        (True, ['stands-alone'])
        """
        path = f"/v1/snapshots/{segment(self.tag)}/compact"
        return Snapshot(
            self.client,
            SnapshotInfo.load(self.client.transport.request("POST", path, json={"to": to}, once=True)),
        )

    def remove(self, *, cascade: bool = False, force: bool = False) -> builtins.list[str]:
        """Removes it, and returns the tags that are gone.

        What others stand on is :class:`BusyError`, unless ``cascade`` (those are removed as well) or ``force`` (those
        keep what they need of it).

        >>> branch = sandbox.branch("to-be-removed")
        >>> branch.remove()
        ['to-be-removed']
        """
        params = clean(cascade="true" if cascade else None, force="true" if force else None)
        reply = self.client.transport.request("DELETE", f"/v1/snapshots/{segment(self.tag)}", params=params)
        return list(reply["removed"]) if reply else [self.tag]


class Image:
    """A bootable root file system, which snapshots are warmed from."""

    def __init__(self, client: Client, info: ImageInfo) -> None:
        self.client = client
        self.info = info

    @property
    def id(self) -> str:
        """Its id."""
        return self.info.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.info.name} {self.id[:12]}>"

    @classmethod
    def list(cls, *, client: Client | None = None) -> builtins.list[Image]:
        """All images.

        >>> "python-numpy" in [image.info.name for image in Image.list()]
        True
        """
        client = client or default()
        return [cls(client, ImageInfo.load(i)) for i in client.transport.request("GET", "/v1/images")]

    @classmethod
    def build(
        cls,
        recipe: str,
        tag: str,
        *,
        files: Mapping[str, bytes] | None = None,
        replace: bool = False,
        on_event: Callable[[dict[str, Any]], Any] | None = None,
        client: Client | None = None,
    ) -> Snapshot:
        """Builds a recipe (its text, docs/recipes.md; ``files`` are those that it names) into a snapshot of that tag.

        Raises :class:`InvalidError` for a recipe that is not right, with line and reason, and :class:`ExistsError`.

        >>> try:
        ...     snapshot = Image.build("name: x\\nnonsense: 1\\n", "x")
        ... except InvalidError as e:
        ...     print("nonsense" in e.message)
        True
        """
        from .._pieces import recipe_tar
        from ..errors import ConnectionLostError, refusal

        client = client or default()
        params = clean(tag=tag, replace="true" if replace else None)
        content = recipe_tar(recipe, files or {})
        with closing(client.transport.lines("POST", "/v1/builds", params=params, content=content)) as lines:
            for event in lines:
                if event.get("error"):
                    raise refusal(0, event["error"], "/v1/builds")
                if event.get("snapshot"):
                    return Snapshot(client, SnapshotInfo.load(event["snapshot"]))
                if on_event:
                    on_event(event)
        raise ConnectionLostError("the build broke off before its end")

    def remove(self) -> None:
        """Removes it. Raises :class:`BusyError` while snapshots need it.

        >>> try:
        ...     (Image.list())[0].remove()
        ... except BusyError as e:
        ...     print(e.code)
        busy
        """
        self.client.transport.request("DELETE", f"/v1/images/{segment(self.id)}")
