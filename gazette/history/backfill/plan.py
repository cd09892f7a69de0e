"""The plan of a run: its shards, and the bytes of journals that it reads.

A plan is made once per run, and stored in the staging area. So a resumed run reads the same bytes, on any
machine. The plan and the result of the first pass give a task for each shard.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from gazette.consumer.application_name import name_of
from gazette.errors import Conflict, Corrupt, Invalid
from gazette.history.backfill.build import ShardTask, journal_spec, shard_mapping
from gazette.history.backfill.definition import Backfill
from gazette.history.backfill.settings import HistoryEnd, RunSettings
from gazette.history.backfill.staging import decoded
from gazette.history.columns import MessageFormat
from gazette.history.loss_warnings import warn_of_loss
from gazette.history.merge import FoldedSnapshot
from gazette.history.snapshot import JournalSnapshot, Snapshot
from gazette.history.snapshot_builder import Selection, journal_specs, take_snapshot
from gazette.history.source import Access, OpenAccess
from gazette.labels import CONTENT_JSON_LINES, CONTENT_PROTO_FIXED, CONTENT_TYPE
from gazette.message.framing.framing import framing_of
from gazette.message.mapping import Partition, Partitions
from gazette.message.uuid_place import DEFAULT_PLACE
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.ids import JournalName, Offset, split_journal_meta
from gazette.protocol.journal import JournalSpec
from gazette.protocol.journal_life import JournalLife
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.shard import ShardSpec
from gazette.stores.claims import BackfillClaim

_LOST_SHOWN: Final = 5


class Plan(msgspec.Struct, frozen=True):
    """The stored plan of a run. ``begins`` and ``ends``: by journal, the offsets between which the run
    reads."""

    backfill: str
    shards: list[str]
    ends: dict[str, int]
    created: str
    begins: dict[str, int] = {}
    token: str = ""
    """Random name of the run. By this name, an attempt recognizes the run's own states in a database."""
    verified: list[str] = []
    """Shards whose states in a database are committed only if a replay gives the same state."""
    partitions: list[str] | None = None
    """Journals that the publisher's mapping chooses from. None in a plan of version 0.1.0."""
    firsts: dict[str, int] = {}
    """By journal: the offset of the first byte that was stored. Version 0.1.0 did not note it, nor lives."""
    lives: dict[str, JournalLife] = {}

    @classmethod
    def of(
        cls,
        backfill: str,
        shards: list[str],
        snapshot: Snapshot,
        created: str,
        token: str,
        verified: list[str],
        partitions: Sequence[Partition],
    ) -> Plan:
        """Return the plan to read a snapshot."""
        journals = snapshot.journals
        return cls(
            backfill,
            shards,
            {journal.journal: journal.end for journal in journals},
            created,
            {journal.journal: journal.begin for journal in journals},
            token,
            verified,
            [partition.journal for partition in partitions],
            {journal.journal: journal.first for journal in journals},
            {journal.journal: life for journal in journals if (life := journal.life) is not None},
        )

    def require_stored(self, snapshot: Snapshot) -> None:
        """Raise ``Conflict`` if first bytes of the plan are stored no more. Staged states have the messages
        there, and other states would lack them."""
        pruned = [
            journal.journal
            for journal in snapshot.journals
            if journal.first > self.firsts.get(journal.journal, journal.first)
        ]
        if pruned:
            raise Conflict(
                f"journals were pruned since the run began: {', '.join(pruned[:_LOST_SHOWN])}",
                hint="Begin again with another --run-id.",
            )

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> Plan:
        """Decode a plan. Raise ``Corrupt`` for other bytes."""
        return decoded(data, cls, "the plan of a backfill")

    def require_same(self, name: str, shards: Sequence[str]) -> None:
        """Raise ``Conflict`` if a run is resumed with another backfill or other shards."""
        if (self.backfill, self.shards) != (name, list(shards)):
            raise Conflict(
                f"the run with this id is of {self.backfill} and {len(self.shards)} shards, not of these",
                hint="Give the same arguments to resume it, or another --run-id.",
            )


