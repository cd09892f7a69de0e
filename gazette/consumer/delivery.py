"""Stage 13 of the byte path: hands committed messages to the application, one by one or in batches.

Here is what the application may do instead of consuming a message: defer it to the next transaction,
or raise an error, which ends the shard or, by its `PoisonPolicy`, sets the message aside. For that, what
the message had done by then is undone: in the store, by a savepoint, and in the publisher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gazette.consumer.application import Application, DeferToNextTransaction, Shard, Store
from gazette.consumer.inbox import Inbox
from gazette.consumer.poison_control import PoisonControl
from gazette.consumer.replica_status import error_text
from gazette.errors import GazetteError
from gazette.message.envelope import Envelope
from gazette.message.publisher import Publisher


class ApplicationFailed(GazetteError):
    """A callback of the application raised. The shard fails; ``__cause__`` is what it raised."""

    default_hint = (
        "Correct the application and restart it; nothing of the failed transaction took effect."
        " `gazctl shards unassign --failed` retries without a restart."
    )


class Deferred(Exception):
    """The application deferred a message. ``done`` messages of the batch before it took effect."""

    def __init__(self, done: int) -> None:
        super().__init__()
        self.done = done


class Delivery:
    """Delivers batches of one shard. Belongs to its thread. A stop of ``inbox`` takes effect between
    two messages."""

    def __init__(
        self,
        application: Application[Any],
        shard: Shard,
        store: Store,
        publisher: Publisher,
        inbox: Inbox,
        poison: PoisonControl | None,
    ) -> None:
        self._application = application
        self._shard = shard
        self._store = store
        self._publisher = publisher
        self._inbox = inbox
        self._poison = poison
        self._guarded = poison is not None and not poison.policy.malformed_only
        self._singly = type(application).consume_messages is Application.consume_messages

    def deliver(self, batch: Sequence[Envelope[Any]]) -> None:
        """Have the application consume a batch. Raises `Deferred`, ``ApplicationFailed``, and errors
        of ours that the application let through."""
        delivered = batch
        if not self._application.deliver_acks and any(one.is_ack for one in batch):
            delivered = [one for one in batch if not one.is_ack]
            if not delivered:
                return
        deliver = self._deliver_each if self._singly else self._deliver_batch
        done = deliver(delivered)
        if done < len(delivered):
            raise Deferred(batch.index(delivered[done]))

    def _deliver_each(self, batch: Sequence[Envelope[Any]]) -> int:
        """How many were consumed: fewer than there are if one was deferred."""
        application, shard, store = self._application, self._shard, self._store
        publisher, inbox = self._publisher, self._inbox
        consume, guarded = application.consume_message, self._guarded
        position = 0
        try:
            for position, envelope in enumerate(batch):  # noqa: B007
                if inbox.stopped:
                    inbox.check()
                if guarded:
                    self._consume_guarded(
                        envelope, lambda one: consume(shard, store, one, publisher)
                    )
                else:
                    consume(shard, store, envelope, publisher)
        except DeferToNextTransaction:
            return position
        except GazetteError:
            raise
        except BaseException as error:
            raise _failed_at("consume_message", error, batch[position : position + 1]) from error
        return len(batch)

    def _deliver_batch(self, batch: Sequence[Envelope[Any]]) -> int:
        application, shard, store = self._application, self._shard, self._store
        publisher = self._publisher
        self._inbox.check()
        poison = self._poison
        try:
            if poison is None or not self._guarded:
                application.consume_messages(shard, store, batch, publisher)
                return len(batch)
            try:
                with self._undoing():
                    application.consume_messages(shard, store, batch, publisher)
            except BaseException as error:
                if not poison.policy.is_poison(error):
                    raise
            else:
                return len(batch)
        except DeferToNextTransaction:
            return 0
        except GazetteError:
            raise
        except BaseException as error:
            raise _failed_at("consume_messages", error, batch) from error
        # Nothing of the batch took effect. Which of its messages is to blame, each tells by itself.
        return self._deliver_batch_singly(batch)

    def _deliver_batch_singly(self, batch: Sequence[Envelope[Any]]) -> int:
        application, shard, store = self._application, self._shard, self._store
        publisher = self._publisher
        position = 0
        try:
            for position, envelope in enumerate(batch):  # noqa: B007
                self._inbox.check()
                self._consume_guarded(
                    envelope,
                    lambda one: application.consume_messages(shard, store, (one,), publisher),
                )
        except DeferToNextTransaction:
            return position
        except GazetteError:
            raise
        except BaseException as error:
            raise _failed_at("consume_messages", error, batch[position : position + 1]) from error
        return len(batch)

    def _consume_guarded(
        self, envelope: Envelope[Any], consume: Callable[[Envelope[Any]], None]
    ) -> None:
        """Consume a message, or skip it if it is poison."""
        poison = self._poison
        assert poison is not None
        try:
            with self._undoing():
                consume(envelope)
        except BaseException as error:
            if not poison.policy.is_poison(error):
                raise
            poison.skip_message(envelope, error)

    @contextmanager
    def _undoing(self) -> Iterator[None]:
        """Undo what the block did, if it raises: in the store, and among what was published."""
        savepoint = self._store.savepoint()
        self._publisher.hold()
        try:
            yield
        except DeferToNextTransaction:
            # As without a policy: what it did before is its own affair.
            self._publisher.release()
            savepoint.release()
            raise
        except BaseException:
            self._publisher.roll_back()
            savepoint.roll_back()
            raise
        self._publisher.release()
        savepoint.release()


def _failed_at(
    callback: str, error: BaseException, batch: Sequence[Envelope[Any]]
) -> ApplicationFailed:
    return application_failed(
        callback, error, journal=batch[0].journal, begin=batch[0].begin, end=batch[-1].end
    )


class application_code:
    """Errors of callbacks, told from our own."""

    def __init__(self, callback: str) -> None:
        self._callback = callback

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: object
    ) -> None:
        if error is None or isinstance(error, GazetteError):
            return
        raise application_failed(self._callback, error) from error


def application_failed(callback: str, error: BaseException, **facts: Any) -> ApplicationFailed:
    text = f"{callback} raised {type(error).__name__}"
    detail = error_text(error)
    if detail != type(error).__name__:
        text = f"{text}: {detail}"
    return ApplicationFailed(text, **facts)
