"""The offset of a stream: the sources of a checkpoint, in JSON. Pure.

For each journal, it has the offset *and* the states of the producers at this offset of the journal. So only
the journals and two such offsets determine the messages of a batch. Any process may plan the batch, any
number of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from gazette.errors import Corrupt
from gazette.history.snapshot import JournalSnapshot
from gazette.message.uuid import PRODUCER_BYTES
from gazette.protocol.checkpoint import ProducerState, SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.journal_life import JournalLife

StreamOffset: TypeAlias = dict[str, Any]
"""``{journal: {"at": offset, "producers": {hex: "clock" or "clock@begin"}}}``, clocks in hex.

Optional: ``"life": "cluster.revision"`` is the life of the journal. ``"ahead": offset`` is the offset up to
which tasks were asked for summaries. ``"since": clock`` is the least clock of the stream's messages, the same
for all journals. ``"seen": {hex: clock}`` has `ProducerState.seen_at` of the producers with an open
transaction, or whose clock is far from the clocks of others. Version 0.1.0 does not know ``seen``.
"""

AT: Final = "at"
AWAITED: Final = "awaited"
"""Key of the bytes that a query waits for. Only the ends in the query's progress have this key."""
_PRODUCERS, _SEEN, _AHEAD, _SINCE, _LIFE = "producers", "seen", "ahead", "since", "life"
_DIGITS: Final = 2 * PRODUCER_BYTES


def encode_offset(
    sources: Mapping[JournalName, SourceCheckpoint],
    ahead: Mapping[JournalName, Offset] = {},
    since: int = 0,
    lives: Mapping[JournalName, JournalLife] = {},
) -> StreamOffset:
    """Encode sources. `StreamOffset` says what ``ahead``, ``since`` and ``lives`` are. Leave out an ``ahead``
    that was read already. Keys have a fixed order, since Spark compares offsets as texts."""
    offset: StreamOffset = {}
    for journal, source in sorted(sources.items()):
        producers, seen = {}, {}
        for producer, state in sorted(source.producers.items()):
            begin = "" if state.begin is None else f"@{state.begin}"
            producers[producer.hex()] = f"{state.last_ack:x}{begin}"
            if state.seen_at:
                seen[producer.hex()] = f"{state.seen_at:x}"
        value: dict[str, Any] = {}
        if ahead.get(journal, 0) > source.read_through:
            value[_AHEAD] = ahead[journal]
        value |= {AT: source.read_through, _PRODUCERS: producers}
        if seen:
            value[_SEEN] = seen
        if since:
            value[_SINCE] = f"{since:x}"
        if (life := lives.get(journal)) is not None:
            value[_LIFE] = f"{life.cluster_id:x}.{life.created}"
        offset[journal] = value
    return offset


def decode_offset(offset: StreamOffset) -> dict[JournalName, SourceCheckpoint]:
    """Return the sources of an offset that `encode_offset` made. Raise `Corrupt` for another offset."""
    sources = {}
    with _decoding():
        for journal, value in offset.items():
            producers, seen = {}, value.get(_SEEN, {})
            for digits, text in value[_PRODUCERS].items():
                clock, separator, begin = text.partition("@")
                if len(digits) != _DIGITS:
                    raise ValueError(digits)
                seen_at = int(seen.get(digits, "0"), 16)
                state = ProducerState(int(clock, 16), int(begin) if separator else None, seen_at)
                producers[bytes.fromhex(digits)] = state
            sources[journal] = SourceCheckpoint(int(value[AT]), producers)
    return sources


def decode_ahead(offset: StreamOffset) -> dict[JournalName, Offset]:
    """Return, by journal, the offset up to which tasks were asked for summaries. Raise `Corrupt` for an
    offset of another source."""
    with _decoding():
        return {name: int(value[_AHEAD]) for name, value in offset.items() if _AHEAD in value}


def decode_since(offset: StreamOffset) -> int:
    """Return the least clock of the stream's messages. Raise `Corrupt` for an offset of another source."""
    with _decoding():
        return max((int(value.get(_SINCE, "0"), 16) for value in offset.values()), default=0)


def decode_lives(offset: StreamOffset) -> dict[JournalName, JournalLife]:
    """Return the known lives of the journals. Raise `Corrupt` for an offset of another source."""
    lives = {}
    with _decoding():
        for journal, value in offset.items():
            if _LIFE in value:
                cluster_id, _, created = value[_LIFE].partition(".")
                lives[journal] = JournalLife(int(cluster_id, 16), int(created))
    return lives


def encode_ends(journals: Iterable[JournalSnapshot]) -> StreamOffset:
    """Return the ends of journals for a query's progress, even if the query waits for earlier bytes."""
    ends = {}
    for journal in journals:
        waits = journal.awaited
        ends[journal.journal] = (
            {AT: journal.end} if waits is None else {AT: waits.known_end, AWAITED: [*waits[:2]]}
        )
    return ends


@contextmanager
def _decoding() -> Iterator[None]:
    """Turn errors of the block into ``Corrupt``."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Corrupt(
            f"the offset of the stream cannot be read: {error!r}",
            hint="The query's checkpoint is of another source: give it another checkpointLocation.",
        ) from error
