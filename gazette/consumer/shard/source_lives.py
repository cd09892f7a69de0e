"""Decides which former bytes a shard does not read again: of sources that were created again, and before
minimum offsets. Pure.

A shard reads a new life of a source only from an offset that an operator has chosen for this life. The
choice is a label of the shard's specification. The original ignores this label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from gazette.errors import Corrupt, GazetteError, Invalid
from gazette.labels import SOURCE_RESTART
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset, Revision, ShardId
from gazette.protocol.journal_life import JournalLife, created_again
from gazette.protocol.label_set import Label, LabelSet
from gazette.protocol.shard import ShardSource, ShardSpec

_SAME: Final = "same"
_CHOICE: Final = re.compile(rf"([0-9]{{1,18}})\.([0-9]{{1,18}}|{_SAME})\.(.+)", re.ASCII)


class SourceRestart(NamedTuple):
    """An operator's choice of the offset at which a shard begins in one life of a source."""

    journal: JournalName
    created: Revision
    offset: Offset | None
    """The chosen offset. None to continue at the old offset, since this life has the former life's bytes."""

    @property
    def label(self) -> Label:
        """The choice as a label of a shard."""
        offset = _SAME if self.offset is None else self.offset
        return Label(SOURCE_RESTART, f"{self.created}.{offset}.{self.journal}")


def restarts_of(labels: LabelSet) -> dict[JournalName, SourceRestart]:
    """Return the operator's choices for a shard, by source. Raise ``Invalid`` for a label of another form."""
    chosen = {}
    for value in labels.values_of(SOURCE_RESTART):
        fields = _CHOICE.fullmatch(value)
        if fields is None:
            raise Invalid(
                f"{value!r} is not a revision, an offset and a journal",
                path=SOURCE_RESTART,
                hint="Set it by: gazctl shards restart-source.",
            )
        created, offset, journal = fields.groups()
        begin = None if offset == _SAME else int(offset)
        chosen[journal] = SourceRestart(journal, int(created), begin)
    return chosen


def with_restarts(labels: LabelSet, restarts: Iterable[SourceRestart]) -> LabelSet:
    """Return the labels with these choices, which replace former choices for the same sources."""
    chosen = {**restarts_of(labels), **{restart.journal: restart for restart in restarts}}
    others = (label for label in labels.labels if label.name != SOURCE_RESTART)
    return LabelSet(tuple(sorted((*others, *(restart.label for restart in chosen.values())))))


def in_present_lives(
    checkpoint: Checkpoint, lives: Mapping[JournalName, JournalLife], spec: ShardSpec
) -> Checkpoint:
    """Return a restored checkpoint, adapted to the present ``lives`` of the shard's sources.

    If a source has another life, begin at the offset that the operator has chosen, without states of
    producers. If the operator has said that this life has the same bytes, keep the offset. Raise ``Corrupt``
    if the operator has made no choice for this life.
    """
    sources, restarts = dict(checkpoint.sources), restarts_of(spec.labels)
    for journal, life in lives.items():
        read_life = checkpoint.lives.get(journal)
        if read_life is None or not life.is_other(read_life):
            continue
        restart = restarts.get(journal)
        if restart is None or restart.created != life.created:
            read_through = sources.get(journal, SourceCheckpoint()).read_through
            raise another_life(journal, read_life, life, spec.id, read_through)
        if restart.offset is not None:
            sources[journal] = SourceCheckpoint(restart.offset)
    return replace(checkpoint, sources=sources, lives={**checkpoint.lives, **lives})


def without_earlier_spans(checkpoint: Checkpoint, read: Iterable[ShardSource]) -> Checkpoint:
    """Return a checkpoint without open transactions that began before the minimum offset of a source.

    Change only sources whose minimum offset is beyond all bytes that the shard has read. To complete an open
    transaction, the shard would read bytes before the minimum offset, which may be gone.
    """
    sources = dict(checkpoint.sources)
    for source in read:
        former = sources.get(source.journal)
        if former is not None and source.min_offset > former.read_through:
            producers = {
                producer: replace(state, begin=None) for producer, state in former.producers.items()
            }
            sources[source.journal] = replace(former, producers=producers)
    return replace(checkpoint, sources=sources)


def another_life(
    journal: JournalName, known: JournalLife, present: JournalLife, shard: ShardId, offset: Offset
) -> Corrupt:
    """Return the error of a shard whose source has another life than the life that the shard has read."""
    command = f"gazctl shards restart-source -l id={shard} --source {journal}"
    return created_again(
        journal,
        known.created,
        present.created,
        hint=f"To read it from its beginning: {command} --offset 0. If its stored fragments were kept, and it"
        f" has the same bytes: {command} --same-bytes. To forget the shard's state as well, give the shard a"
        " new recovery log.",
        shard=shard,
        offset=offset,
    )


def in_words_of_shard(
    error: GazetteError,
    journal: JournalName,
    life: JournalLife | None,
    shard: ShardId,
    offset: Offset,
) -> GazetteError:
    """Return the shard's error for the error of a read of ``life``: that of `another_life` if the journal was
    created again, otherwise ``error`` itself."""
    if life is None or "created" not in error.facts:
        return error
    present = JournalLife(life.cluster_id, error.facts["created"])
    return another_life(journal, life, present, shard, offset)
