"""``gazctl shards hints``: the hints of shards, and the bytes that a recovery with them reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from gazette.client.client import Client
from gazette.client.shards import ListedShard, ShardClient, ShardHints
from gazette.errors import GazetteError
from gazette.gazctl.context import Context, each, parse_selector
from gazette.gazctl.flags import ShardsHintsFlags
from gazette.gazctl.io.output import NONE, Table, json_text
from gazette.gazctl.journals.lookup import write_head
from gazette.gazctl.shards.list import UNKNOWN, list_shards
from gazette.gazctl.shards.prune_plan import Span, hints_by_slot, spans_of
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import JournalName, Offset
from gazette.runtime.numbers import bytes_text


@dataclass(frozen=True, slots=True)
class SlotHints:
    """The hints in one slot of a shard; None for an empty slot. A recovery by these hints reads ``spans``."""

    shard: str
    slot: str
    hints: FSMHints | None
    spans: Sequence[Span] = ()

    def bytes_read(self, heads: Mapping[JournalName, Offset]) -> int | None:
        """Return the number of bytes that a recovery reads now; None if a log's head is unknown."""
        total = 0
        for span in self.spans:
            end = heads.get(span.log) if span.end is None else span.end
            if end is None:
                return None
            total += max(0, end - span.begin)
        return total


async def run(context: Context) -> int:
    flags = context.flags(ShardsHintsFlags)
    consumer = await context.consumer()
    listed = await list_shards(context, consumer, parse_selector(flags.selector, required=False))
    if not listed.shards:
        context.terminal.note("no shard matches")
    for shard in listed.shards:
        if not shard.spec.recovery_log:
            context.terminal.note(f"{shard.spec.id}: it has no recovery log, so no hints")
    slots, errors = await all_slots(context, consumer, listed.shards)
    heads, head_errors = await heads_of(context, await context.broker(), slots)
    for name, error in [*errors.items(), *head_errors.items()]:
        context.terminal.note(f"{name}: {error}")
    match flags.format:
        case "json":
            text = json_text(_documents(listed.shards, slots, errors, heads))
        case "yaml":
            text = yaml.safe_dump(_documents(listed.shards, slots, errors, heads), sort_keys=False)
        case _:
            table = _files_table(slots) if flags.files else _table(slots, heads)
            text = table.text(context.terminal)
    context.terminal.write(text)
    return 1 if errors or head_errors else 0


async def all_slots(
    context: Context, consumer: ShardClient, shards: Sequence[ListedShard]
) -> tuple[list[SlotHints], dict[str, str]]:
    """Return the slots of all shards with a recovery log, and errors by shard."""
    with_log = [shard for shard in shards if shard.spec.recovery_log]

    async def one(shard: ListedShard) -> list[SlotHints]:
        async with context.answering(consumer.address):
            stored = await consumer.get_hints(shard.spec.id)
        return list(_slots_of(shard, stored))

    slots: list[SlotHints] = []
    errors: dict[str, str] = {}
    for shard, result in zip(with_log, await each("hints", with_log, one), strict=True):
        if isinstance(result, GazetteError):
            errors[shard.spec.id] = str(result)
        else:
            slots += result
    return slots, errors


def _slots_of(shard: ListedShard, stored: ShardHints) -> Iterator[SlotHints]:
    """Yield the slots of a shard. Raise ``Invalid`` for hints whose segments contradict each other."""
    for name, hints in hints_by_slot(shard.spec, stored).items():
        spans = () if hints is None else tuple(spans_of(hints))
        yield SlotHints(shard.spec.id, name, hints, spans)


async def heads_of(
    context: Context, client: Client, slots: Sequence[SlotHints]
) -> tuple[dict[JournalName, Offset], dict[JournalName, str]]:
    """Return the heads of logs that are read to their end, and errors by log."""
    logs = sorted({span.log for slot in slots for span in slot.spans if span.end is None})

    async def one(log: JournalName) -> Offset:
        return await write_head(context, client, log)

    heads: dict[JournalName, Offset] = {}
    errors: dict[JournalName, str] = {}
    for log, result in zip(logs, await each("heads", logs, one), strict=True):
        if isinstance(result, GazetteError):
            errors[log] = str(result)
        else:
            heads[log] = result
    return heads, errors


def _table(slots: Sequence[SlotHints], heads: Mapping[JournalName, Offset]) -> Table:
    numbers = ("Files", "Segments", "Properties", "Size", "Begin", "Reads")
    table = Table(["Shard", "Slot", "Log", *numbers], numbers=frozenset(numbers))
    for slot in slots:
        hints = slot.hints
        if hints is None:
            table.add(slot.shard, slot.slot, NONE, *[""] * len(numbers))
            continue
        read_bytes = slot.bytes_read(heads)
        begin = min((span.begin for span in slot.spans if span.log == hints.log), default=0)
        table.add(
            *(slot.shard, slot.slot, hints.log, str(len(hints.live_nodes))),
            str(sum(len(node.segments) for node in hints.live_nodes)),
            str(len(hints.properties)),
            bytes_text(len(hints.to_json())),
            str(begin),
            UNKNOWN if read_bytes is None else bytes_text(read_bytes),
        )
    return table


def _files_table(slots: Sequence[SlotHints]) -> Table:
    """Return a row for each segment of each live file, and for each property."""
    headers = ["Shard", "Slot", "File", "Author", "Sequence", "Offsets", "Log"]
    table = Table(headers)
    for slot in slots:
        if slot.hints is None:
            continue
        for node in slot.hints.live_nodes:
            for segment in node.segments:
                table.add(
                    *(slot.shard, slot.slot, str(node.fnode), str(segment.author)),
                    f"{segment.first_seq_no}-{segment.last_seq_no}",
                    f"{segment.first_offset}-{segment.last_offset or ''}",
                    segment.log or slot.hints.log,
                )
        for prop in slot.hints.properties:
            table.add(slot.shard, slot.slot, prop.path, *["property"], "", "", slot.hints.log)
    return table


def _documents(
    shards: Sequence[ListedShard],
    slots: Sequence[SlotHints],
    errors: Mapping[str, str],
    heads: Mapping[JournalName, Offset],
) -> list[dict[str, Any]]:
    """Return one document for each shard. Hints are the JSON of etcd."""
    documents = []
    for shard in shards:
        document: dict[str, Any] = {"shard": shard.spec.id, "log": shard.spec.recovery_log}
        if shard.spec.id in errors:
            document["error"] = errors[shard.spec.id]
        else:
            shard_slots = [slot for slot in slots if slot.shard == shard.spec.id]
            document["slots"] = [slot_document(slot, heads) for slot in shard_slots]
        documents.append(document)
    return documents


def slot_document(slot: SlotHints, heads: Mapping[JournalName, Offset]) -> dict[str, Any]:
    """Return a slot for programs."""
    if slot.hints is None:
        return {"slot": slot.slot, "hints": None}
    encoded = slot.hints.to_json()
    return {
        "slot": slot.slot,
        "hints": json.loads(encoded),
        "hints_bytes": len(encoded),
        "reads": [
            {
                "log": span.log,
                "begin": span.begin,
                "end": heads.get(span.log) if span.end is None else span.end,
            }
            for span in slot.spans
        ],
        "read_bytes": slot.bytes_read(heads),
    }
