"""Makes forkd/_sync of forkd/_async. With --check it only says whether that is up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("client.py", "commands.py", "contexts.py", "files.py", "sandbox.py")
WORDS = [
    (r"async def", "def"),
    (r"async with", "with"),
    (r"async for", "for"),
    (r"await ", ""),
    (r"\baclosing\b", "closing"),
    (r"asynccontextmanager", "contextmanager"),
    (r"__a(enter|exit|iter|next)__", r"__\1__"),
    (r"\.aclose\b", ".close"),
    (r"def aclose\b", "def close"),
    (r"\.aiter_bytes", ".iter_bytes"),
    (r"async_pieces", "pieces"),
    (r"async_owner", "sync_owner"),
    (r"\bAsync(?=[A-Z])", ""),
]


def sync(text: str) -> str:
    for old, new in WORDS:
        text = re.sub(old, new, text)
    for step in (["check", "--quiet", "--select", "I", "--fix"], ["format"]):
        command = ["ruff", *step, "--stdin-filename", "src/forkd/_sync/x.py", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
        text = done.stdout
    return text


def main() -> int:
    root = ROOT / "src" / "forkd"
    stale = 0
    for name in FILES:
        source = (root / "_async" / name).read_text()
        made = sync(f"# Made of _async/{name} by scripts/unasync.py. Change that one.\n{source}")
        target = root / "_sync" / name
        if "--check" in sys.argv:
            if target.read_text() != made:
                print(f"{target} is not what scripts/unasync.py makes of _async/{name}", file=sys.stderr)
                stale = 1
        else:
            target.write_text(made)
    return stale


if __name__ == "__main__":
    sys.exit(main())
