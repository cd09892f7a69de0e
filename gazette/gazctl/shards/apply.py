"""``gazctl shards apply`` and ``edit``."""

from __future__ import annotations

from collections.abc import Sequence

from gazette.client.shards import ShardChange
from gazette.errors import Conflict, GazetteError, NotFound
from gazette.gazctl.context import Context, parse_selector
from gazette.gazctl.flags import ShardsApplyFlags, ShardsEditFlags
from gazette.gazctl.io.output import proto_text
from gazette.gazctl.io.spec_editor import edit_specs, read_specs
from gazette.gazctl.journals.apply import (
    advise_batches,
    check_batch_size,
    check_delete,
    check_revision,
    explain_conflict,
)
from gazette.gazctl.journals.checks import verify_references
from gazette.gazctl.shards.list import list_shards, shards_yaml
from gazette.protocol.label_set import EVERYTHING
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.shard_list import ShardList
from gazette.protocol.text.validation import within


async def apply(context: Context) -> int:
    flags = context.flags(ShardsApplyFlags)
    changes = parse_changes(context, read_specs(flags.specs, context))
    if flags.dry_run:
        await _verify(context, changes, wanted=flags.verify)
        context.terminal.write(proto_text(_request(changes)))
        return 0
    await _apply(context, changes, flags.max_txn_size, verify=flags.verify)
    return 0


async def edit(context: Context) -> int:
    flags = context.flags(ShardsEditFlags)
    selector = parse_selector(flags.selector, required=True)
    listed = await list_shards(context, await context.consumer(), selector)
    if not listed.shards:
        raise NotFound("no shard matches", selector=selector)

    async def apply_text(text: str) -> None:
        changes = parse_changes(context, text)
        await _apply(context, changes, flags.max_txn_size, verify=flags.verify)

    if not await edit_specs(shards_yaml(listed.shards), apply_text, context):
        context.terminal.note("nothing was changed")
    return 0


def parse_changes(context: Context, text: str) -> list[ShardChange]:
    """Return the changes that a list asks for. Raise ``Invalid`` that names the line or the shard."""
    specs = ShardList.parse(text)
    specs.validate()
    changes: list[ShardChange] = []
    for entry in specs.push_down().shards:
        spec = entry.spec
        if entry.delete:
            check_delete(spec.id, entry.revision)
            changes.append(ShardChange(delete=spec.id, expect_mod_revision=entry.revision))
            continue
        with within(spec.id):
            spec.validate()
        check_revision(spec.id, entry.revision)
        if spec.min_txn_duration_ns > spec.max_txn_duration_ns:
            context.terminal.note(f"{spec.id}: min_txn_duration is longer than max_txn_duration")
        changes.append(ShardChange(upsert=spec, expect_mod_revision=entry.revision))
    return changes


async def _verify(context: Context, changes: Sequence[ShardChange], *, wanted: bool) -> None:
    specs = [change.upsert for change in changes if change.upsert is not None]
    if wanted and specs:
        await verify_references(context, await context.broker(), specs)


async def _apply(
    context: Context, changes: Sequence[ShardChange], batch_size: int, *, verify: bool
) -> None:
    check_batch_size(batch_size)
    if not changes:
        context.terminal.note("there is nothing to apply")
        return
    await _verify(context, changes, wanted=verify)
    consumer = await context.consumer()
    try:
        async with context.answering(consumer.address):
            header = await consumer.apply_shards(changes, batch_size=batch_size)
    except Conflict as error:
        expected = {
            one.delete if one.upsert is None else one.upsert.id: one.expect_mod_revision
            for one in changes
        }
        current = await list_shards(context, consumer, EVERYTHING)
        found = {one.spec.id: one.mod_revision for one in current.shards}
        error.hint = explain_conflict(expected, found)
        raise
    except GazetteError as error:
        advise_batches(error, len(changes), batch_size)
        raise
    deleted = sum(1 for change in changes if change.delete)
    context.terminal.note(
        f"applied at revision {header.etcd.revision}: "
        f"{len(changes) - deleted} put, {deleted} deleted"
    )


def _request(changes: Sequence[ShardChange]) -> consumer_pb2.ApplyRequest:
    return consumer_pb2.ApplyRequest(changes=[change.to_pb() for change in changes])
