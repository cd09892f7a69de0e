"""Publishers of programs that are no shards: `ClientPublisher` for loops, `SyncPublisher` for scripts."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from gazette.client.append.appender import AppendResult
from gazette.client.client import Client
from gazette.client.flags import BrokerClientFlags, broker_flags_of
from gazette.client.rpc.preflight import require_reachable
from gazette.errors import Closed, GazetteError, Invalid, Unavailable
from gazette.message.mapping import Partition
from gazette.message.publishing.outputs import MappingName, Output
from gazette.message.publishing.service import CLOSE_S, TIMEOUT_S, PublishingService
from gazette.protocol.ids import JournalName
from gazette.runtime.clock import SystemClock
from gazette.runtime.loop_bound import ClosedByOwner, LoopBound, running_loop
from gazette.runtime.tasks import LoopThread
from gazette.runtime.timeouts import timeout

_CONNECT_S: Final = 10.0
_USE_WITH: Final = "Use it as `with open_publisher()`, or call its close()."
_USE_ASYNC_WITH: Final = "Use it as `async with ClientPublisher(client)`, or await its close()."


class ClientPublisher:
    """A publisher on an event loop. Use it as ``async with ClientPublisher(client) as publisher``.

    Tasks take turns: while a task has a transaction open, all other tasks wait, at most ``timeout_s``. After
    `CommitFailed`, the publisher cannot be used any more: make a new publisher.

    ``mapping`` says how keys choose among journals. Use the mapping of the application that publishes to the
    same journals. ``timeout_s`` bounds each wait of a publish or commit, in seconds. ``commits`` is a
    directory for this publisher alone. With it, a transaction over several journals is all or nothing even if
    the process dies: the next publisher with the same directory completes it. ``uuid`` is the place of the
    UUID in messages. Give it if neither a label of the journal nor the type of the message says the place.

    Raises ``Invalid`` for settings that cannot be right.
    """

    def __init__(
        self,
        client: Client,
        *,
        mapping: MappingName = "modulo",
        timeout_s: float = TIMEOUT_S,
        commits: Path | str | None = None,
        uuid: str = "",
    ) -> None:
        self._service = PublishingService(
            client, mapping=mapping, timeout_s=timeout_s, commits=commits, uuid=uuid
        )
        self._bound = LoopBound("a ClientPublisher")
        self._timeout_s = timeout_s
        self._is_open = True
        self._turn = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None
        """Task that has a transaction open."""

    async def __aenter__(self) -> Self:
        self._bound.require()
        try:
            await self._service.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the publisher. An open transaction never becomes visible. A transaction whose commit has failed
        may become visible (see `CommitFailed`). May be repeated."""
        if not self._bound.was_forked:
            self._bound.require()
        self._is_open = False
        await self._service.close()

    def __del__(self) -> None:
        # The tasks that watch partitions would keep the objects of the publisher alive for good.
        if getattr(self, "_is_open", False):
            self._bound.dropped(self._service.abandon, _USE_ASYNC_WITH)

    async def publish(self, output: Output, message: Any, *, key: Any = None) -> AppendResult:
        """Publish one message. Return its offsets once it is committed.

        ``output`` is the name of a journal, a ``LabelSelector``, a `Source` or `Output`, or partitions. A
        `Source` or `Output` chooses a partition by its declared key, or at random if it has no key. Several
        other journals are chosen by the key that their labels name. If labels name no key, the hash of
        ``key`` chooses, as in the mapping of applications. If ``key`` is None, the choice is random.

        Raise ``NotFound`` for an unknown journal. Raise ``Invalid`` if the journal cannot hold the message,
        if the key cannot be used, or if this task has a transaction open. Raise ``Unavailable`` if no broker
        answers, or the transaction of another task takes too long. Raise ``Closed`` once the publisher was
        closed, or has failed. After these errors, nothing is appended. Raise `CommitFailed` if the append is
        refused, or takes too long.
        """
        if running_loop() is not self._bound.loop:
            self._bound.require()
        service = self._service
        while (partition := service.partition_of(output, message, key)) is None:
            await service.find(output)
        if self._turn.locked():
            # Wait for the end of the open transaction. No other transaction begins before the next await.
            await self._take_turn()
            self._turn.release()
        future = service.publish_committed(partition, message)
        return await service.appended(future, partition.journal)

    def transaction(self) -> ClientTransaction:
        """Return a transaction: its messages become visible together when its block ends, or never. For
        several journals, set ``commits`` to keep this promise even if the process dies.

        An error that leaves the block rolls the transaction back, and is raised.
        """
        return ClientTransaction(self)

    async def _take_turn(self) -> None:
        """Wait until no task has a transaction open. Raise ``Invalid`` if this task itself has a transaction
        open, and ``Unavailable`` after the timeout."""
        self._bound.require()
        if self._holder is not None and self._holder is asyncio.current_task():
            raise Invalid(
                "this task has a transaction open",
                path="publish",
                hint="Call publish() of the transaction. It is what `async with` returns.",
            )
        try:
            async with timeout(self._timeout_s):
                await self._turn.acquire()
        except TimeoutError as error:
            raise _busy(self._timeout_s) from error


