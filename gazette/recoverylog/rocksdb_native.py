"""RocksDB's binding, which is an extra of the package, and its errors as ours.

Everything that it raises is a plain ``Exception`` with RocksDB's own text.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any, Final

from gazette.errors import Broken, Closed, Corrupt, Invalid, Unavailable

DEFAULT: Final = "default"
"""The column family that every database has."""
CONFIG_FILE: Final = "rocksdict-config.json"
"""Where the binding keeps how keys and values are encoded; a database that it did not make has none."""


def load_rocksdict(what: str) -> Any:
    """The binding. ``what`` needs it: the subject of the error. Raises ``Invalid``."""
    try:
        import rocksdict
    except ImportError as error:
        raise Invalid(
            f"{what} needs a package that is not installed (rocksdict)",
            hint="pip install 'gazette[rocksdb]'",
        ) from error
    return rocksdict


@contextlib.contextmanager
def native_errors(what: str, path: str) -> Iterator[None]:
    """Raise RocksDB's errors as `translated` has them."""
    try:
        yield
    except Exception as error:
        ours = translated(error, what, path)
        if ours is error:
            raise
        raise ours from error


def translated(error: Exception, what: str, path: str) -> Exception:
    """An error of RocksDB's as one of ours, any other as it is.

    ``Corrupt`` for damaged files, ``Unavailable`` for a full disk, ``Closed`` if the database is, ``Invalid``
    for values that cannot be, else ``Broken``. ``what`` could not be done.
    """
    if isinstance(error, OverflowError):
        return Invalid(
            f"RocksDB could not {what}: {error}", hint="Correct the value of the option."
        )
    native = type(error) is Exception or type(error).__module__ == "rocksdict"
    if not native:
        return error
    text = str(error)
    message = f"RocksDB could not {what}: {text}"
    if type(error).__name__ == "DbClosedError":
        return Closed("the store was destroyed", directory=path)
    if "orruption" in text:
        return Corrupt(
            message,
            directory=path,
            hint="A local file is damaged, or a disk fails; the recovery log is not. Let the shard start"
            " anew, which plays it back into another directory; on another host, if it happens again.",
        )
    if os.strerror(errno.ENOSPC) in text:
        return Unavailable(
            message, directory=path, hint="Free space in the directory for recovered files."
        )
    if any(os.strerror(number) in text for number in (errno.EPERM, errno.EACCES, errno.EROFS)):
        return Broken(
            message,
            directory=path,
            hint="The process must be able to write the directory for recovered files.",
        )
    return Broken(message, directory=path)
