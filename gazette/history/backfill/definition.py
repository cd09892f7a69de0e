"""`Backfill`, which an application defines for its backfill, and the default replay of messages.

A backfill folds the history of a shard's sources away from the shard. The application defines a class for it
beside its `Application`:

    class WordCountBackfill(Backfill):
        application = WordCount

        def build(self, shard, store, messages):
            counts = Counter()
            for batch in messages:
                for envelope in batch:
                    counts[envelope.message.word] += 1
            store.executemany("INSERT INTO counts VALUES (?, ?)", sorted(counts.items()))

Without ``build``, the application consumes the messages, as on a live shard. This gives the right state for
every application that does not publish, and is as slow as the application.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from gazette.consumer.application import Application, DeferToNextTransaction
from gazette.consumer.contract.callbacks import require_none
from gazette.consumer.contract.key_check import KeyChecks
from gazette.consumer.transaction.dispatch import deliver_in_halves
from gazette.consumer.transaction.shard_timers import ShardTimers
from gazette.errors import GazetteError, Invalid, NotAllowed
from gazette.message.envelope import Envelope
from gazette.message.mapping import Mapping, PartitionsFunc
from gazette.message.message_time import MessageTime
from gazette.protocol.journal import JournalSpec
from gazette.runtime.tasks import resolved
from gazette.stores.state_builder import OfflineShard

Batches = Iterator[Sequence[Envelope[Any]]]

REPLAY_MESSAGES: Final = 1 << 18
"""Number of messages after which a replay commits its transaction."""
REPLAY_TIMERS: Final = 1 << 10
"""Greatest number of timers that a replay takes from the store at once."""


class Backfill:
    """Subclass, set ``application``, and pass the class to ``gazctl shards backfill module:Class``.

    Every process that builds states creates one object of the class, without arguments.
    """

    application: ClassVar[Callable[[], Application[Any]]]
    """Function that makes the application, usually its class. Its ``new_store`` opens the store to build."""

    history: ClassVar[str] = ""
    """Selector of the journals with the history. Empty: each shard's own sources.

    With a selector, ``mapping`` says to which shard a message belongs. Then shards consume their sources
    from the begin. So no message may be in both the history and a source.
    """

    partitions: ClassVar[str] = ""
    """With a ``history``: selector of the journals that the publisher's mapping chooses from."""

    uuid_field: ClassVar[str] = ""
    """Place of the UUID in messages, with dots between nested fields. Empty: the place that a `Source` or
    the journal's label says, or else the place in the messages' type."""

    discard_publications: ClassVar[bool] = False
    """True to drop the application's publications in a replay: the live shard has published them already.

    False: publishing is an error. If the application publishes, set True beside a ``build``, too. Then the
    history must end where the replaced state ends. Otherwise messages would be lost or published twice.
    """

    def new_application(self) -> Application[Any]:
        """Return the application whose store is built. Raise ``Invalid`` if ``application`` is missing."""
        make = getattr(type(self), "application", None)
        if make is None:
            raise Invalid(
                f"{type(self).__name__} has no application",
                hint="Set the class attribute application to your Application's class.",
            )
        application: Application[Any] = make()
        return application

    def message_type_of(self, application: Application[Any], journal: JournalSpec) -> type[Any]:
        """Return the type that messages decode to. Default: the application's type. A type with fewer fields
        decodes faster."""
        return application.message_type_of(journal)

    def message_time_of(
        self, application: Application[Any], journal: JournalSpec
    ) -> MessageTime | None:
        """Return where messages of a journal have their time. Default: the application's declaration.

        None: their time is the clock of their publisher. Override this method for journals of a ``history``
        that are not sources of the application.
        """
        return application.message_time_of(journal)

    def mapping(self, partitions: PartitionsFunc) -> Mapping[Any] | None:
        """Return the publisher's function from a message to one of ``partitions``. Needed with a ``history``.

        A message of the history belongs to the shards that have its partition as a source. Use
        `modulo_mapping` or `rendezvous_mapping`: a random mapping chooses differently each time.
        """
        return None

    def build(self, shard: OfflineShard, store: Any, messages: Batches) -> None:
        """Build the state of one shard from its committed messages, in order per journal.

        ``store`` is the result of ``new_store``, and is empty. After this call, it is committed with the
        checkpoint. Call ``shard.commit()`` earlier if the changes do not fit into memory.
        """
        replay(self.new_application(), shard, store, messages, discard=self.discard_publications)

    fields: ClassVar[str] = ""
    """Fields of messages that ``fold`` reads, as in CREATE TABLE: ``word string, n long``."""

    meta: ClassVar[Sequence[str]] = ()
    """Columns of metadata that ``fold`` reads too, for example if the order of messages matters.

    They are ``_journal``, ``_offset``, ``_clock`` and so on: a table's columns with ``_`` before the name.
    """

    order: ClassVar[Sequence[str]] = ()
    """Columns by which the rows for ``load`` are sorted. Default: all columns that ``fold`` returns."""

    def combine(self, rows: Any) -> Any:
        """Combine rows of one journal before ``fold``, on Spark. This must not change the result of ``fold``.

        ``rows`` is a ``pyarrow.Table`` of ``fields`` and ``meta``. The result must be a table too, for
        example with sums instead of summands. Spark may pass any of the rows, even rows that never commit,
        and earlier results of this method. If this method raises, the run is read again, and this method gets
        only committed rows. Without this method, the history is read twice, and all rows of a task go to
        Java: this is most of the cost of a fold.
        """
        return rows

    def fold(self, frame: Any) -> Any:
        """Fold the committed rows of all shards as a DataFrame, on Spark.

        The frame has the columns of ``fields`` and ``meta``, and ``shard``. The result must have ``shard``
        too. Then ``load`` gets each shard's rows. Without this method, ``build`` is called on Spark, too.
        """
        return frame

    def load(self, shard: OfflineShard, store: Any, batches: Iterator[Any]) -> None:
        """Write the result of ``fold`` for one shard, on Spark: Arrow record batches, in ``order``.

        A class with ``fold`` must implement this. The default raises ``Invalid``.
        """
        raise Invalid(
            f"{type(self).__name__} has a fold(), but no load() for its result",
            hint="Implement load(shard, store, batches).",
        )

    def clear(self, shard: OfflineShard, store: Any) -> None:
        """Remove the shard's state from a shared database (`SQLStore`), by ``store.execute``.

        Called with ``--overwrite``, if the database has a state of the shard. These statements and the new
        state are one transaction. The default raises ``Invalid``.
        """
        raise Invalid(
            "the shard has a state already, and the backfill does not say how to remove it",
            shard=shard.id,
            hint="Implement clear(), which removes the shard's rows, or remove them yourself.",
        )

    def content(self, shard: OfflineShard, store: Any) -> Iterable[Any]:
        """Yield the values that ``--verify`` compares, in order. Default: `gazette.history.backfill.content`.

        Implement this method for a shared database (`SQLStore`). Yield the rows of this shard, read by
        ``store.execute``: the transaction is not committed yet, and other connections do not see it.
        """
        from gazette.history.backfill.content import content_of

        return content_of(store)


