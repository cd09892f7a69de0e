"""``gazctl journals decide-fragments``: decides which fragments of unknown names are a journal's own."""

from __future__ import annotations

from dataclasses import replace

from gazette.client.client import Client
from gazette.client.journals import FragmentsParams, JournalChange, ListedJournal
from gazette.errors import GazetteError, NotFound
from gazette.gazctl.context import Context, each, parse_selector
from gazette.gazctl.flags import DecideFragmentsFlags
from gazette.gazctl.io.output import Table
from gazette.gazctl.journals.fragments import fragments_of
from gazette.gazctl.journals.list import list_journals
from gazette.protocol import postfix_template
from gazette.protocol.fragment_labels import with_foreign_directory, with_former_template
from gazette.protocol.journal import JournalSpec

NOTHING = "all its fragments are explained"
KNOWN = "known already"
DECIDED = "decided"
WOULD_DECIDE = "would be decided"


async def run(context: Context) -> int:
    flags = context.flags(DecideFragmentsFlags)
    selector = parse_selector(flags.selector, required=True)
    client = await context.broker()
    journals = (await list_journals(context, client, selector)).journals
    if not journals:
        raise NotFound("no journal matches", selector=selector)

    async def one(journal: ListedJournal) -> str:
        if flags.former_template or flags.foreign:
            return await _decide(context, client, journal, flags)
        # While fragments are undecided, a broker lists none, and answers with the reason.
        await fragments_of(context, client, FragmentsParams(journal.spec.name))
        return NOTHING

    results = await each("decide-fragments", journals, one)
    table = Table(["Journal", "Result"])
    for journal, result in zip(journals, results, strict=True):
        table.add(journal.spec.name, str(result))
    context.terminal.write(table.text(context.terminal))
    return 1 if any(isinstance(result, GazetteError) for result in results) else 0


async def _decide(
    context: Context, client: Client, journal: ListedJournal, flags: DecideFragmentsFlags
) -> str:
    """Add the decisions to the labels of one journal, at its listed revision."""
    spec = decided(journal.spec, flags)
    if spec == journal.spec:
        return KNOWN
    if flags.dry_run:
        return WOULD_DECIDE
    change = JournalChange(upsert=spec, expect_mod_revision=journal.mod_revision)
    async with context.answering(client.address):
        await client.apply_journals([change])
    return DECIDED


def decided(spec: JournalSpec, flags: DecideFragmentsFlags) -> JournalSpec:
    """Return the specification with the decisions in its labels. Raise ``Invalid`` for a wrong template, or a
    text that is too long for a label."""
    labels = spec.labels
    if flags.former_template:
        postfix_template.parse(flags.former_template)  # A wrong template would match all fragments.
        labels = with_former_template(labels, flags.former_template)
    for directory in flags.foreign:
        labels = with_foreign_directory(labels, directory)
    return replace(spec, labels=labels)
