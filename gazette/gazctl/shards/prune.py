"""``gazctl shards prune``: remove fragments of recovery logs that no shard needs.

See `prune_plan` for the rules. Nothing is removed before all plans are made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gazette.client.client import Client
from gazette.client.journals import FragmentsParams, ListedJournal
from gazette.client.shards import ListedShard, ShardClient, ShardHints
from gazette.errors import Corrupt, GazetteError, NotFound
from gazette.gazctl.context import Context, each, parse_selector
from gazette.gazctl.flags import ShardsPruneFlags
from gazette.gazctl.journals.fragment_removal import FragmentRemover, blob_stores
from gazette.gazctl.journals.fragments import fragments_of
from gazette.gazctl.journals.lookup import journals_by_name
from gazette.gazctl.journals.prune import PrunePlan, carry_out
from gazette.gazctl.shards.list import list_shards
from gazette.gazctl.shards.prune_plan import Needs, references, unpersisted
from gazette.labels import CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.protocol.journal import JournalSpec, SuspendLevel
from gazette.protocol.label_set import EVERYTHING


async def run(context: Context) -> int:
    flags = context.flags(ShardsPruneFlags)
    selector = parse_selector(flags.selector, required=True)
    consumer = await context.consumer()
    selected = (await list_shards(context, consumer, selector)).shards
    if not selected:
        raise NotFound("no shard matches", selector=selector)
    # List all shards after the selection: a shard that was created meanwhile counts, too.
    shards = (await list_shards(context, consumer, EVERYTHING)).shards
    hints = await _all_hints(
        context, consumer, [shard for shard in shards if shard.spec.recovery_log]
    )
    needs = Needs()
    for shard in shards:
        if shard.spec.id in hints:
            needs.add_shard(shard.spec, hints[shard.spec.id])
    client = await context.broker()
    logs = {
        log
        for shard in selected
        if shard.spec.id in hints
        for log in (shard.spec.recovery_log, *references(hints[shard.spec.id]))
    }
    journals = await journals_by_name(context, client, logs)
    health = await _store_health(context, client, journals.values())
    async with blob_stores(context) as stores:
        remover = FragmentRemover(context, client, stores)

        async def one(log: str) -> PrunePlan:
            return await _plan(context, client, remover, needs, log, journals.get(log), health)

        sorted_logs = sorted(logs)
        plans: list[PrunePlan] = []
        for log, outcome in zip(sorted_logs, await each("plan", sorted_logs, one), strict=True):
            if isinstance(outcome, Corrupt):
                # Hints that contradict one log may contradict others: remove nothing.
                raise outcome
            if isinstance(outcome, GazetteError):
                outcome = PrunePlan(log, note=f"failed: {outcome}", failed=True)
            plans.append(outcome)
        return await carry_out(context, remover, plans, dry_run=flags.dry_run)


async def _all_hints(
    context: Context, consumer: ShardClient, shards: Sequence[ListedShard]
) -> dict[str, ShardHints]:
    """Return the hints of shards, by id. Raise ``GazetteError`` if a shard's hints cannot be read."""

    async def one(shard: ListedShard) -> ShardHints:
        async with context.answering(consumer.address):
            return await consumer.get_hints(shard.spec.id)

    hints: dict[str, ShardHints] = {}
    for shard, outcome in zip(shards, await each("hints", shards, one), strict=True):
        if isinstance(outcome, GazetteError):
            raise GazetteError(
                f"cannot read hints of shard {shard.spec.id}: {outcome}",
                hint="Nothing was removed, since the shard may need any log. Repair its hints "
                "first.",
            ) from outcome
        hints[shard.spec.id] = outcome
    return hints


async def _store_health(
    context: Context, client: Client, journals: Collection[ListedJournal]
) -> dict[str, str]:
    """Return the problem of each store of these journals; empty for a healthy store."""
    urls = sorted({url for journal in journals for url in journal.spec.fragment.stores})

    async def one(url: str) -> str:
        async with context.answering(client.address):
            return await client.fragment_store_health(url)

    results = await each("health", urls, one)
    return {
        url: str(result) if isinstance(result, GazetteError) else result
        for url, result in zip(urls, results, strict=True)
    }


async def _plan(
    context: Context,
    client: Client,
    remover: FragmentRemover,
    needs: Needs,
    log: str,
    listed: ListedJournal | None,
    health: dict[str, str],
) -> PrunePlan:
    """Return the plan of one log, by the rules of `prune_plan`. Raise ``Corrupt`` by rule 4."""
    plan = PrunePlan(log)
    if listed is None:
        plan.note = "skipped: it does not exist"
        return plan
    spec = listed.spec
    plan.note, plan.failed = _why_not(spec, needs, health)
    if plan.note:
        return plan
    stored = await fragments_of(context, client, FragmentsParams(log))
    plan.listed = [listed_fragment.fragment for listed_fragment in stored]
    if not stored:
        return plan
    unneeded = needs.unneeded(log, plan.listed)
    if waiting := unpersisted(unneeded):
        plan.note = f"skipped: {waiting[0].content_name()} is not needed, but not persisted either"
        return plan
    if unneeded:
        owner = await remover.owner(spec)
        plan.doomed = [fragment for fragment in unneeded if owner.owns(fragment.path_postfix)]
        plan.doomed += await remover.duplicates(spec, owner, plan.doomed)
    return plan


def _why_not(spec: JournalSpec, needs: Needs, health: dict[str, str]) -> tuple[str, bool]:
    """Return why a log is skipped, or ``""``; and True if the reason is a failure."""
    if (reason := needs.blocked.get(spec.name, "")) != "":
        return f"skipped: {reason}", False
    if spec.labels.value_of(CONTENT_TYPE) != CONTENT_RECOVERY_LOG:
        return f"skipped: label {CONTENT_TYPE} is not {CONTENT_RECOVERY_LOG}", False
    if spec.suspend_level is SuspendLevel.FULL:
        return "skipped: it is fully suspended", False
    for url in spec.fragment.stores:
        if health[url]:
            return f"skipped: {url} is unhealthy: {health[url]}", True
    return "", False
