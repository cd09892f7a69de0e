"""``gazctl journals reset-head`` and ``suspend``: empty appends that change the state of a journal."""

from __future__ import annotations

from gazette.client.append.appender import AppendParams, SuspendControl
from gazette.client.client import Client
from gazette.client.journals import FragmentsParams, ListedJournal
from gazette.client.rpc.errors import status_of
from gazette.errors import GazetteError, NotFound
from gazette.gazctl.context import Context, each, parse_selector
from gazette.gazctl.flags import ResetHeadFlags, SuspendFlags
from gazette.gazctl.io.output import Table
from gazette.gazctl.journals.fragments import fragments_of, note_holes
from gazette.gazctl.journals.list import list_journals
from gazette.gazctl.journals.lookup import journals_by_name, write_head
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.status import Status

RESET = "reset"
WOULD_RESET = "would be reset, unless an append comes first"
NOT_NEEDED = "not needed: it takes appends"
RACED = "raced: an append came first, and no reset is needed"
EMPTY = "empty: the journal has no fragments to reset to"
FULLY_SUSPENDED = "skipped: it is fully suspended"


async def reset(context: Context) -> int:
    flags = context.flags(ResetHeadFlags)
    client, journals = await _selected(context, flags.selector)

    async def one(journal: ListedJournal) -> tuple[str, str]:
        return await reset_head(context, client, journal, dry_run=flags.dry_run)

    results = await each("reset-head", journals, one)
    table = Table(["Journal", "Head", "Result"], numbers=frozenset({"Head"}))
    for journal, result in zip(journals, results, strict=True):
        if isinstance(result, GazetteError):
            table.add(journal.spec.name, "?", f"failed: {result}")
        else:
            table.add(journal.spec.name, *result)
    context.terminal.write(table.text(context.terminal))
    return 1 if any(isinstance(result, GazetteError) for result in results) else 0


async def reset_head(
    context: Context, client: Client, journal: ListedJournal, *, dry_run: bool
) -> tuple[str, str]:
    """Move the head of a journal that refuses appends to the end of its fragments, unless ``dry_run``. Return
    the head and the outcome."""
    if journal.spec.suspend_level is SuspendLevel.FULL:
        return "?", FULLY_SUSPENDED
    name = journal.spec.name
    head = await write_head(context, client, name)
    if head == 0:
        # Do not append: an append with offset zero means any offset.
        return "0", EMPTY
    refusal = await _refusal(context, client, name)
    if refusal is None:
        return str(head), NOT_NEEDED
    if dry_run:
        return str(head), f"{WOULD_RESET}: {refusal}" if refusal else WOULD_RESET
    params = AppendParams(name, offset=head, suspend=SuspendControl.KEEP)
    try:
        async with context.answering(client.address):
            await client.append(params)
    except GazetteError as error:
        if status_of(error) != Status.WRONG_APPEND_OFFSET.name:
            raise
        return str(head), RACED
    note_holes(context, name, await fragments_of(context, client, FragmentsParams(name)), head)
    return str(head), RESET


async def _refusal(context: Context, client: Client, name: str) -> str | None:
    """Return why a journal refuses appends until its head is reset; None if the journal accepts appends.
    Return ``""`` for a suspended journal: only an append that resumes the journal would show the reason."""
    try:
        async with context.answering(client.address):
            await client.append(AppendParams(name, suspend=SuspendControl.KEEP))
    except GazetteError as error:
        if status_of(error) == Status.SUSPENDED.name:
            return ""
        if status_of(error) != Status.INDEX_HAS_GREATER_OFFSET.name:
            raise
        return error.message
    return None


async def suspend(context: Context) -> int:
    flags = context.flags(SuspendFlags)
    client, journals = await _selected(context, flags.selector)
    control = SuspendControl.NOW if flags.force else SuspendControl.IF_FLUSHED

    async def one(journal: ListedJournal) -> None:
        if journal.spec.suspend_level is not SuspendLevel.FULL and not flags.dry_run:
            await _suspend(context, client, journal.spec.name, control)

    results = await each("suspend", journals, one)
    current = await journals_by_name(context, client, (journal.spec.name for journal in journals))
    table = Table(["Journal", "Before", "After", "Note"])
    failed = False
    for journal, result in zip(journals, results, strict=True):
        name = journal.spec.name
        level = current[name].spec.suspend_level if name in current else SuspendLevel.NONE
        note = ""
        if isinstance(result, GazetteError):
            failed, note = True, f"failed: {result}"
        elif flags.dry_run:
            note = _would(journal.spec.suspend_level, force=flags.force)
        elif level is SuspendLevel.NONE:
            note = (
                "not suspended: a fragment is not persisted, or only recently; wait, or use --force"
            )
        table.add(name, journal.spec.suspend_level.name, level.name, note)
    context.terminal.write(table.text(context.terminal))
    return 1 if failed else 0


def _would(level: SuspendLevel, *, force: bool) -> str:
    if level is SuspendLevel.FULL:
        return "already suspended as far as possible"
    return (
        "would be suspended" if force else "would be suspended if all its fragments are persisted"
    )


async def _suspend(context: Context, client: Client, journal: str, control: SuspendControl) -> None:
    try:
        async with context.answering(client.address):
            await client.append(AppendParams(journal, suspend=control))
    except GazetteError as error:
        if status_of(error) != Status.SUSPENDED.name:  # A suspension succeeds with SUSPENDED.
            raise


async def _selected(context: Context, text: str) -> tuple[Client, tuple[ListedJournal, ...]]:
    selector = parse_selector(text, required=True)
    client = await context.broker()
    listed = await list_journals(context, client, selector)
    if not listed.journals:
        raise NotFound("no journal matches", selector=selector)
    return client, listed.journals
