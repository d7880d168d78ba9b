"""Sandboxes, snapshots and images."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

from .._text import clean, segment
from ..errors import ForkdError
from ..models import Execution, ImageInfo, PortInfo, Result, SandboxInfo, SnapshotInfo, Token
from .client import AsyncClient, default
from .commands import AsyncCommands
from .contexts import AsyncContexts
from .files import AsyncFiles

S = TypeVar("S", bound="AsyncSandbox")


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


class AsyncSandbox:
    """A machine that was forked from a snapshot: commands, files, code, and branches of its own.

    As a context manager it is killed at the end of the ``with`` block.
    """

    def __init__(self, client: AsyncClient, info: SandboxInfo) -> None:
        self._setup(client, info)

    def _setup(self, client: AsyncClient, info: SandboxInfo) -> None:
        self.client = client
        self.info = info
        self._base = f"/v1/sandboxes/{segment(info.id)}"
        self.commands = AsyncCommands(client.transport, self._base)
        self.files = AsyncFiles(client.transport, self._base)
        self.contexts = AsyncContexts(client.transport, self._base)

    @classmethod
    def _of(cls: type[S], client: AsyncClient, info: SandboxInfo) -> S:
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
    async def create(
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
        client: AsyncClient | None = None,
        **more: Any,
    ) -> S:
        """Forks one sandbox from a snapshot.

        ``ttl`` is its time to live in seconds (none: until it is killed), ``on_ttl`` what happens then: ``kill``,
        ``pause`` or ``suspend``. ``idle`` and ``on_idle`` are the same for the time without a call into it; with
        ``auto_resume`` a call resumes or wakes it first. ``egress`` is what it may reach: a preset (``none``,
        ``packages``, …) or an object with ``preset``, ``allow``, ``deny``, ``budget_bytes``. ``limits`` are those of
        docs/api.md, ``more`` other fields of that request. Raises :class:`NotFoundError` for a snapshot that is not there,
        :class:`NoCapacityError`.

        >>> sandbox = await AsyncSandbox.create("python-numpy", ttl=600)
        """
        made = await cls.create_many(
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
    async def create_many(
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
        client: AsyncClient | None = None,
        **more: Any,
    ) -> builtins.list[S]:
        """Forks ``n`` sandboxes at once, all or none. Options are those of :meth:`create`.

        >>> made = await AsyncSandbox.create_many("python-numpy", 2)
        >>> [await one.kill() for one in made]
        [None, None]
        """
        client = client or default()
        body = {"snapshot_tag": snapshot, "n": n, **more}
        body |= _bounds(labels, env, ttl, on_ttl, idle, on_idle, auto_resume, limits, egress)
        made = await client.transport.request("POST", "/v1/sandboxes", json=body, once=idempotency_key or True)
        return [cls._of(client, SandboxInfo.load(s)) for s in made if not s.get("error")]

    @classmethod
    async def connect(cls: type[S], id: str, *, client: AsyncClient | None = None) -> S:
        """The sandbox of that id, or of the workspace of that name. Raises :class:`NotFoundError`.

        >>> (await AsyncSandbox.connect(sandbox.id)).info.state
        'running'
        """
        client = client or default()
        return cls._of(client, SandboxInfo.load(await client.transport.request("GET", f"/v1/sandboxes/{segment(id)}")))

    @classmethod
    async def list(
        cls,
        *,
        labels: Mapping[str, str] | None = None,
        state: str | None = None,
        snapshot: str | None = None,
        client: AsyncClient | None = None,
    ) -> builtins.list[SandboxInfo]:
        """All sandboxes that have these labels, are in this state, were forked from this snapshot.

        >>> sandbox.id in [info.id for info in await AsyncSandbox.list(state="running")]
        True
        """
        params: builtins.list[tuple[str, str]] = [("label", f"{k}={v}") for k, v in (labels or {}).items()]
        params += list(clean(state=state, snapshot=snapshot).items())
        found = await (client or default()).transport.request("GET", "/v1/sandboxes", params=params)
        return [SandboxInfo.load(s) for s in found]

    async def run_code(
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

        >>> execution = await sandbox.run_code("x = 20; print('set')")
        >>> execution.stdout
        'set\\n'
        >>> (await sandbox.run_code("x + 22")).text
        '42'
        """
        return await self.contexts.run(
            code,
            language=language,
            context=context,
            env=env,
            timeout=timeout,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            on_result=on_result,
        )

    async def branch(
        self,
        tag: str | None = None,
        *,
        mode: str | None = None,
        wait: bool = True,
        idempotency_key: str | None = None,
    ) -> AsyncSnapshot:
        """Captures it as a snapshot; it runs on. ``mode`` is ``auto``, ``live``, ``diff`` or ``full``.

        With ``wait=False`` it returns when the sandbox runs again; the snapshot's ``status`` is ``writing`` until it is
        ``ready`` (see :meth:`AsyncSnapshot.wait`), and can be forked meanwhile. Raises :class:`ExistsError` for a tag that
        is taken, :class:`IncompatibleError` for a mode that this host has not.

        >>> execution = await sandbox.run_code("x = 1")
        >>> branch = await sandbox.branch()
        >>> branch.status
        'ready'
        >>> await branch.remove() == [branch.tag]
        True
        """
        body = clean(tag=tag, mode=mode, wait=None if wait else False)
        reply = await self.client.transport.request(
            "POST", f"{self._base}/branch", json=body, once=idempotency_key or True
        )
        return AsyncSnapshot(self.client, SnapshotInfo.load(reply))

    async def fork(
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
    ) -> builtins.list[AsyncSandbox]:
        """Branches it and forks ``n`` children of that instant, in one call; it runs on.

        The snapshot in between has the children's ``info.snapshot_tag`` and stays until it is removed.

        Raises :class:`NoCapacityError`, :class:`WrongStateError`.

        >>> execution = await sandbox.run_code("kept = 7")
        >>> [copy] = await sandbox.fork()
        >>> (await copy.run_code("kept")).text
        '7'
        >>> await copy.kill()
        """
        body = clean(tag=tag, mode=mode, wait=False, n=n)
        body |= _bounds(labels, env, ttl, on_ttl, idle, on_idle, auto_resume, limits, egress)
        reply = await self.client.transport.request("POST", f"{self._base}/branch", json=body, once=True)
        return await _born(self.client, reply["children"])

    async def refresh(self) -> SandboxInfo:
        """Asks what it is like now, and keeps that as ``info``.

        >>> (await sandbox.refresh()).state
        'running'
        """
        self.info = SandboxInfo.load(await self.client.transport.request("GET", self._base))
        return self.info

    async def kill(self) -> None:
        """Ends it; its snapshots and children stay. One that has ended already is no error.

        >>> brief = await AsyncSandbox.create("python-numpy")
        >>> await brief.kill()
        """
        from ..errors import NotFoundError

        try:
            await self.client.transport.request("DELETE", self._base)
        except NotFoundError:
            return

    async def pause(self) -> SandboxInfo:
        """Halts its CPUs; its memory stays.

        Raises :class:`WrongStateError` for one that does not run.

        >>> (await sandbox.pause()).state
        'paused'
        >>> (await sandbox.resume()).state
        'running'
        """
        return await self._change("pause")

    async def resume(self) -> SandboxInfo:
        """Lets a paused one run on.

        Raises :class:`WrongStateError` for one that is not paused.

        >>> info = await sandbox.pause()
        >>> (await sandbox.resume()).state
        'running'
        """
        return await self._change("resume")

    async def suspend(self) -> SandboxInfo:
        """Stores it on disk and frees its memory; it keeps its id.

        Raises :class:`WrongStateError`, :class:`NoCapacityError` when the disk is full.

        >>> (await sandbox.suspend()).state
        'suspended'
        >>> (await sandbox.wake()).state
        'running'
        """
        return await self._change("suspend")

    async def wake(self) -> SandboxInfo:
        """Lets a suspended one run on.

        Raises :class:`WrongStateError` for one that is not suspended, :class:`NoCapacityError`.

        >>> info = await sandbox.suspend()
        >>> (await sandbox.wake()).state
        'running'
        """
        return await self._change("wake")

    async def _change(self, what: str) -> SandboxInfo:
        self.info = SandboxInfo.load(await self.client.transport.request("POST", f"{self._base}/{what}"))
        return self.info

    async def set_ttl(self, ttl: float, *, longer: bool = False) -> SandboxInfo:
        """Gives it another time to live, in seconds from now; 0: until it is killed. With ``longer`` never a shorter one.

        Raises :class:`InvalidError` for less than 0.

        >>> (await sandbox.set_ttl(3600)).expires_at_unix > 0
        True
        """
        body = {"ttl_seconds": ttl, "longer": longer}
        self.info = SandboxInfo.load(await self.client.transport.request("PUT", f"{self._base}/ttl", json=body))
        return self.info

    async def ping(self) -> dict[str, Any]:
        """Asks its agent for a sign of life.

        Raises :class:`WrongStateError` for one that does not run, :class:`TimeoutError`.

        >>> (await sandbox.ping())["pong"]
        True
        """
        reply: dict[str, Any] = await self.client.transport.request("POST", f"{self._base}/ping")
        return reply

    async def logs(self) -> str:
        """The newest part of its console.

        >>> isinstance(await sandbox.logs(), str)
        True
        """
        return (await self.client.transport.send("GET", f"{self._base}/logs")).text

    async def metrics(self) -> dict[str, Any]:
        """What it uses by its own accounting (docs/api.md: Metrics).

        >>> (await sandbox.metrics())["cpus"]
        1
        """
        reply: dict[str, Any] = await self.client.transport.request("GET", f"{self._base}/metrics")
        return reply

    async def usage(self) -> dict[str, Any]:
        """What it costs its host (docs/api.md: Usage).

        >>> (await sandbox.usage())["id"] == sandbox.id
        True
        """
        reply: dict[str, Any] = await self.client.transport.request("GET", f"{self._base}/usage")
        return reply

    async def egress(self) -> dict[str, Any]:
        """What it may reach, and what it has sent and received (docs/api.md: EgressState).

        >>> (await sandbox.egress())["preset"]
        'none'
        """
        reply: dict[str, Any] = await self.client.transport.request("GET", f"{self._base}/egress")
        return reply

    async def set_egress(
        self,
        preset: str | None = None,
        *,
        allow: Sequence[str] = (),
        deny: Sequence[str] = (),
        budget_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Says what it may reach from now on; flows that it may not have any more are cut.

        Raises :class:`InvalidError`, and :class:`DeniedError` for who may not let it reach more.

        >>> (await sandbox.set_egress("none", budget_bytes=1 << 20))["preset"]
        'none'
        """
        body = clean(preset=preset, allow=list(allow) or None, deny=list(deny) or None, budget_bytes=budget_bytes)
        reply: dict[str, Any] = await self.client.transport.request("PUT", f"{self._base}/egress", json=body)
        return reply

    async def flows(self, *, follow: bool = False, since: int | None = None) -> AsyncIterator[dict[str, Any]]:
        """What it said to whom outside, and what was refused (docs/api.md: Flow); with ``follow`` as it happens.

        >>> [flow async for flow in sandbox.flows()]
        []
        """
        params = clean(follow="true" if follow else "false", since=since)
        async with aclosing(self.client.transport.lines("GET", f"{self._base}/flows", params=params)) as lines:
            async for flow in lines:
                yield flow

    async def ports(self) -> builtins.list[PortInfo]:
        """TCP ports that something in it listens on, and those that are public.

        >>> await sandbox.set_port(8080, public=True)
        >>> [(p.port, p.public) for p in await sandbox.ports() if p.port == 8080]
        [(8080, True)]
        """
        reply = await self.client.transport.request("GET", f"{self._base}/ports")
        return [PortInfo.load(p) for p in reply["ports"]]

    async def set_port(self, port: int, *, public: bool) -> None:
        """Says who may connect to a port: everybody who reaches the daemon, or who has a token (which holds at first).

        >>> await sandbox.set_port(8080, public=False)
        """
        await self.client.transport.request("PUT", f"{self._base}/ports/{port}", json={"public": public})

    async def port_url(self, port: int, path: str = "/") -> str:
        """Where the daemon serves a port of its over HTTP (WebSockets, too), to who shows a token unless it is public.

        Raises :class:`ForkdError` for a daemon that serves no TCP.

        >>> try:
        ...     url = await sandbox.port_url(8080, "/health")
        ... except ForkdError as e:
        ...     print(e)
        the daemon serves no TCP; start it with --bind
        """
        url = self.client.transport.target.url
        if self.client.transport.target.socket:
            url = (await self.client.version()).address
        if not url:
            raise ForkdError("the daemon serves no TCP; start it with --bind")
        return f"{url}{self._base}/ports/{port}/{path.lstrip('/')}"

    async def create_token(self, name: str = "", *, scope: str = "use", ttl: float | None = None) -> Token:
        """A token that opens this sandbox and nothing else, and ends with it.

        ``ttl`` is in seconds. Raises :class:`DeniedError`.

        >>> (await sandbox.create_token(ttl=60)).sandbox == sandbox.id
        True
        """
        body = clean(name=name or None, scope=scope, ttl_seconds=ttl)
        return Token.load(await self.client.transport.request("POST", f"{self._base}/tokens", json=body))

    async def __aenter__(self: S) -> S:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()


async def _born(client: AsyncClient, children: list[dict[str, Any]]) -> list[AsyncSandbox]:
    """The children of a reply; if one failed the others are ended, and its error is raised."""
    from ..errors import refusal

    born = [AsyncSandbox._of(client, SandboxInfo.load(c)) for c in children if not c.get("error")]
    failed = [c["error"] for c in children if c.get("error")]
    if not failed:
        return born
    for child in born:
        await child.kill()
    raise refusal(0, failed[0], "fork")


class AsyncSnapshot:
    """A frozen machine, which any number of sandboxes can be forked from."""

    def __init__(self, client: AsyncClient, info: SnapshotInfo) -> None:
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
    async def get(cls, tag: str, *, client: AsyncClient | None = None) -> AsyncSnapshot:
        """The snapshot of that tag. Raises :class:`NotFoundError`.

        >>> (await AsyncSnapshot.get("python-numpy")).status
        'ready'
        """
        client = client or default()
        return cls(client, SnapshotInfo.load(await client.transport.request("GET", f"/v1/snapshots/{segment(tag)}")))

    @classmethod
    async def list(
        cls,
        *,
        status: str | None = None,
        parent: str | None = None,
        branched_from: str | None = None,
        client: AsyncClient | None = None,
    ) -> builtins.list[AsyncSnapshot]:
        """All snapshots: of that status, that stand on that parent, that are branches of that sandbox.

        >>> "python-numpy" in [s.tag for s in await AsyncSnapshot.list(status="ready")]
        True
        """
        client = client or default()
        params = clean(status=status, parent=parent, branched_from=branched_from)
        found = await client.transport.request("GET", "/v1/snapshots", params=params)
        return [cls(client, SnapshotInfo.load(s)) for s in found]

    async def fork(
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
    ) -> builtins.list[AsyncSandbox]:
        """Forks ``n`` sandboxes. Options are those of :meth:`AsyncSandbox.create`.

        >>> snapshot = await AsyncSnapshot.get("python-numpy")
        >>> [one] = await snapshot.fork(env={"GREETING": "hi"})
        >>> (await one.commands.run("echo $GREETING")).stdout
        'hi\\n'
        >>> await one.kill()
        """
        return await AsyncSandbox.create_many(
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

    async def wait(self, timeout: float = 300.0) -> AsyncSnapshot:
        """Waits until it is no longer being written, so many seconds at most. Look at ``status``.

        >>> branch = await sandbox.branch(wait=False)
        >>> (await branch.wait(60)).status
        'ready'
        >>> await branch.remove() == [branch.tag]
        True
        """
        left = timeout
        while True:
            once = min(left, 60.0)
            path = f"/v1/snapshots/{segment(self.tag)}"
            reply = await self.client.transport.request("GET", path, params={"wait": once}, timeout=once + 60)
            self.info = SnapshotInfo.load(reply)
            left -= once
            if self.status != "writing" or left <= 0:
                return self

    async def compact(self, to: str) -> AsyncSnapshot:
        """A snapshot of this content that stands on no other.

        Raises :class:`ExistsError`, :class:`WrongStateError` while it is being written.

        >>> branch = await sandbox.branch()
        >>> alone = await branch.compact("stands-alone")
        >>> await branch.remove() == [branch.tag], await alone.remove()
        (True, ['stands-alone'])
        """
        path = f"/v1/snapshots/{segment(self.tag)}/compact"
        return AsyncSnapshot(
            self.client,
            SnapshotInfo.load(await self.client.transport.request("POST", path, json={"to": to}, once=True)),
        )

    async def remove(self, *, cascade: bool = False, force: bool = False) -> builtins.list[str]:
        """Removes it, and returns the tags that are gone.

        What others stand on is :class:`BusyError`, unless ``cascade`` (those are removed as well) or ``force`` (those
        keep what they need of it).

        >>> branch = await sandbox.branch("to-be-removed")
        >>> await branch.remove()
        ['to-be-removed']
        """
        params = clean(cascade="true" if cascade else None, force="true" if force else None)
        reply = await self.client.transport.request("DELETE", f"/v1/snapshots/{segment(self.tag)}", params=params)
        return list(reply["removed"]) if reply else [self.tag]


class AsyncImage:
    """A bootable root file system, which snapshots are warmed from."""

    def __init__(self, client: AsyncClient, info: ImageInfo) -> None:
        self.client = client
        self.info = info

    @property
    def id(self) -> str:
        """Its id."""
        return self.info.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.info.name} {self.id[:12]}>"

    @classmethod
    async def list(cls, *, client: AsyncClient | None = None) -> builtins.list[AsyncImage]:
        """All images.

        >>> "python-numpy" in [image.info.name for image in await AsyncImage.list()]
        True
        """
        client = client or default()
        return [cls(client, ImageInfo.load(i)) for i in await client.transport.request("GET", "/v1/images")]

    @classmethod
    async def build(
        cls,
        recipe: str,
        tag: str,
        *,
        files: Mapping[str, bytes] | None = None,
        replace: bool = False,
        on_event: Callable[[dict[str, Any]], Any] | None = None,
        client: AsyncClient | None = None,
    ) -> AsyncSnapshot:
        """Builds a recipe (its text, docs/recipes.md; ``files`` are those that it names) into a snapshot of that tag.

        Raises :class:`InvalidError` for a recipe that is not right, with line and reason, and :class:`ExistsError`.

        >>> try:
        ...     snapshot = await AsyncImage.build("name: x\\nnonsense: 1\\n", "x")
        ... except InvalidError as e:
        ...     print("nonsense" in e.message)
        True
        """
        from .._pieces import recipe_tar
        from ..errors import ConnectionLostError, refusal

        client = client or default()
        params = clean(tag=tag, replace="true" if replace else None)
        content = recipe_tar(recipe, files or {})
        async with aclosing(client.transport.lines("POST", "/v1/builds", params=params, content=content)) as lines:
            async for event in lines:
                if event.get("error"):
                    raise refusal(0, event["error"], "/v1/builds")
                if event.get("snapshot"):
                    return AsyncSnapshot(client, SnapshotInfo.load(event["snapshot"]))
                if on_event:
                    on_event(event)
        raise ConnectionLostError("the build broke off before its end")

    async def remove(self) -> None:
        """Removes it. Raises :class:`BusyError` while snapshots need it.

        >>> try:
        ...     await (await AsyncImage.list())[0].remove()
        ... except BusyError as e:
        ...     print(e.code)
        busy
        """
        await self.client.transport.request("DELETE", f"/v1/images/{segment(self.id)}")
