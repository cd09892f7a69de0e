"""Clients that append and read while everything breaks."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, TypeAlias

from gazette.client.append.appender import AppendParams, AppendResult, append_once
from gazette.client.client import Client
from gazette.client.read.reader import OffsetJump, Reader, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.client.rpc.errors import status_of
from gazette.errors import Closed, Corrupt, GazetteError, NotYet
from gazette.protocol.append_session import SessionAppend
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope
from tools.chaos.cluster import ChaosCluster
from tools.chaos.history import (
    ClientFailed,
    Completed,
    Invoked,
    Jumped,
    Labels,
    Opened,
    OtherLife,
    Outcome,
    Read,
)
from tools.chaos.payload import LENGTH_MIN, digest, payload
from tools.chaos.recorder import Recorder
from tools.chaos.registers import REGISTER_MISMATCH, labels_of

ATTEMPT_TIMEOUT_S: Final = 15.0
_ABORTED: Final = "ABORTED_BY_CLIENT"
_SCAN_BYTES: Final = 1 << 18
_SCANS_PER_S: Final = 0.3
_HESITATION_S: Final = (1.0, 20.0)
_SLOW_PIECES: Final = 15
_SLOW_BYTES: Final = 1 << 15
_SLOW_S: Final = 0.3
"""Seconds between two pieces: faster than brokers demand. All pieces take far longer than most appends."""
_SLOW_PAUSE_S: Final = 2.0
_SLOW_TIMEOUT_S: Final = 20.0
_ENDLESS: Final = 1 << 62
_BARE: Final = "-bare@"
_SESSION_ATTEMPTS: Final = 8
_OTHER_LEDGER: Final = "OTHER_LEDGER"
_DATA_LOSS: Final = "DATA_LOSS"


class _Aborted(GazetteError):
    """The client dies in the middle of its append."""


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """``rate``: appends per second of each appender. ``patient``: clients retry what can be retried, and
    record the failures that remain."""

    rate: float = 4.0
    patient: bool = False
    large_bytes: int = 300_000


Kind: TypeAlias = "Callable[[Appending], AsyncIterator[None]]"


class Workload:
    """Appenders and readers of the journals, until ``stopping`` is set."""

    def __init__(
        self,
        cluster: ChaosCluster,
        recorder: Recorder,
        settings: WorkloadSettings,
        seed: int,
    ) -> None:
        self.stopping = asyncio.Event()
        self.appending = 0
        """Number of appenders that have not ended yet."""
        self._cluster = cluster
        self._clock: Clock = cluster.clock
        self._recorder = recorder
        self._settings = settings
        self._seed = seed
        self._clients: dict[tuple[str, bool, bool], Client] = {}
        self._following: dict[str, dict[str, tuple[RetryReader | Reader, int]]] = defaultdict(dict)
        """Readers that follow the head, by journal and name, with the offset from which they start again."""
        recorder.restarted.append(self._restart)

    def start(self, scope: TaskScope, journals: list[str]) -> None:
        """Start all appenders and readers, as children of ``scope``."""
        for journal in journals:
            style = journal.rpartition("/")[2].partition("-")[0]
            kinds: dict[str, list[Kind]] = {
                "plain": [self._plain, self._plain, self._in_session, self._in_session],
                "registers": [
                    self._conditional,
                    self._conditional,
                    self._conditional,
                    self._plain,
                ],
                "offsets": [self._explicit, self._explicit, self._plain],
                "lives": [self._hesitant],
                "slow": [self._slow],
            }
            for index, kind in enumerate(kinds[style]):
                name = f"{kind.__name__.strip('_')}-{index}@{journal}"
                appending = Appending(self, name, journal, self._client(routes=index % 2 == 0))
                scope.spawn(self._run(appending, kind), name=name)
            self._start_readers(scope, journal)

    def _start_readers(self, scope: TaskScope, journal: str) -> None:
        proxy = random.Random(f"{self._seed} {journal}").choice(self._cluster.brokers)
        clients = {
            "local": self._client(),
            "bare": self._client(proxy.url, routes=False),
            "fragments": self._client(fragments=True),
        }
        for source, client in clients.items():
            for kind in (self._tail, self._scan):
                name = f"{kind.__name__.strip('_')}-{source}@{journal}"
                scope.spawn(kind(name, journal, client), name=name)

    def _client(self, address: str = "", *, routes: bool = True, fragments: bool = False) -> Client:
        """Return a client. Callers with the same arguments share it: this does not test connections."""
        key = (address, routes, fragments)
        if key not in self._clients:
            self._clients[key] = self._cluster.client(address, routes=routes, fragments=fragments)
        return self._clients[key]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    # Appends.

    async def _run(self, appending: Appending, kind: Kind) -> None:
        steps = kind(appending)
        self.appending += 1
        try:
            while not self.stopping.is_set():
                await anext(steps)
                await self._clock.sleep(appending.rng.expovariate(self._settings.rate))
        finally:
            self.appending -= 1

    async def _plain(self, appending: Appending) -> AsyncIterator[None]:
        while True:
            await appending.append(appending.new())
            yield

    async def _in_session(self, appending: Appending) -> AsyncIterator[None]:
        """Append in the order of a session, and again while the outcome is unknown."""
        session, ledger = f"{appending.rng.getrandbits(128):032x}", ""
        for sequence in count(1):
            op = appending.new()
            for _ in range(_SESSION_ATTEMPTS):
                attempt = SessionAppend(session, sequence, ledger)
                if await appending.append(op, session=attempt) is not None:
                    break
                ledger = appending.ledger or ledger
                yield
            yield

    async def _hesitant(self, appending: Appending) -> AsyncIterator[None]:
        """Wait after the first append of each life: until the second, brokers need not store anything."""
        while True:
            result = await appending.append(appending.new())
            if result is not None and result.commit.begin == 0:
                await self._clock.sleep(appending.rng.uniform(*_HESITATION_S))
            yield

    async def _slow(self, appending: Appending) -> AsyncIterator[None]:
        """Append so slowly that a pause of a broker often falls into the middle of an append.

        When the broker goes on, it has all of the content. Only its lost lease forbids the acknowledgement.
        """
        appending.slow = True
        while True:
            await appending.append(appending.new())
            await self._clock.sleep(appending.rng.uniform(0.0, _SLOW_PAUSE_S))
            yield

    async def _conditional(self, appending: Appending) -> AsyncIterator[None]:
        """Change registers, mostly on condition that they are as the last answer said."""
        rng, seen = appending.rng, LabelSet()
        while True:
            op = appending.new()
            lock, mark = seen.value_of("lock"), seen.value_of("mark")
            check = ""
            union: Labels = (("lock", f"v{op}"),)
            subtract: Labels = ()
            dice = rng.random()
            if lock is not None and dice < 0.8:
                check = f"lock = {lock}" if dice < 0.6 else f"lock != {lock}"
            if mark is not None and rng.random() < 0.5:
                subtract = (("mark", mark),)
            elif rng.random() < 0.5:
                union = (*union, ("mark", f"m{op}"))
            result = await appending.append(op, check=check, union=union, subtract=subtract)
            if result is not None:
                seen = result.registers
            elif appending.status == REGISTER_MISMATCH:
                # A refusal does not say what the registers are; the answer to any append does.
                result = await appending.append(appending.new())
                seen = result.registers if result is not None else seen
            yield

    async def _explicit(self, appending: Appending) -> AsyncIterator[None]:
        """Append at an offset, and there again while the outcome is unknown: so it happens at most once."""
        while True:
            head = self._recorder.heads[appending.journal]
            # Sometimes at a wrong place.
            offset = max(head + appending.rng.choice((0, 0, 0, 0, -1, 1)), 1)
            op = appending.new()
            for _ in range(5):
                result = await appending.append(op, offset=offset)
                if result is not None or appending.status:
                    break
                yield
            yield

    # Reads.

    async def _tail(self, name: str, journal: str, client: Client) -> None:
        """Follow a journal from its beginning, over all its lives."""
        offset = 0
        while not self.stopping.is_set():
            reading = ReadParams(journal, offset, block=True)
            offset = await self._read(name, client, reading, None)
            await self._clock.sleep(0.2)

    async def _scan(self, name: str, journal: str, client: Client) -> None:
        """Read from anywhere to the head, or for a while."""
        rng = random.Random(f"{self._seed} {name}")
        while not self.stopping.is_set():
            head = self._recorder.heads[journal]
            if head:
                offset = rng.choice((0, rng.randrange(head), max(head - 5000, 0)))
                await self._read(name, client, ReadParams(journal, offset), _SCAN_BYTES)
            await self._clock.sleep(rng.expovariate(_SCANS_PER_S))

    def _restart(self, journal: str, begin: int) -> None:
        """Have readers that are beyond an offset start again there: the journal may differ."""
        for name, (reader, _) in list(self._following[journal].items()):
            if reader.offset > begin or begin == 0:
                self._following[journal][name] = (reader, begin)
                reader.close()

    async def _read(self, name: str, client: Client, params: ReadParams, limit: int | None) -> int:
        """Read until the head, a limit, or an error that is not retried. Return the offset reached."""
        journal, offset = params.journal, params.offset
        params = replace(params, min_etcd_revision=self._recorder.revisions.get(journal, 0))
        self._recorder.record(
            Opened(self._recorder.time, name, journal, offset, follows=limit is None)
        )
        end = _ENDLESS if limit is None else offset + limit
        # One of the sources is read without the retries of the library, so that every answer is seen.
        reader = Reader(client, params) if _BARE in name else client.retry_reader(params)
        if limit is None:
            self._following[journal][name] = (reader, _ENDLESS)
        async with reader:
            offset = await self._read_to(name, reader, end)
        if limit is None:
            offset = min(offset, self._following[journal].pop(name)[1])
        return offset

    async def _read_to(self, name: str, reader: RetryReader | Reader, end: int) -> int:
        record, journal = self._recorder.record, reader.params.journal
        offset = reader.params.offset
        while not self.stopping.is_set() and offset < end:
            try:
                piece = await reader.read()
            except OffsetJump as jump:
                record(Jumped(self._recorder.time, name, journal, offset, jump.offset))
                offset = jump.offset
                continue
            except (NotYet, Closed):
                break
            except GazetteError as error:
                if "created_before" in (facts := error.facts):
                    lives = (facts["created_before"], facts["created"])
                    record(OtherLife(self._recorder.time, name, journal, *lives))
                    break
                damage = isinstance(error, Corrupt) or error.facts.get("code") == _DATA_LOSS
                if damage or _BARE not in name:
                    time = self._recorder.time
                    record(ClientFailed(time, name, str(error), journal, damage))
                break
            if not piece:
                break  # The broker ended the stream; only a reader without retries says so.
            time = self._recorder.time
            record(Read(time, name, journal, offset, offset + len(piece), digest(piece)))
            offset += len(piece)
        return offset

    # What `Appending` needs.

    @property
    def patient(self) -> bool:
        return self._settings.patient

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def recorder(self) -> Recorder:
        return self._recorder

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self._seed} {name}")

    def length(self, rng: random.Random) -> int:
        if rng.random() < 0.02:
            return rng.randint(64 << 10, self._settings.large_bytes)
        return LENGTH_MIN + int(rng.expovariate(1 / 1500))


class Appending:
    """A client that appends to one journal, one append at a time."""

    def __init__(self, workload: Workload, name: str, journal: str, client: Client) -> None:
        self.name = name
        self.journal = journal
        self.rng = workload.rng(name)
        self.status = ""
        """The reason for which the last append was refused."""
        self.ledger = ""
        """The ledger of sessions that the last answer named; empty for none."""
        self.slow = False
        self._workload = workload
        self._recorder = workload.recorder
        self._client = client
        self._attempts: dict[int, tuple[int, int]] = {}

    def new(self) -> int:
        """Return the number of a payload that was never appended."""
        op = self._recorder.new_op()
        length = _SLOW_PIECES * _SLOW_BYTES if self.slow else self._workload.length(self.rng)
        self._attempts = {op: (0, length)}
        return op

    async def append(
        self,
        op: int,
        *,
        offset: int = 0,
        check: str = "",
        union: Labels = (),
        subtract: Labels = (),
        session: SessionAppend | None = None,
    ) -> AppendResult | None:
        """Make one attempt. Return None if it failed, or if its outcome is unknown.

        ``status`` then says which.
        """
        recorder, time = self._recorder, self._recorder.time
        attempt, length = self._attempts[op]
        self._attempts[op] = (attempt + 1, length)
        name = "" if session is None else session.session
        invoked = Invoked(
            time, op, attempt, self.name, self.journal, length, offset, check, union, subtract, name
        )
        recorder.record(invoked)
        params = AppendParams(
            self.journal,
            offset=offset,
            check_registers=LabelSelector.parse(check) if check else None,
            union_registers=LabelSet.of(*union) if union else None,
            subtract_registers=LabelSet.of(*subtract) if subtract else None,
        )
        outcome, error, result = await self._outcome(params, op, length, session)
        if result is None:
            status = self.status
            recorder.record(
                Completed(recorder.time, op, attempt, outcome, status=status, error=error)
            )
            if self._workload.patient and status not in (REGISTER_MISMATCH, "WRONG_APPEND_OFFSET"):
                recorder.record(ClientFailed(recorder.time, self.name, error))
            return None
        commit, route = result.commit, result.header.route
        recorder.record(
            Completed(
                recorder.time,
                op,
                attempt,
                "ok",
                begin=commit.begin,
                end=commit.end,
                sum=commit.sum.hex(),
                registers=labels_of(result.registers),
                members=tuple(member.suffix for member in route.members),
                primary="" if route.primary_id is None else route.primary_id.suffix,
                revision=result.header.etcd.revision,
            )
        )
        return result

    async def _outcome(
        self, params: AppendParams, op: int, length: int, session: SessionAppend | None
    ) -> tuple[Outcome, str, AppendResult | None]:
        """Append. Return the outcome, the text of an error, and the result if there is one."""
        content = payload(op, length)
        timeout_s = _SLOW_TIMEOUT_S if self.slow else ATTEMPT_TIMEOUT_S
        self.status = self.ledger = ""
        try:
            if self._workload.patient:
                return "ok", "", await self._client.append(params, content)
            async with asyncio.timeout(timeout_s):
                result = await append_once(self._client, params, self._content(content), session)
                return "ok", "", result
        except TimeoutError:
            return "unknown", f"no answer within {timeout_s:g} s", None
        except _Aborted as error:
            self.status = _ABORTED
            return "fail", str(error), None
        except GazetteError as error:
            self.ledger = error.facts.get("ledger", "")
            self.status = status_of(error) or (_OTHER_LEDGER if self.ledger else "")
            return ("fail" if self.status else "unknown"), str(error), None

    async def _content(self, content: bytes) -> AsyncIterator[bytes]:
        """Yield the content in one piece or several, sometimes slowly, sometimes not to the end."""
        if self.slow:
            for begin in range(0, len(content), _SLOW_BYTES):
                yield content[begin : begin + _SLOW_BYTES]
                await self._workload.clock.sleep(_SLOW_S)
            return
        pieces = self.rng.choice((1, 1, 2, 5))
        slowly, aborts = self.rng.random() < 0.05, self.rng.random() < 0.02
        step = max(len(content) // pieces, 1)
        for begin in range(0, len(content), step):
            if aborts and begin:
                raise _Aborted("the client ended in the middle of its append")
            if slowly:
                await self._workload.clock.sleep(self.rng.uniform(0.0, 0.2))
            yield content[begin : begin + step]
