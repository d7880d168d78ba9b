# Made of _async/commands.py by scripts/unasync.py. Change that one.
"""Commands of a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any

from .._text import Decoder, Kept, argv, clean, segment
from ..errors import ConnectionLostError, refusal
from ..models import CommandResult, Output, ProcessInfo
from .transport import Transport, WebSocket

#: Seconds beyond a command's own time limit that its reply is waited for.
GRACE = 60.0
DEFAULT_TIMEOUT = 30.0


class Commands:
    """``sandbox.commands``. A command is a text, which ``/bin/sh -c`` runs, or a list of program and arguments."""

    def __init__(self, transport: Transport, base: str) -> None:
        self._t, self._base = transport, base

    def run(
        self,
        cmd: str | Sequence[str],
        timeout: float | None = None,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | None = None,
        tag: str | None = None,
        on_stdout: Callable[[str], Any] | None = None,
        on_stderr: Callable[[str], Any] | None = None,
        check: bool = False,
    ) -> CommandResult:
        """Runs a command and returns what it printed (the first 16 MiB of each stream), and its exit code.

        ``timeout`` is in seconds, 30 if not given; a command that takes longer is killed, and ``timed_out`` set. With
        ``on_stdout`` or ``on_stderr`` each piece of output is passed on as it comes. With ``check`` a code other than 0
        raises :class:`CommandFailedError`. Raises :class:`InvalidError` for a program that is not there and
        :class:`WrongStateError` in a paused or suspended sandbox.

        >>> sandbox.commands.run("echo hello; exit 3")
        CommandResult(stdout='hello\\n', stderr='', exit_code=3, error='', timed_out=False)
        """
        body = clean(
            args=argv(cmd), timeout_secs=timeout, env=dict(env or {}), cwd=cwd, user=user, stdin=stdin, tag=tag
        )
        path = f"{self._base}/exec"
        if on_stdout is None and on_stderr is None:
            limit = (DEFAULT_TIMEOUT if timeout is None else timeout) + GRACE
            result = CommandResult.load(self._t.request("POST", path, json=body, timeout=limit))
        else:
            result = self._stream(path, body, on_stdout, on_stderr)
        return result.check() if check else result

    def _stream(
        self, path: str, body: Any, on_stdout: Callable[[str], Any] | None, on_stderr: Callable[[str], Any] | None
    ) -> CommandResult:
        kept = {"stdout": Kept(), "stderr": Kept()}
        told = {"stdout": on_stdout, "stderr": on_stderr}
        with closing(self._t.lines("POST", path, json=body)) as lines:
            for event in lines:
                kind = event["type"]
                if kind in kept:
                    kept[kind].add(event.get("text", ""))
                    if tell := told[kind]:
                        tell(event.get("text", ""))
                elif kind == "error":
                    raise refusal(0, {"code": event.get("code"), "message": event.get("text")}, path)
                elif kind == "exit":
                    return CommandResult.load({**event, **{k: str(v) for k, v in kept.items()}})
        raise ConnectionLostError("the command's output broke off before its end")

    def start(
        self,
        cmd: str | Sequence[str],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        tag: str | None = None,
        stdin: bool = False,
        kill_on_close: bool = False,
    ) -> Process:
        """Starts a command in the background. It has no time limit unless ``timeout`` (seconds) sets one.

        It goes on when this program leaves, unless ``kill_on_close``; come back to it with :meth:`attach`. While you are
        attached and do not read, it is held back.

        >>> process = sandbox.commands.start("read x; echo got $x", stdin=True)
        >>> process.write("abc\\n")
        >>> (process.wait()).stdout
        'got abc\\n'
        """
        return self._open(
            clean(
                args=argv(cmd),
                env=dict(env or {}),
                cwd=cwd,
                user=user,
                tag=tag,
                timeout_secs=timeout,
                stdin=stdin or None,
                kill_on_close=kill_on_close or None,
            )
        )

    def shell(
        self,
        cmd: str | Sequence[str] | None = None,
        *,
        cols: int = 80,
        rows: int = 24,
        term: str = "xterm-256color",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        tag: str | None = None,
        kill_on_close: bool = False,
    ) -> Process:
        """A terminal of that size with the user's login shell, or a command, in it.

        ``cols`` and ``rows`` are in characters. Raises :class:`InvalidError` for a program that is not there.

        >>> terminal = sandbox.commands.shell(["stty", "size"], cols=100, rows=40)
        >>> (terminal.wait()).stdout
        '40 100\\r\\n'
        """
        return self._open(
            clean(
                args=None if cmd is None else argv(cmd),
                shell=True if cmd is None else None,
                tty={"cols": cols, "rows": rows, "term": term},
                env=dict(env or {}),
                cwd=cwd,
                user=user,
                tag=tag,
                kill_on_close=kill_on_close or None,
            )
        )

    def attach(
        self, process: int | str, *, replay: bool = False, observe: bool = False, stdin: bool = False
    ) -> Process:
        """Comes to a process that runs, by pid or tag: also one that a branch's child has inherited.

        What nobody was sent comes first; with ``replay`` all that is kept. ``observe`` looks on from beside: nothing is
        taken from others, and the process is never held back.

        Raises :class:`NotFoundError`.

        >>> with sandbox.commands.start("sleep 1; echo done", tag="attached"):
        ...     pass  # left alone, it goes on
        >>> process = sandbox.commands.attach("attached")
        >>> (process.wait()).stdout
        'done\\n'
        """
        return self._open(
            clean(
                attach=str(process),
                replay=replay or None,
                observe=observe or None,
                stdin=(stdin and not observe) or None,
            )
        )

    def _open(self, start: Any) -> Process:
        ws = self._t.websocket(f"{self._base}/exec")
        try:
            ws.send(start)
            process = Process(ws)
            process._begin()
        except BaseException:
            ws.close()
            raise
        return process

    def list(self, *, ended: bool = False) -> list[ProcessInfo]:
        """Processes that were started from outside; with ``ended`` those too that can still be asked for.

        >>> process = sandbox.commands.start("sleep 60", tag="listed")
        >>> [p.tag for p in sandbox.commands.list() if p.pid == process.pid]
        ['listed']
        >>> process.kill()
        """
        params = {"ended": "true"} if ended else None
        return [ProcessInfo.load(p) for p in self._t.request("GET", f"{self._base}/processes", params=params)]

    def signal(
        self, process: int | str, signal: str | int = "TERM", *, group: bool = False, tree: bool = False
    ) -> None:
        """Signals a process, by pid or tag: its group with ``group``, all that came from it with ``tree``.

        Raises :class:`NotFoundError` for one that is not there, :class:`InvalidError` for a signal that there is not.

        >>> process = sandbox.commands.start(["sleep", "60"])
        >>> sandbox.commands.signal(process.pid, "TERM")
        >>> (process.wait()).exit_code
        143
        """
        body = clean(signal=str(signal), group=group or None, tree=tree or None)
        self._t.request("POST", f"{self._base}/processes/{segment(str(process))}/signal", json=body)

    def kill(self, process: int | str) -> None:
        """Kills a process and all that came from it.

        Raises :class:`NotFoundError`.

        >>> process = sandbox.commands.start(["sleep", "60"])
        >>> sandbox.commands.kill(process.pid)
        >>> (process.wait()).exit_code
        137
        """
        self.signal(process, "KILL", tree=True)


class Process:
    """A process that runs in a sandbox. Iterate over it for its output, or :meth:`wait` for its end.

    Leaving its ``with`` block detaches from it; it goes on.
    """

    def __init__(self, ws: WebSocket) -> None:
        self._ws = ws
        self._end: CommandResult | None = None
        self._first: Output | None = None
        self.pid = 0
        self.lost = 0  #: bytes of output that are missing here

    def _begin(self) -> None:
        while self.pid == 0 and self._end is None:
            self._first = self._next()
            if self._first is not None:
                return

    def _next(self) -> Output | None:
        """The next output, or None when something else was said: the start, the end."""
        message = self._ws.receive()
        if message is None:
            raise ConnectionLostError("the connection ended before the process; attach to it to go on")
        if isinstance(message, bytes):
            return Output("stderr" if message[0] == 2 else "stdout", message[1:])
        kind = message.get("type")
        if kind == "start":
            self.pid = int(message["pid"])
        elif kind == "lost":
            self.lost += int(message.get("bytes", 0))
        elif kind in ("error", "refused"):
            raise refusal(0, {"code": message.get("code"), "message": message.get("text")}, "exec")
        elif kind == "exit":
            self._end = CommandResult.load(message)
            self._ws.close()
        return None

    def __iter__(self) -> Iterator[Output]:
        if self._first is not None:
            first, self._first = self._first, None
            yield first
        while self._end is None:
            output = self._next()
            if output is not None:
                yield output

    def wait(
        self, on_stdout: Callable[[str], Any] | None = None, on_stderr: Callable[[str], Any] | None = None
    ) -> CommandResult:
        """Reads what is still to come and returns it with the exit code.

        Of each stream the first 16 MiB; iterate for more. Raises :class:`ConnectionLostError`, after which :meth:`attach
        <Commands.attach>` comes back to it, and :class:`WrongStateError` when the sandbox was ended.

        >>> process = sandbox.commands.start("echo out; echo err >&2; exit 3")
        >>> result = process.wait()
        >>> (result.stdout, result.stderr, result.exit_code)
        ('out\\n', 'err\\n', 3)
        """
        texts = {"stdout": Decoder(), "stderr": Decoder()}
        kept = {"stdout": Kept(), "stderr": Kept()}
        told = {"stdout": on_stdout, "stderr": on_stderr}
        for output in self:
            text = texts[output.stream].text(output.data)
            kept[output.stream].add(text)
            if tell := told[output.stream]:
                tell(text)
        for stream, decoder in texts.items():
            kept[stream].add(decoder.rest())
        assert self._end is not None
        return CommandResult.load({**self._end.raw, **{k: str(v) for k, v in kept.items()}})

    @property
    def exit_code(self) -> int | None:
        """Its exit code, once its end was read.

        >>> process = sandbox.commands.start("exit 3")
        >>> result = process.wait()
        >>> process.exit_code
        3
        """
        return None if self._end is None else self._end.exit_code

    def write(self, data: str | bytes) -> None:
        """Writes to its standard input, or types at its terminal.

        It waits while the process takes none. Raises :class:`ConnectionLostError` when the process has ended.

        >>> process = sandbox.commands.start(["cat"], stdin=True)
        >>> process.write("grüße")
        >>> process.close_stdin()
        >>> (process.wait()).stdout
        'grüße'
        """
        data = data.encode() if isinstance(data, str) else data
        for at in range(0, len(data), 1 << 16):
            self._ws.send_bytes(b"\0" + data[at : at + (1 << 16)])

    def close_stdin(self) -> None:
        """Ends its standard input.

        >>> process = sandbox.commands.start("cat; echo end", stdin=True)
        >>> process.close_stdin()
        >>> (process.wait()).stdout
        'end\\n'
        """
        self._ws.send({"type": "eof"})

    def resize(self, cols: int, rows: int) -> None:
        """Gives its terminal another size.

        >>> terminal = sandbox.commands.shell(["sh", "-c", "read x; stty size"])
        >>> terminal.resize(120, 50)
        >>> terminal.write("\\n")
        >>> "50 120" in (terminal.wait()).stdout
        True
        """
        self._ws.send({"type": "resize", "cols": cols, "rows": rows})

    def signal(self, signal: str | int = "TERM", *, group: bool = False) -> None:
        """Signals it, or its process group.

        >>> process = sandbox.commands.start("trap 'exit 9' USR1; echo ready; while :; do sleep 0.1; done")
        >>> for output in process:
        ...     process.signal("USR1")
        >>> process.exit_code
        9
        """
        self._ws.send(clean(type="signal", signal=str(signal), group=group or None))

    def kill(self) -> None:
        """Kills its process group.

        >>> process = sandbox.commands.start(["sleep", "60"])
        >>> process.kill()
        >>> (process.wait()).exit_code
        137
        """
        self.signal("KILL")

    def disconnect(self) -> None:
        """Leaves it alone; it goes on, unless it was started with ``kill_on_close``.

        >>> process = sandbox.commands.start("sleep 1", tag="left")
        >>> process.disconnect()
        >>> "left" in [p.tag for p in sandbox.commands.list()]
        True
        """
        self._ws.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()