def load_backfill(name: str | Backfill) -> Backfill:
    """Return the backfill of ``module:Class`` or ``path.py:Class``, or ``name`` if it is a `Backfill`.

    For an `Application`, return a backfill that replays messages through it. Raise ``Invalid`` if the class
    cannot be imported, or is neither.
    """
    if isinstance(name, Backfill):
        return name
    module_name, separator, class_name = name.rpartition(":")
    if not separator or not module_name or not class_name:
        raise Invalid(f"not a backfill ({name!r}; expected module:Class)", path="APP")
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        sys.path.insert(0, str(path.parent))
        module_name = path.stem
    elif "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise Invalid(
            f"cannot import {module_name}: {error}",
            path="APP",
            hint="Set PYTHONPATH, or run this where the module is.",
        ) from error
    member = getattr(module, class_name, None)
    if member is None:
        bases = (Backfill, Application)
        class_names = sorted(
            member_name
            for member_name, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, bases) and value not in bases
        )
        raise Invalid(
            f"{module_name} has no {class_name}",
            path="APP",
            hint=f"It has {', '.join(class_names)}."
            if class_names
            else "It has no Backfill, and no Application.",
        )
    if inspect.isclass(member) and issubclass(member, Backfill):
        return member()
    if inspect.isclass(member) and issubclass(member, Application):
        return _of_application(member)
    raise Invalid(f"{name} is neither a Backfill nor an Application", path="APP")


def _of_application(application: type[Application[Any]]) -> Backfill:
    """Return a backfill that replays messages through an application."""
    subclass = type(f"{application.__name__}Backfill", (Backfill,), {"application": application})
    backfill: Backfill = subclass()
    return backfill


class _NoPublisher:
    """The publisher of a replayed application: it drops all messages, or raises ``NotAllowed``."""

    def __init__(self, *, discard: bool) -> None:
        self._discard = discard

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("publish"):
            raise AttributeError(name)
        if self._discard:
            return lambda *_args, **_kwargs: resolved(None)
        raise NotAllowed(
            "the application publishes, and a backfill would publish its history again",
            hint="Set discard_publications = True in the Backfill, or implement build().",
        )


