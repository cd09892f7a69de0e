"""The life of a journal, by which a journal that was created again differs from the former journal."""

from __future__ import annotations

from typing import Any, NamedTuple

from gazette.errors import Corrupt
from gazette.protocol.ids import JournalName, Revision


class JournalLife(NamedTuple):
    """The creation of a journal: an etcd cluster, and the CreateRevision of the journal's key there.

    An offset is valid within one life only. Lives of two etcd clusters cannot be compared: brokers that were
    moved to another etcd created all of their journals again.
    """

    cluster_id: int
    created: Revision

    def is_other(self, known: JournalLife | None) -> bool:
        """Return True if ``known`` is another life of the journal, in the same etcd cluster."""
        return (
            known is not None
            and known.cluster_id == self.cluster_id
            and known.created != self.created
        )


def created_again(
    journal: JournalName,
    known: Revision,
    present: Revision,
    hint: str = "Begin at offset 0 of the present journal, or at an offset that you know to be right.",
    **facts: Any,
) -> Corrupt:
    """Return the error for an offset of a former life. ``known`` and ``present`` are creation revisions."""
    return Corrupt(
        "the journal was deleted and created again since, and its offsets are others",
        hint=hint,
        journal=journal,
        created=present,
        created_before=known,
        **facts,
    )
