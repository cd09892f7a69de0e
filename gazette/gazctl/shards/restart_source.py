"""``gazctl shards restart-source``: continue with a source that was deleted and created again."""

from __future__ import annotations

from dataclasses import replace

from gazette.client.shards import ListedShard, ShardChange
from gazette.consumer.shard.source_lives import SourceRestart, with_restarts
from gazette.errors import Invalid, NotFound
from gazette.gazctl.context import Context, parse_selector
from gazette.gazctl.flags import RestartSourceFlags
from gazette.gazctl.shards.list import list_shards
from gazette.protocol.ids import split_journal_meta
from gazette.runtime.numbers import counted


async def run(context: Context) -> int:
    flags = context.flags(RestartSourceFlags)
    selector = parse_selector(flags.selector, required=True)
    if not flags.source:
        raise Invalid("is empty", path="--source", hint="Name the journal that was created again.")
    if (flags.offset < 0) != flags.same_bytes:
        raise Invalid(
            "give either an offset, or --same-bytes",
            path="--offset",
            hint="Use --offset 0 to read the present journal from its begin. Use --same-bytes if the stored"
            " fragments of the former one are its content.",
        )
    consumer = await context.consumer()
    listed = await list_shards(context, consumer, selector)
    shards = [shard for shard in listed.shards if _reads(shard, flags.source)]
    if not shards:
        raise NotFound("no selected shard reads the source", selector=selector, source=flags.source)
    client = await context.broker()
    async with context.answering(client.address):
        journal = await client.get_journal(flags.source)
    changes = [_change(shard, flags, journal.create_revision) for shard in shards]
    ids = [shard.spec.id for shard in shards]
    if not flags.dry_run:
        async with context.answering(consumer.address):
            await consumer.apply_shards(changes)
            await consumer.unassign(ids, only_failed=True)
    context.terminal.write("".join(f"{shard_id}\n" for shard_id in ids))
    verb = "would read" if flags.dry_run else "reads" if len(ids) == 1 else "read"
    place = "at the same offsets" if flags.same_bytes else f"from offset {flags.offset}"
    context.terminal.note(
        f"{counted(len(ids), 'shard')} {verb} {flags.source} {place}, as it was created again at revision"
        f" {journal.create_revision}"
    )
    return 0


def _reads(shard: ListedShard, source: str) -> bool:
    return any(
        split_journal_meta(candidate.journal)[0] == source for candidate in shard.spec.sources
    )


def _change(shard: ListedShard, flags: RestartSourceFlags, created: int) -> ShardChange:
    """Return the change that labels a shard with the offset at which it begins in the present journal. With
    --same-bytes, the label has no offset: the shard keeps its own offset."""
    spec = shard.spec
    [name] = [
        source.journal
        for source in spec.sources
        if split_journal_meta(source.journal)[0] == flags.source
    ]
    begin = None if flags.same_bytes else flags.offset
    labels = with_restarts(spec.labels, [SourceRestart(name, created, begin)])
    return ShardChange(upsert=replace(spec, labels=labels), expect_mod_revision=shard.mod_revision)
