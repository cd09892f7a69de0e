"""``gazctl journals create``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.consumer.declare.apply import TXN_CHANGES, fitted, require_healthy, warnings_of
from gazette.consumer.declare.changes import DeclaredChange, DeclaredChanges
from gazette.consumer.declare.specs import REPLICAS_MAX, SpecSettings, fragment_spec
from gazette.errors import Conflict, Invalid
from gazette.gazctl.batches import TXN_OPS_DEFAULT
from gazette.gazctl.context import Context
from gazette.gazctl.flags import JournalsCreateFlags
from gazette.gazctl.journals.apply import validate, wait_assigned
from gazette.gazctl.journals.lookup import journals_by_name
from gazette.protocol.journal import JournalSpec
from gazette.protocol.journal_tree import JournalNode
from gazette.protocol.label_set import LabelSet
from gazette.protocol.text.duration import SECOND
from gazette.protocol.text.validation import within

_SHOWN_MAX = 10


async def run(context: Context) -> int:
    flags = context.flags(JournalsCreateFlags)
    names = _names(context.loaded.arguments)
    labels = labels_of(flags.label)
    settings = SpecSettings(flags.store, flags.replication or REPLICAS_MAX)
    if flags.replication:
        _specs(names, settings, labels, flags.retention)  # Refuse mistakes before any call.
    client = await context.broker()
    async with context.answering(client.address):
        if not flags.replication:
            settings = await fitted(settings, client)
        specs = _specs(names, settings, labels, flags.retention)
        if flags.dry_run:
            context.terminal.write(JournalNode.of((spec, 0) for spec in specs).to_yaml())
            return 0
        await _require_absent(context, client, names)
        changes = DeclaredChanges(tuple(DeclaredChange(spec, 0, "") for spec in specs), (), 0)
        warnings = await warnings_of(changes, client)
        await require_healthy(client, changes)
        await _create(context, client, specs)
    for spec in specs:
        stores = ", ".join(spec.fragment.stores)
        context.terminal.note(f"created {spec.name}: replication {spec.replication}, in {stores}")
    for line in warnings:
        context.terminal.note(line)
    if flags.wait:
        await wait_assigned(context, specs)
    return 0


def labels_of(texts: Iterable[str]) -> LabelSet:
    """Return the labels of ``--label``. Raise ``Invalid`` for a text that is no label."""
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise Invalid(
                f"{text!r} is no label",
                path="--label",
                hint="Write NAME=VALUE, as in --label content-type=application/x-ndjson.",
            )
        pairs.append((name, value))
    labels = LabelSet.of(*pairs)
    with within("--label"):
        labels.validate()
    return labels


def _names(names: Sequence[str]) -> list[str]:
    if not names:
        raise Invalid(
            "no journal is named",
            path="gazctl journals create",
            hint="As in `gazctl journals create a/journal --store s3://bucket/prefix/`.",
        )
    for name in names:
        if names.count(name) > 1:
            raise Invalid(f"{name} is named twice", path="gazctl journals create")
    return sorted(names)


def _specs(
    names: Sequence[str], settings: SpecSettings, labels: LabelSet, retention_s: float
) -> list[JournalSpec]:
    """Return the specifications, with the checks of `journals apply`."""
    fragment = fragment_spec(settings, round(retention_s * SECOND))
    specs = [JournalSpec(name, settings.replication, labels, fragment) for name in names]
    for spec in specs:
        with within(spec.name):
            validate(spec)
    return specs


async def _require_absent(context: Context, client: Client, names: Sequence[str]) -> None:
    """Raise ``Conflict`` with the names of existing journals."""
    existing = sorted(await journals_by_name(context, client, names))
    if existing:
        shown = ", ".join(existing[:_SHOWN_MAX])
        more = f" and {len(existing) - _SHOWN_MAX} more" if len(existing) > _SHOWN_MAX else ""
        raise Conflict(
            f"{shown}{more} {'exists' if len(existing) == 1 else 'exist'} already, and nothing was created",
            hint="Leave them out, or change them by `gazctl journals edit`.",
        )


async def _create(context: Context, client: Client, specs: Sequence[JournalSpec]) -> None:
    changes = [JournalChange(upsert=spec, expect_mod_revision=0) for spec in specs]
    batch_size = 0 if len(changes) <= TXN_OPS_DEFAULT else TXN_CHANGES
    try:
        await client.apply_journals(changes, batch_size=batch_size)
    except Conflict as error:
        error.hint = (
            "Another program has created one of them meanwhile: see `gazctl journals list`."
        )
        raise
