"""Asks brokers and members for the rows of ``gazctl top``, with a bounded number of calls each time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import grpc

from gazette.client.client import Client
from gazette.client.journals import ListedJournal
from gazette.client.read.reader import WRITE_HEAD, OffsetJump, ReadParams
from gazette.client.rpc.preflight import require_reachable
from gazette.client.shards import ListedShard, ShardClient
from gazette.errors import GazetteError, Invalid, NotAllowed, NotYet, printable
from gazette.gazctl.context import Context, each
from gazette.gazctl.shards.list import ask_problems, status_text
from gazette.gazctl.top.rows import TopRow
from gazette.protocol.ids import JournalName, split_journal_meta
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.route import Header
from gazette.protocol.shard import ReplicaCode

CALLS_MAX: Final = 200
"""Greatest number of calls of a refresh, besides lists. A shard with more sources than that takes more."""
ONCE_CALLS_MAX: Final = 2000
"""The same for ``--once``."""
_LIST_EVERY_S: Final = 10.0
_LIST_SHARE: Final = 10
"""The pause after a list is this many times the time that the list took."""
_LIST_S: Final = 15.0
_ANSWER_S: Final = 3.0
Key = tuple[str, str]


def _pause(taken_s: float, _items: int) -> float:
    return max(_LIST_EVERY_S, taken_s * _LIST_SHARE)


@dataclass(slots=True)
class Listed:
    """The last lists. ``headers`` says which server answered, by ``broker`` and ``consumer``."""

    journals: dict[JournalName, ListedJournal] = field(default_factory=dict)
    shards: dict[str, ListedShard] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    """By id of a shard that no primary reads: the reason why it waits."""
    headers: dict[str, Header] = field(default_factory=dict)
    refusals: dict[str, GazetteError] = field(default_factory=dict)
    """Errors of lists that were refused, as for a token that has expired. They are in ``problems``, too."""
    at: dict[str, float] = field(default_factory=dict)
    """Time of each list, by the monotonic clock."""


@dataclass(slots=True)
class Sampler:
    """The journals and shards of a selector, and their last answers. Loop-bound.

    Every `_LIST_EVERY_S` seconds or more, the journals and the shards are listed, by one call each. Each
    refresh asks the shown items, and as many others as `calls_max` permits, in turn. So a cluster of any size
    gets the same number of calls.
    """

    context: Context
    selector: LabelSelector
    calls_max: int
    twice: bool = False
    """True if this asks twice only: a list that fails is an error, and shown items get all calls."""
    problems: dict[str, str] = field(default_factory=dict)
    """Why the brokers or the consumers were not listed."""
    rows: dict[Key, TopRow] = field(default_factory=dict)
    asked: int = 0
    """Number of items that the last refresh asked."""
    listed: Listed = field(default_factory=Listed)
    pause: Callable[[float, int], float] = _pause
    """Function from the time that the last list took, and its items, to the seconds until the next list."""
    _list_at: dict[str, float] = field(default_factory=dict)
    _list_limit_s: dict[str, float] = field(default_factory=dict)
    _turn: int = 0
    """Index of the row to ask next, after the shown ones."""

    async def refresh(self, shown: Sequence[TopRow]) -> list[TopRow]:
        """Ask the shown items, and some that are not shown. Return the asked items.

        Raise ``NotAllowed`` or ``Invalid`` at the end if a list was refused. The other list is used then.
        With ``twice``, raise the error of any list that fails, before items are asked.
        """
        await self._list()
        chosen = self._choose(shown)
        self.asked = len(chosen)
        shards = [self.listed.shards[item.name] for item in chosen if item.family == "shard"]
        names = {item.name for item in chosen if item.family == "journal"}
        names |= {journal for shard in shards for journal in _sources(shard)}
        heads = await self._look_at(sorted(names))
        await self._stat(shards, heads)
        for error in self.listed.refusals.values():
            raise error
        return chosen

    async def _list(self) -> None:
        """Make the lists that are due. A failed list is due at once; a refused one, after a pause."""
        clock, now = self.context.clock, self.context.clock.monotonic()
        works = {"broker": self._list_journals, "consumer": self._list_shards}
        failed = self.problems.keys() - self.listed.refusals.keys()
        due = [what for what in works if what in failed or now >= self._list_at.get(what, 0.0)]
        for what in due:
            begun, items = clock.monotonic(), 0
            failure: GazetteError | None = None
            try:
                items = await works[what]()
            except GazetteError as error:
                if self.twice:
                    raise
                failure = error
            # Clear these only now: until the answer comes, the page shows the last failure.
            self.problems.pop(what, None)
            self.listed.refusals.pop(what, None)
            ended = clock.monotonic()
            self._list_at[what] = ended + self.pause(ended - begun, items)
            if failure is not None:
                self.problems[what] = f"{failure.message}; it is asked again"
                if isinstance(failure, Invalid | NotAllowed):
                    self.listed.refusals[what] = failure
            else:
                self.listed.at[what] = ended
                self._list_limit_s[what] = max(_ANSWER_S, (ended - begun) * _LIST_SHARE)
        if due:
            self._note_items()

    def _note_items(self) -> None:
        """Follow the lists: add and forget rows, and note each status and why an item is not asked."""
        keys = [("journal", name) for name in self.listed.journals] + [
            ("shard", id) for id in self.listed.shards
        ]
        for key in set(self.rows) - set(keys):
            del self.rows[key]
        for key in keys:
            item = self.rows.setdefault(key, TopRow(key[0], key[1]))  # type: ignore[arg-type]
            if key[0] == "journal":
                item.status = _journal_status(self.listed.journals[key[1]])
            else:
                item.status = status_text(self.listed.shards[key[1]])
            if problem := self._unasked(item):
                item.fail(problem)

    async def _list_journals(self) -> int:
        client = await self.context.broker()
        async with self._reached(client, "broker"):
            listed = await client.list_journals(self.selector)
        self.listed.journals = {journal.spec.name: journal for journal in listed.journals}
        self.listed.headers["broker"] = listed.header
        return len(listed.journals)

    async def _list_shards(self) -> int:
        if not self.context.is_given("consumer.address"):
            return 0
        client = await self.context.consumer()
        async with self._reached(client, "consumer"):
            listed = await client.list_shards(self.selector)
        self.listed.shards = {shard.spec.id: shard for shard in listed.shards}
        self.listed.headers["consumer"] = listed.header
        unread = [shard for shard in listed.shards if not _is_read(shard)][: self.calls_max]
        self.listed.waits, _ = await ask_problems(self.context, client, unread, self.selector)
        return len(listed.shards)

    @asynccontextmanager
    async def _reached(self, client: Client | ShardClient, what: str) -> AsyncIterator[None]:
        """Bound a list in the block. Raise ``Unavailable`` soon if the server is away."""
        connect_s = min(_ANSWER_S, self.context.timeout_s)
        await require_reachable(client, what, connect_s=connect_s, hint="It is asked again.")
        limit_s = min(self._list_limit_s.get(what, _LIST_S), self.context.timeout_s)
        async with self.context.answering(client.address, limit_s):
            yield

    def _choose(self, shown: Sequence[TopRow]) -> list[TopRow]:
        """Return the items to ask: first shown items, and then other items in turn.

        Leave a quarter of the calls to the other items, unless this asks twice only.
        """
        keys = list(self.rows)
        chosen: dict[Key, TopRow] = {}
        limit = self.calls_max if self.twice else self.calls_max * 3 // 4
        self._take([(row.family, row.name) for row in shown], chosen, limit)
        turned = keys[self._turn :] + keys[: self._turn]
        passed = self._take(turned, chosen, self.calls_max)
        self._turn = (self._turn + passed) % max(1, len(keys))
        return list(chosen.values())

    def _take(self, keys: Sequence[Key], chosen: dict[Key, TopRow], calls_max: int) -> int:
        """Choose items until no call is left, but at least one. Return how many keys were passed."""
        calls, is_first = sum(map(self._calls_of, chosen.values())), True
        for at, key in enumerate(keys):
            row = self.rows.get(key)
            if row is None or key in chosen or self._unasked(row):
                continue
            calls += self._calls_of(row)
            if calls > calls_max and not is_first:
                return at
            chosen[key], is_first = row, False
        return len(keys)

    def _calls_of(self, row: TopRow) -> int:
        return 1 if row.family == "journal" else 1 + len(_sources(self.listed.shards[row.name]))

    def _unasked(self, item: TopRow) -> str:
        """Return the reason not to ask an item: it would not answer. Return "" for an item to ask."""
        service = "broker" if item.family == "journal" else "consumer"
        if service in self.problems:
            return f"the {service} does not answer"
        if item.family == "journal":
            journal = self.listed.journals[item.name]
            if journal.spec.suspend_level is SuspendLevel.FULL:
                return "it is fully suspended"
            return "" if journal.route.members else "no broker has it"
        shard = self.listed.shards[item.name]
        if _is_read(shard):
            return ""
        waits = self.listed.waits.get(item.name)
        return _error_of(shard) or (f"it {waits}" if waits else "it has no primary that reads")

    async def _look_at(self, names: Sequence[JournalName]) -> dict[JournalName, int | GazetteError]:
        """Return the heads of journals, and note them in their items."""
        if "broker" in self.problems:
            return {}
        client = await self.context.broker()

        async def look(name: JournalName) -> int:
            item = self.rows.get(("journal", name))
            # The second look is at the last byte: a stored fragment that ends there has a time.
            is_second = item is not None and item.position and item.rate is None
            offset = (item.position or 0) - 1 if item is not None and is_second else WRITE_HEAD
            head, mod_time = await self._head(client, name, offset)
            now = self.context.clock.monotonic()
            if item is not None:
                age_s = max(0.0, self.context.clock.now() - mod_time)
                item.note(head, now, now - age_s if mod_time else None)
            return head

        heads = dict(zip(names, await each("heads", names, look), strict=True))
        for name, head in heads.items():
            if isinstance(head, GazetteError) and ("journal", name) in self.rows:
                self._fail(("journal", name), head)
        return heads

    async def _head(self, client: Client, name: JournalName, offset: int) -> tuple[int, int]:
        """Return a journal's head, and the time of the stored fragment that ends there; 0 if none does."""

        async def reason() -> str:
            return client.waits.reason(name)

        params = ReadParams(name, offset=offset, metadata_only=True)
        limit_s = min(_ANSWER_S, self.context.timeout_s)
        answering = self.context.answering(client.address, limit_s, reason)
        async with client.retry_reader(params) as reader:
            async with answering:
                with suppress(NotYet, OffsetJump):
                    await reader.read()
            head, fragment = max(reader.offset, reader.write_head), reader.fragment
        ends_there = fragment is not None and fragment.end == head
        return head, fragment.mod_time if fragment is not None and ends_there else 0

    async def _stat(
        self, shards: Sequence[ListedShard], heads: dict[JournalName, int | GazetteError]
    ) -> None:
        """Ask shards how far they have read, and note the offsets in their items."""
        if not shards:
            return
        consumer = await self.context.consumer()

        async def stat(shard: ListedShard) -> None:
            limit_s = min(_ANSWER_S, self.context.timeout_s)
            async with self.context.answering(consumer.address, limit_s):
                answer = await consumer.stat(shard.spec.id)
            item = self.rows["shard", shard.spec.id]
            item.note(sum(answer.read_through.values()), self.context.clock.monotonic())
            item.error = printable(_error_of(shard), one_line=True)
            lag = 0
            for source in shard.spec.sources:
                journal = split_journal_meta(source.journal)[0]
                head = heads.get(journal)
                if not isinstance(head, int):
                    reason = self.problems.get("broker") if head is None else head
                    item.lag, item.error = None, f"{journal}: {reason}"
                    return
                read_through = answer.read_through.get(source.journal, 0)
                lag += max(0, head - max(read_through, source.min_offset))
            item.lag = lag

        for shard, result in zip(shards, await each("stats", shards, stat), strict=True):
            if isinstance(result, GazetteError):
                self._fail(("shard", shard.spec.id), result)

    def _fail(self, key: Key, error: GazetteError) -> None:
        self.rows[key].fail(str(error))
        if error.facts.get("code") == grpc.StatusCode.UNAUTHENTICATED.name:
            # The next list says if the token has expired.
            self._list_at["broker" if key[0] == "journal" else "consumer"] = 0.0


def _sources(shard: ListedShard) -> list[JournalName]:
    return [split_journal_meta(source.journal)[0] for source in shard.spec.sources]


def _is_read(shard: ListedShard) -> bool:
    """Return True if the shard has a primary that reads."""
    primary = shard.route.primary
    return primary is not None and shard.status[primary].code is ReplicaCode.PRIMARY


def _error_of(shard: ListedShard) -> str:
    """Return the first error of a replica; empty without an error."""
    return next((error for status in shard.status for error in status.errors), "")


def _journal_status(journal: ListedJournal) -> str:
    if journal.spec.suspend_level is not SuspendLevel.NONE:
        return "suspended"
    return f"{len(journal.route.members)}/{journal.spec.replication}"
