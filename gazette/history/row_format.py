"""The columns of rows, and which messages become rows: `RowFormat`. Needs pyarrow. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa

from gazette.errors import Invalid
from gazette.history.columns import Columns
from gazette.history.commit_filter import Mask
from gazette.history.json_values import EncodeVariant
from gazette.history.merge import CommittedRun
from gazette.history.meta_columns import META
from gazette.history.snapshot import Run

Value = Literal["json", "csv", "protobuf", "text", "binary"]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Columns and bounds of rows.

    ``schema`` has all columns in order. ``meta`` maps columns of metadata to keys of `META`. Other columns
    are fields of the message; for ``text`` and ``binary``, one column has the whole message.
    Messages with clocks in ``[clock_begin, clock_end)`` become rows; with ``acks``, acknowledgements, too.
    """

    value: Value
    schema: pa.Schema
    meta: tuple[tuple[str, str], ...] = ()
    acks: bool = False
    clock_begin: int = 0
    clock_end: int | None = None
    corrupt: str = ""
    """Name of the column with the whole text of messages that do not fit; empty without such a column."""
    encode_variant: EncodeVariant | None = None
    """Encoder of JSON for columns of Spark's type VARIANT."""

    @classmethod
    def of(cls, value: str, schema: pa.Schema, prefix: str, **more: Any) -> RowFormat:
        """Return a format, with its further fields ``more``. Names of metadata columns have ``prefix``."""
        meta = tuple((f"{prefix}{key}", key) for key in META if f"{prefix}{key}" in schema.names)
        return cls(cast(Value, value), schema, meta, **more)

    @property
    def fields(self) -> pa.Schema:
        """Columns that are fields of messages."""
        # Without such a column, `corrupt` is empty. Do not leave out a field whose name is empty.
        names = {*dict(self.meta), *([self.corrupt] if self.corrupt else [])}
        return pa.schema([field for field in self.schema if field.name not in names])

    @property
    def scanned(self) -> pa.Schema:
        """Fields that the scanner may find together with the UUIDs."""
        return self.fields if self.value == "json" else pa.schema([])

    def validate(self) -> None:
        """Raise `Invalid` if two columns have one name, or if a column of metadata, of corrupt records, or of
        texts or bytes has another type than it needs."""
        require_distinct(self.schema)
        for name, key in self.meta:
            column_type = self.schema.field(name).type
            if column_type != META[key]:
                raise Invalid(f"column {name} has type {META[key]}, not {column_type}", path=name)
        if self.corrupt and self.schema.field(self.corrupt).type != pa.string():
            raise Invalid("the column of corrupt records must have type string", path=self.corrupt)
        fields = self.fields
        if self.value in ("text", "binary"):
            needed = pa.string() if self.value == "text" else pa.binary()
            if len(fields) > 1 or any(field.type != needed for field in fields):
                raise Invalid(f"value={self.value} needs exactly one column of type {needed}")

    def selects(self, run: CommittedRun | Run) -> bool:
        """Return True if a run may have rows within the bounds. Only a `CommittedRun` shows its clocks."""
        if isinstance(run, Run):
            return True
        if run.empty or (self.clock_begin and run.clock_max < self.clock_begin):
            return False
        return self.clock_end is None or run.clock_min < self.clock_end

    def bounded(self, columns: Columns, wanted: Mask) -> Mask:
        """Return the wanted messages that are within the bounds."""
        if self.clock_begin:
            wanted = wanted & (columns.uuids.clocks >= np.uint64(self.clock_begin))
        if self.clock_end is not None:
            clocks = columns.uuids.clocks
            # Messages without a UUID have the clock 0, and no time.
            wanted = wanted & (clocks < np.uint64(self.clock_end)) & (clocks != 0)
        return wanted


def require_distinct(fields: Iterable[pa.Field], path: str = "") -> None:
    """Raise `Invalid` if two columns, or two fields of a struct in them, have the same name."""
    names: set[str] = set()
    for field in fields:
        field_path = f"{path}.{field.name}" if path else field.name
        if field.name in names:
            raise Invalid(
                f"there are two columns {field_path!r}",
                path=field_path,
                hint="Give each column a name of its own, or leave one out.",
            )
        names.add(field.name)
        type_ = field.type
        while pa.types.is_list(type_) or pa.types.is_map(type_):
            type_ = type_.value_type if pa.types.is_list(type_) else type_.item_type
        if pa.types.is_struct(type_):
            require_distinct(type_, field_path)
