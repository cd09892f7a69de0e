"""``gazctl shards list``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from gazette.client.client import Client
from gazette.client.shards import ListedShard, ShardClient, ShardList
from gazette.errors import GazetteError, NotFound, Unavailable, printable
from gazette.gazctl.context import Context, each, parse_selector
from gazette.gazctl.flags import ShardsListFlags
from gazette.gazctl.io.output import NONE, Table, proto_json, proto_text
from gazette.gazctl.journals.lookup import write_head
from gazette.protocol.ids import split_journal_meta
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.shard import ReplicaCode, ReplicaStatus
from gazette.runtime.numbers import bytes_text

UNKNOWN = "?"
_STAT_TIMEOUT_S = 10.0
_ASK_S = 5.0
"""Seconds to wait until a member answers what its shards wait for."""


async def run(context: Context) -> int:
    flags = context.flags(ShardsListFlags)
    selector = parse_selector(flags.selector, required=False)
    consumer = await context.consumer()
    listed = await list_shards(context, consumer, selector)
    if not listed.shards:
        context.terminal.note("no shard matches")
    match flags.format:
        case "table":
            problems, failures = await ask_problems(context, consumer, listed.shards, selector)
            for endpoint, error in failures.items():
                context.terminal.note(f"cannot ask {endpoint} what its shards wait for: {error}")
            await _write_table(context, consumer, listed.shards, flags, problems)
            for shard, problem in sorted(problems.items()):
                context.terminal.note(f"{shard}: {problem}")
        case "yaml":
            context.terminal.write(shards_yaml(listed.shards))
        case "json":
            context.terminal.write(proto_json(list_response(listed)))
        case _:
            context.terminal.write(proto_text(list_response(listed)))
    return 0


async def ask_problems(
    context: Context,
    consumer: ShardClient,
    shards: Sequence[ListedShard],
    selector: LabelSelector,
) -> tuple[dict[str, str], dict[str, GazetteError]]:
    """Ask the members of shards what the shards wait for. Return the answers by shard id, and the errors by
    endpoint."""

    async def ask(endpoint: str) -> dict[str, str]:
        async with context.answering(endpoint, min(_ASK_S, context.timeout_s)):
            return await consumer.shard_problems(endpoint, selector)

    endpoints = sorted({url for shard in shards for url in shard.route.endpoints if url})
    problems: dict[str, str] = {}
    failures: dict[str, GazetteError] = {}
    for endpoint, result in zip(endpoints, await each("ask", endpoints, ask), strict=True):
        if isinstance(result, GazetteError):
            failures[endpoint] = result
        else:
            problems |= result
    return problems, failures


async def list_shards(
    context: Context, consumer: ShardClient, selector: LabelSelector
) -> ShardList:
    """Return the matching shards. Raise ``Unavailable`` after --timeout."""
    async with context.answering(consumer.address):
        return await consumer.list_shards(selector)


async def get_shard(context: Context, consumer: ShardClient, shard_id: str) -> ListedShard:
    """Return one shard. Raise ``NotFound`` if the shard does not exist."""
    listed = await list_shards(context, consumer, LabelSelector.of(id=shard_id))
    if not listed.shards:
        raise NotFound("shard not found", shard=shard_id)
    return listed.shards[0]


def shards_yaml(shards: Sequence[ListedShard]) -> str:
    """Return the list that ``shards apply`` reads."""
    from gazette.protocol.shard_list import ShardList as ShardSpecs  # Only this form needs YAML.

    return ShardSpecs.of((shard.spec, shard.mod_revision) for shard in shards).to_yaml()


def list_response(listed: ShardList) -> consumer_pb2.ListResponse:
    return consumer_pb2.ListResponse(
        header=listed.header.to_pb(),
        shards=[
            consumer_pb2.ListResponse.Shard(
                spec=shard.spec.to_pb(),
                mod_revision=shard.mod_revision,
                create_revision=shard.create_revision,
                route=shard.route.to_pb(),
                status=[status.to_pb() for status in shard.status],
            )
            for shard in listed.shards
        ],
        extension=listed.extension,
    )


async def _write_table(
    context: Context,
    consumer: ShardClient,
    shards: Sequence[ListedShard],
    flags: ShardsListFlags,
    problems: Mapping[str, str],
) -> None:
    columns = {
        "Primary": flags.primary,
        "Replicas": flags.replicas,
        "RF": flags.rf,
        "Lag": flags.lag,
    }
    shown = [name for name, is_shown in columns.items() if is_shown]
    lags, reasons = [""] * len(shards), ""
    if flags.lag:
        lags, reasons = await _lags(context, consumer, shards, problems)
    table = Table(["ID", "Status", *shown, *flags.label_columns], numbers=frozenset({"RF"}))
    for shard, lag in zip(shards, lags, strict=True):
        spec, route = shard.spec, shard.route
        members = zip(route.members, shard.status, strict=True)
        cells = {
            "Primary": str(route.primary_id or NONE),
            "Replicas": ",".join(f"{member}:{status.code.name}" for member, status in members)
            or NONE,
            "RF": str(spec.desired_replication(spec.hot_standbys)),
            "Lag": lag,
        }
        labels = [",".join(spec.labels.values_of(name)) or NONE for name in flags.label_columns]
        table.add(spec.id, status_text(shard), *(cells[name] for name in shown), *labels)
    context.terminal.write(table.text(context.terminal) + errors_text(shards) + reasons)


def status_text(shard: ListedShard) -> str:
    """Return the most advanced status of the shard's replicas; else ``DISABLED`` or ``UNASSIGNED``."""
    if not shard.status:
        return "DISABLED" if shard.spec.disable else "UNASSIGNED"
    return reduce(ReplicaStatus.reduce, shard.status).code.name


