"""Interpreters of a sandbox that keep their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from .._text import Kept, clean, segment
from ..errors import ConnectionLostError
from ..models import ContextInfo, Execution, ExecutionError, Result
from .transport import AsyncTransport


class AsyncContexts:
    """``sandbox.contexts``: interpreters with state of their own, forked with the sandbox."""

    def __init__(self, transport: AsyncTransport, base: str) -> None:
        self._t, self._base = transport, base

    async def list(self) -> list[ContextInfo]:
        """Those there are.

        >>> execution = await sandbox.run_code("1")
        >>> "default" in [c.id for c in await sandbox.contexts.list()]
        True
        """
        return [ContextInfo.load(c) for c in await self._t.request("GET", f"{self._base}/contexts")]

    async def create(
        self,
        id: str | None = None,
        *,
        language: str | None = None,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ContextInfo:
        """Starts one: ``python`` (if not given), ``shell``, ``javascript``, ``typescript``, or a driver of the image.

        Raises :class:`ExistsError`, and :class:`UnsupportedError` for a language that the image has not.

        >>> context = await sandbox.contexts.create("other", language="python", cwd="/tmp")
        >>> (await sandbox.run_code("import os; os.getcwd()", context="other")).text
        "'/tmp'"
        >>> await sandbox.contexts.remove("other")
        """
        body = clean(id=id, language=language, cwd=cwd, user=user, env=dict(env or {}))
        return ContextInfo.load(await self._t.request("POST", f"{self._base}/contexts", json=body, once=True))

    async def restart(self, id: str) -> ContextInfo:
        """Ends one and starts it again, with nothing in it.

        Raises :class:`NotFoundError`.

        >>> context = await sandbox.contexts.create("restarted")
        >>> execution = await sandbox.run_code("kept = 1", context="restarted")
        >>> context = await sandbox.contexts.restart("restarted")
        >>> (await sandbox.run_code("kept", context="restarted")).error.name
        'NameError'
        """
        return ContextInfo.load(await self._t.request("POST", f"{self._base}/contexts/{segment(id)}/restart"))

    async def interrupt(self, id: str) -> None:
        """Interrupts what it evaluates, which then ends with ``KeyboardInterrupt``.

        Raises :class:`NotFoundError`.

        >>> context = await sandbox.contexts.create("interrupted")
        >>> await sandbox.contexts.interrupt("interrupted")  # it does nothing now
        """
        await self._t.request("POST", f"{self._base}/contexts/{segment(id)}/interrupt")

    async def remove(self, id: str) -> None:
        """Ends one.

        Raises :class:`NotFoundError`.

        >>> context = await sandbox.contexts.create("removed")
        >>> await sandbox.contexts.remove("removed")
        """
        await self._t.request("DELETE", f"{self._base}/contexts/{segment(id)}")

    async def run(
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
        """See :meth:`AsyncSandbox.run_code`.

        >>> (await sandbox.contexts.run("6 * 7")).text
        '42'
        """
        body = clean(code=code, language=language, context=context, env=dict(env or {}), timeout_secs=timeout)
        done = Execution()
        kept = {"stdout": Kept(), "stderr": Kept()}
        told = {"stdout": on_stdout, "stderr": on_stderr}
        async with aclosing(self._t.lines("POST", f"{self._base}/eval", json=body)) as lines:
            async for event in lines:
                kind = event["type"]
                if kind in kept:
                    kept[kind].add(event.get("text", ""))
                    if tell := told[kind]:
                        tell(event.get("text", ""))
                elif kind == "result":
                    result = Result.load({k: v for k, v in event.items() if k != "type"})
                    done.results.append(result)
                    if result.is_main_result:
                        done.text = result.text
                    if on_result:
                        on_result(result)
                elif kind == "error":
                    done.error = ExecutionError(*(event.get(k, "") for k in ("name", "value", "traceback")))
                elif kind == "number_of_executions":
                    done.execution_count = event.get("execution_count", 0)
                elif kind == "end_of_execution" or (kind == "unexpected_end_of_execution" and done.error):
                    done.ms, done.exit_code = event.get("ms", 0.0), event.get("exit_code") or (1 if done.error else 0)
                    done.stdout, done.stderr = str(kept["stdout"]), str(kept["stderr"])
                    return done
                elif kind == "unexpected_end_of_execution":
                    raise ConnectionLostError(f"the execution broke off: {event.get('text', '')}")
        raise ConnectionLostError("the execution's output broke off before its end")
