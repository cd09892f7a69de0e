"""Records of commits: acknowledgements that a publisher is about to append, in a file that outlives it.

A transaction over several journals commits by an acknowledgement in each journal. A process that dies between
two acknowledgements would leave a part of the transaction visible. So the acknowledgements are recorded
first: the record decides the commit. The next publisher with the same directory appends them.

Only one publisher at a time may use the directory. Another publisher could append an old acknowledgement of a
producer that is already in its next transaction. This would roll the next transaction back.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import fcntl
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from gazette.errors import Broken, Corrupt, Invalid, Unavailable
from gazette.protocol.ids import JournalName
from gazette.runtime.private_paths import make_private_directory, open_private
from gazette.runtime.tasks import BlockingPool, OpFuture, await_future
from gazette.runtime.timeouts import timeout

T = TypeVar("T")

_LOCK: Final = "lock"
_RECORD: Final = "commit.json"


class CommitRecords:
    """The record of the last commit in a directory, and the directory's lock. Use it in one thread."""

    def __init__(self, directory: Path) -> None:
        """Lock the directory, and create it if it is absent.

        Raise ``Invalid`` if another publisher uses the directory, and ``Unavailable`` if it cannot be
        written.
        """
        self.path = directory / _RECORD
        """The file of the record. It exists only while a commit may be incomplete."""
        try:
            make_private_directory(directory)
            self._lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(directory, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise Invalid(
                f"another publisher has the directory {directory}",
                path="commits",
                hint="Give each publisher that runs at the same time a directory of its own.",
            ) from error

    def load(self) -> dict[JournalName, bytes]:
        """Return the recorded content, by journal; empty if there is no record. Raise ``Unavailable`` if the
        file cannot be read, and ``Corrupt`` if it is no record."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _unwritable(self.path, error) from error
        try:
            return {
                journal: base64.b64decode(content, validate=True)
                for journal, content in json.loads(text).items()
            }
        except (ValueError, AttributeError, TypeError, binascii.Error) as error:
            raise Corrupt(
                "the record of a commit cannot be read",
                hint="Its transaction may be visible in some journals only. Look at these, then "
                "remove the file.",
                file=self.path,
            ) from error

    def save(self, intents: Mapping[JournalName, bytes]) -> None:
        """Record the acknowledgements that are about to be appended. The record is on disk when this returns.

        Raise ``Unavailable`` if surely no record was made, and ``Broken`` if a record may have been made.
        """
        text = json.dumps(
            {journal: base64.b64encode(content).decode() for journal, content in intents.items()}
        )
        partial = self.path.with_suffix(".partial")
        try:
            with open(partial, "w", opener=open_private) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # The partial file may stay: no publisher reads it, and the next record replaces it.
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise _unwritable(self.path, error) from error
        try:
            partial.replace(self.path)
            self._sync()
        except OSError as error:
            # After a crash, either name may be in the directory: removing one of them here changes nothing.
            raise Broken(
                f"a commit may have been recorded in {self.path}: {error.strerror}"
            ) from error

    def clear(self) -> None:
        """Remove the record, once all its content is appended. Raise ``Unavailable`` if the disk refuses."""
        try:
            self.path.unlink(missing_ok=True)
            self._sync()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Release the directory for other publishers. Leave a record there. May be repeated."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _sync(self) -> None:
        handle = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class CommitDirectory:
    """`CommitRecords` for an event loop: each call runs in a thread, and has a deadline.

    After its deadline, a call raises ``TimeoutError``, which names the directory and the duration of the
    call. The thread goes on.
    """

    def __init__(self, directory: Path) -> None:
        """Make no call yet."""
        self.directory = directory
        self.path = directory / _RECORD
        self._pool = BlockingPool("commit-records", 1)
        self._records: CommitRecords | None = None
        self._last_call: OpFuture[Any] | None = None

    async def load(self, deadline: float) -> dict[JournalName, bytes]:
        """Lock the directory, and return the recorded content. For the errors see `CommitRecords`."""

        def load() -> dict[JournalName, bytes]:
            self._records = CommitRecords(self.directory)
            return self._records.load()

        return await self._within(deadline, load)

    async def save(self, intents: Mapping[JournalName, bytes], deadline: float) -> None:
        """Call `CommitRecords.save`. After a ``TimeoutError`` or a cancellation the record may come later."""
        assert self._records is not None
        await self._within(deadline, self._records.save, intents)

    async def clear(self, deadline: float) -> None:
        """Call `CommitRecords.clear`."""
        assert self._records is not None
        await self._within(deadline, self._records.clear)

    async def _within(self, deadline: float, call: Callable[..., T], *args: Any) -> T:
        self._last_call = self._pool.submit(call, *args)
        seconds = max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            async with timeout(seconds):
                return await await_future(self._last_call)
        except TimeoutError as error:
            raise TimeoutError(
                f"the directory {self.directory} did not answer within {seconds:.1f} s"
            ) from error

    def close(self) -> None:
        """Make no more calls, and `release` the directory."""
        self._pool.close()
        self.release()

    def release(self) -> None:
        """Release the directory for other publishers once no call runs. Otherwise a late call would make a
        record that no publisher completes, or remove another publisher's record."""
        if self._last_call is not None:
            self._last_call.add_done_callback(lambda _: self.leave())

    def leave(self) -> None:
        """Release the directory at once, in a forked child, where no call can run."""
        if self._records is not None:
            self._records.close()


def _unwritable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"the record of a commit, {path}, cannot be used: {error.strerror}",
        hint="Give a directory that can be read and written, and that stays.",
    )
