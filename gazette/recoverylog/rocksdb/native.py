"""RocksDB's binding, which is an extra of the package, and the conversion of its errors.

The binding raises only plain ``Exception`` with RocksDB's text.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any, Final

from gazette.errors import Broken, Closed, Invalid, not_installed
from gazette.recoverylog.disk_errors import damaged_file, disk_error, full_disk

DEFAULT: Final = "default"
"""Name of the column family that every database has."""
CONFIG_FILE: Final = "rocksdict-config.json"
"""File in which the binding keeps the encoding of keys and values. Databases of other programs lack it."""


def load_rocksdict(what: str) -> Any:
    """Return the module rocksdict. Raise ``Invalid`` if it is not installed. ``what`` is what needs it."""
    try:
        import rocksdict
    except ImportError as error:
        raise not_installed(what, "rocksdict", "rocksdb") from error
    return rocksdict


@contextlib.contextmanager
def native_errors(what: str, path: str) -> Iterator[None]:
    """Convert RocksDB's errors with `map_errors`."""
    try:
        yield
    except Exception as error:
        mapped = map_errors(error, what, path)
        if mapped is error:
            raise
        raise mapped from error


def map_errors(error: Exception, what: str, path: str) -> Exception:
    """Return the `GazetteError` for an error of RocksDB, and any other error unchanged.

    The result is ``Corrupt`` for damaged files, ``Unavailable`` for a full disk, ``Closed`` for a closed
    database, ``Invalid`` for invalid values, else ``Broken``. ``what`` is the action that failed.
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
    if "orruption" in text:  # RocksDB writes Corruption, and in some messages corruption.
        return damaged_file(message, path)
    if os.strerror(errno.ENOSPC) in text:
        return full_disk(message, path)
    for number in (errno.EPERM, errno.EACCES, errno.EROFS):
        if os.strerror(number) in text:
            return disk_error(what, path, OSError(number, text))
    return Broken(message, directory=path)