class ClientTransaction:
    """One transaction of a `ClientPublisher`. Use it once, as ``async with``."""

    def __init__(self, publisher: ClientPublisher) -> None:
        self._publisher = publisher
        self._service = publisher._service
        self._clock: int | None = None
        """Clock of the open transaction."""
        self.offsets: Mapping[JournalName, int] = {}
        """By journal, the offset after the committed transaction. A query with these offsets as
        ``gazette-read-through`` reflects the transaction."""

    async def __aenter__(self) -> Self:
        await self._publisher._take_turn()
        try:
            self._clock = self._service.begin()
        except BaseException:
            self._publisher._turn.release()
            raise
        self._publisher._holder = asyncio.current_task()
        return self

    async def publish(self, output: Output, message: Any, *, key: Any = None) -> None:
        """Publish a message, visible once the transaction commits. See `ClientPublisher.publish`.

        After an error other than `CommitFailed`, the message is not part of the transaction, and other
        messages may still be published.
        """
        _require_open(self._clock)
        service = self._service
        while (partition := service.partition_of(output, message, key)) is None:
            await service.find(output)
        if service.stage(partition, message):
            await service.relieve()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        clock, self._clock = _require_open(self._clock), None
        try:
            if kind is None:
                self.offsets = await self._service.commit(self._service.end_for_commit())
            else:
                await self._service.roll_back(self._service.end_for_rollback(clock))
        except BaseException as failure:
            self._service.fail(failure)
            # The error that ended the block says more than the error of the rollback.
            if kind is None or not isinstance(failure, GazetteError | TimeoutError):
                raise
        finally:
            self._publisher._holder = None
            self._publisher._turn.release()


