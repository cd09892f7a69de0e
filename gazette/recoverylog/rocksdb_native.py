"""RocksDB's binding, which is an extra of the package, and its errors as ours.

Everything that it raises is a plain ``Exception`` with RocksDB's own text.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any, Final

from gazette.errors import Broken, Closed, Invalid
from gazette.recoverylog.local_files import damaged_file, disk_error, full_disk

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
        return damaged_file(message, path)
    if os.strerror(errno.ENOSPC) in text:
        return full_disk(message, path)
    for number in (errno.EPERM, errno.EACCES, errno.EROFS):
        if os.strerror(number) in text:
            return disk_error(what, path, OSError(number, text))
    return Broken(message, directory=path)