def replay(
    application: Application[Any],
    shard: OfflineShard,
    store: Any,
    messages: Batches,
    *,
    discard: bool = False,
) -> None:
    """Have an application consume committed messages, in transactions of many messages.

    The caller commits the last transaction. Raise errors of callbacks, ``Invalid`` if the application needs
    acknowledgements, and ``NotAllowed`` if it publishes and ``discard`` is false. Raise `Misplaced` for a
    message for which a shard would fail.
    """
    if application.deliver_acks:
        raise Invalid(
            f"{type(application).__name__} needs acknowledgements, which a backfill leaves out",
            hint="Implement build() of the Backfill.",
        )
    publisher: Any = _NoPublisher(discard=discard)
    bulk = type(application).consume_messages is not Application.consume_messages
    undoes = bulk and store.has_savepoints and shard.commits_on_the_way
    transaction = _Transaction(application, shard, store, publisher, undoes=undoes)
    checks = KeyChecks(application.key_place)
    for batch_read in messages:
        batch = checks.consumed(batch_read)
        if not batch:
            continue
        if shard.timers is not None:
            for envelope in batch:
                transaction.consume_with_timers(shard.timers, envelope)
            continue
        parts: Iterable[Sequence[Envelope[Any]]] = (batch,) if bulk else ((one,) for one in batch)
        for part in parts:
            transaction.consume(part)
    transaction.finalize()


class _Transaction:
    """The transactions of a replay, one after the other."""

    def __init__(
        self,
        application: Application[Any],
        shard: OfflineShard,
        store: Any,
        publisher: Any,
        *,
        undoes: bool,
    ) -> None:
        self._application = application
        self._undoes = undoes
        self._shard = shard
        self._store = store
        self._publisher = publisher
        self._consumed = 0
        self._running = False

    def consume(self, messages: Sequence[Envelope[Any]]) -> None:
        """Let the application consume messages. As on a shard, a deferred message ends the transaction."""
        if self._consumed >= REPLAY_MESSAGES and self._shard.commits_on_the_way:
            self._commit()
        while (count := self._deliver(messages)) < len(messages):
            messages = messages[count:]
            self._require_deferrable(messages[0])
            self._commit()

    def consume_with_timers(self, timers: ShardTimers, envelope: Envelope[Any]) -> None:
        """Let the application consume a message at the message's time. Fire the timers that are due before
        the message, and after it the timers that are due then."""
        self._shard.advance(envelope)
        self._fire(timers)
        timers.begin_pass()
        self.consume((envelope,))
        self._shard.observe((envelope,))
        self._fire(timers)

    def _fire(self, timers: ShardTimers) -> None:
        """Let all timers fire that are due, and all that become due meanwhile."""
        while timers.is_due(ready=False) and timers.confirm_due():
            self._begin()
            for timer in timers.fire(REPLAY_TIMERS):
                result: object = self._application.on_timer(  # type: ignore[func-returns-value]
                    self._shard, self._store, timer, self._publisher
                )
                require_none("on_timer", result)
                self._consumed += 1

    def _require_deferrable(self, message: Envelope[Any]) -> None:
        """Raise ``GazetteError`` if the transaction has consumed nothing: the next transaction would defer
        the message again. Raise ``Invalid`` if the store cannot commit before the end."""
        facts: dict[str, Any] = {
            "journal": message.journal,
            "begin": message.begin,
            "end": message.end,
        }
        if not self._consumed:
            raise GazetteError(
                "the first message of a transaction was deferred to the next",
                hint=DeferToNextTransaction.default_hint,
                shard=self._shard.id,
                **facts,
            )
        if not self._shard.commits_on_the_way:
            raise Invalid(
                "the application defers messages, and its store cannot commit before the end "
                "of the build",
                shard=self._shard.id,
                hint="Implement build() of the Backfill.",
                **facts,
            )

    def _deliver(self, messages: Sequence[Envelope[Any]]) -> int:
        """Let the application consume messages up to the first one that it defers. Return their number."""
        self._begin()
        return deliver_in_halves(messages, self._attempt)

    def _begin(self) -> None:
        if not self._running:
            result: object = self._application.begin_transaction(self._shard, self._store)  # type: ignore[func-returns-value]
            self._running = True
            require_none("begin_transaction", result)

    def _attempt(self, messages: Sequence[Envelope[Any]]) -> int:
        """Let the application consume messages. If it defers, undo its changes, if the store can. Without
        savepoints, it may defer only before any change, as on a shard."""
        savepoint = self._store.savepoint() if self._undoes else None
        try:
            result: object = self._application.consume_messages(  # type: ignore[func-returns-value]
                self._shard, self._store, messages, self._publisher
            )
        except DeferToNextTransaction:
            if savepoint is not None:
                savepoint.roll_back()
            raise
        require_none("consume_messages", result)
        if savepoint is not None:
            savepoint.release()
        self._consumed += len(messages)
        return len(messages)

    def finalize(self) -> None:
        """End the transaction, if one is running, for the commit that follows."""
        if self._running:
            result: object = self._application.finalize_transaction(  # type: ignore[func-returns-value]
                self._shard, self._store, self._publisher
            )
            require_none("finalize_transaction", result)
            self._running = False
            self._consumed = 0

    def _commit(self) -> None:
        self.finalize()
        commit = self._shard.commit()
        self._application.finished_transaction(self._shard, self._store, commit)
