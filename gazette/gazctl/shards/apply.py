"""``gazctl shards apply`` and ``edit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gazette.client.shards import ListedShard, ShardChange
from gazette.errors import Broken, NotFound, Unavailable
from gazette.gazctl.batches import apply_in_batches, check_batch_size
from gazette.gazctl.context import Context, parse_selector
from gazette.gazctl.flags import ShardsApplyFlags, ShardsEditFlags
from gazette.gazctl.io.output import proto_text
from gazette.gazctl.io.spec_editor import edit_specs, read_specs
from gazette.gazctl.journals.apply import check_delete, check_revision
from gazette.gazctl.journals.checks import verify_references
from gazette.gazctl.shards.list import errors_text, list_shards, shards_yaml, status_text
from gazette.protocol.label_set import EVERYTHING
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.shard import ReplicaCode, ShardSpec
from gazette.protocol.shard_list import ShardList
from gazette.protocol.text.validation import within
from gazette.runtime.numbers import counted
from gazette.runtime.timeouts import timeout

_POLL_S: Final = 0.2


async def apply(context: Context) -> int:
    flags = context.flags(ShardsApplyFlags)
    changes = parse_changes(context, read_specs(flags.specs, context))
    if flags.dry_run:
        await _verify(context, changes, wanted=flags.verify)
        context.terminal.write(proto_text(_request(changes)))
        return 0
    await _apply(context, changes, flags.max_txn_size, verify=flags.verify)
    if flags.wait:
        await _wait_served(
            context, [change.upsert for change in changes if change.upsert is not None]
        )
    return 0


async def _wait_served(context: Context, specs: Sequence[ShardSpec]) -> None:
    """Wait until each shard has a ready primary, and all its standbys are ready.

    Raise ``Unavailable`` after --timeout, and ``Broken`` at once for a shard that has failed. Shards that
    are disabled, or were deleted or changed meanwhile, need fewer members or none.
    """
    consumer = await context.consumer()
    waiting_ids = {spec.id for spec in specs}
    waiting: list[ListedShard] = []
    try:
        async with timeout(context.timeout_s):
            while waiting_ids:
                listed = await consumer.list_shards(EVERYTHING)
                shards = [shard for shard in listed.shards if shard.spec.id in waiting_ids]
                if failed := [shard for shard in shards if _has_failed(shard)]:
                    raise Broken(
                        f"failure of {counted(len(failed), 'shard')}:\n{errors_text(failed).rstrip()}",
                        hint="The specifications are applied. Correct the cause, then run "
                        "`gazctl shards unassign --failed`.",
                    )
                waiting = [shard for shard in shards if _lacks_members(shard)]
                if not waiting:
                    return
                await context.clock.sleep(_POLL_S)
    except TimeoutError as error:
        names = sorted(f"{shard.spec.id} ({status_text(shard)})" for shard in waiting)
        raise Unavailable(
            f"after {context.timeout_s:g} s, members do not serve {counted(len(names), 'shard')}, such as "
            f"{names[0] if names else 'all'}",
            hint="The specifications are applied. Start more members, or raise their "
            "--consumer.limit; see `gazctl shards list --replicas`.",
        ) from error


def _has_failed(shard: ListedShard) -> bool:
    return any(status.code is ReplicaCode.FAILED for status in shard.status)


def _lacks_members(shard: ListedShard) -> bool:
    spec = shard.spec
    needed = 0 if spec.disable else 1 + spec.hot_standbys
    ready = [status.code in (ReplicaCode.PRIMARY, ReplicaCode.STANDBY) for status in shard.status]
    if needed and not any(status.code is ReplicaCode.PRIMARY for status in shard.status):
        return True
    return sum(ready) < needed


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
    """Return the changes of a list. Raise ``Invalid`` with the line or the shard."""
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
    """Check and apply changes, and report them. Raise ``Invalid`` for journals that do not suit the shards.

    Raise the client's errors; their hints explain conflicts and large batches.
    """
    check_batch_size(batch_size)
    if not changes:
        context.terminal.note("there is nothing to apply")
        return
    await _verify(context, changes, wanted=verify)
    consumer = await context.consumer()

    async def revisions() -> dict[str, int]:
        current = await list_shards(context, consumer, EVERYTHING)
        return {shard.spec.id: shard.mod_revision for shard in current.shards}

    await apply_in_batches(
        context, consumer.address, changes, batch_size, consumer.apply_shards, revisions
    )


def _request(changes: Sequence[ShardChange]) -> consumer_pb2.ApplyRequest:
    return consumer_pb2.ApplyRequest(changes=[change.to_pb() for change in changes])