def errors_text(shards: Sequence[ListedShard]) -> str:
    """Return the errors of FAILED replicas, and what to do."""
    lines: list[str] = []
    for shard in shards:
        for member, status in zip(shard.route.members, shard.status, strict=True):
            if status.code is ReplicaCode.FAILED:
                lines += [
                    f"{shard.spec.id} at {member}: {printable(error)}" for error in status.errors
                ]
    if not lines:
        return ""
    advice = "Restart them with: gazctl shards unassign --failed -l id=…"
    return "\nFAILED:\n" + "".join(f"  {line}\n" for line in lines) + f"{advice}\n"


async def _lags(
    context: Context,
    consumer: ShardClient,
    shards: Sequence[ListedShard],
    problems: Mapping[str, str],
) -> tuple[list[str], str]:
    """Return the lag of each shard as text, and a text with the reasons of unknown lags."""
    broker = await context.broker()
    journals = sorted(
        {split_journal_meta(source.journal)[0] for shard in shards for source in shard.spec.sources}
    )
    heads = dict(
        zip(
            journals,
            await each("heads", journals, lambda journal: _head(context, broker, journal)),
            strict=True,
        )
    )

    async def one(shard: ListedShard) -> str:
        problem = problems.get(shard.spec.id)
        if problem and status_text(shard) != ReplicaCode.PRIMARY.name:
            raise Unavailable(f"it {problem}")  # A call would wait as long as the shard does.
        return await _lag(context, consumer, shard, heads)

    results = await each("lag", shards, one)
    reasons = [
        f"  {shard.spec.id}: {result}\n"
        for shard, result in zip(shards, results, strict=True)
        if isinstance(result, GazetteError)
    ]
    texts = [UNKNOWN if isinstance(result, GazetteError) else result for result in results]
    return texts, ("\nLag is unknown of:\n" + "".join(reasons)) if reasons else ""


async def _head(context: Context, broker: Client, journal: str) -> int:
    return await write_head(context, broker, journal)


async def _lag(
    context: Context,
    consumer: ShardClient,
    shard: ListedShard,
    heads: dict[str, int | GazetteError],
) -> str:
    """Return the bytes that a shard has not consumed, for each source if it has several.

    Raise ``NotFound`` without a primary, and the error of a source whose head is unknown.
    """
    if shard.route.primary is None:
        raise NotFound("it has no primary")
    # A shard that recovers does not answer until it is done: wait a shorter time.
    async with context.answering(consumer.address, min(_STAT_TIMEOUT_S, context.timeout_s)):
        stat = await consumer.stat(shard.spec.id)
    lags: list[tuple[str, int]] = []
    for source in shard.spec.sources:
        journal = split_journal_meta(source.journal)[0]
        head = heads[journal]
        if isinstance(head, GazetteError):
            raise head
        # Bytes before the minimum offset are never read: do not count them.
        read_through = max(stat.read_through.get(source.journal, 0), source.min_offset)
        lags.append((journal, max(0, head - read_through)))
    if len(lags) == 1:
        return bytes_text(lags[0][1])
    return ",".join(f"{journal}:{bytes_text(lag)}" for journal, lag in lags) or NONE
