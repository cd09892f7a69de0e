"""The contract between the consumer runtime and applications: `Application`, `Store`, `Shard`.

An application is a set of plain synchronous callbacks. Each shard calls the callbacks of its store and its
transactions from its own thread, in a fixed order. So these callbacks may block: they delay their own shard
and nothing else. Callbacks that describe journals, such as ``message_type_of``, are also called on the event
loop, and must not block.

The life of one transaction, as a shard sees it:

    begin_transaction              at the first message, or the first timer that is due
    consume_messages …             the default calls consume_message for each
    on_timer …                     for each timer that is due
    finalize_transaction           publish and flush what is still buffered
    Store.start_commit             the store's state and the checkpoint, as one
    finished_transaction           with the future of that commit

The next transaction begins while the former commits and is acknowledged. An exception in a callback ends the
shard, and undoes the running transaction. The shard is reported as FAILED, with the text of the exception. A
`PoisonPolicy` may skip the message instead. `DeferToNextTransaction` is the one exception with another
meaning.
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

    Raise it before any effect: the effects of ``consume_message`` stay. For batches see ``consume_messages``.

    An application must not defer the first message of a transaction: the transaction would be empty, and the
    message deferred for ever.
    """

    default_hint = "Raise it only after the transaction has consumed a message."


@runtime_checkable
class Shard(Protocol):
    """The shard that a callback runs for, with all that the callback may read and do there."""

    @property
    def id(self) -> str:
        """Name of the shard: unique within its application."""
        ...

    @property
    def fqn(self) -> str:
        """Key of the shard's specification in etcd: unique over the applications of a cluster."""
        ...

    @property
    def spec(self) -> ShardSpec:
        """The specification in force when the callback was called."""
        ...

    def publish_future(self, future: OpFuture[Any]) -> None:
        """Make the commit of the running transaction wait for ``future`` too."""
        ...

    @property
    def now(self) -> datetime:
        """Processing time in UTC: the clock of the member, which tests control. Never goes back within a
        promotion.

        This property, ``watermark``, ``schedule`` and ``cancel`` need an application with ``on_timer``.
        """
        ...

    @property
    def watermark(self) -> datetime | None:
        """Event time in UTC that the sources have reached; None until each that is not idle had a message.

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

        Replace the timer of the same key and domain. The timer is a part of the running
        transaction: it commits with the state. Call it within the callbacks of a transaction.

        ``key`` has 1 to 1,024 bytes, ``payload`` 64 KiB at most. Raise ``InvalidValue`` for other lengths,
        and for a time without zone, or outside of the years 1 to 9999. Raise ``NotAllowed`` if nothing would
        fire the timer, outside of a transaction, and on another thread.
        """
        ...

    def cancel(self, key: str, *, domain: TimeDomain = TimeDomain.PROCESSING) -> None:
        """Remove a timer, if it exists: it does not fire, even if it is due. Errors: those of `schedule`."""
        ...


class Savepoint(Protocol):
    """A point made by `Store.savepoint`. The runtime calls one of its methods, once; none if an error ends
    the shard."""

    def release(self) -> None:
        """Keep the changes since the savepoint."""
        ...

    def roll_back(self) -> None:
        """Undo the changes since the savepoint."""
        ...


