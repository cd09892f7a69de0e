"""Asks brokers and members for the data of pages, while a page is open: `ClusterWatch`.

The number and size of the last answers set the pace of the next questions. So the cost for a server does not
grow with the cluster. While no page is open, there is no cost.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Final, NoReturn

import msgspec

from gazette.client.journals import journal_problems
from gazette.client.shards import ListedShard
from gazette.errors import GazetteError, Unavailable, printable
from gazette.gazctl.context import Context, each
from gazette.gazctl.flags import BrokerFlags, ConsumerFlags
from gazette.gazctl.members import ListedMember, members_of
from gazette.gazctl.support_bundle import fetch, http_guesses, tls_of
from gazette.gazctl.top.sampler import Key, Sampler
from gazette.protocol.label_set import EVERYTHING
from gazette.run.console.metric_lines import Samples, by_shard, samples_in
from gazette.runtime.tasks import BlockingPool, sleep_unless
from gazette.runtime.timeouts import timeout

_EVERY_S: Final = 3.0
"""Least time between two refreshes."""
_ITEM_S: Final = 3e-3
"""Seconds between two lists for each item of the last list: an item takes a server some 20 us."""
_CALL_S: Final = 0.05
"""Seconds between refreshes for each call of the last refresh: a call takes a broker some 0.3 ms."""
_OPEN_S: Final = 12.0
"""Seconds after its last question for which a page counts as open: each page asks every few seconds."""
_CALLS_MAX: Final = 140
"""Greatest number of calls of a refresh: a page has at most 100 rows."""
_MEMBER_EVERY_S: Final = 5.0
_BYTE_S: Final = 8e-6
"""Seconds between two scrapes for each byte of the last scrape: a byte takes a member less than 80 ns."""
_FETCH_S: Final = 3.0
_FETCH_THREADS: Final = 4
_FIRST_S: Final = 20.0
"""Longest wait of a page for the first lists."""


def _pause(_taken_s: float, items: int) -> float:
    return max(_EVERY_S, items * _ITEM_S)


@dataclass(frozen=True, slots=True)
class Scrape:
    """Metrics of a process at one time: all samples, and the samples of shards by ids."""

    at: float
    samples: Samples
    shards: Mapping[str, Samples]


@dataclass(slots=True)
class SeenMember:
    """A broker or a member of an application, as it answered last. Times are of the monotonic clock."""

    listed: ListedMember
    not_ready: str = ""
    """Why the member does not serve, in its own words; empty if it serves."""
    error: str = ""
    """Why the member did not answer."""
    problems: dict[str, str] = field(default_factory=dict)
    """Problems of the member's journals or shards, by name."""
    scrape: Scrape | None = None
    shards: list[dict[str, Any]] = field(default_factory=list)
    """The member's shards, as its page ``/debug/shards`` describes them."""
    next_at: float = 0.0


