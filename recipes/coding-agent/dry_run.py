"""Three fixes of one bug are tried at once, each in a child of a sandbox with the package and 50 MiB of data. Needs no model.

Argument: the snapshot of this recipe (default: coding-agent). Ends with 1 when something that it says is not so.
"""

import ast
import hashlib
import pathlib
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from forkd import Sandbox

MIB = 1 << 20
tag = sys.argv[1] if len(sys.argv) > 1 else "coding-agent"
project = pathlib.Path(__file__).parent / "project"
source = (project / "ranges.py").read_text()
failed = []

# What a model would come up with: lines to put in the place of others, and what it does besides.
fixes = {
    "keep the larger end": ([("], last)", "], max(merged[-1][1], last))")], ""),
    "sort, join neighbours": (
        [
            ("], last)", "], max(merged[-1][1], last))"),
            ("in ranges:", "in sorted(ranges):"),
            ("[-1][1]:", "[-1][1] + 1:"),
        ],
        "",
    ),
    "join all, and tidy up": ([("first <= merged[-1][1]", "True")], "os.remove('/srv/data.bin')"),
}


def check(claim, holds):
    print(f"{'ok ' if holds else 'NOT'}  {claim}")
    if not holds:
        failed.append(claim)


def fixed(changes):
    text = source
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def look(sandbox):
    """The outcome of every test, and digests of the source and of the data, as they are in that sandbox."""
    code = """
import contextlib, hashlib, io, os
class Outcomes:
    def __init__(self): self.all = {}
    def pytest_runtest_logreport(self, report):
        if report.when == "call": self.all[report.nodeid] = report.outcome
def digest(path):
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file: return hashlib.file_digest(file, "sha256").hexdigest()
    return "gone"
os.chdir("/srv/project")
outcomes = Outcomes()
with contextlib.redirect_stdout(io.StringIO()):
    pytest.main(["-q", "-p", "no:cacheprovider"], plugins=[outcomes])
outcomes.all, digest("ranges.py"), digest("/srv/data.bin")
"""
    execution = sandbox.run_code(code, timeout=600)
    execution.raise_for_error()
    return ast.literal_eval(execution.text)


def try_fix(child, changes, besides):
    child.files.write("/srv/project/ranges.py", fixed(changes))
    if besides:
        child.run_code(f"import os; {besides}").raise_for_error()
    seen = look(child)
    return *seen, child.refresh()


data = random.Random(7).randbytes(50 * MIB)
with Sandbox.create(tag) as parent:
    started = time.monotonic()
    parent.files.write("/srv/data.bin", data)
    uploaded = time.monotonic() - started
    for path in project.rglob("*.py"):
        parent.files.write(f"/srv/project/{path.relative_to(project)}", path.read_bytes())
    parent.commands.run("sync").check()  # its disk has what its memory has: children share both
    started = time.monotonic()
    branch = parent.branch()
    captured = time.monotonic() - started
    try:
        started = time.monotonic()
        children = branch.fork(len(fixes))
        forked = time.monotonic() - started
        try:
            with ThreadPoolExecutor(len(fixes)) as pool:
                seen = list(
                    pool.map(lambda pair: try_fix(pair[0], *pair[1]), zip(children, fixes.values(), strict=True))
                )
        finally:
            for child in children:
                child.kill()
        still = (*look(parent), parent.refresh())
    finally:
        branch.remove()

print(
    f"\n50 MiB sent once in {uploaded:.1f} s; captured in {captured:.1f} s with a pause of {branch.info.pause_ms:.0f} ms;"
)
print(f"three children in {forked:.1f} s\n")
print(
    f"{'':8} {'fix':22} {'passed':>7} {'failed':>7}  {'ranges.py':10} {'data.bin':10} {'own disk':>9} {'own memory':>11}"
)
for name, fix, (tests, text, blob, info) in zip(
    ["parent", "child 1", "child 2", "child 3"], ["", *fixes], [still, *seen], strict=True
):
    passed = sum(outcome == "passed" for outcome in tests.values())
    print(
        f"{name:8} {fix:22} {passed:>7} {len(tests) - passed:>7}  {text[:8]:10} {blob[:8]:10}"
        f" {info.disk_own_bytes / MIB:>5.1f} MiB {info.memory_own_bytes / MIB:>7.1f} MiB"
    )
print()

want = hashlib.sha256(data).hexdigest()
bad = [
    [name.split("::")[1] for name, outcome in tests.items() if outcome != "passed"] for tests, _, _, _ in [still, *seen]
]
check(
    "every test ran in every machine",
    all(tests.keys() == still[0].keys() for tests, _, _, _ in seen) and len(still[0]) == 7,
)
check(
    "one fix is right, and the others are told apart by the tests", [not b for b in bad] == [False, False, True, False]
)
check(
    "each child has its own fix and no other",
    [s[1] for s in seen] == [hashlib.sha256(fixed(c).encode()).hexdigest() for c, _ in fixes.values()],
)
check("the parent has the bug it had", still[1] == hashlib.sha256(source.encode()).hexdigest())
check(
    "the 50 MiB are to the byte what was sent, in the parent and in both children that left them",
    [s[2] for s in [still, *seen]] == [want, want, want, "gone"],
)
check(
    "no child keeps a copy of them: each has less than 10 MiB of disk of its own",
    all(s[3].disk_own_bytes < 10 * MIB for s in seen),
)
sys.exit(1 if failed else 0)
