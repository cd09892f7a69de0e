"""The contract between the consumer runtime and applications: `Application`, `Store`, `Shard`.

An application is a set of plain synchronous callbacks. Each shard calls the callbacks of its store and its
transactions on its own thread, in a fixed order. These callbacks may block: only their own shard is delayed.
Callbacks that describe journals, such as ``message_type_of``, must not block, since the event loop also calls
them.

The life of one transaction, as a shard sees it:

    begin_transaction              at the first message, or the first timer that is due
    consume_messages …             the default calls consume_message for each message
    on_timer …                     for each timer that is due
    finalize_transaction           publish and flush all that is still buffered
    Store.start_commit             commits the store's state together with the checkpoint
    finished_transaction           with the future of that commit

The next transaction begins while the former commits and is acknowledged. An exception in a callback ends the
shard, and undoes the running transaction. The shard is reported as FAILED, with the text of the exception. A
`PoisonPolicy` may skip the message instead. Only the exception `DeferToNextTransaction` does not end the
shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from gazette.consumer.contract.callbacks import require_instance, require_none
from gazette.consumer.contract.error_cause import ErrorCause
from gazette.consumer.contract.key_check import KeyPlace
from gazette.consumer.contract.poison import PoisonPolicy
from gazette.consumer.timers.timer import EventTime, TimeDomain, Timer, TimerTable
from gazette.errors import GazetteError, NotAllowed
from gazette.labels import MESSAGE_UUID
from gazette.message.keys import ANY, KeyEncoding
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.shard import ShardSpec
from gazette.runtime.tasks import OpFuture

if TYPE_CHECKING:
    from gazette.consumer.contract.array_pass import ArrayPass
    from gazette.consumer.inbox import Feed
    from gazette.consumer.service import ConsumerService
    from gazette.message.envelope import Envelope
    from gazette.message.message_time import MessageTime
    from gazette.message.publisher import Publisher
    from gazette.recoverylog.log.recorder import Recorder
    from gazette.recoverylog.playback.staged_files import PlayedFiles

StoreT = TypeVar("StoreT", bound="Store")


class DeferToNextTransaction(GazetteError):
    """Raised by ``consume_message`` to end this transaction and get the same message in the next.

    Raise it before any effect of the message, since effects stay. For batches see ``consume_messages``.

    An application must not defer the first message of a transaction: the transaction would be empty, and
    would defer the message for ever.
    """

    default_hint = "Raise it only after the transaction has consumed a message."


@runtime_checkable
class Shard(Protocol):
    """The shard for which a callback runs: the values that it may read, and its timers."""

    @property
    def id(self) -> str:
        """Name of the shard: unique within its application."""
        ...

    @property
    def fqn(self) -> str:
        """Key of the shard's specification in etcd: unique among all applications of a cluster."""
        ...

    @property
    def spec(self) -> ShardSpec:
        """The specification in force when the callback was called."""
        ...

    def publish_future(self, future: OpFuture[Any]) -> None:
        """Make the commit of the running transaction wait for ``future``, too."""
        ...

    @property
    def now(self) -> datetime:
        """Processing time in UTC: the clock of the member, which tests control. It never goes back while the
        member leads the shard.

        This property, ``watermark``, ``schedule`` and ``cancel`` need an application with ``on_timer``.
        """
        ...

    @property
    def watermark(self) -> datetime | None:
        """Event time in UTC that the sources have reached; None until each source had a message or is idle.

        A message whose `Envelope.time` is before the watermark is late. Raises ``NotAllowed`` without
        ``event_time``.
        """
        ...

    def schedule(
        self,
        key: str,
        at: datetime,
        payload: bytes = b"",
        *,
        domain: TimeDomain = TimeDomain.PROCESSING,
    ) -> None:
        """Set a timer: ``on_timer`` is called once ``at`` is reached, in a transaction.

        Replace a timer with the same key and domain. The timer commits with the running transaction. Call
        this method within the callbacks of a transaction.

        ``key`` has 1 to 1,024 bytes, ``payload`` at most 64 KiB. Raise ``InvalidValue`` for other lengths,
        and for a time without a zone, or outside of the years 1 to 9999. Raise ``NotAllowed`` if nothing
        would fire the timer. Raise it also outside of a transaction, and on another thread.
        """
        ...

    def cancel(self, key: str, *, domain: TimeDomain = TimeDomain.PROCESSING) -> None:
        """Remove a timer, if it exists: it does not fire, even if it is due. Errors are as in `schedule`."""
        ...


