"""The options for reading journals as tables: `TableOptions`."""

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
    """Options of `read_table` and `read_batches`. All are optional."""

    selector: str | LabelSelector
    """Selector of the journals to read, instead of names: ``prefix=words/``. Needs brokers."""
    broker: str
    """Addresses of brokers, separated by commas. The default is ``BROKER_ADDRESS`` of the environment,
    with the credentials there, as for ``gazctl``, or else http://localhost:8080."""
    store: str | Sequence[str]
    """URL of a blob store to read without brokers, or several. Bytes that are not stored yet are left out."""
    access: Access
    """Addresses and credentials in full, instead of ``broker``."""
    fields: str | pa.Schema
    """Fields of messages and their types, as in CREATE TABLE (``word string, n long``), or as a schema of
    Arrow. The default is the fields of ``message``. Else fields are inferred from messages."""
    columns: Sequence[str]
    """Names of the columns to return. The default is all: metadata, then fields."""
    message: type[Any]
    """Generated class of protobuf messages."""
    value: Literal["json", "csv", "protobuf", "text", "binary"]
    """Form of a message. The default follows from the journals' content type. ``text`` and ``binary``
    return one column ``value`` with the whole message."""
    content_type: str
    """Content type of journals, instead of their label. Stores do not know labels."""
    uuid_field: str
    """Place of the UUID in messages, such as ``_meta.uuid``. The default is the journals' label
    ``app.gazette.dev/message-uuid``, or else ``uuid``. Stores do not know labels."""
    meta_prefix: str
    """Prefix for the names of metadata columns, if messages have fields of the same names."""
    path_postfix: str
    """Template ``path_postfix_template`` of the journals, with ``store``."""
    begin: int | Mapping[str, int]
    """Offset at which to begin, for all journals or by journal. Of a transaction that began before it, only
    the messages from this offset on are returned."""
    end: int | Mapping[str, int]
    """Offset at which to end. The default is the head, as of the call."""
    begin_time: Time
    """Time of the first messages, by their clocks. Older fragments are not opened."""
    end_time: Time
    """Time before which messages are read, by their clocks. Messages without a UUID have no time."""
    isolation: Literal["read_committed", "read_uncommitted"]
    """Default: ``read_committed``. ``read_uncommitted`` returns every message, committed or not."""
    acks: bool
    """True to return acknowledgements too, as messages without fields."""
    misfits: Literal["fail", "null", "skip"]
    """Treatment of messages and fields that do not fit the columns. Default: ``fail``."""
    lost: Literal["settled", "fail", "skip"]
    """Treatment of lost bytes of a journal. ``settled``, the default, skips them as consumers do, but
    fails if a broker may still store them. ``fail`` always fails, ``skip`` never. Bytes that an operator
    has confirmed as lost are no error: brokers know such bytes, stores do not."""
    part_bytes: int
    """Bytes of a journal that an open transaction may hold back in memory. Default: 16 MiB."""
    answer_s: float
    """Seconds to wait for an answer of brokers before the call fails. Default: 60."""
