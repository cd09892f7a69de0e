"""``gazctl shards unassign``."""

from __future__ import annotations

from typing import Final

from gazette.errors import NotFound
from gazette.gazctl.context import Context, parse_selector
from gazette.gazctl.flags import UnassignFlags
from gazette.gazctl.shards.list import list_shards

BATCH: Final = 100
TIMEOUT_S: Final = 10.0
"""Seconds for all batches together. A cluster that takes longer is not healthy."""


async def run(context: Context) -> int:
    flags = context.flags(UnassignFlags)
    selector = parse_selector(flags.selector, required=True)
    consumer = await context.consumer()
    listed = await list_shards(context, consumer, selector)
    if not listed.shards:
        raise NotFound("no shard matches", selector=selector)
    ids = [shard.spec.id for shard in listed.shards]
    count = 0
    async with context.answering(consumer.address, TIMEOUT_S):
        for begin in range(0, len(ids), BATCH):
            unassigned = await consumer.unassign(
                ids[begin : begin + BATCH], only_failed=flags.failed, dry_run=flags.dry_run
            )
            # Report each batch at once: its changes stay when a later batch fails.
            context.terminal.write("".join(f"{shard_id}\n" for shard_id in unassigned))
            count += len(unassigned)
    verb = "would be unassigned" if flags.dry_run else "unassigned"
    context.terminal.note(f"{count} of {len(ids)} shards {verb}")
    return 0
