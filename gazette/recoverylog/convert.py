"""Conversion of a log's files to plain SQLite databases, beside these files: `convert`.

Use it on a directory that another player has filled. The original's player knows neither images nor redo.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import apsw

from gazette.errors import Corrupt, GazetteError, Invalid
from gazette.recoverylog.shard_state import recorded_databases
from gazette.recoverylog.sqlite.redo import build, files_of

STAGING: Final = ".gazctl-convert"
"""Name of the temporary directory, inside the target: a finished database is moved, not copied."""
_WHOLE: Final = [("ok",)]
"""Answer of SQLite's ``integrity_check`` for a sound database."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A database that was made. ``unchecked``: why SQLite could not check the whole database; empty if it
    did."""

    path: Path
    unchecked: str = ""


def convert(directory: Path) -> tuple[Converted, ...]:
    """Make all databases of a directory, beside their images and redo. Blocks.

    All databases are made and checked before any of them gets its name. Raise ``Invalid`` if there is no
    database, or a file has the name of a database. Raise ``Corrupt`` naming a damaged or missing file. Raise
    ``GazetteError`` if the disk fails or is full. After an error no database is left.
    """
    try:
        files = files_of(directory)
    except OSError as error:
        raise Invalid(f"cannot read {directory}: {error.strerror}", path="--convert") from error
    names = sorted(recorded_databases(files))
    if not names:
        raise Invalid(
            f"{directory} holds no images and redo files of a SQLite database",
            path="--convert",
            hint="Files of RocksDB, of JSON stores and of the SQLite mode vfs need no conversion.",
        )
    for name in names:
        if name in files:
            raise _exists(directory / name)
    staging = directory / STAGING
    try:
        # An interrupted conversion may have left this directory behind.
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(0o700)
        converted = [_convert_database(directory, name) for name in names]
        _put_in_place(directory, names)
    except OSError as error:
        raise GazetteError(
            f"cannot write below {directory}: {error.strerror or error}",
            hint="Free space there, or copy the files to another disk first.",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return tuple(converted)


def _convert_database(directory: Path, name: str) -> Converted:
    path = directory / STAGING / name
    build(files_of(directory), name, path)
    return Converted(directory / name, _check_integrity(path, name))


def _check_integrity(path: Path, name: str) -> str:
    """Raise ``Corrupt`` for a damaged database. Return why SQLite could not check the whole database, or
    ``""``."""
    try:
        # No process writes to the database. With `immutable`, SQLite makes no files beside it, in any
        # journal mode.
        connection = apsw.Connection(
            f"file:{quote(str(path))}?immutable=1",
            flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI,
        )
        try:
            problems = connection.execute("PRAGMA integrity_check(1)").fetchall()
        finally:
            connection.close()
    except apsw.SQLError as error:
        # A schema may use functions, collations and modules that only the application adds.
        if not str(error).startswith("no such "):
            raise _damaged(name, str(error)) from error
        return f"{error}: the application adds it"
    except apsw.Error as error:
        raise _damaged(name, str(error)) from error
    if problems != _WHOLE:
        raise _damaged(name, str(problems[0][0]))
    return ""


def _put_in_place(directory: Path, names: list[str]) -> None:
    """Move all databases to their names, or none. Keep a file that already has one of these names, and raise
    ``Invalid``."""
    reserved: list[Path] = []  # Empty files, which hold the names until all databases can be moved.
    try:
        for name in names:
            target = directory / name
            try:
                os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError as error:
                raise _exists(target) from error
            reserved.append(target)
        for target in reserved:
            (directory / STAGING / target.name).replace(target)
    except BaseException:
        for target in reserved:
            with contextlib.suppress(OSError):
                target.unlink()
        raise


def _exists(path: Path) -> Invalid:
    return Invalid(
        f"{path} exists and is not replaced",
        path="--convert",
        hint="Move it away to make the database again.",
    )


def _damaged(name: str, reason: str) -> Corrupt:
    return Corrupt(
        f"the database {name} is damaged: {reason}",
        hint="Recover the shard again. If that fails, use an older backup of its hints (--backup).",
    )
