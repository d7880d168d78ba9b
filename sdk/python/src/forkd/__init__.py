"""Fork warm microVMs: sandboxes, branches and snapshots of a forkd daemon.

>>> from forkd import Sandbox
>>> with Sandbox.create("python-numpy") as sandbox:
...     _ = sandbox.run_code("x = numpy.arange(10)")
...     branch = sandbox.branch()
...     kids = branch.fork(3)
...     print([k.run_code(f"int(x.sum() * {i})").text for i, k in enumerate(kids)])
['0', '45', '90']

Everything is there twice: ``Sandbox`` and, for event loops, ``AsyncSandbox``. Without FORKD_URL the daemon of this user
is meant, which is started if none answers.
"""

from ._async.client import AsyncClient
from ._async.commands import AsyncCommands, AsyncProcess
from ._async.contexts import AsyncContexts
from ._async.files import AsyncFiles
from ._async.sandbox import AsyncImage, AsyncSandbox, AsyncSnapshot
from ._sync.client import Client
from ._sync.commands import Commands, Process
from ._sync.contexts import Contexts
from ._sync.files import Files
from ._sync.sandbox import Image, Sandbox, Snapshot
from .controller import BranchMode, Controller, ControllerError
from .errors import (
    ERRORS,
    APIError,
    BadGatewayError,
    BusyError,
    CommandFailedError,
    ConnectionLostError,
    CorruptError,
    DeniedError,
    ExecutionFailedError,
    ExhaustedError,
    ExistsError,
    ForkdError,
    IncompatibleError,
    InternalError,
    InvalidError,
    KeyReusedError,
    MethodNotAllowedError,
    NoCapacityError,
    NoDaemonError,
    NotFoundError,
    ThrottledError,
    TimeoutError,
    UnacceptableError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedError,
    WrongStateError,
)
from .models import (
    CommandResult,
    ContextInfo,
    Event,
    Execution,
    ExecutionError,
    FileEvent,
    FileInfo,
    ImageInfo,
    Output,
    PortInfo,
    ProcessInfo,
    Result,
    SandboxInfo,
    SnapshotInfo,
    Token,
    TreeNode,
    VersionInfo,
)

__version__ = "0.1.0"

__all__ = [
    "APIError",
    "AsyncClient",
    "AsyncCommands",
    "AsyncContexts",
    "AsyncFiles",
    "AsyncImage",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSnapshot",
    "BadGatewayError",
    "BranchMode",
    "BusyError",
    "Client",
    "CommandFailedError",
    "CommandResult",
    "Commands",
    "ConnectionLostError",
    "ContextInfo",
    "Contexts",
    "Controller",
    "ControllerError",
    "CorruptError",
    "DeniedError",
    "ERRORS",
    "Event",
    "Execution",
    "ExecutionError",
    "ExecutionFailedError",
    "ExhaustedError",
    "ExistsError",
    "FileEvent",
    "FileInfo",
    "Files",
    "ForkdError",
    "Image",
    "ImageInfo",
    "IncompatibleError",
    "InternalError",
    "InvalidError",
    "KeyReusedError",
    "MethodNotAllowedError",
    "NoCapacityError",
    "NoDaemonError",
    "NotFoundError",
    "Output",
    "PortInfo",
    "Process",
    "ProcessInfo",
    "Result",
    "Sandbox",
    "SandboxInfo",
    "Snapshot",
    "SnapshotInfo",
    "ThrottledError",
    "TimeoutError",
    "Token",
    "TreeNode",
    "UnacceptableError",
    "UnauthorizedError",
    "UnavailableError",
    "UnsupportedError",
    "VersionInfo",
    "WrongStateError",
    "__version__",
]
