"""Transactions of a program that is no shard: `PublishingService`, used by both publishers.

A transaction's messages are pending until their acknowledgement is in the same journal. So a transaction in
one journal is all or nothing. In several journals, each gets an acknowledgement once all messages are in
place. A process that dies between two acknowledgements leaves a part of the transaction visible, unless it
has a directory for `CommitDirectory`.

An append that was enqueued cannot be withdrawn. So a publisher cannot be used any more after a failed commit,
or after a wait that was given up. Messages without an acknowledgement stay pending for ever, and no reader
gets them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from gazette.client.append.appender import AppendParams, AppendResult, may_be_appended
from gazette.client.append.service import AppendService, AppendServiceSettings
from gazette.client.client import Client
from gazette.client.wait_question import ask_reason
from gazette.errors import Broken, Closed, GazetteError, Invalid, NotAllowed, Unavailable
from gazette.message.mapping import Partition
from gazette.message.publisher import Publisher
from gazette.message.publishing.commit_records import CommitDirectory
from gazette.message.publishing.outputs import MappingName, Output, Outputs
from gazette.message.uuid_place import names_of
from gazette.protocol.ids import JournalName
from gazette.runtime.failpoints import reach
from gazette.runtime.loop_bound import MadeBeforeFork
from gazette.runtime.tasks import OpFuture, TaskScope, await_future
from gazette.runtime.timeouts import timeout

TIMEOUT_S: Final = 60.0
"""Seconds that a publish or a commit may take by default."""
BACKLOG_BYTES_MAX: Final = 32 << 20
"""Bytes of a transaction that may wait for brokers. With more bytes, publishing waits."""
CLOSE_S: Final = 10.0
"""Seconds that each step of closing a publisher may take."""
_SETTINGS: Final = AppendServiceSettings(memory_max=2 * BACKLOG_BYTES_MAX)


class CommitFailed(Broken):
    """A transaction did not commit, committed in some journals only, or has an unknown outcome."""

    default_hint = (
        "Make another publisher. Publish again only what no reader can have seen: read the journals "
        "if some acknowledgements may have been appended."
    )

    def __init__(
        self,
        message: str,
        *,
        committed: tuple[JournalName, ...] = (),
        unknown: tuple[JournalName, ...] = (),
        hint: str | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message, hint=hint, **facts)
        self.committed = committed
        """Journals in which the transaction is visible."""
        self.unknown = unknown
        """Journals in which the transaction may be visible now or later."""


class PublishingService:
    """A producer, its outputs and its appends. Loop-bound, except where a method says so."""

    def __init__(
        self,
        client: Client,
        *,
        mapping: MappingName = "modulo",
        timeout_s: float = TIMEOUT_S,
        commits: Path | str | None = None,
        uuid: str = "",
    ) -> None:
        if mapping not in ("modulo", "rendezvous"):
            raise Invalid(f"must be modulo or rendezvous, not {mapping!r}", path="mapping")
        if not timeout_s > 0:  # Also for NaN.
            raise Invalid(f"must be a number above 0, not {timeout_s!r}", path="timeout_s")
        if uuid:
            names_of(uuid)
        self._client = client
        self._timeout_s = timeout_s
        self._scope = TaskScope("publisher", on_failure=self.fail)
        self._outputs = Outputs(client, self._scope, mapping, uuid)
        self._appends = AppendService(client, settings=_SETTINGS)
        self._publisher = Publisher.standalone(self._appends, client.clock, random.SystemRandom())
        self._records = None if commits is None else CommitDirectory(Path(commits))
        self._failure: BaseException | None = None
        """Error after which the publisher cannot be used any more."""
        self._process = MadeBeforeFork("a publisher")
        self._closed = False

    async def start(self) -> None:
        """Complete a commit that a former publisher with the same directory recorded: append its content.

        Raise ``Invalid`` if another publisher uses the directory. Raise ``Unavailable`` or ``Corrupt`` if the
        records cannot be read in time, and ``CommitFailed`` if an append does not succeed in time.
        """
        if self._records is None:
            return
        deadline = self._deadline()
        try:
            intents = await self._records.load(deadline)
        except TimeoutError as error:
            raise Unavailable(
                f"the record of a former commit was not read: {error}",
                hint="Check the disk of the directory.",
                directory=self._records.directory,
            ) from error
        if intents:
            await self._acknowledge(intents, deadline)

    def abandon(self) -> None:
        """Close the publisher without waiting, also not for the thread of the records. Call this on the event
        loop."""
        self._closed = True
        self._appends.abandon()
        self._scope.cancel()
        if self._records is not None:
            self._records.release()

    async def close(self) -> None:
        """End the publisher, within about twice `CLOSE_S` seconds. Give up appends that wait."""
        self._closed = True
        if self._process.was_forked:
            if self._records is not None:
                self._records.leave()
            return
        try:
            await self._appends.close(CLOSE_S)
        finally:
            try:
                await self._scope.stop(CLOSE_S)
            finally:
                if self._records is not None:
                    self._records.close()

    # Outputs and messages.

    def partition_of(self, output: Output, message: Any, key: Any) -> Partition | None:
        """Return the journal for a message; None if the output must be found first, by `find`.

        Any thread may call this. For the errors see `KnownOutput.partition_of`.
        """
        self._require_open()
        single = self._outputs.single
        if isinstance(output, str) and (partition := single.get((output, type(message)))):
            return partition
        return self._outputs.partition_of(output, message, key)

    async def find(self, output: Output) -> None:
        """Find an output. Raise ``Unavailable`` if no broker answers in time, and ``Closed`` as
        `require_usable` does. Other errors are those of `Outputs.find`."""
        self.require_usable()
        async with self._in_time("no broker has named a journal of the output", self._deadline()):
            await self._outputs.find(output)

    def publish_committed(self, partition: Partition, message: Any) -> OpFuture[AppendResult]:
        """Publish a message outside of transactions. Any thread may call this, but only one at a time.

        For the errors see `Publisher.publish_committed`. After an error nothing is published.
        """
        self._require_open()
        return self._publisher.publish_committed(lambda _: partition, message)

    async def appended(self, future: OpFuture[AppendResult], journal: JournalName) -> AppendResult:
        """Wait for an append. Raise ``CommitFailed`` if the append fails, or takes longer than the timeout.
        After a cancellation the append goes on."""
        try:
            async with self._in_time("the message was not appended", self._deadline()):
                return await await_future(future)
        except GazetteError as error:
            failure = f"publishing to {journal} has failed"
            if may_be_appended(error):
                failed = CommitFailed(
                    f"{failure}, and the message may be visible: {error}", unknown=(journal,)
                )
            else:
                failed = CommitFailed(f"{failure}: {error}", hint=error.hint)
            raise self._fail_with(failed) from error

    # Transactions.

    def begin(self) -> int:
        """Begin a transaction, after the last one has ended. Any thread may call this.

        Return the clock of the transaction, which is less than the clocks of all its messages.
        """
        self.require_usable()
        self._publisher.clock.update(int(self._client.clock.now() * 1e9))
        # Keep messages back while they fit in memory, so that a rollback needs no append.
        self._publisher.hold(strict=False)
        return self._publisher.clock.value

    def stage(self, partition: Partition, message: Any) -> bool:
        """Publish a message within a transaction. Return True if the caller must call `relieve`.

        Call this in the thread of the transaction. For the errors see `Publisher.publish_uncommitted`: after
        an error other than ``Closed`` the message is not a part of the transaction.
        """
        self.require_usable()
        self._publisher.publish_uncommitted(lambda _: partition, message)
        return self._appends.backlog_bytes > BACKLOG_BYTES_MAX

    async def relieve(self) -> None:
        """Wait until all enqueued messages are appended. Raise ``CommitFailed`` on failure or timeout."""
        try:
            await self._flush(self._deadline())
        except GazetteError as error:
            raise self._fail_with(_nothing_is_visible(error)) from error

    def end_for_commit(self) -> dict[JournalName, bytes]:
        """End the transaction, and enqueue its messages. Return the content that commits it, by journal.

        Call this in the thread of the transaction. Raise ``Closed`` as `require_usable` does: the application
        may have caught an earlier error, which said that nothing is visible.
        """
        self.require_usable()
        self._publisher.release()
        return self._publisher.build_ack_intents()

    async def commit(self, intents: Mapping[JournalName, bytes]) -> dict[JournalName, int]:
        """Commit the transaction that `end_for_commit` has ended. Return the offset after it, by journal.

        The timeout bounds the record and all appends together. On failure, raise ``CommitFailed``, which says
        in which journals the transaction is visible. After a cancellation, this is not known.
        """
        deadline = self._deadline()
        try:
            # A single journal needs no wait: its acknowledgement surely comes after the messages.
            if len(intents) > 1:
                await self._flush(deadline)
                await reach("publish.deciding", self._publisher.producer.hex(), self._client.clock)
        except GazetteError as error:
            raise self._fail_with(_nothing_is_visible(error)) from error
        if self._records is not None and len(intents) > 1:
            try:
                await self._records.save(intents, deadline)
            except Unavailable as error:
                raise self._fail_with(_nothing_is_visible(error)) from error
            except (Broken, TimeoutError) as error:
                raise self._fail_with(self._perhaps_recorded(intents, error)) from error
        await reach("publish.decided", self._publisher.producer.hex(), self._client.clock)
        return await self._acknowledge(intents, deadline)

    def end_for_rollback(self, clock: int) -> dict[JournalName, bytes]:
        """End the transaction that began at ``clock``, and leave nothing visible.

        Return the content of the rollback, by journal: empty if nothing was enqueued. Call this in the thread
        of the transaction.
        """
        try:
            self._publisher.roll_back()
        except NotAllowed:  # Some messages were enqueued.
            rollbacks = self._publisher.build_rollbacks(clock)
            self._publisher.build_ack_intents()
            return rollbacks
        return {}

    async def roll_back(self, intents: Mapping[JournalName, bytes]) -> None:
        """Append the content that rolls a transaction back, within `CLOSE_S` seconds.

        Raise the error of an append, or ``TimeoutError``. After an error, readers keep the messages pending
        until they forget the producer.
        """
        for journal, content in intents.items():
            self._appends.append(AppendParams(journal), content)
        if intents:
            async with timeout(CLOSE_S):
                await self._appends.flush()

    async def _acknowledge(
        self, intents: Mapping[JournalName, bytes], deadline: float
    ) -> dict[JournalName, int]:
        """Append acknowledgements. On failure, raise ``CommitFailed``, which says what each journal has."""
        futures = {
            journal: self._appends.append(AppendParams(journal), content)
            for journal, content in intents.items()
        }
        cause: BaseException | None = None
        try:
            async with self._in_time("acknowledgements were not appended", deadline):
                for journal, future in futures.items():
                    try:
                        await await_future(future)
                    except GazetteError:
                        continue  # Raise it below, together with the outcome of all other journals.
                    await reach("publish.acknowledged", journal, self._client.clock)
        except Unavailable as error:
            cause = error
        # Look at each append: some may have succeeded even after a timeout.
        ends: dict[JournalName, int] = {}
        refused: set[JournalName] = set()
        for journal, future in futures.items():
            try:
                if future.done():
                    ends[journal] = future.result().commit.end
            except GazetteError as error:
                cause = cause or error
                if not may_be_appended(error):
                    refused.add(journal)
        if cause is not None:
            raise self._fail_with(self._not_everywhere(intents, ends, refused, cause)) from cause
        if self._records is not None and len(intents) > 1:
            try:
                await self._records.clear(self._deadline())
            except (Unavailable, TimeoutError) as error:
                raise self._fail_with(_stays_recorded(ends, error)) from error
        return ends

    def _not_everywhere(
        self,
        intents: Mapping[JournalName, bytes],
        ends: Mapping[JournalName, int],
        refused: set[JournalName],
        error: BaseException,
    ) -> CommitFailed:
        """Return the error of a commit whose acknowledgements are not all appended. Journals of ``ends`` have
        their acknowledgement, journals of ``refused`` have refused theirs. Of the others neither is known."""
        unknown = tuple(sorted(intents.keys() - ends.keys() - refused))
        committed = tuple(sorted(ends))
        where = []
        if committed:
            where.append(f"it is visible in {', '.join(committed)}")
        if unknown:
            where.append(f"it may become visible in {', '.join(unknown)}")
        if refused:
            where.append(f"it is not visible in {', '.join(sorted(refused))}")
        hint = None
        if self._records is not None and len(intents) > 1:
            hint = (
                f"It is decided, and recorded in {self._records.directory}. The next publisher with this "
                "directory completes it: do not publish it again."
            )
            if refused:
                hint += (
                    f" Mend what refuses it before. If that is impossible, remove {self._records.path}: "
                    "the transaction is then given up where it is not visible."
                )
        return CommitFailed(
            f"the transaction did not commit everywhere: {'; '.join(where)} ({error})",
            committed=committed,
            unknown=unknown,
            hint=hint,
        )

    def _perhaps_recorded(
        self, intents: Mapping[JournalName, bytes], error: Exception
    ) -> CommitFailed:
        assert self._records is not None
        return CommitFailed(
            f"the transaction is visible nowhere, and may become visible later ({error})",
            unknown=tuple(sorted(intents)),
            hint="End this program, which may still make the record, and mend the directory. If "
            f"{self._records.path} is there then, the next publisher with this directory commits the "
            "transaction. If it is not, publish the messages again.",
        )

    def _deadline(self) -> float:
        """Return the deadline of an operation that begins now, as a time of the event loop."""
        return asyncio.get_running_loop().time() + self._timeout_s

    async def _flush(self, deadline: float) -> None:
        async with self._in_time("the messages were not appended", deadline):
            await self._appends.flush()

    @asynccontextmanager
    async def _in_time(self, problem: str, deadline: float) -> AsyncIterator[None]:
        """Bound a wait. After ``deadline`` raise ``Unavailable`` with ``problem`` and why appends wait."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError as error:
            reasons = await self._reasons()
            raise Unavailable(
                f"{problem} within {self._timeout_s:g} s{reasons}",
                hint="Check that brokers run at the address, and that the journals have a primary "
                "(`gazctl journals list --primary`).",
                address=self._client.address,
            ) from error

    async def _reasons(self) -> str:
        """Return why appends wait. Ask brokers about the first journal without an answer, not about all."""
        waiting = sorted(self._appends.waiting().items())
        silent_journal = next((name for name, reason in waiting if not reason), "")
        broker_reason = await ask_reason(self._client, silent_journal) if silent_journal else ""
        texts = [f"{name}: {reason or broker_reason or 'no answer'}" for name, reason in waiting]
        return f": {'; '.join(texts)}" if texts else ""

    # The end of the publisher.

    def require_usable(self) -> None:
        """Raise ``Closed`` once the publisher was closed, has failed, or is in a forked process."""
        self._process.require()
        self._require_open()

    def _require_open(self) -> None:
        """Raise ``Closed`` once the publisher was closed, or has failed."""
        if self._closed:
            raise Closed("the publisher was closed", hint="Publish within its `with` block.")
        failure = self._failure
        if failure is not None:
            raise Closed(
                f"the publisher has failed: {str(failure) or type(failure).__name__}",
                hint="Make another one. Pending messages without an acknowledgement never become visible.",
            ) from failure

    def fail(self, error: BaseException) -> None:
        """Refuse later messages: the messages that wait belong to a transaction that failed."""
        if self._failure is None:
            self._failure = error

    def _fail_with(self, error: CommitFailed) -> CommitFailed:
        self.fail(error)
        return error


def _stays_recorded(ends: Mapping[JournalName, int], error: Exception) -> CommitFailed:
    return CommitFailed(
        f"the transaction is visible in all its journals, and its record was not removed ({error})",
        committed=tuple(sorted(ends)),
        hint="Do not publish it again. Mend the directory: the next publisher with it removes the record.",
    )


def _nothing_is_visible(error: GazetteError) -> CommitFailed:
    return CommitFailed(
        f"the transaction did not commit: nothing of it is visible ({error})",
        hint="Make another publisher, and publish the messages again.",
    )
