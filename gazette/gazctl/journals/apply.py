"""``gazctl journals apply`` and ``edit``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gazette.client.client import Client
from gazette.client.journals import JournalChange, ListedJournal
from gazette.errors import Invalid, NotFound, Unavailable
from gazette.gazctl.batches import ANY_REVISION, apply_in_batches, check_batch_size
from gazette.gazctl.context import Context, parse_selector
from gazette.gazctl.flags import EditFlags, JournalsApplyFlags
from gazette.gazctl.io.output import proto_text
from gazette.gazctl.io.spec_editor import edit_specs, read_specs
from gazette.gazctl.journals.list import journals_yaml, list_journals
from gazette.gazctl.journals.lookup import journals_by_name
from gazette.protocol.journal import REPLICATION_MAX, JournalSpec
from gazette.protocol.journal_tree import JournalNode
from gazette.protocol.pb import broker_pb2
from gazette.protocol.text import duration
from gazette.protocol.text.validation import within
from gazette.runtime.numbers import counted
from gazette.runtime.timeouts import timeout

_POLL_S = 0.2


async def apply(context: Context) -> int:
    flags = context.flags(JournalsApplyFlags)
    changes = parse_changes(read_specs(flags.specs, context))
    if flags.dry_run:
        try:
            changes = await keep_suspensions(context, await context.broker(), changes)
        except Unavailable as error:
            context.terminal.note(f"{error}\nCannot look up suspensions of journals.")
        context.terminal.write(proto_text(_request(changes)))
        return 0
    await _apply(context, changes, flags.max_txn_size)
    if flags.wait:
        await wait_assigned(
            context, [change.upsert for change in changes if change.upsert is not None]
        )
    return 0


async def wait_assigned(context: Context, specs: Sequence[JournalSpec]) -> None:
    """Wait until each journal has a primary and all replicas. Raise ``Unavailable`` after --timeout. Journals
    that are suspended, or were deleted or changed meanwhile, need fewer brokers or none."""
    client = await context.broker()
    waiting = [spec.name for spec in specs]
    try:
        async with timeout(context.timeout_s):
            while waiting:
                listed = await journals_by_name(context, client, waiting)
                waiting = [name for name, journal in listed.items() if _lacks_brokers(journal)]
                if waiting:
                    await context.clock.sleep(_POLL_S)
    except TimeoutError as error:
        raise Unavailable(
            f"after {context.timeout_s:g} s, brokers are still too few for "
            f"{counted(len(waiting), 'journal')}, such as {min(waiting)}",
            hint="The specifications are applied. Start more brokers, or raise their "
            "--broker.limit.",
        ) from error


def _lacks_brokers(journal: ListedJournal) -> bool:
    replicas = journal.spec.desired_replication(REPLICATION_MAX)
    if replicas and journal.route.primary is None:
        return True
    return len(journal.route.members) < replicas


async def edit(context: Context) -> int:
    flags = context.flags(EditFlags)
    selector = parse_selector(flags.selector, required=True)
    listed = await list_journals(context, await context.broker(), selector)
    if not listed.journals:
        raise NotFound("no journal matches", selector=selector)

    async def apply_text(text: str) -> None:
        await _apply(context, parse_changes(text), flags.max_txn_size)

    if not await edit_specs(journals_yaml(listed.journals), apply_text, context):
        context.terminal.note("nothing was changed")
    return 0


def parse_changes(text: str) -> list[JournalChange]:
    """Return the changes of a tree. Raise ``Invalid`` with the line or the journal."""
    tree = JournalNode.parse(text)
    tree.validate()
    changes: list[JournalChange] = []
    for node in tree.push_down().journals():
        spec = node.spec
        if node.delete:
            check_delete(spec.name, node.revision)
            changes.append(JournalChange(delete=spec.name, expect_mod_revision=node.revision))
            continue
        with within(spec.name):
            validate(spec)
        check_revision(spec.name, node.revision)
        changes.append(JournalChange(upsert=spec, expect_mod_revision=node.revision))
    return changes


def validate(spec: JournalSpec) -> None:
    """Raise ``Invalid`` for a specification that is not to be applied. Refuse a retention below zero, which
    the original allows: every fragment would be too old for it."""
    spec.validate()
    if (retention_ns := spec.fragment.retention_ns) < 0:
        raise Invalid(
            f"invalid Retention ({duration.format_go_duration(retention_ns)}; expected >= 0s)",
            path="Fragment",
        )


def check_delete(name: str, revision: int) -> None:
    """Raise ``Invalid`` for a deletion at revision 0: this would mean that the item does not exist."""
    if revision == 0:
        raise Invalid(
            f"cannot delete {name}: it has no revision",
            path="revision",
            hint=f"Give the revision at which it was listed, or {ANY_REVISION} for any revision.",
        )
    check_revision(name, revision)


def check_revision(name: str, revision: int) -> None:
    if revision < ANY_REVISION:
        raise Invalid(
            f"{name} has an invalid revision ({revision}; expected >= {ANY_REVISION})",
            path="revision",
        )


async def keep_suspensions(
    context: Context, client: Client, changes: Sequence[JournalChange]
) -> list[JournalChange]:
    """Return the changes, each with the parts of a suspension that it leaves out: see `_with_suspension`.

    An update replaces the specification. Without its suspension a journal would resume, and its offsets
    would begin again at zero if its fragments are gone.
    """
    names = [change.upsert.name for change in changes if change.upsert is not None]
    current = await journals_by_name(context, client, names)
    result: list[JournalChange] = []
    for change in changes:
        spec = change.upsert
        journal = None if spec is None else current.get(spec.name)
        if spec is None or journal is None or journal.spec.suspend is None:
            result.append(change)
            continue
        suspended = _with_suspension(spec, journal.spec)
        if suspended is not spec:
            context.terminal.note(f"{spec.name}: its suspension is kept")
            # An append may resume the journal at any time. Require the revision of the look-up.
            revision = change.expect_mod_revision
            revision = journal.mod_revision if revision == ANY_REVISION else revision
            change = replace(change, upsert=suspended, expect_mod_revision=revision)
        result.append(change)
    return result


def _with_suspension(spec: JournalSpec, current: JournalSpec) -> JournalSpec:
    """Return ``spec`` with the parts of the present suspension that it lacks: all, or only the offset."""
    assert current.suspend is not None
    if spec.suspend is None:
        return replace(spec, suspend=current.suspend)
    if spec.suspend.offset == 0 and current.suspend.offset:
        return replace(spec, suspend=replace(spec.suspend, offset=current.suspend.offset))
    return spec


async def _apply(context: Context, changes: Sequence[JournalChange], batch_size: int) -> None:
    """Apply changes, and report them. The errors are those of `apply_in_batches`."""
    check_batch_size(batch_size)
    if not changes:
        context.terminal.note("there is nothing to apply")
        return
    client = await context.broker()
    changes = await keep_suspensions(context, client, changes)

    async def revisions() -> dict[str, int]:
        names = [item.delete if item.upsert is None else item.upsert.name for item in changes]
        current = await journals_by_name(context, client, names)
        return {name: journal.mod_revision for name, journal in current.items()}

    await apply_in_batches(
        context, client.address, changes, batch_size, client.apply_journals, revisions
    )


def _request(changes: Sequence[JournalChange]) -> broker_pb2.ApplyRequest:
    return broker_pb2.ApplyRequest(changes=[change.to_pb() for change in changes])
