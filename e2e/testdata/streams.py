"""Takes much output of a command, and a file both ways, with forkd's Python SDK. Prints a line of JSON for each: how many bytes
there were, and by how much this program's memory grew."""

import json
import resource
import sys

from forkd import Sandbox

id, size, local = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sandbox = Sandbox.connect(id)


def told(what, take):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = take()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"what": what, "bytes": taken, "grown": grown << 10}), flush=True)


def called_back():
    pieces = []
    sandbox.commands.run(f"head -c {size} /dev/zero | tr '\\0' x", 7200, on_stdout=lambda text: pieces.append(len(text)))
    return sum(pieces)


def upload():
    sandbox.files.upload(local, "/tmp/up")
    return sandbox.files.stat("/tmp/up").size


sandbox.commands.run("true", on_stdout=print)
sandbox.commands.start("true").wait()
told("iteration", lambda: sum(len(out.data) for out in sandbox.commands.start(f"head -c {size} /dev/zero")))
told("callback", called_back)
told("upload", upload)
told("download", lambda: sandbox.files.download("/tmp/up", local + ".back"))
sandbox.files.remove("/tmp/up")
