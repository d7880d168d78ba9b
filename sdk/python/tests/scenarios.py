"""Runs sdk/scenarios.json with this SDK, which is installed: python scenarios.py sync|async SCENARIOS NAME=VALUE…

What it prints is what each scenario came to; the exit code says whether all went well.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import inspect
import json
import re
import sys
import time
from typing import Any

import forkd

SAME = {"Client", "Sandbox", "Snapshot", "Image"}


class Wrong(Exception):
    """What came is not what was expected."""


class Run:
    def __init__(self, kind: str, variables: dict[str, str]) -> None:
        self.kind = kind
        self.vars: dict[str, Any] = dict(variables)
        self.clients: list[Any] = []

    def cls(self, name: str) -> Any:
        return getattr(forkd, f"Async{name}" if self.kind == "async" and name in SAME else name)

    def look(self, path: str) -> Any:
        """The value of x.y.0."""
        head, *rest = path.split(".")
        value = self.vars[head]
        for part in rest:
            value = member(value, part)
        return value

    def fill(self, value: Any) -> Any:
        """A step's argument with what it names put in."""
        if isinstance(value, str):
            if value.startswith("$"):
                return self.look(value[1:])
            return re.sub(r"\{([\w.]+)\}", lambda m: str(self.look(m[1])), value)
        if isinstance(value, list):
            return [self.fill(v) for v in value]
        if isinstance(value, dict):
            if "$bytes" in value:
                return base64.b64decode(value["$bytes"])
            if "$collect" in value:
                collected: list[Any] = []
                self.vars[value["$collect"]] = collected
                return collected.append
            return {k: self.fill(v) for k, v in value.items()}
        return value

    async def await_(self, value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    async def call(self, step: dict[str, Any]) -> Any:
        do = step["do"]
        args, options = self.fill(step.get("args", [])), self.fill(step.get("options", {}))
        if do == "cleanup":
            return await self.cleanup()
        if do.startswith("new "):
            made = self.cls(do[4:])(**options)
            self.clients.append(made)
            return made
        if "on" not in step:
            name, method = do.split(".")
            return await self.await_(getattr(self.cls(name), method)(*args, **options))
        target = self.look(step["on"])
        if do == "take":
            return await self.take(
                getattr(target, step["iterate"])(**options) if "iterate" in step else target, step["count"]
            )
        if do == "watch":
            return await self.watch(target, step, args, options)
        for part in do.split("."):
            target = getattr(target, part)
        return await self.await_(target(*args, **options))

    async def take(self, source: Any, count: int) -> list[Any]:
        found: list[Any] = []
        if hasattr(source, "__aiter__"):
            iterator = source.__aiter__()
            while len(found) < count:
                found.append(await iterator.__anext__())
            if hasattr(iterator, "aclose"):
                await iterator.aclose()
            return found
        iterator = iter(source)
        while len(found) < count:
            found.append(next(iterator))
        if hasattr(iterator, "close"):
            iterator.close()
        return found

    async def watch(self, target: Any, step: dict[str, Any], args: Any, options: Any) -> Any:
        context = target.files.watch(*args, **options)
        if hasattr(context, "__aenter__"):
            async with context as events:
                for s in step["inside"]:
                    await self.step(s)
                return await self.take(events, step["count"])
        with context as events:
            for s in step["inside"]:
                await self.step(s)
            return await self.take(events, step["count"])

    async def cleanup(self) -> None:
        mine = self.vars["client"]
        ids = {v.id for v in self.vars.values() if isinstance(v, (forkd.Sandbox, forkd.AsyncSandbox))}
        for id in ids & {s["id"] for s in await self.await_(mine.request("GET", "/v1/sandboxes"))}:
            await self.await_(mine.request("DELETE", f"/v1/sandboxes/{id}"))
        for client in self.clients:
            close = getattr(client, "aclose", None) or getattr(client, "close", None)
            if close:
                await self.await_(close())

    async def step(self, step: dict[str, Any]) -> None:
        times = step.get("repeat", 1)
        wanted = step.get("error") or step.get("throws")
        for n in range(times):
            try:
                value = self.fill(step["value"]) if "value" in step else await self.call(step)
            except forkd.ForkdError as e:
                if not wanted:
                    raise
                if n + 1 < times and getattr(e, "code", "") != step.get("error"):
                    continue
                self.failed_as(e, step)
                return
        if wanted:
            raise Wrong(f"{step['do']}: no error; {wanted} was expected")
        if "as" in step:
            self.vars[step["as"]] = value
        if "expect" in step:
            self.hold(value, self.fill_expected(step["expect"]), step.get("do", step.get("value")))

    def failed_as(self, e: forkd.ForkdError, step: dict[str, Any]) -> None:
        if "throws" in step:
            if not isinstance(e, getattr(forkd, step["throws"])):
                raise Wrong(f"{step['do']}: {e!r}; a {step['throws']} was expected")
            return
        code = step["error"]
        if type(e) is not forkd.ERRORS[code] or e.code != code or not e.message:
            raise Wrong(f"{step['do']}: {e!r} ({getattr(e, 'code', '')}); {code} was expected")

    def fill_expected(self, value: Any) -> Any:
        if isinstance(value, dict) and "$bytes" not in value:
            return {k: self.fill_expected(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.fill_expected(v) for v in value]
        return self.fill(value)

    def hold(self, seen: Any, want: Any, where: str) -> None:
        """Holds a value against what is expected."""

        def wrong(why: str = "") -> Wrong:
            return Wrong(f"{where}: {seen!r}; {want!r} was expected {why}")

        if isinstance(want, dict):
            for key, w in want.items():
                if key == "$contains":
                    if not any(self.fits(v, w) for v in seen):
                        raise wrong()
                elif key == "$matches":
                    if not re.search(w, seen):
                        raise wrong()
                elif key == "$length":
                    if len(seen) != w:
                        raise wrong()
                elif key == "$least":
                    if not seen >= w:
                        raise wrong()
                else:
                    self.hold(member(seen, key), w, f"{where}.{key}")
        elif isinstance(want, list):
            if len(seen) != len(want):
                raise wrong("(other length)")
            for i, w in enumerate(want):
                self.hold(seen[i], w, f"{where}[{i}]")
        elif seen != want:
            raise wrong()

    def fits(self, seen: Any, want: Any) -> bool:
        try:
            self.hold(seen, want, "")
        except Wrong:
            return False
        return True


def member(value: Any, name: str) -> Any:
    if name.isdigit():
        return value[int(name)]
    if isinstance(value, dict):
        return value[name]
    if dataclasses.is_dataclass(value) or hasattr(value, name):
        return getattr(value, name)
    raise Wrong(f"{value!r} has no {name}")


async def main() -> int:
    kind, path, *pairs = sys.argv[1:]
    with open(path) as f:
        suite = json.load(f)
    run = Run(kind, dict(p.split("=", 1) for p in pairs))
    if sorted(forkd.ERRORS) != sorted(suite["codes"]):
        print(f"FAIL the codes that have classes: {sorted(forkd.ERRORS)}")
        return 1
    failed = passed = skipped = 0
    only = run.vars.get("only")
    for s in suite["setup"]:
        await run.step(s)
    try:
        for scenario in suite["scenarios"]:
            if only and not re.search(only, scenario["name"]):
                continue
            if scenario.get("needs", "snapshot") not in run.vars:
                skipped += 1
                continue
            began = time.monotonic()
            try:
                for s in scenario["steps"]:
                    await run.step(s)
            except Exception as e:
                failed += 1
                print(f"FAIL {scenario['name']}: {type(e).__name__}: {e}")
                continue
            passed += 1
            print(f"ok   {scenario['name']} ({time.monotonic() - began:.1f} s)")
    finally:
        for s in suite["teardown"]:
            await run.step(s)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


sys.exit(asyncio.run(main()))
