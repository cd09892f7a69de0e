"""One task of a backfill: build the state of one shard, and stage it.

A task is a value that any runner can run: a thread, a process, an executor of a Spark cluster. Any number of
attempts of a task may run, even at the same time, and end at any time. Each attempt has its own objects, and
the manifest chooses one attempt.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from gazette.consumer.application import Application
from gazette.consumer.contract.key_check import KeyChecks
from gazette.consumer.transaction.shard_timers import defines_timers
from gazette.errors import Corrupt, Fenced, Invalid, NotAllowed, NotFound
from gazette.history.backfill.content import (
    Spooled,
    first_difference,
    in_transaction,
    timers_of,
)
from gazette.history.backfill.definition import Backfill, Batches, load_backfill, replay
from gazette.history.backfill.staging import Staging, open_staging, state_name
from gazette.history.merge import CommittedRun
from gazette.history.read import read_envelopes
from gazette.history.source import Access, OpenAccess
from gazette.labels import CONTENT_TYPE
from gazette.message.envelope import Envelope
from gazette.message.mapping import Mapping, Partition, Partitions
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.ids import split_journal_meta
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.scratch import BUILDS, scratch_directory, sweep
from gazette.runtime.clock import SystemClock
from gazette.runtime.failpoints import hit
from gazette.stores.claims import BackfillClaim
from gazette.stores.state_builder import BuiltState, OfflineShard, StateBuilder

_FRAGMENT_LENGTH: Final = 1 << 20
_MERGED_MESSAGES: Final = 256

OnRead = Callable[[int], None]
"""Function that is called with the number of bytes of the history that were read since its last call."""


def _ignore(_bytes: int) -> None:
    return None


@dataclass(frozen=True, slots=True)
class ShardTask:
    """The input for the state of one shard. ``backfill`` is a name, or an object that can be pickled."""

    backfill: str | Backfill
    spec: ShardSpec
    access: Access
    runs: tuple[CommittedRun, ...]
    """Runs of the history that may have messages of the shard, in the order of their journals."""
    checkpoint: Checkpoint
    staging: str
    run_id: str
    partitions: tuple[Partition, ...] = ()
    """Partitions that the publisher's mapping chooses from, if the history is not the shards' sources."""
    fqn: str = ""
    overwrite: bool = False
    scratch: Path | None = None
    claim: BackfillClaim | None = None
    """Claim of a shard whose state is in a database."""
    verify: bool = False
    """True to compare a state in a database with a replay before it is committed."""

    def load(self) -> Backfill:
        return load_backfill(self.backfill)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A state that was built and staged."""

    shard: str
    attempt: str
    built: BuiltState


def journal_spec(journal: str, content_type: str) -> JournalSpec:
    """Return a specification with the parts that an application may ask for: name and content type."""
    return JournalSpec(
        journal,
        1,
        LabelSet.of((CONTENT_TYPE, content_type)),
        FragmentSpec(length=_FRAGMENT_LENGTH),
    )


def read_messages(
    task: ShardTask, backfill: Backfill, access: OpenAccess, on_read: OnRead = _ignore
) -> Batches:
    """Return the committed messages of a task's shard, in order per journal. Errors: see `read_envelopes`.

    If the application has timers, merge journals by the clocks of publishers: a live shard gets messages in
    about that order. Windows and watermarks follow declared times, in any order of messages.
    """
    application = backfill.new_application()
    if not defines_timers(application):
        return _read_runs(task, task.runs, backfill, application, access, on_read)
    journals: dict[str, list[CommittedRun]] = {}
    for run in task.runs:
        journals.setdefault(run.run.journal, []).append(run)
    return merge_by_time(
        [
            _read_runs(task, runs, backfill, application, access, on_read)
            for runs in journals.values()
        ]
    )


def merge_by_time(journals: Sequence[Batches]) -> Batches:
    """Yield the messages of journals by the clocks of their publishers. Keep the order of each journal."""
    if len(journals) == 1:
        yield from journals[0]
        return
    flat = [chain.from_iterable(batches) for batches in journals]
    merged = heapq.merge(*flat, key=lambda envelope: envelope.clock)
    while batch := list(islice(merged, _MERGED_MESSAGES)):
        yield batch


