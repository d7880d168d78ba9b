"""Runs the examples in the docstrings, with a sandbox called sandbox. Argument: the tag of a snapshot with numpy.

Every public method has one. What is asynchronous has the same, of which these are made. With a second argument only those of
what is called so are run.
"""

from __future__ import annotations

import doctest
import inspect
import sys

import forkd
from forkd import controller
from forkd._sync import client, commands, contexts, files
from forkd._sync import sandbox as sandboxes

CLASSES = (
    forkd.Client,
    forkd.Commands,
    forkd.Process,
    forkd.Contexts,
    forkd.Files,
    forkd.Sandbox,
    forkd.Snapshot,
    forkd.Image,
    forkd.Controller,
)


def without() -> list[str]:
    """Public methods that have no example, and what has no docstring."""
    found = []
    for cls in CLASSES:
        for name, member in vars(cls).items():
            function = member.__func__ if isinstance(member, classmethod) else member
            if name.startswith("_") or not (inspect.isfunction(function) or isinstance(function, property)):
                continue
            text = inspect.getdoc(function) or ""
            if not text or (inspect.isfunction(function) and ">>>" not in text):
                found.append(f"{cls.__name__}.{name}")
    return found


if missing := without():
    print("no example:", *missing)
    sys.exit(1)
only = sys.argv[2] if len(sys.argv) > 2 else ""
before = {s.id for s in forkd.Sandbox.list()}
tags = {s.tag for s in forkd.Snapshot.list()}
tried = failed = 0
try:
    with forkd.Sandbox.create(sys.argv[1]) as sandbox:
        for module in (forkd, controller, client, commands, contexts, files, sandboxes):
            names = {name: getattr(forkd, name) for name in forkd.__all__} | {"sandbox": sandbox}
            for test in doctest.DocTestFinder(exclude_empty=True).find(module, globs=names):
                if only in test.name:
                    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
                    tried, failed = tried + result.attempted, failed + result.failed
finally:
    for left in forkd.Sandbox.list():
        if left.id not in before:
            forkd.Sandbox.connect(left.id).kill()
    for snapshot in forkd.Snapshot.list():
        if snapshot.tag not in tags:
            snapshot.remove(force=True)
print(f"{tried} tried, {failed} failed")
sys.exit(1 if failed or not tried else 0)
