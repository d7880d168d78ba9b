"""One daemon."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from .. import _config
from .._defaults import async_owner
from .._text import clean
from ..models import Event, Token, TreeNode, VersionInfo
from .transport import AsyncTransport

#: Seconds that a reply is waited for where nothing else says how long.
TIMEOUT = 300.0


class AsyncClient:
    """A daemon: the one that ``url`` names, else FORKD_URL or FORKD_HOST, else this user's, which is started if need be.

    ``url`` is ``unix:///path``, ``http://host:port`` or ``https://host:port``; ``token`` (else FORKD_TOKEN) is what it
    wants over TCP. FORKD_CA or FORKD_FINGERPRINT say how a daemon over https is trusted. ``timeout`` is in seconds.
    """

    def __init__(self, url: str | None = None, token: str | None = None, *, timeout: float = TIMEOUT) -> None:
        self.transport = AsyncTransport(_config.find(url, token), timeout)

    async def version(self) -> VersionInfo:
        """Who the daemon is.

        >>> client = AsyncClient()
        >>> (await client.version()).api
        'v1'
        """
        return VersionInfo.load(await self.transport.request("GET", "/version"))

    async def host(self) -> dict[str, Any]:
        """What its host offers, check by check.

        >>> (await sandbox.client.host())["ok"]
        True
        """
        reply: dict[str, Any] = await self.transport.request("GET", "/v1/host")
        return reply

    async def tree(self, *, steps: bool = False) -> list[TreeNode]:
        """Images, snapshots and sandboxes as a family tree.

        >>> [node.kind for node in await sandbox.client.tree()][0]
        'image'
        """
        reply = await self.transport.request("GET", "/v1/tree", params=clean(all="true" if steps else None))
        return [TreeNode.load(n) for n in reply]

    async def events(
        self,
        *,
        types: Sequence[str] = (),
        sandbox: str | None = None,
        snapshot: str | None = None,
        since: int | None = None,
        tail: int | None = None,
        follow: bool = True,
    ) -> AsyncIterator[Event]:
        """What happens, as it happens: without end if ``follow``, else what is kept.

        ``types`` are ``sandbox`` or ``sandbox.forked``, …; ``since`` the sequence of the last event that you have seen,
        ``tail`` how many of those before to begin with.

        Raises :class:`InvalidError` for a type that there is not.

        >>> async for event in sandbox.client.events(types=["sandbox.forked"], sandbox=sandbox.id, follow=False):
        ...     print(event.type, event.sandbox_id == sandbox.id)
        sandbox.forked True
        """
        params: list[tuple[str, Any]] = [("type", t) for t in types]
        params += list(clean(sandbox=sandbox, snapshot=snapshot, since=since, tail=tail).items())
        params.append(("follow", "true" if follow else "false"))
        async with aclosing(self.transport.lines("GET", "/v1/events", params=params)) as lines:
            async for event in lines:
                yield Event.load(event)

    async def usage(self, *, labels: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """What every sandbox costs its host (docs/api.md: Usage).

        >>> sandbox.id in [u["id"] for u in await sandbox.client.usage()]
        True
        """
        params = [("label", f"{k}={v}") for k, v in (labels or {}).items()]
        reply: list[dict[str, Any]] = await self.transport.request("GET", "/v1/usage", params=params)
        return reply

    async def create_token(
        self, name: str = "", *, scope: str = "use", sandbox: str | None = None, ttl: float | None = None
    ) -> Token:
        """Makes a token: of scope ``read``, ``use``, ``manage`` or ``admin``; ``ttl`` in seconds, none: for ever.

        Raises :class:`DeniedError` for who may not do all that the token may.

        >>> token = await sandbox.client.create_token("reader", scope="read", ttl=60)
        >>> (token.name, token.scope)
        ('reader', 'read')
        """
        body = clean(name=name or None, scope=scope, sandbox=sandbox, ttl_seconds=ttl)
        return Token.load(await self.transport.request("POST", "/v1/tokens", json=body))

    async def request(self, method: str, path: str, **options: Any) -> Any:
        """Any request of docs/api.md, for what has no method here: ``json=``, ``params=``, ``headers=``.

        Raises what the daemon says, as all calls do: a class of :class:`APIError`.

        >>> (await sandbox.client.request("GET", "/healthz"))["ok"]
        True
        """
        return await self.transport.request(method, path, **options)

    async def aclose(self) -> None:
        """Closes its connections.

        >>> client = AsyncClient()
        >>> await client.aclose()
        """
        await self.transport.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


_defaults: dict[Any, AsyncClient] = {}
_lock = threading.Lock()


def default() -> AsyncClient:
    """The client of the daemon that the environment names, one for all."""
    target = _config.find()
    key = (async_owner(_defaults), target)
    with _lock:
        if key not in _defaults:
            _defaults[key] = AsyncClient()
        return _defaults[key]