class Savepoint(Protocol):
    """A point made by `Store.savepoint`. The runtime calls one of its methods, once; but no method if an
    error ends the shard."""

    def release(self) -> None:
        """Keep the changes since the savepoint."""
        ...

    def roll_back(self) -> None:
        """Undo the changes since the savepoint."""
        ...


class Store(ABC):
    """A shard's state. The shard calls every method on its thread, `classify_error` also on the event loop.

    The contract that makes transactions exactly-once:

    - ``start_commit`` makes the state and the checkpoint durable *together*, and only after every
      future of ``wait_for`` has succeeded. It must not block on these futures: it returns its own future.
    - The shard does not call ``start_commit`` again before the former commit's future is done. Meanwhile, it
      consumes messages of the next transaction.
    - Once a newer owner of the same state has called ``restore_checkpoint``, the commits of older
      owners must fail (``Fenced``).
    """

    @abstractmethod
    def start_commit(
        self, shard: Shard, checkpoint: Checkpoint, wait_for: Collection[OpFuture[Any]]
    ) -> OpFuture[Any]:
        """Begin to commit. Return a future of the commit; see the contract of the class."""

    @abstractmethod
    def restore_checkpoint(self, shard: Shard) -> Checkpoint:
        """Return the checkpoint of the last commit, or an empty checkpoint. Without a recovery log, fence
        older owners here."""

    def savepoint(self) -> Savepoint:
        """Return a savepoint of the running transaction. Begin a transaction if none runs.

        The runtime rolls back to the savepoint before it skips a poison message, and after a batch was
        deferred. One savepoint is open at a time. Optional: the default raises ``NotAllowed``. A shard of a
        store without this method permits only a `PoisonPolicy` with ``malformed_only``.
        """
        raise NotAllowed(
            f"{type(self).__name__} cannot undo the effects of a single message",
            hint="Set malformed_only in the poison policy, or use another store.",
        )

    @property
    def has_savepoints(self) -> bool:
        """True if `savepoint` is implemented."""
        return type(self).savepoint is not Store.savepoint

    def classify_error(self, error: Exception) -> ErrorCause:
        """Return the cause of an exception: the message, or the store.

        Return `ErrorCause.MESSAGE` for an error that does not come from the store. Return it also if the same
        message would surely raise the error again, such as a violated constraint. A `PoisonPolicy` skips
        messages for this cause only. After `ErrorCause.ABORTED` the shard is restarted, a few times at most.

        Called on the shard's thread, and once the shard has failed also on the event loop: do not block.
        Optional: a store without this method permits only a `PoisonPolicy` with ``malformed_only``.
        """
        return ErrorCause.STORE

    @property
    def classifies_errors(self) -> bool:
        """True if `classify_error` is implemented."""
        return type(self).classify_error is not Store.classify_error

    def timer_table(self, shard: Shard) -> TimerTable:
        """Return the table of the shard's timers. Create it if it is absent.

        Called after `restore_checkpoint`, for applications with ``on_timer``.
        Optional: the default raises ``NotAllowed``, so that an application with ``on_timer`` is refused.
        """
        raise NotAllowed(
            f"{type(self).__name__} keeps no timers",
            shard=shard.id,
            hint="Implement Store.timer_table, or use SQLiteStore, RocksDBStore, JSONFileStore or SQLStore.",
        )

    @property
    def holds_timers(self) -> bool:
        """True if the state holds timers. Then an application without ``on_timer`` may not open the state."""
        return False

    @abstractmethod
    def destroy(self) -> None:
        """Release files and connections. Called once, even if the shard failed.

        Do not wait for a pending commit: its appends may have failed before this call, and other futures may
        never be done.
        """


class StateView(ABC):
    """A shard's state on a hot standby, which answers queries that allow stale answers.

    A store that can be read without its log has a view (``SQLiteStore.view``). One thread at a time calls the
    methods of the view, but not always the same thread. Calls may block, except ``release``.
    """

    @abstractmethod
    def refresh(self, files: PlayedFiles) -> Any:
        """Return a reader of the state in ``files``. Queries get this reader in place of the primary's store.

        ``files`` are the shard's files at the end of an append. They do not change during the call. Queries
        may use an earlier reader until the shard calls ``release`` with that reader.
        """

    @abstractmethod
    def release(self, reader: Any) -> None:
        """Release a reader of ``refresh`` that no query uses any more. Called on the event loop."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections, but not readers: queries may use a reader until ``release``."""