class Store(ABC):
    """A shard's state. Every method is called from the thread of its shard, `classify_error` also on the
    event loop.

    The contract that makes transactions exact:

    - ``start_commit`` makes the state and the checkpoint durable *together*, and not before every
      future of ``wait_for`` succeeded. It must not block on these futures: it returns a future of its own.
    - ``start_commit`` is not called again before the former commit's future is done. Messages of the next
      transaction are consumed meanwhile.
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
        """Return the checkpoint of the last commit, or an empty one. Without a recovery log, fence older
        owners here."""

    def savepoint(self) -> Savepoint:
        """Return a savepoint of the running transaction. Begin a transaction if none runs.

        The runtime rolls back to the savepoint before it skips a poison message, and after a batch was
        deferred. One savepoint is open at a time. A store need not override this method, which raises
        ``NotAllowed``. A shard of such a store permits only a `PoisonPolicy` with ``malformed_only``.
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
        message is sure to raise the error again, such as a violated constraint. A `PoisonPolicy` skips
        messages for this cause only. After `ErrorCause.ABORTED` the shard is restarted, a few times at most.

        Called on the shard's thread. Also called on the event loop once the shard has failed: do not block.
        Optional: a store without this method can have no full `PoisonPolicy`.
        """
        return ErrorCause.STORE

    @property
    def classifies_errors(self) -> bool:
        """True if `classify_error` is implemented."""
        return type(self).classify_error is not Store.classify_error

    def timer_table(self, shard: Shard) -> TimerTable:
        """Return the table of the shard's timers. Create it if it is absent.

        Called after `restore_checkpoint`, for applications with ``on_timer``.
        Optional: this default raises ``NotAllowed``, which refuses such an application.
        """
        raise NotAllowed(
            f"{type(self).__name__} keeps no timers",
            shard=shard.id,
            hint="Implement Store.timer_table, or use SQLiteStore, RocksDBStore, JSONFileStore or SQLStore.",
        )

    @property
    def holds_timers(self) -> bool:
        """True if the state holds timers. An application without ``on_timer`` may not open such a state."""
        return False

    @abstractmethod
    def destroy(self) -> None:
        """Release files and connections. Called once, even if the shard failed.

        Must not wait for a pending commit: its appends may have failed before this call, and other futures
        may never be done.
        """


class StateView(ABC):
    """A shard's state on a hot standby, which answers queries that allow stale answers.

    A store that can be read without its log has a view (``SQLiteStore.view``). One thread at a time calls its
    methods, not always the same thread. Calls may block, except ``release``.
    """

    @abstractmethod
    def refresh(self, files: PlayedFiles) -> Any:
        """Return a reader of the state in ``files``. Queries get this reader in place of the primary's store.

        ``files`` are the shard's files at the end of an append. The files do not change during the call.
        Queries may use an earlier reader until ``release`` is called with it.
        """

    @abstractmethod
    def release(self, reader: Any) -> None:
        """Release a reader that ``refresh`` returned: no query uses it any more. Called on the event loop."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections, but not readers: queries still use those that were not released."""


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
    """Name of the callback that gets batches, for errors. `gazette.TableApplication` has another one."""

    event_time: ClassVar[EventTime | None] = None
    """Rules that derive the watermark from messages. None: there are no timers of event time."""

    async def initialize(self, service: ConsumerService) -> None:
        """Prepare the application. Called once on the event loop, before this member takes any shard.

        Register gRPC services (``service.grpc_server``) and HTTP routes (``service.add_route``)
        here, and read settings (``service.config``). Must not block.
        """

    def message_type_of(self, journal: JournalSpec) -> type[Any]:
        """Return the type that messages of a source journal decode to. Default: ``message_type``, or raise
        ``GazetteError`` if it is not set."""
        if self.message_type is None:
            raise GazetteError(
                f"{type(self).__name__} has no message_type",
                hint="Set the class attribute message_type, or override message_type_of().",
                journal=journal.name,
            )
        return self.message_type

    def uuid_place_of(self, journal: JournalSpec) -> str:
        """Return where messages of a journal have their UUID, such as ``_meta.uuid``.

        Default: the label ``app.gazette.dev/message-uuid`` of the journal. An empty text stands for the class
        attribute ``gazette_uuid`` of the type, or else its field ``uuid``. A `Source` with ``uuid=``
        overrides this.
        """
        return journal.labels.value_of(MESSAGE_UUID) or ""

    def message_time_of(self, journal: JournalSpec) -> MessageTime | None:
        """Return where messages of a source journal have their time, or None for their publisher's clock.

        A message without a usable time is an error of that message: see `poison_policy`. Default: None. A
        `Source` with ``time=`` overrides this.
        """
        return None

    def keyed_journals(self) -> LabelSelector | None:
        """Return the selector of the partitions to which publishers map messages by key.

        The partition's number is the hash of the key modulo the number of partitions, as with
        `gazette.message.mapping.modulo_mapping`. Routes and RPCs with a ``key`` find their shard so.
        Default: None. A `Source` with a key overrides this.
        """
        return None

    def key_encoding(self) -> KeyEncoding:
        """Return how the key of a request is encoded: the key may come as text. Default: by its Python type.

        A `Source` with a key overrides this with the encoding of the key's declared type.
        """
        return ANY

    def key_place(self, journal: str) -> KeyPlace | None:
        """Return which keys belong to a source journal. Default: None, for all keys. A `Source` with a key
        overrides this."""
        return None

    def poison_policy(self, shard: Shard) -> PoisonPolicy | None:
        """Return what to do with messages that do not decode or cannot be consumed; None: the shard fails.

        Called once per promotion. Default: the policy of the shard's labels, see `PoisonPolicy.of_labels`.
        """
        return PoisonPolicy.of_labels(shard.spec.labels)

    def array_pass(self, shard: Shard) -> ArrayPass | None:
        """Return how the shard decodes and sequences messages in arrays. Default: None, one by one.
        `gazette.TableApplication` overrides this."""
        return None

    @abstractmethod
    def new_store(self, shard: Shard, recorder: Recorder | None) -> StoreT:
        """Open the shard's store. Called once per promotion, after play-back of the recovery log.

        ``recorder`` is None exactly if the specification names no recovery log: then the store keeps
        its state elsewhere. With a log, the recorder's ``directory`` holds the files that were played back.
        """

    def new_view(self, shard: Shard, directory: Path) -> StateView | None:
        """Return the view from which hot standbys of the shard answer queries that allow stale answers.

        None: standbys answer no queries. ``directory`` is empty, and belongs to the view. Called at the first
        such query of a standby, and again until it returns a view. An example: ``return
        MyStore.view(directory)``.
        """
        return None

    @abstractmethod
    def consume_message(
        self, shard: Shard, store: StoreT, envelope: Envelope[Any], publisher: Publisher
    ) -> None:
        """Handle one committed message. Called for each, in order per journal and producer. A message comes
        again if it was deferred, or if its transaction failed: only one call takes effect."""

    def consume_messages(
        self,
        shard: Shard,
        store: StoreT,
        batch: Sequence[Envelope[Any]],
        publisher: Publisher,
    ) -> None:
        """Handle some committed messages, in order. The default calls ``consume_message`` for each. Override
        this where work per batch is cheaper than per message. ``DeferToNextTransaction`` undoes the call's
        changes of the store and its uncommitted publishes. The runtime then delivers the batch in halves. The
        transaction ends before the first message that is deferred alone. A store without savepoints cannot
        undo: with it, raise the exception before any change.
        """
        consume = self.consume_message
        for envelope in batch:
            if (result := consume(shard, store, envelope, publisher)) is not None:
                require_none("consume_message", result)

    def on_timer(self, shard: Shard, store: StoreT, timer: Timer, publisher: Publisher) -> None:
        """Handle a timer that is due. Define this to use `Shard.schedule`: the default raises ``NotAllowed``.

        Called within a transaction, once for each timer, in each domain in order of their times. The same
        transaction removes the timer: schedule it again to repeat it. A timer that is set here for the time
        of ``timer`` or before waits for the next transaction, or until messages were consumed. Must not raise
        ``DeferToNextTransaction``.
        """
        raise NotAllowed(f"{type(self).__name__} defines no on_timer")

    def begin_transaction(self, shard: Shard, store: StoreT) -> None:
        """Prepare for a transaction. Called before its first message or timer. May block."""

    def finalize_transaction(self, shard: Shard, store: StoreT, publisher: Publisher) -> None:
        """Publish and flush what is buffered. Called after the last message of a transaction."""

    def finished_transaction(self, shard: Shard, store: StoreT, commit: OpFuture[Any]) -> None:
        """Observe the commit. Called after every ``begin_transaction`` that returned.

        ``commit`` is the future of ``Store.start_commit``, or a failed future if the transaction failed
        before.
        """


