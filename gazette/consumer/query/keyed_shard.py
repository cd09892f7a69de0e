"""Find the shard that has the messages of a key: it reads the partition to which publishers map the key."""

from __future__ import annotations

from collections.abc import Iterable

from gazette.errors import Invalid, NotFound
from gazette.protocol.ids import JournalName
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.protocol.shard import ShardSpec


def one_reader(journal: JournalName, readers: Iterable[ShardSpec], covered: LabelSelector) -> str:
    """Return the id of the only shard that reads a partition, is enabled, and matches ``covered``.

    Ignore disabled shards, since another shard may have taken over the key. To the caller, a shard that the
    token does not cover does not exist. Raise ``NotFound`` for no shard, and ``Invalid`` for several.
    """
    shards = [
        spec.id for spec in readers if not spec.disable and covered.matches(spec.labels_with_id())
    ]
    # A caller whose token covers only some shards must not learn the partition.
    if not shards and covered != EVERYTHING:
        raise NotFound("no shard that the token covers has the messages of this key")
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
