"""Runs the examples in the docstrings, with a sandbox called sandbox. Argument: the tag of a snapshot with numpy."""

from __future__ import annotations

import doctest
import sys

import forkd
from forkd import controller
from forkd._sync import client, commands, contexts, files
from forkd._sync import sandbox as sandboxes

before = {s.id for s in forkd.Sandbox.list()}
tags = {s.tag for s in forkd.Snapshot.list()}
tried = failed = 0
with forkd.Sandbox.create(sys.argv[1]) as sandbox:
    for module in (forkd, controller, client, commands, contexts, files, sandboxes):
        names = {name: getattr(forkd, name) for name in forkd.__all__} | {"sandbox": sandbox}
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, globs=names):
            result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
            tried, failed = tried + result.attempted, failed + result.failed
for left in forkd.Sandbox.list():
    if left.id not in before:
        forkd.Sandbox.connect(left.id).kill()
for snapshot in forkd.Snapshot.list():
    if snapshot.tag not in tags:
        snapshot.remove(force=True)
print(f"{tried} tried, {failed} failed")
sys.exit(1 if failed or tried < 12 else 0)
