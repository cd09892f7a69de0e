"""Queries of shards: a query, its answer, and the errors with which a call ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio

from gazette.auth import Claims
from gazette.errors import GazetteError, Invalid, NotAllowed
from gazette.protocol.error_codes import code_of
from gazette.protocol.ids import ProcessId
from gazette.protocol.route import Header

T = TypeVar("T")

EVERYTHING: Final = Claims(0)


@dataclass(frozen=True, slots=True)
class ShardQuery:
    """A query of a shard, and which replicas may answer it."""

    shard: str
    read_through: Mapping[str, int] = field(default_factory=dict)
    """Offsets of sources that the answer must reflect, so that callers read their own writes.

    A publish or an append returns such offsets. A standby cannot check offsets: only the primary answers.
    """
    max_staleness_s: float | None = None
    """Largest age in seconds of a hot standby's state from which it may answer. None: the primary answers."""
    header: Header | None = None
    """Set if another member forwarded the query: then this member must answer or refuse it."""
    claims: Claims = EVERYTHING

    def __post_init__(self) -> None:
        if self.max_staleness_s is not None and not self.max_staleness_s >= 0:  # Also for NaN.
            raise Invalid(
                f"invalid max_staleness ({self.max_staleness_s:g} s; expected >= 0)",
                path="max_staleness",
            )
        for journal, offset in self.read_through.items():
            if offset < 0:
                raise Invalid(f"invalid offset ({offset}) of {journal}", path="read_through")


@dataclass(frozen=True, slots=True)
class QueryResult(Generic[T]):
    """An answer, and the member that gave it."""

    value: T
    member: ProcessId | None
    staleness_s: float = 0.0
    """Age in seconds of the state at the moment of the answer; 0 for a primary."""


@asynccontextmanager
async def rpc_errors(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End the call of an application's handler with the code of a `GazetteError` that the block raises."""
    try:
        yield
    except GazetteError as error:
        text = error.message if isinstance(error, NotAllowed) else str(error)
        await context.abort(code_of(error), text)
