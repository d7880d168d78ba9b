"""What the daemon tells, typed. Names are the API's (docs/api.md); ``raw`` has the whole object, new fields included."""

from __future__ import annotations

import base64
import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import CommandFailedError, ExecutionFailedError

Raw = dict[str, Any]
M = TypeVar("M", bound="Model")


@dataclass
class Model:
    """Something the daemon has said."""

    raw: Raw = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    @classmethod
    def load(cls: type[M], raw: Mapping[str, Any]) -> M:
        """From the API's object; fields that are not known here stay in ``raw``."""
        known = {f.name for f in dataclasses.fields(cls)} - {"raw"}
        made = cls(**{k: v for k, v in raw.items() if k in known and v is not None}, raw=dict(raw))
        made._convert()
        return made

    def _convert(self) -> None:
        """Make fields what their types say."""


@dataclass
class SandboxInfo(Model):
    """A sandbox as the daemon knows it. Times are seconds since 1970, sizes bytes."""

    id: str = ""
    snapshot_tag: str = ""
    state: str = ""  #: running, paused, suspended, failed
    reason: str = ""  #: of failed
    index: int = 0
    count: int = 1
    created_at_unix: int = 0
    expires_at_unix: int = 0  #: 0: never
    pid: int = 0
    hostname: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    cpus: int = 0
    memory_bytes: int = 0
    memory_own_bytes: int = 0
    memory_shared_bytes: int = 0
    disk_own_bytes: int = 0
    disk_shared_bytes: int = 0
    accelerator: str = ""
    ready_ms: float = 0.0
    waited_ms: float = 0.0
    branch_count: int = 0
    latest_branch: str = ""
    workspace: str = ""
    warnings: list[str] = field(default_factory=list)
    egress: Raw = field(default_factory=dict)


@dataclass
class SnapshotInfo(Model):
    """A frozen machine. Sizes are bytes."""

    tag: str = ""
    id: str = ""
    status: str = ""  #: writing, ready, failed
    created_at_unix: int = 0
    parent: str = ""
    image: str = ""
    recipe: str = ""
    warm: list[str] = field(default_factory=list)
    cpus: int = 0
    memory_bytes: int = 0
    memory_own_bytes: int = 0
    disk_own_bytes: int = 0
    stored_bytes: int = 0
    hot: bool = False
    sandboxes: int = 0
    branched_from: str = ""
    mode: str = ""  #: of a branch: live, diff, full
    mode_reason: str = ""
    pause_ms: float = 0.0
    progress: float = 0.0
    error: str = ""
    chain_depth: int = 0
    ancestors: list[str] = field(default_factory=list)
    dependents: list[str] = field(default_factory=list)


@dataclass
class ImageInfo(Model):
    """A bootable root file system. Sizes are bytes."""

    id: str = ""
    name: str = ""
    base: str = ""
    packages: int = 0
    created_at_unix: int = 0
    disk_bytes: int = 0
    own_bytes: int = 0
    stored_bytes: int = 0
    snapshots: list[str] = field(default_factory=list)


@dataclass
class TreeNode(Model):
    """An image, snapshot or sandbox in the family tree."""

    kind: str = ""
    name: str = ""
    state: str = ""
    own_bytes: int = 0
    children: list[TreeNode] = field(default_factory=list)

    def _convert(self) -> None:
        self.children = [TreeNode.load(c) if isinstance(c, dict) else c for c in self.children]


@dataclass
class Event(Model):
    """Something that has happened: ``sandbox.forked``, ``snapshot.ready``, …"""

    sequence: int = 0
    time: str = ""
    type: str = ""
    sandbox_id: str = ""
    snapshot_tag: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    lost: int = 0