class Application(ABC, Generic[StoreT]):
    """The base class of applications: implement ``new_store`` and ``consume_message``, and pass an object of
    your class to ``runconsumer.main``.

    One object serves all shards of the process, each from its own thread. Keep the application's
    state in the store, or guard it by a lock.
    """

    message_type: type[Any] | None = None
    """Type that sources decode to; None: override ``message_type_of``.

    A `gazette.Message` (or any ``msgspec.Struct``), dataclass, pydantic model or protobuf class.
    """

    config_groups: ClassVar[Mapping[str, type]] = {}
    """Settings of the application, by the name of their group.

    A group is a frozen dataclass with fields made by `gazette.config.setting`. Their flags, environment
    names and file keys work like the runtime's own."""

    application_name: ClassVar[str] = ""
    """Name of the application in etcd and in its states. Empty: module and name of the class."""

    deliver_acks: bool = False
    """True to deliver transaction acknowledgements of producers as messages."""

    batch_callback: ClassVar[str] = "consume_messages"
    """Name, in errors, of the callback that gets batches. `gazette.TableApplication` has another callback."""

    event_time: ClassVar[EventTime | None] = None
    """Rules that derive the watermark from messages. If None, timers of event time are refused."""

    async def initialize(self, service: ConsumerService) -> None:
        """Prepare the application. Called once on the event loop, before this member takes any shard.

        Register gRPC services (``service.grpc_server``) and HTTP routes (``service.add_route``)
        here, and read settings (``service.config``). Must not block.
        """

    def message_type_of(self, journal: JournalSpec) -> type[Any]:
        """Return the type of the messages of a source journal. By default return ``message_type``, or raise
        ``GazetteError`` if that is not set."""
        if self.message_type is None:
            raise GazetteError(
                f"{type(self).__name__} has no message_type",
                hint="Set the class attribute message_type, or override message_type_of().",
                journal=journal.name,
            )
        return self.message_type

    def uuid_place_of(self, journal: JournalSpec) -> str:
        """Return the place of the UUID in messages of a journal, such as ``_meta.uuid``.

        By default return the value of the journal's label ``app.gazette.dev/message-uuid``. An empty text
        stands for the class attribute ``gazette_uuid`` of the type, or else its field ``uuid``. A `Source`
        with ``uuid=`` overrides this.
        """
        return journal.labels.value_of(MESSAGE_UUID) or ""

    def message_time_of(self, journal: JournalSpec) -> MessageTime | None:
        """Return the place of the time in messages of a source journal, or None for the publisher's clock.

        A message without a usable time is an error of that message: see `poison_policy`. By default return
        None. A `Source` with ``time=`` overrides this.
        """
        return None

    def keyed_journals(self) -> LabelSelector | None:
        """Return the selector of the partitions to which publishers map messages by key.

        The partition's number is the hash of the key modulo the number of partitions, as with
        `gazette.message.mapping.modulo_mapping`. Routes and RPCs with a ``key`` find their shard in this way.
        By default return None. A `Source` with a key overrides this.
        """
        return None

    def key_encoding(self) -> KeyEncoding:
        """Return the encoding for the key of a request, which may come as text. By default, the Python type
        of the key decides. A `Source` with a key overrides this with the encoding of the declared type.
        """
        return ANY

    def key_place(self, journal: str) -> KeyPlace | None:
        """Return the keys that belong to a source journal. By default return None, for all keys. A `Source`
        with a key overrides this."""
        return None

    def poison_policy(self, shard: Shard) -> PoisonPolicy | None:
        """Return the policy for messages that do not decode or cannot be consumed. For None, the shard fails.

        Called once per promotion. By default return the policy of the shard's labels: see
        `PoisonPolicy.of_labels`."""
        return PoisonPolicy.of_labels(shard.spec.labels)

    def array_pass(self, shard: Shard) -> ArrayPass | None:
        """Return the `ArrayPass` that decodes and sequences messages in arrays. By default return None:
        messages are handled one by one. `gazette.TableApplication` overrides this."""
        return None

    @abstractmethod
    def new_store(self, shard: Shard, recorder: Recorder | None) -> StoreT:
        """Open the shard's store. Called once per promotion, after play-back of the recovery log.

        ``recorder`` is None if the specification names no recovery log: then the store keeps its state
        elsewhere. With a log, the recorder's ``directory`` holds the files that were played back.
        """

    def new_view(self, shard: Shard, directory: Path) -> StateView | None:
        """Return the view from which hot standbys of the shard answer queries that allow stale answers.

        If None, standbys answer no queries. ``directory`` is empty, and belongs to the view. A standby calls
        this at its first query, and at later queries until this returns a view. An example: ``return
        MyStore.view(directory)``.
        """
        return None

    @abstractmethod
    def consume_message(
        self, shard: Shard, store: StoreT, envelope: Envelope[Any], publisher: Publisher
    ) -> None:
        """Handle one committed message. Called for each message, in order per journal and producer. A message
        comes again if it was deferred, or if its transaction failed: only one call takes effect."""

    def consume_messages(
        self,
        shard: Shard,
        store: StoreT,
        batch: Sequence[Envelope[Any]],
        publisher: Publisher,
    ) -> None:
        """Handle some committed messages, in order. The default calls ``consume_message`` for each. Override
        this if work per batch is cheaper than per message. ``DeferToNextTransaction`` undoes the call's
        changes of the store and its uncommitted publishes. The runtime then delivers the batch in halves. The
        transaction ends before the first message that is deferred alone. A store without savepoints cannot
        undo changes: for such a store, raise the exception before any change.
        """
        consume = self.consume_message
        for envelope in batch:
            if (result := consume(shard, store, envelope, publisher)) is not None:
                require_none("consume_message", result)

    def on_timer(self, shard: Shard, store: StoreT, timer: Timer, publisher: Publisher) -> None:
        """Handle a timer that is due. Define this to use `Shard.schedule`: the default raises ``NotAllowed``.

        Called within a transaction, once for each timer, in each domain in order of their times. The same
        transaction removes the timer: schedule it again to repeat it. A new timer that is set here for the
        time of ``timer`` or before waits for the next transaction, or until messages were consumed. Must not
        raise ``DeferToNextTransaction``.
        """
        raise NotAllowed(f"{type(self).__name__} defines no on_timer")

    def begin_transaction(self, shard: Shard, store: StoreT) -> None:
        """Prepare for a transaction. Called before its first message or timer. May block."""

    def finalize_transaction(self, shard: Shard, store: StoreT, publisher: Publisher) -> None:
        """Publish and flush all that you have buffered. Called after the last message of a transaction."""

    def finished_transaction(self, shard: Shard, store: StoreT, commit: OpFuture[Any]) -> None:
        """Observe the commit. Called for every transaction whose ``begin_transaction`` returned.

        ``commit`` is the future of ``Store.start_commit``, or a failed future if the transaction failed
        before it.
        """


