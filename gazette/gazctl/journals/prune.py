"""``gazctl journals prune``: remove fragments that are older than the retention of their journal."""

from __future__ import annotations

from dataclasses import dataclass, field

from gazette.client.client import Client
from gazette.client.journals import FragmentsParams, ListedJournal
from gazette.errors import GazetteError, Invalid, NotFound
from gazette.gazctl.context import Context, each, parse_selector
from gazette.gazctl.flags import JournalsPruneFlags
from gazette.gazctl.io.output import Table
from gazette.gazctl.journals.fragment_removal import (
    FragmentRemover,
    Removal,
    blob_stores,
    report_removal,
)
from gazette.gazctl.journals.fragments import fragments_of
from gazette.gazctl.journals.list import list_journals
from gazette.labels import CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.protocol.fragment import Fragment
from gazette.protocol.journal import JournalSpec, SuspendLevel
from gazette.protocol.text.duration import SECOND
from gazette.runtime.numbers import bytes_text, counted


@dataclass(slots=True)
class PrunePlan:
    """The fragments to remove from one journal, or the reason for removing none."""

    journal: str
    listed: list[Fragment] = field(default_factory=list)
    doomed: list[Fragment] = field(default_factory=list)
    """Fragments to remove: listed fragments, and the duplicates that these cover."""
    note: str = ""
    failed: bool = False


async def run(context: Context) -> int:
    flags = context.flags(JournalsPruneFlags)
    selector = parse_selector(flags.selector, required=True)
    client = await context.broker()
    journals = (await list_journals(context, client, selector)).journals
    if not journals:
        raise NotFound("no journal matches", selector=selector)
    async with blob_stores(context) as stores:
        remover = FragmentRemover(context, client, stores)

        async def one(journal: ListedJournal) -> PrunePlan:
            return await _plan(context, client, remover, journal.spec)

        outcomes = await each("plan", journals, one)
        plans = [
            PrunePlan(journal.spec.name, note=f"failed: {outcome}", failed=True)
            if isinstance(outcome, GazetteError)
            else outcome
            for journal, outcome in zip(journals, outcomes, strict=True)
        ]
        return await carry_out(context, remover, plans, dry_run=flags.dry_run)


async def _plan(
    context: Context, client: Client, remover: FragmentRemover, spec: JournalSpec
) -> PrunePlan:
    """Return the plan of one journal: remove its own fragments that are older than its retention."""
    if spec.fragment.retention_ns < 0:
        raise Invalid(
            "its retention is negative", hint="Give it one by: gazctl journals edit. 0 keeps all."
        )
    plan = PrunePlan(spec.name, note=_why_not(spec))
    if plan.note:
        return plan
    listed = await fragments_of(context, client, FragmentsParams(spec.name))
    plan.listed = [stored.fragment for stored in listed]
    oldest = context.clock.now() - spec.fragment.retention_ns / SECOND
    aged = [fragment for fragment in plan.listed if is_past(fragment, oldest)]
    if aged:
        owner = await remover.owner(spec)
        plan.doomed = [fragment for fragment in aged if owner.owns(fragment.path_postfix)]
        duplicates = await remover.duplicates(spec, owner, plan.doomed)
        plan.doomed += [fragment for fragment in duplicates if is_past(fragment, oldest)]
    return plan


def is_past(fragment: Fragment, oldest: float) -> bool:
    """Return True if a fragment was persisted before a time; False for an unpersisted fragment."""
    return 0 < fragment.mod_time < oldest and fragment.backing_store != ""


def _why_not(spec: JournalSpec) -> str:
    """Return why a journal is not pruned; empty if it is pruned."""
    if spec.labels.value_of(CONTENT_TYPE) == CONTENT_RECOVERY_LOG:
        return "skipped: a recovery log is pruned by `gazctl shards prune`"
    if not spec.fragment.retention_ns:
        return "skipped: it has no retention"
    if spec.suspend_level is SuspendLevel.FULL:
        return "skipped: it is fully suspended"
    return ""


async def carry_out(
    context: Context, remover: FragmentRemover, plans: list[PrunePlan], *, dry_run: bool
) -> int:
    """Remove the fragments of the plans, unless ``dry_run``, and report. Return the exit code."""
    doomed = [fragment for plan in plans for fragment in plan.doomed]
    removal = Removal() if dry_run else await remover.remove(doomed)
    headers = ["Journal", "Fragments", "Bytes", "Pruned", "Pruned bytes", "Note"]
    table = Table(headers, numbers=frozenset(headers[1:5]))
    for plan in plans:
        table.add(
            plan.journal,
            str(len(plan.listed)),
            bytes_text(sum(fragment.length for fragment in plan.listed)),
            str(len(plan.doomed)),
            bytes_text(sum(fragment.length for fragment in plan.doomed)),
            plan.note,
        )
    context.terminal.write(table.text(context.terminal))
    if dry_run:
        context.terminal.note(f"{counted(len(doomed), 'fragment')} would be removed")
    else:
        context.terminal.note(f"removed {counted(removal.removed, 'fragment')}")
    code = report_removal(context, removal)
    return 1 if any(plan.failed for plan in plans) else code