def _read_runs(
    task: ShardTask,
    runs: Sequence[CommittedRun],
    backfill: Backfill,
    application: Application[Any],
    access: OpenAccess,
    on_read: OnRead,
) -> Batches:
    """Yield the shard's messages of runs. Report all bytes that were read, even those of other messages."""
    belongs = _filter(task, backfill)
    min_offsets = {split_journal_meta(s.journal)[0]: s.min_offset for s in task.spec.sources}
    for run in runs:
        journal = run.run.journal
        spec = journal_spec(journal, run.run.shape.content_type)
        message_type = backfill.message_type_of(application, spec)
        time = backfill.message_time_of(application, spec)
        min_offset = min_offsets.get(journal, 0)
        offset = run.run.pieces[0].begin
        for batch in read_envelopes(access, run, message_type, time):
            on_read(max(0, batch[-1].end - offset))
            offset = max(offset, batch[-1].end)
            messages: Sequence[Envelope[Any]] = batch
            if batch[0].begin < min_offset:
                messages = [envelope for envelope in batch if envelope.begin >= min_offset]
            if belongs is not None:
                messages = [envelope for envelope in messages if belongs(envelope)]
            if messages:
                yield messages
        on_read(max(0, run.run.end - offset))


def _filter(task: ShardTask, backfill: Backfill) -> Callable[[Envelope[Any]], bool] | None:
    """Return a test whether a message belongs to the shard; None if all messages belong to the shard."""
    if not backfill.history:
        return None
    mapping = shard_mapping(backfill, task.partitions)
    source_journals = {split_journal_meta(source.journal)[0] for source in task.spec.sources}
    return lambda envelope: mapping(envelope.message).journal in source_journals


def shard_mapping(backfill: Backfill, partitions: Sequence[Partition]) -> Mapping[Any]:
    """Return the publisher's mapping over ``partitions``. Raise ``Invalid`` if it has no mapping."""
    all_partitions = Partitions(sorted(partitions))
    mapping = backfill.mapping(lambda: all_partitions)
    if mapping is None:
        raise Invalid(
            f"{type(backfill).__name__} has its own history, but no mapping() to shards",
            hint="Return the publisher's mapping: modulo_mapping(partitions, key), for example.",
        )
    return mapping


def observed(shard: OfflineShard, batches: Batches) -> Batches:
    """Yield the same batches. Let the watermark follow each batch when the next batch is requested."""
    for batch in batches:
        yield batch
        shard.observe(batch)


def consumed(backfill: Backfill, batches: Batches) -> Batches:
    """Yield the messages that shards consume, without messages that shards have republished elsewhere.

    Raise `Misplaced` if a shard would fail. The default ``build`` needs no such check: `replay` has it.
    """
    if type(backfill).build is Backfill.build:
        return batches
    checks = KeyChecks(backfill.new_application().key_place)
    return filter(None, map(checks.consumed, batches))


def run_task(task: ShardTask, on_read: OnRead = _ignore) -> Attempt:
    """Build the shard's state from its messages, and stage it. Blocks. Errors: see `build_state`."""
    backfill = task.load()

    count = 0

    def counted(batches: Batches) -> Batches:
        nonlocal count
        for batch in batches:
            count += len(batch)
            yield batch

    def fill(builder: StateBuilder) -> int:
        with task.access.open() as access:
            messages = counted(read_messages(task, backfill, access, on_read))
            messages = consumed(backfill, observed(builder.shard, messages))
            backfill.build(builder.shard, builder.store, messages)
            # Read the messages that `build` has left, too: the watermark and the count need them.
            for _ in messages:
                pass
        return count

    return build_state(task, backfill, fill)


def build_state(
    task: ShardTask, backfill: Backfill, fill: Callable[[StateBuilder], int]
) -> Attempt:
    """Build a state by ``fill``, which returns the number of its messages, and stage the state. Blocks.

    Raise ``NotAllowed`` when the shard's database has a state already that must not be overwritten. Raise
    ``Fenced`` when an owner has opened that state since the run began. Raise the errors of ``fill`` and of
    the store, and ``Unavailable`` if the staging area fails. Always remove the build from the local disk.
    """
    staging = open_staging(task.staging)
    rng = random.SystemRandom()
    attempt = f"{rng.getrandbits(64):016x}"
    application: Application[Any] = backfill.new_application()
    # Remove directories of killed processes.
    sweep(task.scratch, SystemClock().now())
    with scratch_directory(BUILDS, task.scratch) as scratch:
        directory = scratch / "state"
        with StateBuilder(
            application, task.spec, directory, rng, fqn=task.fqn, claim=task.claim
        ) as builder:
            built = _build(task, backfill, fill, builder)
            hit("backfill.built", task.spec.id)
            return _stage(task, staging, attempt, builder, built)


