"""A `ShardQuery` and a `QueryResult` as HTTP headers and as gRPC metadata.

Names of a query:

- ``gazette-max-staleness``: largest age of a hot standby's state from which it may answer: ``2.5``, ``2.5s``.
- ``gazette-read-through``: the offsets that the answer must reflect: ``journal=offset``, comma separated.
- ``gazette-header-bin``: the `Header` of a query that one member forwards to another. gRPC only.

Names of a result:

- ``gazette-staleness``: age of the state in seconds.
- ``gazette-served-by``: the member that answered: ``zone#member``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from google.protobuf.message import DecodeError

from gazette.auth import Claims
from gazette.consumer.query.query import QueryResult, ShardQuery
from gazette.errors import Invalid
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header
from gazette.runtime.numbers import is_digits, parse_number

MAX_STALENESS: Final = "gazette-max-staleness"
READ_THROUGH: Final = "gazette-read-through"
HEADER: Final = "gazette-header-bin"
STALENESS: Final = "gazette-staleness"
SERVED_BY: Final = "gazette-served-by"

Values = Mapping[str, str | bytes]


def values_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Values:
    """Return the metadata of a call as a dict with lower-case names."""
    return {name.lower(): value for name, value in metadata or ()}


def query_of(values: Values, claims: Claims) -> ShardQuery:
    """Decode a query, whose shard is not known yet. Raise ``Invalid`` for malformed values."""
    return ShardQuery(
        "",
        read_through_of(_text(values.get(READ_THROUGH, ""))),
        _max_staleness(_text(values.get(MAX_STALENESS, ""))),
        _header(values.get(HEADER)),
        claims,
    )


def of_shard(query: ShardQuery, shard: Any) -> ShardQuery:
    """Return the query with its shard. Raise ``Invalid`` for an empty id."""
    if not (isinstance(shard, str) and shard):
        raise Invalid(
            "the request names no shard",
            path="shard",
            hint="See `gazctl shards list` for the ids of shards.",
        )
    return replace(query, shard=shard)


def read_through_of(text: str) -> dict[str, int]:
    """Decode ``journal=offset,…``. Raise ``Invalid`` for any other text."""
    offsets: dict[str, int] = {}
    for part in filter(None, (pair.strip() for pair in text.split(","))):
        journal, _, offset = part.rpartition("=")
        if not journal or not is_digits(offset):
            raise Invalid(
                f"invalid read-through ({part[:200]!r}; expected journal=offset)", path=READ_THROUGH
            )
        offsets[journal] = max(int(offset), offsets.get(journal, 0))
    return offsets


def _max_staleness(text: str) -> float | None:
    if not text:
        return None
    try:
        seconds = parse_number(text.removesuffix("s"))
    except ValueError:
        seconds = math.nan  # The check below refuses it.
    if not 0 <= seconds < math.inf:
        raise Invalid(f"invalid staleness ({text[:50]!r}; expected seconds)", path=MAX_STALENESS)
    return seconds


def _header(value: str | bytes | None) -> Header | None:
    if value is None:
        return None
    data = value if isinstance(value, bytes) else value.encode("latin-1")
    try:
        return Header.from_pb(broker_pb2.Header.FromString(data))
    except DecodeError as error:
        raise Invalid(f"not a Header: {error}", path=HEADER) from error


def metadata_of(query: ShardQuery) -> tuple[tuple[str, Any], ...]:
    """Return the metadata of a call that forwards a query to another member."""
    metadata: list[tuple[str, Any]] = []
    if query.max_staleness_s is not None:
        metadata.append((MAX_STALENESS, repr(query.max_staleness_s)))
    if query.read_through:
        pairs = (f"{journal}={offset}" for journal, offset in query.read_through.items())
        metadata.append((READ_THROUGH, ",".join(pairs)))
    if query.header is not None:
        metadata.append((HEADER, query.header.to_pb().SerializeToString()))
    return tuple(metadata)


def result_headers(answer: QueryResult[Any]) -> dict[str, str]:
    """Return the headers of an answer."""
    values = {STALENESS: f"{answer.staleness_s:.3f}"}
    if answer.member is not None:
        values[SERVED_BY] = str(answer.member)
    return values


def result_of(value: Any, values: Values) -> QueryResult[Any]:
    """Decode a peer's answer. An answer without a staleness, as older versions send it, is of a primary."""
    try:
        staleness_s = float(_text(values.get(STALENESS, "0")))
    except ValueError:
        staleness_s = 0.0
    zone, _, suffix = _text(values.get(SERVED_BY, "")).partition("#")
    return QueryResult(value, ProcessId(zone, suffix) if suffix else None, staleness_s)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