@dataclass
class CommandResult(Model):
    """How a command ended. ``exit_code`` is as a shell reports it: 128 and the signal's number if that ended it."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    error: str = ""  #: why it was ended, e.g. that its time was over
    timed_out: bool = False

    def check(self) -> CommandResult:
        """This result, or :class:`CommandFailedError` if the code is not 0."""
        if self.exit_code != 0 or self.timed_out:
            raise CommandFailedError(self)
        return self


@dataclass
class ProcessInfo(Model):
    """A process that was started from outside."""

    pid: int = 0
    command: str = ""
    args: list[str] = field(default_factory=list)
    tag: str = ""
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = ""
    user: str = ""
    tty: bool = False
    age_ms: int = 0
    attached: int = 0
    output_bytes: int = 0
    running: bool = False
    exit_code: int | None = None
    signal: int = 0
    status: str = ""
    timed_out: bool = False


@dataclass
class Output:
    """A piece of what a process printed. ``stream`` is ``stdout`` (a terminal's is all that) or ``stderr``."""

    stream: str
    data: bytes

    @property
    def text(self) -> str:
        """As text; a character that is cut in two by pieces becomes U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass
class FileInfo(Model):
    """A file or directory of a sandbox."""

    name: str = ""
    path: str = ""
    type: str = ""  #: file, dir, symlink (to nothing), other
    size: int = 0
    mode: int = 0
    permissions: str = ""
    owner: str = ""
    group: str = ""
    modified_time: str = ""
    symlink_target: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def modified(self) -> datetime.datetime:
        """When it was last written."""
        text = self.modified_time.replace("Z", "+00:00")
        head, dot, rest = text.partition(".")
        if dot:  # Python 3.10 knows three or six digits only
            digits, sign, zone = rest.partition("+")
            text = f"{head}.{digits[:6].ljust(6, '0')}{sign}{zone}"
        return datetime.datetime.fromisoformat(text)


@dataclass
class FileEvent(Model):
    """A change below a watched directory: create, write, remove, rename, chmod. ``name`` is relative to the directory."""

    name: str = ""
    type: str = ""
    entry: FileInfo | None = None

    def _convert(self) -> None:
        if isinstance(self.entry, dict):
            self.entry = FileInfo.load(self.entry)


@dataclass
class PortInfo(Model):
    """A TCP port of a sandbox that something listens on, or that is public."""

    port: int = 0
    address: str = ""  #: that a service listens on; empty: nobody does
    pid: int = 0
    process: str = ""
    public: bool = False  #: reached without a token
    path: str = ""  #: below which the daemon serves it
    host: str = ""  #: as which the daemon serves it, where it has a domain


@dataclass
class ContextInfo(Model):
    """A stateful interpreter."""

    id: str = ""
    language: str = ""
    version: str = ""
    cwd: str = ""
    user: str = ""
    pid: int = 0
    alive: bool = False
    busy: bool = False
    ended: str = ""
    evals: int = 0


@dataclass
class Result(Model):
    """A value in every representation that it has; ``png``, ``jpeg`` and ``pdf`` in base64."""

    text: str = ""
    html: str = ""
    markdown: str = ""
    svg: str = ""
    png: str = ""
    jpeg: str = ""
    pdf: str = ""
    latex: str = ""
    json: Any = None
    javascript: str = ""
    data: Any = None
    chart: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    is_main_result: bool = False
    omitted: list[Raw] = field(default_factory=list)

    def formats(self) -> list[str]:
        """Names of the representations that are there."""
        names = (
            "text",
            "html",
            "markdown",
            "svg",
            "png",
            "jpeg",
            "pdf",
            "latex",
            "json",
            "javascript",
            "data",
            "chart",
        )
        return [n for n in names if getattr(self, n) not in ("", None)] + list(self.extra)

    def image(self) -> bytes:
        """The bytes of ``png`` or ``jpeg``; empty if there is neither."""
        return base64.b64decode(self.png or self.jpeg)


@dataclass
class ExecutionError:
    """How code failed: the interpreter's own name, value and traceback."""

    name: str
    value: str
    traceback: str


@dataclass
class Execution:
    """What code gave: output, results in order, and perhaps an error."""

    text: str | None = None  #: what a prompt would print of the last value
    stdout: str = ""
    stderr: str = ""
    results: list[Result] = field(default_factory=list)
    error: ExecutionError | None = None
    execution_count: int = 0
    exit_code: int = 0
    ms: float = 0.0  #: inside the guest

    def raise_for_error(self) -> Execution:
        """This execution, or :class:`ExecutionFailedError` if there was an error."""
        if self.error is not None:
            raise ExecutionFailedError(self)
        return self


@dataclass
class VersionInfo(Model):
    """Who the daemon is."""

    version: str = ""
    api: str = ""
    pid: int = 0
    home: str = ""
    socket: str = ""
    address: str = ""
    fingerprint: str = ""


@dataclass
class Token(Model):
    """A token; ``token`` itself is told once, when it is made."""

    id: str = ""
    name: str = ""
    scope: str = ""
    sandbox: str = ""
    token: str = field(default="", repr=False)
    created_at_unix: int = 0
    expires_at_unix: int = 0
