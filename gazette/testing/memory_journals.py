"""Journals in memory, with the appends of publishers, recorders and transactions."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, Self

from gazette.client.append.appender import AppendParams, AppendResult
from gazette.errors import Bug, Closed, Fenced, GazetteError
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import ProcessId
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet, subtract, union
from gazette.protocol.route import EMPTY_ROUTE, EtcdHeader, Header
from gazette.recoverylog.log.recorder import fence
from gazette.runtime.tasks import OpFuture, first_failure, resolved
from gazette.testing.recovery import LOG, MemoryLog

_HEADER: Final = Header(ProcessId("local", "test-member"), EMPTY_ROUTE, EtcdHeader(1, 1, 1, 1))


@dataclass(slots=True)
class _Append:
    params: AppendParams
    content: bytes
    waits: tuple[OpFuture[Any], ...]
    future: OpFuture[AppendResult]
    owner: object


@dataclass(slots=True)
class _Journal:
    data: bytearray = field(default_factory=bytearray)
    registers: LabelSet = EMPTY_LABELS
    queue: list[_Append] = field(default_factory=list)
    held: bool = False
    """True while the first append of the queue is held: then all of the queue waits."""


class MemoryJournals:
    """Journals in memory, with registers. Appends take place in order of their release. Any thread.

    ``holds(journal, content)`` may return True for an append. Then this append and the later ones
    of its journal wait, until ``release`` or the crash of their owner. ``doubles`` may let an
    append take place twice, like a retry after a lost answer. A take-over of a recovery log
    calls ``on_hand_off`` first. In this callback, a test may append as the former owner: the new
    owner has not played these bytes yet.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._journals: dict[str, _Journal] = {}
        self._members = 0
        self.holds: Callable[[str, bytes], bool] = lambda journal, content: False
        self.doubles: Callable[[str, bytes], bool] = lambda journal, content: False
        self.on_hand_off: Callable[[str], None] = lambda journal: None

    def _of(self, journal: str) -> _Journal:
        return self._journals.setdefault(journal, _Journal())

    def random_of(self, seed: int) -> random.Random:
        """Return random numbers for one more member. Members share no ids of producers or authors."""
        with self._lock:
            self._members += 1
            return random.Random(f"{seed}-{self._members}")

    def content(self, journal: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return all of a journal's bytes, or a range of them."""
        with self._lock:
            return bytes(self._of(journal).data[begin:end])

    def end(self, journal: str) -> int:
        """Return the write head of a journal."""
        with self._lock:
            return len(self._of(journal).data)

    def append(self, journal: str, content: bytes) -> int:
        """Append at once, before all appends that wait. Return the new end of the journal."""
        with self._lock:
            data = self._of(journal).data
            data += content
            return len(data)

    def hand_off(self, journal: str, content: bytes, registers: LabelSet) -> AppendResult:
        """Append at once and set registers, as a take-over of a log does."""
        self.on_hand_off(journal)
        with self._lock:
            target = self._of(journal)
            begin = len(target.data)
            target.data += content
            target.registers = union(registers, target.registers)
            commit = Fragment(journal, begin, len(target.data))
            return AppendResult(commit, target.registers, _HEADER)

    def release(self) -> None:
        """Stop holding appends: held appends take place, and ``holds`` is forgotten."""
        with self._lock:
            self.holds = lambda journal, content: False
            for journal in self._journals.values():
                journal.held = False
        self._pump_all()

    def drop(self, owner: object) -> None:
        """Drop the appends that ``owner`` has enqueued, as its death would."""
        with self._lock:
            dropped: list[_Append] = []
            for journal in self._journals.values():
                dropped += [append for append in journal.queue if append.owner is owner]
                journal.queue = [append for append in journal.queue if append.owner is not owner]
                journal.held = journal.held and bool(journal.queue)
        for append in dropped:
            append.future.set_exception(Closed("the process has crashed"))

    def enqueue(self, append: _Append) -> None:
        """Apply an append as soon as its futures are done, after all appends that were enqueued before."""
        with self._lock:
            self._of(append.params.journal).queue.append(append)
        for future in append.waits:
            future.add_done_callback(lambda _: self._pump(append.params.journal))
        self._pump(append.params.journal)

    def is_waiting(self, owner: object, journal: str) -> bool:
        """Return True if an append of ``owner`` to a journal has not taken place yet."""
        with self._lock:
            return any(append.owner is owner for append in self._of(journal).queue)

    def waiting(self, journal: str) -> list[bytes]:
        """Return the content of a journal's enqueued appends, in order."""
        with self._lock:
            return [append.content for append in self._of(journal).queue]

    def pending_except(self, owner: object, journal: str) -> frozenset[OpFuture[Any]]:
        """Return the futures of an owner's waiting appends, except appends to ``journal``."""
        with self._lock:
            return frozenset(
                append.future
                for name, other_journal in self._journals.items()
                for append in other_journal.queue
                if name != journal and append.owner is owner
            )

    def _pump_all(self) -> None:
        for name in list(self._journals):
            self._pump(name)

    def _pump(self, name: str) -> None:
        """Apply the appends of a journal's queue in order, up to one that is held, or waits for a future. An
        append whose future has failed fails with the same error."""
        while True:
            with self._lock:
                journal = self._of(name)
                if not journal.queue or journal.held:
                    return
                first = journal.queue[0]
                if not all(future.done() for future in first.waits):
                    return
                error = first_failure(first.waits)
                if error is None and self.holds(name, first.content):
                    journal.held = True
                    return
                del journal.queue[0]
                result = None if error is not None else self._apply(journal, first)
            if isinstance(result, AppendResult):
                first.future.set_result(result)
            else:
                first.future.set_exception(error or result or Bug("append without a result"))

    def _apply(self, journal: _Journal, append: _Append) -> AppendResult | GazetteError:
        """Check registers and append, as a broker does. Return the result, or the error of the append."""
        params = append.params
        check = params.check_registers
        # A journal without registers passes every check, as at a broker.
        if check is not None and journal.registers.labels and not check.matches(journal.registers):
            return Fenced("another author owns the journal", journal=params.journal)
        begin = len(journal.data)
        journal.data += append.content
        if append.content:
            if params.subtract_registers is not None:
                journal.registers = subtract(journal.registers, params.subtract_registers)
            if params.union_registers is not None:
                journal.registers = union(params.union_registers, journal.registers)
            if self.doubles(params.journal, append.content):
                journal.data += append.content
        commit = Fragment(params.journal, begin, len(journal.data))
        return AppendResult(commit, journal.registers, _HEADER)


class MemoryTxn:
    """An open append."""

    def __init__(self, appends: MemoryAppends, append: _Append) -> None:
        self._appends = appends
        self._append = append
        self._content = bytearray()

    def write(self, content: bytes | bytearray | memoryview) -> None:
        self._content += content

    def release(self) -> OpFuture[AppendResult]:
        self._append.content = bytes(self._content)
        self._appends.journals.enqueue(self._append)
        return self._append.future

    def roll_back(self) -> None:
        self._content.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class MemoryJournalAppends:
    """Appends to one journal, which are enqueued at once."""

    must_wait = False

    def __init__(self, appends: MemoryAppends, params: AppendParams) -> None:
        self._appends = appends
        self._params = params

    def enqueue(self, content: bytes | bytearray) -> OpFuture[AppendResult]:
        txn = self._appends.start_append(self._params)
        txn.write(content)
        return txn.release()

    def in_place(
        self,
        write: Callable[[Any, int, bytearray], None],
        item: Any,
        flags: int,
        length_max: int,
    ) -> OpFuture[AppendResult] | None:
        """See `gazette.client.append.backlog.JournalAppends.in_place`."""
        content = bytearray()
        write(item, flags, content)
        return None if len(content) > length_max else self.enqueue(content)

    def await_room(self) -> None:
        """Return at once: memory has room."""


class MemoryAppends:
    """The part of an append service that publishers, recorders and transactions use."""

    def __init__(self, journals: MemoryJournals) -> None:
        self.journals = journals
        self.closed = False
        self.commit_waits: set[OpFuture[Any]] = set()
        """Futures that the last commit waits for, as `pending_except` returned them."""

    def start_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = ()
    ) -> MemoryTxn:
        if self.closed:
            raise Closed("the process has crashed")
        return MemoryTxn(self, _Append(params, b"", tuple(dependencies), OpFuture(), self))

    def journal(self, params: AppendParams) -> MemoryJournalAppends:
        return MemoryJournalAppends(self, params)

    def pending_except(self, journal: str) -> frozenset[OpFuture[Any]]:
        """Return the futures that a transaction's commit must wait for, and record them."""
        self.commit_waits = set(self.journals.pending_except(self, journal))
        return frozenset(self.commit_waits)


class JournalLog(MemoryLog):
    """A recovery log that is a journal of `MemoryJournals`."""

    def __init__(self, appends: MemoryAppends) -> None:
        super().__init__()
        self._appends = appends

    def start_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = ()
    ) -> Any:
        return self._appends.start_append(params, dependencies)

    def hand_off(self, content: bytes, author: int) -> OpFuture[AppendResult]:
        """Append the hand-off at once. It fences the former author, whose enqueued appends then fail."""
        return resolved(self._appends.journals.hand_off(LOG, content, fence(author)))

    @property
    def end(self) -> int:
        return self._appends.journals.end(LOG)

    def __getitem__(self, span: slice) -> bytes:
        return self._appends.journals.content(LOG, span.start, span.stop)