def sources_of(specs: Collection[ShardSpec]) -> dict[JournalName, Offset]:
    """Return the sources of shards with their minimal offsets. Raise ``Invalid`` if shards differ."""
    offsets: dict[JournalName, Offset] = {}
    for spec in specs:
        for source in spec.sources:
            name = split_journal_meta(source.journal)[0]
            if offsets.setdefault(name, source.min_offset) != source.min_offset:
                raise Invalid(
                    f"shards read {name} from different minimal offsets",
                    path=f"{spec.id}.sources",
                    hint="Backfill them one after the other, each with a run of its own.",
                )
    return offsets


def plan_snapshot(
    access: OpenAccess,
    backfill: Backfill,
    specs: Collection[ShardSpec],
    end: HistoryEnd,
    *,
    plan: Plan | None = None,
) -> Snapshot:
    """Return the snapshot to read. Blocks. ``plan`` is the plan of a resumed run.

    Raise ``Invalid`` if there is neither a source nor a history, and for ends of journals outside the
    history. Raise ``NotFound`` for absent journals. Raise ``NotYet`` for missing bytes that may still come.
    """
    if backfill.history:
        selection = Selection(selector=LabelSelector.parse(backfill.history))
    else:
        minima = sources_of(specs)
        if not minima:
            raise Invalid(
                "the shards have no sources, and the backfill no history", path="--shards"
            )
        selection = Selection(journals=tuple(sorted(minima)), begin=minima)
    if plan is not None:
        # Read only the journals of the plan: states that are staged already have no other journal's messages.
        selection = Selection(
            journals=tuple(sorted(plan.ends)), end=plan.ends, begin=plan.begins, lives=plan.lives
        )
    elif end.offsets:
        selection = replace(selection, end=dict(end.offsets))
    specs_of = _specs(access, selection)
    if unread := sorted(selection.end.keys() - specs_of.keys()):
        raise Invalid(
            f"offsets are given for journals that are not read: {', '.join(unread[:_LOST_SHOWN])}",
            path="--offsets",
        )
    application = backfill.new_application()
    shapes: dict[MessageFormat, list[JournalName]] = {}
    for name, spec in specs_of.items():
        content_type = spec.labels.value_of(CONTENT_TYPE) or CONTENT_JSON_LINES
        message_type = backfill.message_type_of(application, journal_spec(name, content_type))
        uuid_place = backfill.uuid_field or application.uuid_place_of(spec)
        shape = message_format_of(content_type, message_type, uuid_place)
        shapes.setdefault(shape, []).append(name)
    journals: list[JournalSnapshot] = []
    for shape, names in shapes.items():
        of_shape = replace(selection, journals=tuple(names), selector=None, shape=shape)
        snapshot = _snapshot(access, of_shape)
        if end.until_s and plan is None:
            time_ends = _ends_at(snapshot, end.until_s)
            snapshot = take_snapshot(access, replace(of_shape, end=time_ends))
        journals += snapshot.journals
    merged = Snapshot(tuple(sorted(journals, key=lambda journal: journal.journal)))
    warn_of_loss(merged)
    return merged


def _snapshot(access: OpenAccess, chosen: Selection) -> Snapshot:
    """Call `take_snapshot`. An error about the option ``end`` names the flag ``--offsets`` instead."""
    try:
        return take_snapshot(access, chosen)
    except Invalid as error:
        if error.path != "end":
            raise
        raise Invalid(
            error.message,
            path="--offsets",
            hint="Leave the journal out, to read it to its end.",
            **error.facts,
        ) from error


def list_partitions(
    access: OpenAccess, backfill: Backfill, planned: Collection[JournalName] | None
) -> tuple[Partition, ...]:
    """Return the partitions for the publisher's mapping; empty if the backfill has no own history. Blocks.

    ``planned`` names the partitions of a resumed plan: staged states were mapped to them. Raise ``NotFound``
    if no journal matches, and ``Invalid`` if the class does not name ``partitions``. Raise ``Conflict`` if a
    planned partition is gone.
    """
    if not backfill.history:
        return ()
    if not backfill.partitions:
        raise Invalid(
            f"{type(backfill).__name__} has its own history, but does not say to which "
            "journals its messages were mapped",
            hint="Set the class attribute partitions to the publisher's selector.",
        )
    selector = LabelSelector.parse(backfill.partitions)
    listed = Partitions.of_specs(access.run(journal_specs(access, (), selector))).all
    if planned is None:
        return listed
    partitions = tuple(partition for partition in listed if partition.journal in planned)
    if gone := sorted({*planned} - {partition.journal for partition in partitions}):
        raise Conflict(
            f"partitions were deleted since the run began: {', '.join(gone[:_LOST_SHOWN])}",
            hint="Begin again with another --run-id.",
        )
    return partitions


