"""Stage 13 of the byte path: gives committed messages and timers to the application.

The application may also defer a message to the next transaction, or raise an error. The error ends the shard,
unless the shard's `PoisonPolicy` skips the message. Before a skip, the message's effects are undone: in the
store by a savepoint, and in the publisher. The effects of a deferred batch are undone, too, since a smaller
batch is delivered next. (A store without savepoints keeps its changes.) Timers are delivered in the same
way, but cannot be deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

from gazette.consumer.application import Application, DeferToNextTransaction
from gazette.consumer.contract.array_pass import MessageRows
from gazette.consumer.contract.callbacks import ApplicationFailed, application_failed, require_none
from gazette.consumer.contract.error_cause import ErrorCause, cause_of, passes_through
from gazette.consumer.inbox import Inbox
from gazette.consumer.timers.timer import Timer
from gazette.consumer.transaction.misplaced import MisplacedMessages
from gazette.consumer.transaction.poison_handler import PoisonSkipper
from gazette.consumer.transaction.shard_callbacks import ShardCallbacks
from gazette.consumer.transaction.shard_timers import ShardTimers, declared_times
from gazette.consumer.transaction.untimed import UntimedMessages
from gazette.errors import Aborted
from gazette.message.envelope import Envelope
from gazette.message.uuid import ACK_TXN
from gazette.protocol.ids import JournalName

_TRANSIENT: Final = (
    "The message is not to blame, but the system that it was written to: see the cause, and "
    "check that database or system. Nothing of the transaction took effect. Its messages are "
    "consumed again when the shard starts: gazctl shards unassign --failed, or allow "
    "restarts (--consumer.max-restarts)."
)


class Deferred(Exception):
    """The application deferred a message. ``done`` messages before it in the batch have taken effect."""

    def __init__(self, done: int) -> None:
        super().__init__()
        self.done = done


class TimersDue(Exception):
    """Timers of event time are due after ``done`` messages of a batch, and fire before the next message."""

    def __init__(self, done: int) -> None:
        super().__init__()
        self.done = done


def deliver_in_halves(
    batch: Sequence[Envelope[Any]], attempt: Callable[[Sequence[Envelope[Any]]], int]
) -> int:
    """Consume a batch by ``attempt``. Return the number of consumed messages: all, unless one was deferred.

    ``attempt`` takes a batch and returns the number of consumed messages. If it raises
    `DeferToNextTransaction`, the batch had no effect: try its halves. So the transaction ends before the
    first message that is deferred alone.
    """
    try:
        return attempt(batch)
    except DeferToNextTransaction:
        if len(batch) == 1:
            return 0
    half = len(batch) // 2
    consumed = deliver_in_halves(batch[:half], attempt)
    return consumed if consumed < half else half + deliver_in_halves(batch[half:], attempt)


class Dispatcher:
    """Deliveries of one shard's batches. Belongs to its thread. A stop of ``inbox`` takes effect between two
    calls of the application."""

    def __init__(
        self,
        callbacks: ShardCallbacks,
        inbox: Inbox,
        poison: PoisonSkipper | None,
        timers: ShardTimers | None = None,
        clock_places: Mapping[JournalName, str] = MappingProxyType({}),
    ) -> None:
        """Make the dispatcher. ``clock_places``: by source, the place of UUIDs whose clock is the time."""
        self._timers = timers
        self._application = application = callbacks.application
        self._callbacks = callbacks
        self._store = callbacks.store
        self._publisher = callbacks.publisher
        self._inbox = inbox
        self._poison = poison
        self._skips_errors = poison is not None and not poison.policy.malformed_only
        """True if the policy skips messages and timers for which the application raises an error."""
        observes = timers is not None and timers.observes
        self._untimed = UntimedMessages(
            bool(declared_times(application, callbacks.shard)), clock_places if observes else {}
        )
        self._misplaced = MisplacedMessages(callbacks, poison)
        self._unchecked: set[JournalName] = set()
        """Sources whose messages need no check of keys and no check of times."""
        self._gets_single_messages = (
            type(application).consume_messages is Application.consume_messages
        )
        """True if the application gets messages one by one, and not in batches."""

    def deliver(self, batch: Sequence[Envelope[Any]]) -> None:
        """Have the application consume a batch. Leave out acknowledgements, unless ``deliver_acks`` is set.

        Raise `Deferred` or `TimersDue` if only a part of the batch is done. Raise ``ApplicationFailed`` for
        an error of the application; a `GazetteError` passes through. Raise ``Closed`` once the inbox is
        stopped. Raise the error of a message that the policy cannot skip.
        """
        delivered = batch
        if not self._application.deliver_acks and not isinstance(batch, MessageRows):
            delivered = [envelope for envelope in batch if envelope.flags != ACK_TXN]
            if not delivered:
                return
        is_unchecked = batch[0].journal in self._unchecked or self._needs_no_check(batch[0].journal)
        consumed, due = (self._deliver_all if is_unchecked else self._deliver_checked)(delivered)
        if consumed < len(delivered):
            position = consumed
            if delivered is not batch:  # Count the acknowledgements that were not delivered, too.
                position = next(i for i, each in enumerate(batch) if each is delivered[consumed])
            raise TimersDue(position) if due else Deferred(position)

    def _needs_no_check(self, journal: JournalName) -> bool:
        """Return True if no message of a source can be misplaced or lack its time. Remember such a source."""
        if self._misplaced.checks(journal) or self._untimed.checks(journal):
            return False
        self._unchecked.add(journal)
        return True

    def _deliver_checked(self, batch: Sequence[Envelope[Any]]) -> tuple[int, bool]:
        """Deliver a batch that needs checks. Count its misplaced messages or take them out, as the policy
        says. Return the number of messages that are done, and True if timers are due. A message that was
        taken out is done."""
        misplaced = self._misplaced.find(batch)
        if not misplaced:
            return self._deliver_timed(batch)
        if self._misplaced.are_consumed(batch[0].journal):
            consumed, due = self._deliver_timed(batch)
            self._misplaced.note(batch[index] for index in misplaced if index < consumed)
            return consumed, due
        begin = 0
        for index in misplaced:
            consumed, due = self._deliver_timed(batch[begin:index])
            if due or begin + consumed < index:  # Timers are due, or a message was deferred.
                return begin + consumed, due
            begin = index + 1
            if self._take_out(batch[index]):
                return begin, True
        consumed, due = self._deliver_timed(batch[begin:])
        return begin + consumed, due

    def _take_out(self, envelope: Envelope[Any]) -> bool:
        """Take a misplaced message out of the batch. Return True if timers are due after the message."""
        self._inbox.require_running()
        self._misplaced.take_out(envelope)
        timers = self._timers
        if timers is None or not timers.observes:
            return False
        return envelope.event_us is not None and timers.observe(envelope)

    def _deliver_timed(self, batch: Sequence[Envelope[Any]]) -> tuple[int, bool]:
        """Deliver a batch without a check of keys. Skip messages that lack their time; without a policy,
        raise the error of such a message. Return the number of messages that are done, and True if timers
        are due."""
        untimed = self._untimed.find(batch) if batch else []
        if not untimed:
            return self._deliver_all(batch)
        begin = 0
        for index, error in untimed:
            consumed, due = self._deliver_all(batch[begin:index])
            if due or begin + consumed < index:
                return begin + consumed, due
            self._inbox.require_running()
            if self._poison is None:
                raise error
            self._poison.skip_untimed(batch[index], error)
            begin = index + 1
        consumed, due = self._deliver_all(batch[begin:])
        return begin + consumed, due

    def _deliver_all(self, batch: Sequence[Envelope[Any]]) -> tuple[int, bool]:
        """Deliver a batch that needs no check. Return the number of consumed messages, and True if due timers
        have stopped the delivery."""
        if not batch:
            return 0, False
        if self._timers is not None and self._timers.observes:
            return self._deliver_observed(self._timers, batch)
        deliver = self._deliver_each if self._gets_single_messages else self._deliver_batch
        return deliver(batch), False

    def _deliver_observed(
        self, timers: ShardTimers, batch: Sequence[Envelope[Any]]
    ) -> tuple[int, bool]:
        """Deliver a batch, and note the times of its messages for the watermark. If messages are delivered
        one by one, stop when timers are due. Return the same as `_deliver_all`."""
        if (
            not self._gets_single_messages
        ):  # Do not stop: timers that become due during the batch fire after it.
            consumed = self._deliver_batch(batch)
            for envelope in batch[:consumed]:
                timers.observe(envelope)
            return consumed, False
        for position, envelope in enumerate(batch):
            if not self._deliver_each((envelope,)):
                return position, False
            if timers.observe(envelope):
                return position + 1, True
        return len(batch), False

    def fire(self, timer: Timer) -> None:
        """Have the application handle a timer that is due, or skip the timer if the policy says so. Raise the
        errors of `deliver`."""
        self._inbox.require_running()
        self._callbacks.running_callback.enter("on_timer", timer)
        try:
            if self._skips_errors:
                self._fire_or_skip(timer)
            else:
                self._fire(timer)
        except DeferToNextTransaction as error:
            raise ApplicationFailed(
                "on_timer deferred a timer to the next transaction",
                hint="Schedule the timer again instead.",
                **_place_of_timer(timer),
            ) from error
        except BaseException as error:
            if passes_through(error):
                raise
            raise self._callback_failure("on_timer", error, _place_of_timer(timer)) from error
        finally:
            self._callbacks.running_callback.leave()

    def _fire(self, timer: Timer) -> None:
        result: object = self._application.on_timer(  # type: ignore[func-returns-value]
            self._callbacks.shard, self._store, timer, self._publisher
        )
        require_none("on_timer", result, **_place_of_timer(timer))

    def _fire_or_skip(self, timer: Timer) -> None:
        """Have the application handle a timer, or skip the timer if it is poison."""
        poison, timers = self._poison, self._timers
        assert poison is not None
        assert timers is not None
        cancelled_keys = timers.cancelled_keys()
        try:
            with self._undoing(deferred=False):
                self._fire(timer)
        except BaseException as error:
            if not self._is_poison(error):
                raise
            timers.restore_cancelled_keys(cancelled_keys)
            poison.skip_timer(timer, error)

    def _deliver_each(self, batch: Sequence[Envelope[Any]]) -> int:
        """Deliver messages one by one. Return the number of consumed messages: all, unless one was deferred.
        Raise ``ApplicationFailed`` for an error of the callback; a `GazetteError` passes through."""
        application, shard, store = self._application, self._callbacks.shard, self._store
        publisher, inbox = self._publisher, self._inbox
        consume, skips_errors = application.consume_message, self._skips_errors
        running = self._callbacks.running_callback
        running.enter("consume_message", batch[0])
        position = 0
        try:
            for position, envelope in enumerate(batch):  # noqa: B007
                if inbox.stopped:
                    inbox.require_running()
                running.call = envelope
                if skips_errors:
                    self._consume_or_skip(envelope)
                    continue
                result: object = consume(shard, store, envelope, publisher)
                if result is not None:
                    require_none("consume_message", result, **_place_of_batch((envelope,)))
        except DeferToNextTransaction:
            return position
        except BaseException as error:
            if passes_through(error):
                raise
            raise self._batch_failure(
                "consume_message", error, batch[position : position + 1]
            ) from error
        finally:
            running.leave()
        return len(batch)

    def _consume_or_skip(self, envelope: Envelope[Any]) -> None:
        """Have the application consume a message, or skip the message if it is poison."""
        poison = self._poison
        assert poison is not None
        try:
            with self._undoing(deferred=False):
                result: object = self._application.consume_message(
                    self._callbacks.shard, self._store, envelope, self._publisher
                )
                require_none("consume_message", result, **_place_of_batch((envelope,)))
        except BaseException as error:
            if not self._is_poison(error):
                raise
            poison.skip_message(envelope, error)

    def _is_poison(self, error: BaseException) -> bool:
        """Return True if the message is the cause of the error, and the policy covers the error."""
        poison = self._poison
        if poison is None or not poison.policy.is_poison(error):
            return False
        return self._cause_of(error) is ErrorCause.MESSAGE

    def _cause_of(self, error: BaseException) -> ErrorCause:
        return cause_of(error, self._store.classify_error)

    def _batch_failure(
        self, callback: str, error: BaseException, batch: Sequence[Envelope[Any]]
    ) -> ApplicationFailed:
        return self._callback_failure(callback, error, _place_of_batch(batch))

    def _callback_failure(
        self, callback: str, error: BaseException, place: dict[str, Any]
    ) -> ApplicationFailed:
        """Return the error for a callback's exception, with a hint for errors of the store."""
        failed = application_failed(callback, error, **place)
        match self._cause_of(error):
            case ErrorCause.TRANSIENT:
                failed.hint = _TRANSIENT
            case ErrorCause.ABORTED:
                failed.hint = Aborted.default_hint
        return failed

    def _deliver_batch(self, batch: Sequence[Envelope[Any]]) -> int:
        """Deliver a batch at once. Return the number of consumed messages: all, unless one was deferred.

        If a batch is poison, deliver smaller parts of it, to find the message that is the cause.
        """
        return deliver_in_halves(batch, self._attempt_or_skip)

    def _attempt_or_skip(self, batch: Sequence[Envelope[Any]]) -> int:
        """Deliver a batch in one attempt. If it is poison, deliver its parts; skip a single message.

        Return the number of messages that are done. `DeferToNextTransaction` and any other `GazetteError`
        that no policy covers pass through. Raise ``ApplicationFailed`` for any other error.
        """
        self._inbox.require_running()
        try:
            self._attempt(batch)
        except BaseException as error:
            poison = self._poison
            if poison is None or not self._is_poison(error):
                if passes_through(error):
                    raise
                callback = self._application.batch_callback
                raise self._batch_failure(callback, error, batch) from error
            if len(batch) == 1:
                poison.skip_message(batch[0], error)
                return 1
        else:
            return len(batch)
        # Find the message that is the cause: one by one, or by halves of a table.
        step = len(batch) // 2 if isinstance(batch, MessageRows) else 1
        for position in range(0, len(batch), step):
            part = batch[position : position + step]
            if (consumed := self._deliver_batch(part)) < len(part):
                return position + consumed  # The next message was deferred.
        return len(batch)

    def _attempt(self, batch: Sequence[Envelope[Any]]) -> None:
        """Have the application consume a batch. Undo the batch's effects if the application defers, or if it
        raises an error and there is a policy."""
        callback = self._application.batch_callback
        self._callbacks.running_callback.enter(callback, batch)
        try:
            with self._undoing(deferred=True):
                result: object = self._application.consume_messages(  # type: ignore[func-returns-value]
                    self._callbacks.shard, self._store, batch, self._publisher
                )
                require_none(callback, result, **_place_of_batch(batch))
        finally:
            self._callbacks.running_callback.leave()

    @contextmanager
    def _undoing(self, *, deferred: bool) -> Iterator[None]:
        """Undo the publishes of a block that raises and, by a savepoint, its changes of the store.

        After a deferral, undo only if ``deferred``. After any other error, undo only if the policy skips
        errors: without such a policy, the error ends the shard.
        """
        savepoint = self._store.savepoint() if self._store.has_savepoints else None
        self._publisher.hold(strict=self._skips_errors)
        try:
            yield
        except BaseException as error:
            is_deferral = isinstance(error, DeferToNextTransaction)
            if is_deferral and not deferred:
                # Undo nothing: effects before the deferral stay, as they do without a policy.
                self._publisher.release()
                if savepoint is not None:
                    savepoint.release()
            elif is_deferral or self._skips_errors:
                self._publisher.roll_back()
                if savepoint is not None:
                    savepoint.roll_back()
            raise
        self._publisher.release()
        if savepoint is not None:
            savepoint.release()


def _place_of_batch(batch: Sequence[Envelope[Any]]) -> dict[str, Any]:
    return {"journal": batch[0].journal, "begin": batch[0].begin, "end": batch[-1].end}


def _place_of_timer(timer: Timer) -> dict[str, Any]:
    return {"timer": timer.key, "at": timer.at.isoformat(), "domain": timer.domain.name.lower()}
