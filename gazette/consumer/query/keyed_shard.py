"""The shard that has the messages of a key: it reads the partition to which publishers map the key."""

from __future__ import annotations

from collections.abc import Iterable

from gazette.errors import Invalid, NotFound
from gazette.protocol.ids import JournalName
from gazette.protocol.shard import ShardSpec


def one_reader(journal: JournalName, readers: Iterable[ShardSpec]) -> str:
    """Return the id of the one shard that reads a partition and is not disabled.

    A disabled shard makes way for another one, which has the state of the key. Raise ``NotFound`` without
    a shard, and ``Invalid`` if there are several.
    """
    shards = [one.id for one in readers if not one.disable]
    if not shards:
        raise NotFound(
            f"no shard reads {journal}, which has the messages of this key",
            hint="Apply specifications of shards, and enable them.",
        )
    if len(shards) > 1:
        raise Invalid(
            f"{len(shards)} shards read {journal}, which has the messages of this key: "
            f"{', '.join(shards)}",
            path="key",
            hint="Let the request name the shard.",
        )
    return shards[0]
