"""Where the daemon is: the same rules as the command line's."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from .errors import ForkdError, NoDaemonError

MAX_SOCKET_PATH = 107  # room of sockaddr_un, less the final NUL


@dataclass(frozen=True)
class Target:
    """A daemon's address: a unix socket, or a URL."""

    socket: str = ""
    url: str = "http://forkd"
    token: str = ""
    ca: str = ""
    fingerprint: str = ""
    home: str = ""  # of a daemon to start if none answers; empty for one that somebody else runs
    may_start: bool = False

    def __str__(self) -> str:
        return f"unix://{self.socket}" if self.socket else self.url


def find(url: str | None = None, token: str | None = None, env: Mapping[str, str] | None = None) -> Target:
    """The daemon that is meant: ``url``, else FORKD_URL, else FORKD_HOST, else the socket of this user's daemon."""
    env = os.environ if env is None else env
    token = (token if token is not None else env.get("FORKD_TOKEN", "")).strip()
    address = url or env.get("FORKD_URL", "") or env.get("FORKD_HOST", "")
    ca, pin = env.get("FORKD_CA", ""), env.get("FORKD_FINGERPRINT", "")
    if not address:
        home, path = _home(env)
        return Target(socket=path, token=token, home=home, may_start=True)
    if address.startswith("unix://"):
        path = address[len("unix://") :]
        if not path.startswith("/"):
            raise ForkdError(f"daemon address {address}: the path of a unix socket is absolute: unix:///path")
        return Target(socket=path, token=token)
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ForkdError(
            "the daemon's address is not understood: give unix:///path, http://host:port or https://host:port"
        )
    if parts.scheme == "http" and token and not _this_host(parts.hostname):
        raise ForkdError(f"daemon address {address}: the token would travel unencrypted; give https://")
    return Target(url=address.rstrip("/"), token=token, ca=ca, fingerprint=pin)


def _this_host(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost") or name.startswith("127.") or name == "::1"


def _home(env: Mapping[str, str]) -> tuple[str, str]:
    """The home directory to start a daemon with (empty: its default), and the socket."""
    if home := env.get("FORKD_HOME", ""):
        root = os.path.abspath(home)
        return root, os.path.join(root, "forkd.sock")
    if os.getuid() == 0:
        return "", "/run/forkd/forkd.sock"
    run = env.get("XDG_RUNTIME_DIR", "")
    directory = os.path.join(run, "forkd") if run else os.path.join(tempfile.gettempdir(), f"forkd-{os.getuid()}")
    return "", os.path.join(directory, "forkd.sock")


def reachable(path: str) -> tuple[str, int | None]:
    """A name for a socket that the kernel takes, and the descriptor that it needs while it is used."""
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path, None
    fd = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return reachable_at(fd, path), fd


def reachable_at(fd: int, path: str) -> str:
    """The name for a socket through a descriptor of its directory."""
    return f"/proc/self/fd/{fd}/{os.path.basename(path)}"


def started(target: Target) -> Target:
    """The target of a daemon that need not be started again: once is enough to show that it does not stay."""
    return replace(target, may_start=False)


def program(env: Mapping[str, str] | None = None) -> str:
    """The command line to start a daemon with: FORKD_BIN, or forkd on the PATH."""
    env = os.environ if env is None else env
    found = env.get("FORKD_BIN", "") or shutil.which("forkd") or ""
    if not found:
        raise NoDaemonError(
            "no daemon answers, and there is no program forkd on the PATH to start one with; "
            "install it, set FORKD_BIN to it, or set FORKD_URL and FORKD_TOKEN to a daemon elsewhere"
        )
    return found


def start(target: Target) -> None:
    """Starts a daemon in the background and returns when it answers."""
    command = [program()] + (["--home", target.home] if target.home else []) + ["daemon", "start"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=90)
    if done.returncode != 0:
        raise NoDaemonError(f"no daemon answers, and none could be started: {done.stderr.strip()}")


def trust(target: Target) -> ssl.SSLContext | bool:
    """How a daemon over https proves who it is: the system's certificates, FORKD_CA, or FORKD_FINGERPRINT."""
    if not target.url.startswith("https://"):
        return True
    if not target.fingerprint:
        return ssl.create_default_context(cafile=target.ca) if target.ca else True
    parts = urlsplit(target.url)
    certificate = _certificate(parts.hostname or "", parts.port or 443)
    want, got = _pin(target.fingerprint), hashlib.sha256(_public_key(certificate)).digest()
    if got != want:
        shown = base64.b64encode(got).decode()
        raise ForkdError(f"no secure connection to the daemon at {target.url}: its fingerprint is sha256//{shown}")
    # From now on this certificate is trusted and no other, whatever it is called.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context


def _certificate(host: str, port: int) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), timeout=10) as plain, context.wrap_socket(plain) as secure:
            return secure.getpeercert(binary_form=True) or b""
    except OSError as e:
        raise NoDaemonError(f"no daemon answers at https://{host}:{port}: {e}") from e


def _pin(text: str) -> bytes:
    try:
        pin = base64.b64decode(text[8:]) if text.startswith("sha256//") else bytes.fromhex(text.removeprefix("sha256:"))
    except ValueError:
        pin = b""
    if len(pin) != 32:
        raise ForkdError(f"fingerprint {text[:100]!r}: give it as the daemon prints it: sha256//…")
    return pin


def _public_key(certificate: bytes) -> bytes:
    """The SubjectPublicKeyInfo of an X.509 certificate."""

    def element(at: int) -> tuple[int, int, int]:  # tag, begin of content, end
        tag, length, at = certificate[at], certificate[at + 1], at + 2
        if length & 0x80:
            n = length & 0x7F
            length, at = int.from_bytes(certificate[at : at + n], "big"), at + n
        return tag, at, at + length

    at = element(element(0)[1])[1]  # into Certificate, into TBSCertificate
    if element(at)[0] == 0xA0:  # the version
        at = element(at)[2]
    for _ in range(5):  # serial number, signature, issuer, validity, subject
        at = element(at)[2]
    return certificate[at : element(at)[2]]
