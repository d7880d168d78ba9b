"""A test suite of strangers is dealt to children of one warm parent; what one test breaks, no other child sees.

Arguments: the snapshot of this recipe (default: parallel-pytest), the number of children (4). Ends with 1 when something that
it says is not so.
"""

import pathlib
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from forkd import Sandbox

tag = sys.argv[1] if len(sys.argv) > 1 else "parallel-pytest"
workers = int(sys.argv[2]) if len(sys.argv) > 2 else 4
project = pathlib.Path(__file__).parent / "project"
failed = []


def check(claim, holds):
    print(f"{'ok ' if holds else 'NOT'}  {claim}")
    if not holds:
        failed.append(claim)


def name(test):
    return test.split("::")[1]


def run(child, tests):
    """Verdicts by test, as far as the runner came, and the seconds that took."""
    started = time.monotonic()
    code = f"pytest.main(['-v', '--tb=no', '-p', 'no:cacheprovider', *{tests!r}])"
    said = child.run_code(code, timeout=600).stdout
    if "collected" not in said:
        raise RuntimeError(f"pytest did not come to collect {tests[0]}:\n{said}")
    return dict(re.findall(r"^(\S+::\S+) (PASSED|FAILED|ERROR)", said, re.M)), time.monotonic() - started


def run_all(branch, shards):
    """One child for each list of tests, all at the same time."""
    children = branch.fork(len(shards))
    try:
        with ThreadPoolExecutor(len(shards)) as pool:
            return list(pool.map(run, children, shards))
    finally:
        for child in children:
            child.kill()


def files(sandbox):
    listing = "import pathlib; {str(p): p.read_text() for p in sorted(pathlib.Path('/srv/project').rglob('*.py'))}"
    return sandbox.run_code(listing).text


with Sandbox.create(tag) as parent:
    for path in project.rglob("*.py"):
        parent.files.write(f"/srv/project/{path.relative_to(project)}", path.read_bytes())
    # Collecting runs their code as well: here, and once. The children have it imported.
    parent.run_code("import os, sys; os.chdir('/srv/project'); sys.path.insert(0, '.')").raise_for_error()
    collected = parent.run_code("pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider'])", timeout=600)
    tests = re.findall(r"^\S+::\S+$", collected.stdout, re.M)
    if not tests:
        sys.exit(f"nothing was collected:\n{collected.stdout}{collected.stderr}{collected.error or ''}")
    before = files(parent)
    branch = parent.branch()
    try:
        started = time.monotonic()
        shards = [tests[i::workers] for i in range(workers)]
        done = run_all(branch, shards)
        first = {test: verdict for verdicts, _ in done for test, verdict in verdicts.items()}
        # What failed, or was in one child with a test that ended it, runs again, each in a child of its own.
        again = [test for test in tests if first.get(test) != "PASSED"]
        redone = run_all(branch, [[test] for test in again]) if again else []
        took = time.monotonic() - started
    finally:
        branch.remove()
    after = files(parent)

print(f"\n{len(tests)} tests, {workers} children of one parent with pytest and the suite imported\n")
print(f"{'':22} {'tests':>6} {'passed':>7} {'failed':>7} {'lost':>5} {'seconds':>8}")
rows = [(f"child {i}", shard, result) for i, (shard, result) in enumerate(zip(shards, done, strict=True), 1)]
rows += [(name(test), [test], result) for test, result in zip(again, redone, strict=True)]
for who, shard, (verdicts, seconds) in rows:
    passed = sum(v == "PASSED" for v in verdicts.values())
    counts = f"{len(shard):>6} {passed:>7} {len(verdicts) - passed:>7} {len(shard) - len(verdicts):>5}"
    print(f"{who:22} {counts} {seconds:>8.2f}")
busy = sum(seconds for _, seconds in done + redone)
print(f"\n{busy:.1f} s of tests in {took:.1f} s, forks included\n")

alone = {name(test): verdicts.get(test, "lost") for test, (verdicts, _) in zip(again, redone, strict=True)}
passed = {name(test) for test, verdict in first.items() if verdict == "PASSED"}
well = passed | {test for test, verdict in alone.items() if verdict == "PASSED"}
check("every test was collected, and ran in a shard or in a child of its own", len(well | alone.keys()) == 28)
check(
    "the test that ends its runner is found out, alone",
    [t for t, v in alone.items() if v == "lost"] == ["test_ends_its_runner"],
)
check(
    "the test that is wrong fails alone as well, and no other",
    [t for t, v in alone.items() if v == "FAILED"] == ["test_rounds_up"],
)
check("what was lost with it passes alone", "PASSED" in alone.values())
check(
    "a test deleted the project and one set a trap, and that stayed with them",
    {"test_deletes_everything", "test_sets_a_trap"} <= well,
)
check("nothing left a sandbox", "test_phones_home" in well)
check("the parent's files are what they were", before == after and "def split" in before)
sys.exit(1 if failed else 0)