class SyncPublisher:
    """A publisher for scripts, with an event loop in a thread of its own. See `open_publisher`.

    Any thread may use it. While a thread has a transaction open, others wait, at most ``timeout_s``. In a
    forked child, ``publish`` and the begin of a transaction raise ``Closed``, and ``close`` changes nothing.
    """

    def __init__(
        self,
        flags: BrokerClientFlags,
        *,
        mapping: MappingName = "modulo",
        timeout_s: float = TIMEOUT_S,
        commits: Path | str | None = None,
        uuid: str = "",
    ) -> None:
        """Connect. For the errors see `open_publisher`."""
        self._timeout_s = timeout_s
        self._process = ClosedByOwner("a SyncPublisher")
        self._turn = threading.Lock()
        self._holder: int | None = None
        """Identity of the thread that has a transaction open."""
        self._client: Client | None = None
        self._service: PublishingService | None = None
        self._loop = LoopThread("publisher")

        async def start() -> None:
            client = self._client = flags.client("", SystemClock())
            self._service = PublishingService(
                client, mapping=mapping, timeout_s=timeout_s, commits=commits, uuid=uuid
            )
            await require_reachable(
                client,
                "broker",
                connect_s=min(_CONNECT_S, timeout_s),
                hint="Check that it runs there, or give another address.",
            )
            await self._service.start()

        try:
            self._loop.run(start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the publisher, its connections and its thread, within seconds. May be repeated. For uncommitted
        messages see `ClientPublisher.close`."""
        service, self._service = self._service, None
        client, self._client = self._client, None
        if self._process.was_forked:
            return

        try:
            if service is not None or client is not None:
                self._loop.run(_close_all(service, client))
        finally:
            self._loop.close()

    def __del__(self) -> None:
        # The thread would keep its event loop, and so all connections, alive for good.
        service, client = getattr(self, "_service", None), getattr(self, "_client", None)
        if client is not None:
            loop = self._loop
            self._process.dropped(lambda: loop.leave(_close_all(service, client)), _USE_WITH)

    def publish(self, output: Output, message: Any, *, key: Any = None) -> AppendResult:
        """Publish one message, which is committed when this returns. See `ClientPublisher.publish`."""
        service = self._require_service()
        partition = self._partition_of(service, output, message, key)
        taken: list[bool] = []
        try:
            self._take_turn(taken)
            future = service.publish_committed(partition, message)
        finally:
            if True in taken:
                self._turn.release()
        return self._loop.run(service.appended(future, partition.journal))

    def transaction(self) -> SyncTransaction:
        """Return a transaction: its messages become visible together when its block ends, or never.

        An error or Ctrl-C that leaves the block rolls the transaction back, and is raised.
        """
        return SyncTransaction(self)

    def _require_service(self) -> PublishingService:
        self._process.require()
        if self._service is None:
            raise Closed("the publisher was closed", hint="Publish within its `with` block.")
        return self._service

    def _partition_of(
        self, service: PublishingService, output: Output, message: Any, key: Any
    ) -> Partition:
        while (partition := service.partition_of(output, message, key)) is None:
            self._loop.run(service.find(output))
        return partition

    def _take_turn(self, taken: list[bool]) -> None:
        """Wait until no thread has a transaction open, then take the turn and add True to ``taken``. Raise
        ``Invalid`` if this thread has a transaction open, and ``Unavailable`` after the timeout.

        One call of C code does both: Python raises Ctrl-C before or after a call of C code, never within it.
        """
        if self._holder == threading.get_ident():
            raise Invalid(
                "this thread has a transaction open",
                path="publish",
                hint="Call publish() of the transaction. It is what `with` returns.",
            )
        taken.extend(map(self._turn.acquire, (True,), (self._timeout_s,)))
        if True not in taken:
            raise _busy(self._timeout_s)


async def _close_all(service: PublishingService | None, client: Client | None) -> None:
    """Close the service and the client of a `SyncPublisher`."""
    try:
        if service is not None:
            await service.close()
    finally:
        if client is not None:
            await asyncio.wait_for(client.close(), CLOSE_S)


class SyncTransaction:
    """One transaction of a `SyncPublisher`. Use it once, as ``with``, and in one thread."""

    def __init__(self, publisher: SyncPublisher) -> None:
        self._publisher = publisher
        self._clock: int | None = None
        """Clock of the open transaction."""
        self.offsets: Mapping[JournalName, int] = {}
        """By journal, the offset after the committed transaction."""

    def __enter__(self) -> Self:
        publisher, taken = self._publisher, list[bool]()
        service = publisher._require_service()
        try:
            publisher._take_turn(taken)
            self._clock = service.begin()
            publisher._holder = threading.get_ident()
            return self
        except BaseException:
            if True in taken:
                service.end_for_rollback(0)  # Ctrl-C may come after the begin.
                publisher._turn.release()
            raise

    def publish(self, output: Output, message: Any, *, key: Any = None) -> None:
        """Publish a message, visible once the transaction commits. See `ClientTransaction.publish`."""
        _require_open(self._clock)
        publisher = self._publisher
        service = publisher._require_service()
        partition = publisher._partition_of(service, output, message, key)
        if service.stage(partition, message):
            publisher._loop.run(service.relieve())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        publisher, clock = self._publisher, self._clock
        service = publisher._service
        if clock is None:  # Another transaction may have the turn.
            raise _not_open()
        # Call nothing before the `try`: Ctrl-C would leave the turn taken.
        try:
            self._clock = None
            if service is None:
                if kind is None:
                    publisher._require_service()  # Raises ``Closed``.
            elif kind is None:
                self.offsets = publisher._loop.run(service.commit(service.end_for_commit()))
            else:
                publisher._loop.run(service.roll_back(service.end_for_rollback(clock)))
        except BaseException as failure:
            if service is not None:
                service.fail(failure)
            if kind is None or not isinstance(failure, GazetteError | TimeoutError):
                raise
        finally:
            publisher._holder = None
            publisher._turn.release()


def open_publisher(
    broker: str = "",
    *,
    flags: BrokerClientFlags | None = None,
    mapping: MappingName = "modulo",
    timeout_s: float = TIMEOUT_S,
    commits: Path | str | None = None,
    uuid: str = "",
) -> SyncPublisher:
    """Return a publisher for a script. Use it as ``with open_publisher() as publisher``.

    ``broker`` is the address of a broker, or several addresses separated by commas. By default, the
    environment gives the address (``BROKER_ADDRESS``) and the credentials, as for ``gazctl``. ``flags``
    replaces both the address and the credentials.

    ``mapping`` says how keys choose among journals: ``modulo`` or ``rendezvous``. Use the mapping of the
    application that publishes to the same journals. ``timeout_s`` bounds each wait of a call, in seconds.
    ``commits`` is a directory for this publisher alone. With it, a transaction over several journals is all
    or nothing even if the process dies: the next publisher with the same directory completes it. ``uuid`` is
    the place of the UUID in messages, such as ``_meta.uuid``. Give it if neither a label of the journal nor
    the type of the message says the place.

    Raise ``Unavailable`` if no broker answers in time, and ``Invalid`` for settings that cannot be right.
    """
    if flags is None:
        flags = broker_flags_of(os.environ, broker)
    elif broker:
        raise Invalid("is given, and flags have an address, too", path="broker")
    return SyncPublisher(flags, mapping=mapping, timeout_s=timeout_s, commits=commits, uuid=uuid)


def _busy(timeout_s: float) -> Unavailable:
    return Unavailable(
        f"another transaction of the publisher was open for {timeout_s:g} s",
        hint="A publisher has one transaction at a time. Make a publisher for each task that has long ones.",
    )


def _require_open(clock: int | None) -> int:
    if clock is None:
        raise _not_open()
    return clock


def _not_open() -> Closed:
    return Closed(
        "the transaction is not open",
        hint="Publish within the `with` block of the transaction.",
    )