class MessageProducer(ABC):
    """Mixin *beside* `Application` for an application that brings the messages of its shards.

    The shards then read no sources: messages come from other systems, or are generated. Declare ``class
    Mine(Application[MyStore], MessageProducer)``. Each message is an `Envelope` with the name of a journal,
    which need not exist. The checkpoint holds how far each journal was read. Messages with a clock are
    sequenced as usual: duplicates are dropped, and pending messages wait for their acknowledgement.
    """

    @abstractmethod
    def start_reading(self, shard: Shard, store: Any, checkpoint: Checkpoint, feed: Feed) -> None:
        """Start to put messages into ``feed``, from the offsets of ``checkpoint`` on.

        Called on the shard's thread, once per promotion and again after each ``feed.close()``. This call must
        return: let another thread put the messages. The shard may be stopped at any time. Your thread must
        end once ``feed.closed`` is True; ``put`` then raises ``Closed``.
        """

    @abstractmethod
    def replay(
        self, shard: Shard, store: Any, journal: str, begin: int, end: int
    ) -> Iterator[Sequence[Envelope[Any]]]:
        """Yield the messages of [begin, end) of a journal again, exactly as they were put.

        Called on the shard's thread, for a transaction with more messages than the shard's ring holds.
        """

    def read_through(
        self, shard: Shard, store: Any, offsets: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Return the offsets that the shard must reach before it answers a query that asks for ``offsets``.

        By default return the same offsets. Any thread may call this.
        """
        return offsets


def checked_store(store: object) -> Store:
    """Return the result of ``new_store``. Raise ``ApplicationFailed`` or ``Invalid`` if it is no store."""
    methods = (
        "start_commit",
        "restore_checkpoint",
        "savepoint",
        "classify_error",
        "timer_table",
        "destroy",
    )
    require_instance("new_store", store, Store, methods)
    assert isinstance(store, Store)
    return store


def checked_view(view: object) -> StateView | None:
    """Return the result of ``new_view``. Raise ``ApplicationFailed`` or ``Invalid`` if it is no view."""
    if view is None:
        return None
    require_instance("new_view", view, StateView, ("refresh", "release", "close"))
    assert isinstance(view, StateView)
    return view