class ClusterWatch:
    """The last answers of brokers and members. Loop-bound."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.sampler = Sampler(context, EVERYTHING, _CALLS_MAX, pause=_pause)
        self.members: dict[tuple[str, str], SeenMember] = {}
        """By family and endpoint."""
        self.refusal: GazetteError | None = None
        """Why the last refresh was refused, as for a token that has expired."""
        self._pool = BlockingPool("console-fetch", _FETCH_THREADS)
        self._shown: dict[Key, float] = {}
        self._open_until = 0.0
        self._asked = asyncio.Event()
        self._refreshed = asyncio.Event()

    def close(self) -> None:
        self._pool.close()

    async def run(self) -> NoReturn:
        """Refresh while a page is open, and once at the start, so that the first page need not wait."""
        clock = self.context.clock
        while True:
            self._asked.clear()
            await self._refresh(clock.monotonic())
            self._refreshed.set()
            pause_s = max(_EVERY_S, self.sampler.asked * _CALL_S)
            await sleep_unless(clock, pause_s, self._asked)
            if clock.monotonic() >= self._open_until:
                await self._asked.wait()

    async def opened(self, shown: Iterable[Key] = ()) -> None:
        """Note that a page is open, and the rows that it shows. Wait for the first lists.

        Raise ``NotAllowed`` or another error that no later refresh would mend.
        """
        now = self.context.clock.monotonic()
        was_open, self._open_until = now < self._open_until, now + _OPEN_S
        keys = list(shown)
        is_new = any(key not in self._shown and self._position(key) is None for key in keys)
        self._shown |= dict.fromkeys(keys, now)
        if not was_open or is_new:
            self._asked.set()
        try:
            async with timeout(_FIRST_S):
                await self._refreshed.wait()
        except TimeoutError as error:
            addresses = ", ".join(self.addresses().values())
            raise Unavailable(
                f"no list of journals and shards within {_FIRST_S:g} s from {addresses}",
                hint="Check that brokers and members run. It is asked again.",
            ) from error
        if self.refusal is not None and not self.sampler.rows:
            raise self.refusal

    def _position(self, key: Key) -> int | None:
        row = self.sampler.rows.get(key)
        return None if row is None else row.position

    def addresses(self) -> dict[str, str]:
        """Return the addresses that are asked, by ``broker`` and ``consumer``."""
        addresses = {"broker": self.context.loaded.group(BrokerFlags).address}
        if self.context.is_given("consumer.address"):
            addresses["consumer"] = self.context.loaded.group(ConsumerFlags).address
        return addresses

    def flags_for(self, command: str) -> str:
        """Return the flags with which a command of `gazctl` asks the servers of this console."""
        context = self.context
        flags = {
            f"{family}.address": address
            for family, address in self.addresses().items()
            if context.is_given(f"{family}.address")
        }
        if command.startswith("gazctl journals"):
            flags.pop("consumer.address", None)
        if context.in_use:
            flags = {"context": context.in_use}
        return "".join(f" --{name}={shlex.quote(value)}" for name, value in flags.items())

    def problems(self) -> dict[tuple[str, str], str]:
        """Return the problems that brokers and members report of journals and shards, by family and name."""
        problems: dict[tuple[str, str], str] = {}
        for (family, _), member in self.members.items():
            what = "journal" if family == "broker" else "shard"
            problems |= {(what, name): text for name, text in member.problems.items()}
        return problems

    async def _refresh(self, now: float) -> None:
        self._shown = {key: at for key, at in self._shown.items() if now - at < _OPEN_S}
        rows = [self.sampler.rows[key] for key in self._shown if key in self.sampler.rows]
        try:
            await self.sampler.refresh(rows)
            self.refusal = None
        except GazetteError as error:
            self.refusal = error
        self._note_members()
        due = [key for key, member in self.members.items() if now >= member.next_at]
        await each("members", due, self._ask)

    def _note_members(self) -> None:
        """Follow the lists: forget members that no list names any more."""
        listed, members = self.sampler.listed, dict[tuple[str, str], ListedMember]()
        journal_routes = [journal.route for journal in listed.journals.values()]
        shard_routes = [shard.route for shard in listed.shards.values()]
        for family, routes in (("broker", journal_routes), ("consumer", shard_routes)):
            if family in listed.headers:
                for member in members_of(family, listed.headers[family], routes):
                    members[family, member.endpoint or str(member.id)] = member
        for key, member in members.items():
            self.members.setdefault(key, SeenMember(member)).listed = member
        for key in set(self.members) - set(members):
            del self.members[key]

    async def _ask(self, key: tuple[str, str]) -> None:
        """Ask one member by its calls and pages. Note its answers, or why it does not answer."""
        family, endpoint = key
        member, clock = self.members[key], self.context.clock
        begun, size = clock.monotonic(), 0
        try:
            async with self.context.answering(endpoint, min(_FETCH_S, self.context.timeout_s)):
                if family == "broker":
                    client = await self.context.broker()
                    member.problems = await journal_problems(client, endpoint)
                else:
                    consumer = await self.context.consumer()
                    member.problems = await consumer.shard_problems(endpoint)
            async with self.context.answering(endpoint, 4 * _FETCH_S):
                ready, metrics, shards = await self._pool.run(self._pages, family, endpoint)
        except GazetteError as error:
            member.error = printable(str(error), one_line=True)
            member.problems, member.shards = {}, []
        else:
            member.error, size = "", len(metrics) + len(shards)
            member.not_ready = "" if ready.strip() == "ready" else printable(ready.strip()[:500])
            samples = samples_in(metrics)
            member.scrape = Scrape(begun, samples, by_shard(samples))
            member.shards = shards_in(shards)
        member.next_at = begun + max(_MEMBER_EVERY_S, size * _BYTE_S)

    def _pages(self, family: str, endpoint: str) -> tuple[str, str, str]:
        """Return readiness, metrics and shards of a member. Blocks. Raise ``Unavailable``.

        The gRPC port serves HTTP, too. With ``--debug.private``, it does not serve these pages.
        """
        flags = self.context.loaded.group(BrokerFlags if family == "broker" else ConsumerFlags)
        tls, reasons = tls_of(flags), list[str]()
        for url in reversed(http_guesses(endpoint)):
            try:
                ready = fetch(f"{url}/debug/ready", tls, _FETCH_S)
                metrics = fetch(f"{url}/metrics", tls, _FETCH_S)
                shards = fetch(f"{url}/debug/shards", tls, _FETCH_S) if family != "broker" else ""
            except (OSError, ValueError, HTTPException) as error:
                # `HTTPException` has a tree of its own.
                reasons.append(f"{url}: {error}")
            else:
                return ready, metrics, shards
        reason = "; ".join(reasons) or f"{endpoint} has no address for HTTP"
        raise Unavailable(f"its pages below /debug cannot be read: {reason}")

    def primary_of(self, shard: ListedShard) -> SeenMember | None:
        """Return the member that is primary of a shard. None: no member is, or it was not asked yet."""
        route = shard.route
        if route.primary is None or not route.endpoints:
            return None
        return self.members.get(("consumer", route.endpoints[route.primary]))


def shards_in(text: str) -> list[dict[str, Any]]:
    """Return the shards of a page ``/debug/shards``. Leave out values of another form."""
    try:
        document = msgspec.json.decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError):
        return []
    shards = document.get("shards") if isinstance(document, dict) else None
    return [
        shard
        for shard in (shards if isinstance(shards, list) else ())
        if isinstance(shard, dict) and isinstance(shard.get("id"), str)
    ]
