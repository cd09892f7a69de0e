"""Journals that were deleted, and whose fragments may still be below the directory of another journal.

Fragments outlive their journal. The fragments of a deleted journal ``a/b`` are below the directory of ``a``.
Such fragments must not look like unexplained fragments of ``a``. So etcd keeps the name of a deleted journal
if a journal above it exists. The key is outside of the prefix that brokers watch. Only a replica whose
listing has found unexplained fragments reads these keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gazette.protocol.ids import JournalName

if TYPE_CHECKING:
    from gazette.cluster.allocator.state import State
    from gazette.cluster.etcd.client import Etcd


def deleted_key(root: str, journal: JournalName) -> str:
    """Return the key that keeps the name of a deleted journal, in a cluster of prefix ``root``."""
    parent, _, name = root.rpartition("/")
    return f"{parent}/.deleted/{name}/{journal}"


async def deleted_below(etcd: Etcd, root: str, journal: JournalName) -> list[JournalName]:
    """Return the names of deleted journals below a journal. Raise ``Unavailable`` if etcd does not answer."""
    prefix = deleted_key(root, "")
    response = await etcd.range(deleted_key(root, f"{journal}/"))
    return [kv.key.decode().removeprefix(prefix) for kv in response.kvs]


async def note_deletions(etcd: Etcd, state: State, journals: Sequence[JournalName]) -> None:
    """Keep the names of journals that are about to be deleted. Raise ``Unavailable`` if etcd fails.

    A kept name has no effect while its journal exists: the fragments then belong to that journal.
    """
    for journal in journals:
        if any(state.item(ancestor) is not None for ancestor in _above(journal)):
            await etcd.put(deleted_key(state.root, journal), b"")


def _above(journal: JournalName) -> list[JournalName]:
    components = journal.split("/")
    return ["/".join(components[:count]) for count in range(1, len(components))]
