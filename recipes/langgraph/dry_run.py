"""An agent is branched in the middle of a thought, and each child is steered another way. Needs no model.

Argument: the snapshot of this recipe (default: langgraph). Ends with 1 when something that it says is not so.
"""

import collections
import json
import os.path
import random
import sys
import time

from forkd import Sandbox

tag = sys.argv[1] if len(sys.argv) > 1 else "langgraph"
steers = ["Look by city", "Look by month", "Look by product"]
failed = []


def check(claim, holds):
    print(f"{'ok ' if holds else 'NOT'}  {claim}")
    if not holds:
        failed.append(claim)


def report(sandbox, wait=0.0):
    execution = sandbox.run_code(f"print(agent.report({wait}))")
    execution.raise_for_error()
    return json.loads(execution.stdout)


def best(orders, column):
    sums = collections.Counter()
    for order in orders:
        sums[order[column]] += order[3]
    return "{} with {}".format(*sums.most_common(1)[0])


draw = random.Random(7)
cities, months, products = ["Bergen", "Porto", "Turin"], ["May", "June", "July"], ["tea", "salt"]
orders = [(draw.choice(cities), draw.choice(months), draw.choice(products), draw.randrange(100)) for _ in range(3000)]
answers = [best(orders, column) for column in range(3)]

with Sandbox.create(tag) as parent:
    parent.files.write("/srv/orders.csv", "".join(",".join(map(str, order)) + "\n" for order in orders))
    parent.run_code("agent.start('Find out what sells best in /srv/orders.csv')").raise_for_error()
    deadline = time.monotonic() + 300
    before = report(parent)
    while len(before["thought"].split()) < 20:  # two tools have been called, and it thinks about what it has seen
        if not before["running"] or time.monotonic() > deadline:
            sys.exit(f"the agent does not come to think: {before}")
        before = report(parent)
    started = time.monotonic()
    branch = parent.branch()
    took = time.monotonic() - started
    try:
        started = time.monotonic()
        children = branch.fork(len(steers))
        forked = time.monotonic() - started
        try:
            for child, steer in zip(children, steers, strict=True):
                child.run_code(f"agent.steer({steer!r})").raise_for_error()
            after = [report(child, wait=300) for child in children]
        finally:
            for child in children:
                child.kill()
        still = report(parent)
    finally:
        branch.remove()

thoughts = [r["messages"][5][2] if len(r["messages"]) > 5 else "" for r in after]
shared = os.path.commonprefix([*thoughts, still["thought"]])
print(f"\nBranched in the middle of a thought; paused for {branch.info.pause_ms:.0f} ms, ")
print(f"captured in {took:.1f} s, three children in {forked:.1f} s.\n")
print(f"{'':8} {'calls of':>10} {'words':>10} {'of them':>10} {'orders':>7}")
print(f"{'':8} {'the model':>10} {'thought':>10} {'inherited':>10} {'kept':>7}  steered           answer")
for name, r, thought, steer in zip(
    ["parent", "child 1", "child 2", "child 3"],
    [still, *after],
    [still["thought"], *thoughts],
    ["", *steers],
    strict=True,
):
    answer = "(thinks on)" if r["running"] else r["messages"][-1][2]
    inherited = len(shared.split()) if steer else 0
    print(f"{name:8} {r['calls']:>10} {len(thought.split()):>10} {inherited:>10} {r['rows']:>7}  {steer:16}  {answer}")
print()

check("no agent failed", not any(r["error"] for r in [still, *after]))
check(
    "each child has the parent's messages, to the id",
    all(r["messages"][:5] == before["messages"] and len(before["messages"]) == 5 for r in after),
)
check("each child went on with the very thought, from the word it had come to", shared.startswith(before["thought"]))
check("after that no two think the same: each draws words of its own", len(set(thoughts)) == 3)
check(
    "no call of the model was made again: two each, after the three of the parent",
    [r["calls"] for r in after] == [5] * 3,
)
check(
    "each answered what it was steered to, rightly",
    [a in r["messages"][-1][2] for a, r in zip(answers, after, strict=True)] == [True] * 3,
)
check("what the children deleted from their database in memory is in the parent's", still["rows"] == len(orders))
check("the parent heard of none of it and thinks on", still["running"] and still["calls"] == 3)
sys.exit(1 if failed else 0)
