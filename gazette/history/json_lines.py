"""Lines of JSON as columns, by one compiled pass over their bytes: `LineScanner`.

It finds where messages are, their UUIDs, and those of their fields that are asked for. What it does not
understand at once it declines, and its caller takes the longer way, which is the specification.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gazette.message.message_uuid import UuidArrays

LOGGER: Final = logging.getLogger(__name__)

FieldKind = Literal["text", "integer", "float", "boolean"]
_KINDS: Final[tuple[FieldKind, ...]] = ("text", "integer", "float", "boolean")
"""By the numbers that the kernel has for them."""
FIELDS_MAX: Final = 60
"""More fields are not looked for: whether a key was there twice is kept in the bits of a number."""
_LINE_BYTES_MIN: Final = 3
"""Of ``{}`` and its newline: so many lines a buffer may have."""
_ROOM_BYTES: Final = 1 << 20
"""Room is made for multiples of this."""
_DECLINED_MAX: Final = 4
"""After so many buffers in a row that were declined, the next ones are not tried."""


class Field(NamedTuple):
    """A field of messages that is to be found, at their top level."""

    name: str
    kind: FieldKind


class Texts(NamedTuple):
    """Strings as UTF-8: that of a row lies in ``data`` between two ``bounds``."""

    bounds: npt.NDArray[np.int32]
    data: npt.NDArray[np.uint8]


class FieldColumn(NamedTuple):
    """The values of a field. Where ``present`` is false it is null, or not there."""

    present: npt.NDArray[np.bool_]
    values: Texts | npt.NDArray[np.int64] | npt.NDArray[np.float64] | npt.NDArray[np.bool_]


class Scanned(NamedTuple):
    """The lines of a buffer: where each begins, counted from its first byte; their UUIDs and fields."""

    begins: npt.NDArray[np.int64]
    uuids: UuidArrays
    fields: tuple[FieldColumn, ...]


@functools.cache
def kernel() -> ModuleType | None:
    """The compiled pass; None where it is not installed, or cannot be compiled.

    Reading is slower then, and the same. The first one on a machine waits until it is compiled.
    """
    try:
        from gazette.history import json_kernel
    except ImportError as error:
        # It is an extra, and Numba lags behind new releases of NumPy.
        LOGGER.info("reading JSON without a compiled scanner", extra={"reason": str(error)})
        return None
    LOGGER.debug("compiling the scanner of JSON, if that has not been done on this machine")
    try:
        json_kernel.compile_ahead()
    except OSError as error:  # The disk of its cache is full, say.
        LOGGER.warning("reading JSON without a compiled scanner", extra={"reason": str(error)})
        return None
    return json_kernel


class LineScanner:
    """Scans the lines of one journal. For one thread."""

    def __init__(self, uuid_field: str, fields: Sequence[Field] = ()) -> None:
        """``uuid_field`` is at the top level, too. Raises ``ValueError`` for more than `FIELDS_MAX`."""
        if len(fields) > FIELDS_MAX:
            raise ValueError(f"too many fields ({len(fields)})")
        names = [field.name.encode() for field in fields] + [uuid_field.encode()]
        self._fields = tuple(fields)
        self._names = np.frombuffer(b"".join(names), np.uint8)
        self._bounds = np.cumsum([0, *map(len, names)]).astype(np.int64)
        self._kinds = np.array([_KINDS.index(field.kind) for field in fields], np.int64)
        self._kernel: Any = kernel()
        self._room = 0
        self._scratch: tuple[npt.NDArray[Any], ...] = ()
        self._declined = 0

    def scan(self, buffer: bytes, stop: int) -> Scanned | None:
        """The lines of ``buffer`` before ``stop``, where a line ends.

        None if there is any that the specification is to judge: then it is to judge all of them.
        """
        if self._kernel is None or self._declined >= _DECLINED_MAX:
            return None
        if stop > self._room:
            self._make_room(stop)
        begins, producers, clocks, flags, present, numbers, offsets, texts = self._scratch
        rows = self._kernel.scan(
            np.frombuffer(buffer, np.uint8, stop),
            stop,
            self._names,
            self._bounds,
            self._kinds,
            *self._scratch,
        )
        if rows < 0:
            self._declined += 1
            return None
        self._declined = 0
        columns = []
        for number, field in enumerate(self._fields):
            values: Any = numbers[number, :rows]
            match field.kind:
                case "text":
                    bounds = offsets[number, : rows + 1].copy()
                    values = Texts(bounds, texts[number, : bounds[-1]].copy())
                case "integer":
                    values = values.copy()
                case "float":
                    values = values.view(np.float64).copy()
                case "boolean":
                    values = values != 0
            columns.append(FieldColumn(present[number, :rows] != 0, values))
        return Scanned(
            begins[:rows].copy(),
            UuidArrays(producers[:rows].copy(), clocks[:rows].copy(), flags[:rows].copy()),
            tuple(columns),
        )

    def _make_room(self, size: int) -> None:
        """For buffers of that size. Memory that is not written to costs nothing, and most of this is not."""
        # Buffers of about the same size follow: not all of this for each that is a little larger.
        size += _ROOM_BYTES - size % _ROOM_BYTES
        self._room = size
        count, rows = len(self._fields), size // _LINE_BYTES_MIN + 1
        self._scratch = (
            np.empty(rows, np.int64),
            np.empty(rows, np.uint64),
            np.empty(rows, np.uint64),
            np.empty(rows, np.uint64),
            np.empty((count, rows), np.uint8),
            np.empty((count, rows), np.int64),
            np.empty((count, rows + 1), np.int32),
            np.empty((count, size), np.uint8),
        )
