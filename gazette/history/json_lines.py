"""Converts lines of JSON to columns, by one compiled pass over their bytes: `LineScanner`.

The scanner finds messages, their UUIDs, and the wanted fields. It declines lines that it does not understand,
and buffers with many such lines. The caller then uses the specification, which is slower.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from gazette.message.uuid import UuidArrays

LOGGER: Final = logging.getLogger(__name__)

FieldKind = Literal[
    "text",
    "integer",
    "boolean",
    "number",
    "decimal",
    "instant",
    "local",
    "date",
    "value",
    "struct",
    "list",
]
"""Kinds of fields. Values of ``number`` and ``value`` are texts of JSON."""
_KINDS: Final[tuple[FieldKind, ...]] = get_args(FieldKind)
"""Kinds of fields, in the order of their numbers in the kernel."""
_TEXTS: Final = frozenset({"text", "number", "value"})
DEPTH_MAX: Final = 30
"""Greatest number of levels of fields."""
FIELDS_MAX: Final = 256
"""Greatest number of fields, with nested fields: it bounds memory."""
_ROOM_BYTES: Final = 1 << 20
"""Unit of the sizes of arrays, in bytes."""
_DECLINED_MAX: Final = 4
"""Number of consecutive declined buffers after which the scanner declines all later buffers."""

_SAID_AFTER_S: Final = 2.0
"""Seconds after which the log says that Numba compiles. Cached code loads in less time."""
_COMMAND: Final = "python -m gazette.history.json_kernel"
_COMPILING: Final = threading.RLock()
# Numba holds a lock while it compiles. A forked child would wait for it for ever: so forks wait for the end.
os.register_at_fork(
    before=_COMPILING.acquire,
    after_in_parent=_COMPILING.release,
    after_in_child=_COMPILING.release,
)


class Field(NamedTuple):
    """A wanted field of messages."""

    name: str
    kind: FieldKind
    scale: int = 0
    """Digits after the point, of decimals."""
    precision: int = 0
    """Greatest number of digits, of decimals."""
    children: tuple[Field, ...] = ()
    """Fields of a struct, or the items of a list."""

    @property
    def size(self) -> int:
        """Number of fields: this one, and all nested in it."""
        return 1 + sum(child.size for child in self.children)

    @property
    def depth(self) -> int:
        """Number of levels of fields."""
        return 1 + max((child.depth for child in self.children), default=0)


class Texts(NamedTuple):
    """Strings as UTF-8. The string of a row is in ``data`` between two ``bounds``."""

    bounds: npt.NDArray[np.int32]
    data: npt.NDArray[np.uint8]


class FieldColumn(NamedTuple):
    """Values of a field. Where ``present`` is false, the value is null or absent.

    A decimal is an integer that counts its smallest unit. A time is in microseconds since 1970, a date in
    days. For a list, two consecutive ``values`` are the bounds of its items. A struct has no values.
    """

    present: npt.NDArray[np.bool_]
    values: Any
    """`Texts`, or an array of numbers."""
    children: tuple[FieldColumn, ...] = ()


class FoundFields(NamedTuple):
    """Fields of the lines of a buffer."""

    columns: tuple[FieldColumn, ...]
    declined: npt.NDArray[np.int64]
    """Positions of declined lines, which have no fields here."""
    kept: npt.NDArray[np.bool_] | None = None
    """The lines that are messages, if some are skipped as malformed."""
    lenient: npt.NDArray[np.int64] = np.zeros(0, np.int64)
    """Positions of lines that a decoder of declared types may read differently: see `json_kernel`."""


class Scanned(NamedTuple):
    """Lines of a buffer: their positions in the buffer, their UUIDs, and their fields."""

    begins: npt.NDArray[np.int64]
    uuids: UuidArrays
    fields: FoundFields
    """The fields. Declined lines have neither fields nor a UUID here."""


@functools.cache
def kernel() -> ModuleType | None:
    """Return the compiled pass. Return None if Numba cannot be imported, or cannot use its cache.

    Without the pass, reading is slower, with the same result. The first call on a machine waits for the
    compilation, and the log says so.
    """
    try:
        from gazette.history import json_kernel
    except ImportError as error:
        # Numba is an optional extra, and supports new releases of NumPy late.
        LOGGER.info("reading JSON without the compiled scanner", extra={"reason": str(error)})
        return None
    try:
        compile_aloud(json_kernel)
    except OSError as error:  # For example, the disk of the cache is full.
        LOGGER.warning("reading JSON without the compiled scanner", extra={"reason": str(error)})
        return None
    except (EOFError, pickle.UnpicklingError) as error:  # The machine lost power after a write.
        scan: Any = json_kernel.scan
        LOGGER.warning(
            "reading JSON without the compiled scanner: a file of Numba in %(directory)s is damaged. "
            "Remove the files *.nbi there.",
            {"directory": scan.stats.cache_path},
            extra={"reason": str(error)},
        )
        return None
    return json_kernel


def compile_aloud(kernel: Any, after_s: float = _SAID_AFTER_S) -> None:
    """Compile the pass, or load it from the cache. No process forks meanwhile. Log a warning if Numba
    compiles for ``after_s``."""
    ended = threading.Event()
    threading.Thread(
        target=_say_that_it_compiles, args=(kernel.scan, ended, after_s), daemon=True
    ).start()
    try:
        with _COMPILING:
            kernel.compile_ahead()
    finally:
        ended.set()


def _say_that_it_compiles(scan: Any, ended: threading.Event, after_s: float) -> None:
    while not ended.wait(after_s):
        if scan.stats.cache_misses:  # Without a miss, Numba only loads cached code, slowly.
            # Log a warning: a program that configures no log shows no lower level.
            LOGGER.warning(
                "Numba compiles the pass over JSON, which takes a minute of a processor. "
                "The code is kept in %(directory)s. To compile ahead: %(command)s",
                {"directory": scan.stats.cache_path or "no directory", "command": _COMMAND},
            )
            return


class LineScanner:
    """Scanner of the lines of one journal. For one thread."""

    def __init__(self, uuid_field: str, fields: Sequence[Field] = ()) -> None:
        """Make a scanner. ``uuid_field`` is a name, with dots for nested fields.

        Raise ``ValueError`` for more than `FIELDS_MAX` fields, or more than `DEPTH_MAX` levels of fields.
        """
        if (size := sum(field.size for field in fields)) > FIELDS_MAX:
            raise ValueError(f"too many fields ({size})")
        if (depth := max((field.depth for field in fields), default=0)) > DEPTH_MAX:
            raise ValueError(f"fields are nested too deeply ({depth} levels)")
        self._fields = tuple(fields)
        self._kernel: Any = kernel()
        self._wanted: Any = None
        if self._kernel is not None:
            path = [name.encode() for name in uuid_field.split(".")]
            self._wanted = self._kernel.wanted([self._node(field) for field in fields], path)
        self._tree = _numbered(fields)
        self._arrays: Any = None
        """Arrays that the kernel writes into, for buffers of at most ``_buffer_max`` bytes, and for at most
        ``_slots_max`` lines, and items of lists."""
        self._buffer_max = self._slots_max = 0
        self._has_lists = any(field.kind == "list" for _, field, _ in self._tree)
        self._declined_buffers = 0
        """Number of consecutive buffers with too many declined lines."""

    def _node(self, field: Field) -> Any:
        children = tuple(self._node(child) for child in field.children)
        kind = _KINDS.index(field.kind)
        return self._kernel.Node(field.name.encode(), kind, field.scale, field.precision, children)

    def scan(self, buffer: bytes, stop: int) -> Scanned | None:
        """Scan the lines of ``buffer`` before ``stop``, where a line ends.

        Return None without a compiled pass, or if too many lines are declined. Return None for good after
        `_DECLINED_MAX` such buffers in a row. Return None if the memory does not suffice: each text field
        needs as much as the buffer. The caller then uses the specification for all lines.
        """
        if self._kernel is None or self._declined_buffers >= _DECLINED_MAX:
            return None
        content = np.frombuffer(buffer, np.uint8, stop)
        try:
            self._make_room(content)
        except MemoryError:
            return None
        lines = self._arrays
        rows = self._kernel.scan(content, stop, self._wanted, lines)
        if rows < 0:
            self._declined_buffers += 1
            return None
        self._declined_buffers = 0
        # Children come after their parents, so begin with the last one.
        columns: dict[int, FieldColumn] = {}
        for number, field, children in reversed(self._tree):
            nested = tuple(columns[child] for child in children)
            columns[number] = self._column(number, field.kind, nested)
        return Scanned(
            lines.begins[:rows].copy(),
            UuidArrays(
                lines.producers[:rows].copy(), lines.clocks[:rows].copy(), lines.flags[:rows].copy()
            ),
            FoundFields(
                tuple(columns[number] for number in range(1, len(self._fields) + 1)),
                np.flatnonzero(lines.declined[:rows] == self._kernel.DECLINED),
                lenient=np.flatnonzero(lines.declined[:rows] == self._kernel.LENIENT),
            ),
        )

    def _column(
        self, number: int, kind: FieldKind, children: tuple[FieldColumn, ...]
    ) -> FieldColumn:
        """Return copies of what the kernel wrote for the node ``number``."""
        arrays = self._arrays
        rows = int(arrays.counts[number])
        present = arrays.present[number, :rows] != 0
        number_row, text_row = self._wanted.rows[number]
        if kind == "struct":
            return FieldColumn(present, None, children)
        if kind == "list" or kind in _TEXTS:
            bounds = arrays.offsets[number, : rows + 1].copy()
            if kind == "list":
                return FieldColumn(present, bounds, children)
            return FieldColumn(present, Texts(bounds, arrays.texts[text_row, : bounds[-1]].copy()))
        values = arrays.numbers[number_row, :rows].copy()
        return FieldColumn(present, values != 0 if kind == "boolean" else values)

    def _make_room(self, content: npt.NDArray[np.uint8]) -> None:
        """Allocate larger arrays if lines need them."""
        size, slots = len(content), self._kernel.slots(content, self._has_lists)
        if size <= self._buffer_max and slots <= self._slots_max:
            return
        # Round up: the next buffers have about the same size, and then need no new allocation.
        size = max(self._buffer_max, size + _ROOM_BYTES - size % _ROOM_BYTES)
        slots = max(self._slots_max, 1 << slots.bit_length())
        self._arrays = self._kernel.arrays(self._wanted, size, slots)
        self._buffer_max, self._slots_max = size, slots


def _numbered(fields: Sequence[Field]) -> list[tuple[int, Field, range]]:
    """Return the fields, with their numbers in the kernel and the numbers of their children. The line itself
    has the number 0."""
    numbered: list[tuple[int, Field, range]] = []
    nodes = list(fields)
    for field in nodes:  # The list grows in the loop: breadth first.
        first = len(nodes) + 1
        nodes += field.children
        numbered.append((len(numbered) + 1, field, range(first, len(nodes) + 1)))
    return numbered