def _specs(access: OpenAccess, selection: Selection) -> dict[JournalName, JournalSpec]:
    specs = access.run(journal_specs(access, selection.journals, selection.selector))
    return {spec.name: spec for spec in specs}


def message_format_of(content_type: str, message_type: type[Any], place: str) -> MessageFormat:
    """Return the encoding of a type's messages in a journal. ``place`` is the place of the UUID.

    Empty: the place in the type. Raise ``Invalid`` for a type that the content type cannot encode.
    """
    uuid_field, message = place or DEFAULT_PLACE, ""
    if not place:
        type_place = framing_of(content_type, message_type).codec.place
        uuid_field = DEFAULT_PLACE if type_place is None else type_place.text
    if content_type == CONTENT_PROTO_FIXED:
        message = f"{message_type.__module__}:{message_type.__qualname__}"
    return MessageFormat(content_type, uuid_field=uuid_field, message=message)


def _ends_at(snapshot: Snapshot, until_s: float) -> dict[JournalName, Offset]:
    """Return, by journal, the end of the last fragment that was stored at ``until_s`` or before."""
    return {
        journal.journal: max(
            (
                piece.end
                for piece in journal.pieces
                if piece.fragment is not None and piece.fragment.mod_time <= until_s
            ),
            default=journal.begin,
        )
        for journal in snapshot.journals
    }


def checkpoint_of(folded: FoldedSnapshot, spec: ShardSpec, application: str) -> Checkpoint:
    """Return the checkpoint of a shard that has consumed exactly the history of its sources.

    ``application`` is the name of the application that owns the state.
    """
    sources, lives = {}, {}
    life_of = {part.journal: part.life for part in folded.snapshot.journals}
    for source in spec.sources:
        journal = split_journal_meta(source.journal)[0]
        source_checkpoint = folded.sources.get(journal)
        if source_checkpoint is not None:
            sources[source.journal] = source_checkpoint
        if (life := life_of.get(journal)) is not None:
            lives[source.journal] = life
    return Checkpoint(sources, application=application, lives=lives)


def require_replayable(folded: FoldedSnapshot) -> None:
    """Raise ``Corrupt`` if a journal has lost messages that are pending at the snapshot's end.

    The live shard must read these messages when they commit.
    """
    for journal in folded.snapshot.journals:
        pieces = journal.pieces
        for producer, state in folded.sources[journal.journal].producers.items():
            begin = state.begin
            if begin is None or any(piece.begin <= begin < piece.end for piece in pieces):
                continue
            raise Corrupt(
                "a transaction is open at the end of the history, and its begin is lost: the "
                "state would miss its messages when it commits",
                hint="End the history before it, with --offsets.",
                journal=journal.journal,
                producer=producer.hex(),
                begin=begin,
            )


def tasks_of(
    backfill: Backfill,
    name: str,
    specs: Sequence[ShardSpec],
    folded: FoldedSnapshot,
    access: Access,
    settings: RunSettings,
    *,
    partitions: tuple[Partition, ...] = (),
    claims: Mapping[str, BackfillClaim] | None = None,
    verified: Collection[str] = (),
) -> list[ShardTask]:
    """Return a task for each shard. Raise ``Invalid`` for a backfill with a history and no mapping. Raise the
    error of `require_replayable`."""
    require_replayable(folded)
    application = settings.application or name_of(backfill.new_application())
    if backfill.history:
        shard_mapping(backfill, partitions)
    tasks = []
    for spec in specs:
        source_journals = {split_journal_meta(source.journal)[0] for source in spec.sources}
        tasks.append(
            ShardTask(
                name or backfill,
                spec,
                access,
                tuple(
                    run
                    for run in folded.runs
                    if not run.empty and (backfill.history or run.run.journal in source_journals)
                ),
                checkpoint_of(folded, spec, application),
                settings.staging,
                settings.run_id,
                partitions,
                settings.fqn(spec.id),
                settings.overwrite,
                settings.scratch,
                (claims or {}).get(spec.id),
                spec.id in verified,
            )
        )
    return tasks
