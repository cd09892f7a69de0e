"""Options of reading journals as tables: `TableOptions`."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from gazette.history.source import Access
from gazette.protocol.label_set import LabelSelector

if TYPE_CHECKING:
    import pyarrow as pa

Time = str | float | datetime.datetime
"""A time: ISO 8601, Unix seconds, or a ``datetime``. Without a zone it is UTC."""


class TableOptions(TypedDict, total=False):
    """Options of `read_table` and `read_batches`. All of them may be omitted."""

    selector: str | LabelSelector
    """Labels of the journals to read, instead of names: ``prefix=words/``. Needs brokers."""
    broker: str
    """Address of a broker, or of several, separated by commas. The default is ``BROKER_ADDRESS`` of the
    environment, and the credentials beside it, as for ``gazctl``; otherwise http://localhost:8080."""
    store: str | Sequence[str]
    """URL of a fragment store to read without brokers, or several. What is not stored yet is not read."""
    access: Access
    """Addresses and credentials in full, instead of ``broker``."""
    fields: str | pa.Schema
    """Fields of messages and their types: as in CREATE TABLE (``word string, n long``), or a schema of
    Arrow. The default is those of ``message``, or those of some messages, which are read for it."""
    columns: Sequence[str]
    """Names of the columns to return. The default is all: metadata, then fields."""
    message: type[Any]
    """Generated class of protobuf messages."""
    value: Literal["json", "csv", "protobuf", "text", "binary"]
    """Form of a message. The default is the journals' content type. With ``text`` and ``binary``
    there is one column ``value``, the whole message."""
    content_type: str
    """Content type of journals, instead of their label. Stores do not know labels."""
    uuid_field: str
    """Place of the UUID in messages, such as ``_meta.uuid``. The default is the journals' label
    ``app.gazette.dev/message-uuid``, and without one ``uuid``. Stores do not know labels."""
    meta_prefix: str
    """Prefix of the columns of metadata, where messages have fields of the same names."""
    path_postfix: str
    """Template ``path_postfix_template`` of the journals, with ``store``."""
    begin: int | Mapping[str, int]
    """Offset at which to begin: of all journals, or by journal. Of a transaction that began before it,
    only the messages behind it are returned."""
    end: int | Mapping[str, int]
    """Offset at which to end. The default is the head, as of the call."""
    begin_time: Time
    """Time of the first messages, by their clocks. Older fragments are not opened."""
    end_time: Time
    """Time before which messages are read. Messages without a UUID have no time."""
    isolation: Literal["read_committed", "read_uncommitted"]
    """``read_committed`` by default. Otherwise every message is returned, as it was written."""
    acks: bool
    """True to return acknowledgements, too, as messages without fields."""
    misfits: Literal["fail", "null", "skip"]
    """Treatment of messages and fields that do not fit the columns. ``fail`` by default."""
    lost: Literal["settled", "fail", "skip"]
    """Treatment of bytes that a journal has lost. ``settled``, the default, continues behind them as
    consumers do, and fails where a broker may still store them. ``fail`` always fails, ``skip`` never.
    What an operator has confirmed as lost is no error: brokers know it, and stores alone do not."""
    part_bytes: int
    """Bytes of a journal that an open transaction may hold back in memory, 16 MiB by default."""
    answer_s: float
    """Seconds for which brokers may give no answer, 60 by default. Then the call fails."""
