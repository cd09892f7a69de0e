"""Lines of JSON as columns, by one compiled pass over their bytes: `LineScanner`.

It finds messages, their UUIDs, and the wanted fields. It declines buffers that it does not
understand. Its caller then uses the specification, which is slower.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gazette.message.uuid import UuidArrays

LOGGER: Final = logging.getLogger(__name__)

FieldKind = Literal["text", "integer", "float", "boolean"]
_KINDS: Final[tuple[FieldKind, ...]] = ("text", "integer", "float", "boolean")
"""Kinds of fields, in the order of their numbers in the kernel."""
FIELDS_MAX: Final = 60
"""Greatest number of fields. The kernel marks the keys it has seen in the bits of one number."""
_LINE_BYTES_MIN: Final = 3
"""Length of ``{}`` and its newline, which bounds the number of lines of a buffer."""
_ROOM_BYTES: Final = 1 << 20
"""Unit of the size of arrays, in bytes."""
_DECLINED_MAX: Final = 4
"""Number of consecutive declined buffers after which the scanner stops trying."""


class Field(NamedTuple):
    """A wanted field of messages, at their top level."""

    name: str
    kind: FieldKind


class Texts(NamedTuple):
    """Strings as UTF-8. The string of a row lies in ``data`` between two ``bounds``."""

    bounds: npt.NDArray[np.int32]
    data: npt.NDArray[np.uint8]


class FieldColumn(NamedTuple):
    """Values of a field. Where ``present`` is false, the value is null or absent."""

    present: npt.NDArray[np.bool_]
    values: Texts | npt.NDArray[np.int64] | npt.NDArray[np.float64] | npt.NDArray[np.bool_]


class Scanned(NamedTuple):
    """Lines of a buffer: their positions from its first byte, their UUIDs, and their fields."""

    begins: npt.NDArray[np.int64]
    uuids: UuidArrays
    fields: tuple[FieldColumn, ...]


@functools.cache
def kernel() -> ModuleType | None:
    """Return the compiled pass. Return None if it is not installed, or cannot be compiled.

    Without it, reading is slower, with the same result. The first call on a machine waits for the
    compilation.
    """
    try:
        from gazette.history import json_kernel
    except ImportError as error:
        # Numba is an optional extra, and does not support new releases of NumPy at once.
        LOGGER.info("reading JSON without the compiled scanner", extra={"reason": str(error)})
        return None
    LOGGER.debug("loading the scanner of JSON; its first use on a machine compiles it")
    try:
        json_kernel.compile_ahead()
    except OSError as error:  # For example, the disk of its cache is full.
        LOGGER.warning("reading JSON without the compiled scanner", extra={"reason": str(error)})
        return None
    return json_kernel


class LineScanner:
    """Scanner of the lines of one journal. For one thread."""

    def __init__(self, uuid_field: str, fields: Sequence[Field] = ()) -> None:
        """Make a scanner. ``uuid_field`` is at the top level, too.

        Raise ``ValueError`` for more than `FIELDS_MAX` fields.
        """
        if len(fields) > FIELDS_MAX:
            raise ValueError(f"too many fields ({len(fields)})")
        names = [field.name.encode() for field in fields] + [uuid_field.encode()]
        self._fields = tuple(fields)
        self._kernel: Any = kernel()
        self._wanted: Any = self._kernel and self._kernel.Wanted(
            np.frombuffer(b"".join(names), np.uint8),
            np.cumsum([0, *map(len, names)]).astype(np.int64),
            np.array([_KINDS.index(field.kind) for field in fields], np.int64),
        )
        self._room = 0
        self._arrays: Any = None
        self._declined = 0

    def scan(self, buffer: bytes, stop: int) -> Scanned | None:
        """Scan the lines of ``buffer`` before ``stop``, where a line ends.

        Return None if any line needs the specification. The caller then uses it for all lines.
        """
        if self._kernel is None or self._declined >= _DECLINED_MAX:
            return None
        if stop > self._room:
            self._make_room(stop)
        found = self._arrays
        rows = self._kernel.scan(np.frombuffer(buffer, np.uint8, stop), stop, self._wanted, found)
        if rows < 0:
            self._declined += 1
            return None
        self._declined = 0
        columns = []
        for number, field in enumerate(self._fields):
            values: Any = found.numbers[number, :rows]
            match field.kind:
                case "text":
                    bounds = found.offsets[number, : rows + 1].copy()
                    values = Texts(bounds, found.texts[number, : bounds[-1]].copy())
                case "integer":
                    values = values.copy()
                case "float":
                    values = values.view(np.float64).copy()
                case "boolean":
                    values = values != 0
            columns.append(FieldColumn(found.present[number, :rows] != 0, values))
        return Scanned(
            found.begins[:rows].copy(),
            UuidArrays(
                found.producers[:rows].copy(), found.clocks[:rows].copy(), found.flags[:rows].copy()
            ),
            tuple(columns),
        )

    def _make_room(self, size: int) -> None:
        """Allocate arrays for buffers of that size. Most of the memory is never written, and so
        takes no pages.
        """
        # Round up, since buffers of about the same size follow: avoid a new allocation for each.
        size += _ROOM_BYTES - size % _ROOM_BYTES
        self._room = size
        rows = size // _LINE_BYTES_MIN + 1
        self._arrays = self._kernel.arrays(len(self._fields), rows, size)
