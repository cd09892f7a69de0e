"""Defects of consumers that a simulation plants in the shipped code, to show that its judge finds them.

Each is a function that patches the shipped code of this process and returns what undoes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gazette.consumer.query.running_queries import RunningQueries
from gazette.consumer.shard.loop_shard_io import Progress
from gazette.consumer.shard.ownership import Ownership
from gazette.consumer.shard.standby_reads import StandbyReads
from gazette.consumer.timers.memory_timers import MemoryTimers
from gazette.consumer.timers.timer import Position, TimeDomain, TimerRow
from gazette.consumer.transaction.shard_timers import ShardTimers
from gazette.consumer.transaction.transactor import PriorTransaction, Transactor
from gazette.protocol.journal_life import JournalLife
from gazette.recoverylog.log import broker_logs
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.playback.player import Player
from gazette.runtime.tasks import resolved
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.databases import RedoDatabases
from gazette.stores.sqlite.timers import TAKE, SQLiteTimers

Undo = Callable[[], None]


def _replace(owner: type, name: str, make: Callable[[Any], Any]) -> Undo:
    """Replace an attribute by what ``make`` makes of it."""
    before = owner.__dict__[name]
    setattr(owner, name, make(before))
    return partial(setattr, owner, name, before)


def recovered_acks_not_awaited() -> Undo:
    """Commit the next transaction before recovered acknowledgements are in place."""

    def make(before: Callable[[PriorTransaction], bool]) -> Callable[[PriorTransaction], bool]:
        return lambda self: self.recovered or before(self)

    return _replace(PriorTransaction, "is_acknowledged", make)


def hints_before_flush() -> Undo:
    """Store hints before the operations that they name are in the log."""

    def snapshot(self: Recorder) -> Any:
        return self.fsm.build_hints(self.log), resolved(None)

    return _replace(Recorder, "snapshot_hints", lambda before: snapshot)


def jump_not_sequenced() -> Undo:
    """Let only the decoder follow a jump of a source, and not the sequencer."""

    def jump(self: Transactor, transaction: Any, journal: str, offset: int) -> None:
        self._decoders[journal].jump(offset)

    return _replace(Transactor, "_jump", lambda before: jump)


def fence_after_the_end() -> Undo:
    """Let a store set its fence although its shard has ended."""
    return _replace(Ownership, "require_running", lambda before: lambda self: None)


def sqlite_commits_without_waits() -> Undo:
    """Record a commit of SQLite before what the transaction published is in place."""

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, wait_for=(), **options: before(self, **options)

    return _replace(RedoDatabases, "ship", make)


def answered_before_the_offset() -> Undo:
    """Answer a query before its shard has read through the offset that the query waits for."""
    return _replace(Progress, "has", lambda before: lambda self, offsets: True)


def answers_of_the_running_transaction() -> Undo:
    """Let queries of a JSON file see what its running transaction has done so far."""

    def read(self: JSONFileStore[Any]) -> Any:
        return self._encoding.decode(self._encode())

    return _replace(JSONFileStore, "read", lambda before: read)


def standby_older_than_it_says() -> Undo:
    """Let a standby report its state as fresh, however old it is."""
    return _replace(StandbyReads, "age_s", lambda before: lambda self, edition: 0.0)


def queries_outlive_the_lease() -> Undo:
    """Let a member that has lost its lease finish the queries that are in progress."""
    return _replace(RunningQueries, "end", lambda before: lambda self, *args: None)


def views_forget_the_hand_off() -> Undo:
    """Let a standby wait for more bytes of its log, although it was promoted: it was making a view then."""

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        async def read_some(self: Player, scope: Any, *, at_head: bool, may_return: bool) -> None:
            asked = self._requested.is_set()
            await before(self, scope, at_head=at_head, may_return=may_return and not asked)

        return read_some

    return _replace(Player, "_read_some", make)


def sources_forget_their_life() -> Undo:
    """Take a source that was deleted and created again for its former life."""
    return _replace(JournalLife, "is_other", lambda before: lambda self, known: False)


def timers_stay() -> Undo:
    """Leave timers of SQLite in the table when they fire."""

    def take(self: SQLiteTimers, domain: TimeDomain, after: Position, *bounds: int) -> Any:
        return [TimerRow(*row) for row in self._query(TAKE, (domain.value, *after, *bounds))]

    return _replace(SQLiteTimers, "take", lambda before: take)


def promotions_append_once() -> Undo:
    """Fail a shard if an append of its promotion has no known outcome, instead of repeating the append."""
    before = broker_logs.REPEATS_MAX

    def undo() -> None:
        broker_logs.REPEATS_MAX = before  # type: ignore[misc]

    broker_logs.REPEATS_MAX = 0  # type: ignore[misc]
    return undo


def timers_in_memory_only() -> Undo:
    """Commit a state without its timers."""
    return _replace(MemoryTimers, "to_json", lambda before: lambda self: b"{}")


def timers_of_the_former_pass() -> Undo:
    """Forget timers that are set for an earlier time than that of the timer that fires."""

    def begin_pass(self: ShardTimers) -> None:
        for queue in (self._processing_queue, self._event_queue):
            queue.behind_from = None
        self._processing_queue.begin_pass()
        self._event_queue.begin_pass()

    return _replace(ShardTimers, "begin_pass", lambda before: begin_pass)


TIMER_PLANTS: dict[str, Callable[[], Undo]] = {
    "timers-stay": timers_stay,
    "timers-in-memory-only": timers_in_memory_only,
    "timers-of-the-former-pass": timers_of_the_former_pass,
}
"""Defects that only applications with timers show."""
PLANTS: dict[str, Callable[[], Undo]] = {
    "recovered-acks-not-awaited": recovered_acks_not_awaited,
    "hints-before-flush": hints_before_flush,
    "jump-not-sequenced": jump_not_sequenced,
    "fence-after-the-end": fence_after_the_end,
    "sqlite-commits-without-waits": sqlite_commits_without_waits,
    "answered-before-the-offset": answered_before_the_offset,
    "answers-of-the-running-transaction": answers_of_the_running_transaction,
    "standby-older-than-it-says": standby_older_than_it_says,
    "queries-outlive-the-lease": queries_outlive_the_lease,
    "sources-forget-their-life": sources_forget_their_life,
    "views-forget-the-hand-off": views_forget_the_hand_off,
    "promotions-append-once": promotions_append_once,
}