def _build(
    task: ShardTask, backfill: Backfill, fill: Callable[[StateBuilder], int], builder: StateBuilder
) -> BuiltState:
    """Build the state, or take the state that an attempt of the run has committed in the database. Raise
    ``NotAllowed`` if there is another state, and ``overwrite`` is not set."""
    facts = {"verified": True} if task.verify else {}
    if task.claim is not None and builder.held.is_of(task.claim.token):
        # An earlier attempt has committed the state in the database.
        return builder.in_place(task.checkpoint, facts)
    try:
        if builder.held.checkpoint != Checkpoint():
            if not task.overwrite:
                raise has_state(task.spec.id)
            backfill.clear(builder.shard, builder.store)
            if (timers := builder.shard.timers) is not None:
                timers.clear()
                timers.begin()
        count = _fill_verified(task, backfill, fill, builder) if task.verify else fill(builder)
        return builder.finish(task.checkpoint, messages=count, facts=facts)
    except Fenced:
        # Either another attempt was faster, and the state is done. Or the shard has begun to run.
        if not builder.is_done:
            raise
        return builder.in_place(task.checkpoint, facts)


def has_state(shard: str) -> NotAllowed:
    return NotAllowed(
        "the database has a state of the shard already",
        shard=shard,
        hint="--overwrite replaces it, by clear() of the Backfill.",
    )


def _fill_verified(
    task: ShardTask, backfill: Backfill, fill: Callable[[StateBuilder], int], builder: StateBuilder
) -> int:
    """Fill a database, and compare the result with a replay. Raise ``Corrupt`` for a difference, before the
    commit.

    Replay and build run in the same transaction: the replay comes first, and a savepoint undoes it. Raise
    ``Invalid`` for a store without savepoints.
    """
    store, shard = builder.store, builder.shard
    if not store.has_savepoints:
        raise Invalid(
            f"a {type(store).__name__} cannot be verified: it has no savepoints",
            hint="Leave --verify out.",
            shard=shard.id,
        )
    uncommitted = in_transaction(store)

    def content() -> Iterator[Any]:
        return chain(backfill.content(shard, uncommitted), timers_of(shard, store))

    savepoint = store.savepoint()
    with Spooled(task.scratch) as replayed:
        with task.access.open() as access:
            messages = read_messages(task, backfill, access)
            replay(backfill.new_application(), shard, store, messages, discard=True)
        _write_watermark(shard)
        replayed.write(content())
        shard.waits.clear()
        savepoint.roll_back()
        shard.open_timers(store)
        count = fill(builder)
        _write_watermark(shard)
        savepoint = store.savepoint()
        difference = first_difference(content(), replayed.read())
        savepoint.roll_back()  # Undo that the comparison has taken the timers.
    if difference is not None:
        raise differs_from_replay(shard.id, str(difference))
    return count


def _write_watermark(shard: OfflineShard) -> None:
    """Write the watermark to the store, as a commit does."""
    if shard.timers is not None:
        shard.timers.finish()
        shard.timers.begin()


def differs_from_replay(shard: str, reason: str) -> Corrupt:
    return Corrupt(
        f"the built state of {shard} differs from a replay through the application ({reason})",
        hint="Nothing of it was published. Make build() or fold() of the Backfill do what the "
        "application does.",
    )


def _stage(
    task: ShardTask, staging: Staging, attempt: str, builder: StateBuilder, built: BuiltState
) -> Attempt:
    """Put a built state into the staging area: its log, if it has one, and then its description."""
    name = state_name(task.run_id, task.spec.id, attempt)
    if built.log:
        staging.put(name, builder.path)
    # Write the description last: only a complete state has a description.
    staging.create(f"{name}.json", built.to_json())
    hit("backfill.staged", task.spec.id)
    return Attempt(task.spec.id, attempt, built)


def staged_attempt(staging: Staging, run_id: str, shard: str, attempt: str) -> Attempt:
    """Return a staged attempt. Raise ``NotFound`` if the attempt was removed."""
    name = state_name(run_id, shard, attempt)
    data = staging.find(f"{name}.json")
    if data is None:
        raise NotFound(
            "a staged state is gone, although the run needs it",
            hint="It was removed: run the backfill again with a new --run-id.",
            object=name,
        )
    return Attempt(shard, attempt, BuiltState.from_json(data))