class MessageProducer(ABC):
    """Mixin *beside* `Application` for an application that brings the messages of its shards.

    The shards then read no sources: messages come from other systems, or are generated. Declare ``class
    Mine(Application[MyStore], MessageProducer)``. Each message is an `Envelope` with the name of a journal,
    which need not exist. The checkpoint holds how far each journal was read. Messages with a clock are
    sequenced as usual: duplicates are dropped, and pending ones wait for their acknowledgement.
    """

    @abstractmethod
    def start_reading(self, shard: Shard, store: Any, checkpoint: Checkpoint, feed: Feed) -> None:
        """Start to put messages into ``feed``, from the offsets of ``checkpoint`` on.

        Called on the shard's thread, once per promotion and again after each ``feed.close()``. This call must
        return: let another thread put the messages. The shard may be stopped at any time. That thread must
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

        Default: the same offsets. Any thread may call this.
        """
        return offsets


def checked_store(store: object) -> Store:
    """Return what ``new_store`` returned. Raise ``ApplicationFailed`` or ``Invalid`` if it is not a store."""
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
    """Return what ``new_view`` returned. Raise ``ApplicationFailed`` or ``Invalid`` if it is not a view."""
    if view is None:
        return None
    require_instance("new_view", view, StateView, ("refresh", "release", "close"))
    assert isinstance(view, StateView)
    return view
