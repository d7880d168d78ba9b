"""Children of a browser with a page in it answer from that page: its DOM and a picture of it, without loading anything.

Arguments: the snapshot of this recipe (default: browser), a directory for the pictures (none). Ends with 1 when something that it
says is not so.
"""

import ast
import base64
import pathlib
import struct
import sys
import time

from forkd import Sandbox

tag = sys.argv[1] if len(sys.argv) > 1 else "browser"
keep = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
failed = []


def check(claim, holds):
    print(f"{'ok ' if holds else 'NOT'}  {claim}")
    if not holds:
        failed.append(claim)


def ask(child, i):
    """What is on the child's page, after it has been given a line of its own, and a picture of it."""
    code = f"""
import base64
title, origin = page.js("document.title"), page.js("performance.timeOrigin")
page.js("document.getElementById('list').append('child {i}')")
drawn = page.js("crypto.getRandomValues(new Uint32Array(4)).join()")
title, origin, page.js("document.body.innerText"), drawn, base64.b64encode(page.screenshot()).decode()
"""
    started = time.monotonic()
    execution = child.run_code(code, timeout=600)
    execution.raise_for_error()
    title, origin, text, drawn, picture = ast.literal_eval(execution.text)
    return title, origin, text, drawn, base64.b64decode(picture), time.monotonic() - started


started = time.monotonic()
children = Sandbox.create_many(tag, 3)
forked = time.monotonic() - started
try:
    seen = [ask(child, i) for i, child in enumerate(children, 1)]
finally:
    for child in children:
        child.kill()

print(f"\nThree children in {forked:.1f} s\n")
print(f"{'':8} {'title':14} {'picture':>20} {'seconds':>8}  last line of the page")
for i, (title, _, text, _, picture, seconds) in enumerate(seen, 1):
    width, height = struct.unpack(">II", picture[16:24])
    size = f"{width}x{height}, {len(picture)} B"
    print(f"child {i}  {title:14} {size:>20} {seconds:>8.2f}  {text.splitlines()[-1]}")
    if keep:
        keep.joinpath(f"child-{i}.png").write_bytes(picture)
print()

check(
    "each child has the page of the warm-up, loaded at that time",
    {s[:2] for s in seen} == {("A warm page", seen[0][1])},
)
check("each has its own line on it and no other's", [s[2].count("child") for s in seen] == [1] * 3)
check("each drew a picture of it, and no two are the same", len({s[4] for s in seen}) == 3)
check("the pictures are PNGs of the window's size", all(s[4].startswith(b"\x89PNG") and len(s[4]) > 2000 for s in seen))
check("what a page draws at random differs between children", len({s[3] for s in seen}) == 3)
sys.exit(1 if failed else 0)
