"""Apply a declaration to a running cluster: list specifications, and put missing or changed ones."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Final

from gazette.client.append.appender import backoff_s
from gazette.client.client import Client
from gazette.client.journals import JournalChange, ListedJournal, broker_count
from gazette.client.rpc.errors import status_of
from gazette.client.shards import ListedShard, ShardChange, ShardClient
from gazette.consumer.declare.changes import DeclaredChanges, changes_of
from gazette.consumer.declare.declaration import Declaration
from gazette.consumer.declare.specs import REPLICAS_MAX, SpecSettings, log_specs
from gazette.errors import Conflict, Unavailable
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.status import Status

_ATTEMPTS: Final = 5
_SHOWN_MAX: Final = 5
"""Greatest number of differences that an error names."""
TXN_CHANGES: Final = 64
"""Greatest number of changes in one transaction: etcd accepts 128 operations by default."""


async def changes_needed(
    declaration: Declaration,
    settings: SpecSettings,
    brokers: Client,
    members: ShardClient | None,
    *,
    given: Collection[str] = (),
    more_partitions: bool = False,
    changed_key: bool = False,
) -> DeclaredChanges:
    """Return the changes that the cluster needs. Without ``members``, assume that it has no shards.

    Raise ``NotAllowed`` for refused changes (see `changes_of`). Errors of calls reach the caller.
    """
    shards = () if members is None else (await members.list_shards()).shards
    listed = await _listed(declaration, settings, brokers, shards)
    return changes_of(
        declaration,
        settings,
        listed,
        shards,
        given=given,
        more_partitions=more_partitions,
        changed_key=changed_key,
    )


async def fitted(settings: SpecSettings, brokers: Client) -> SpecSettings:
    """Return settings with a replica for each broker, at most `REPLICAS_MAX`. If the number of brokers is not
    known, use `REPLICAS_MAX`. Call this if the user has not given the replication."""
    count = await broker_count(brokers)
    replication = REPLICAS_MAX if count is None else max(1, min(count, REPLICAS_MAX))
    return replace(settings, replication=replication)


async def warnings_of(changes: DeclaredChanges, brokers: Client) -> list[str]:
    """Return warnings about the replication of the journals to put."""
    replications = {change.spec.replication for change in changes.journals}
    count = await broker_count(brokers) if replications else None
    if count is None:
        return []
    highest, running = max(replications), "1 broker runs" if count == 1 else f"{count} brokers run"
    text = f"warning: {running}, and "
    if highest > count:
        text += (
            f"a replication of {highest} needs {highest}: journals take no appends until more brokers "
            f"start. Start them, or give --replication {count}"
        )
        return [text]
    if highest < REPLICAS_MAX:
        text += (
            f"journals get a replication of {highest}: appends that are not stored yet are lost with "
            f"{'it' if highest == 1 else 'them'}. With {REPLICAS_MAX} brokers, give --replication "
            f"{REPLICAS_MAX}"
        )
        return [text]
    return []


async def require_healthy(brokers: Client, changes: DeclaredChanges) -> None:
    """Raise ``Unavailable`` if brokers cannot use a store of the journals to put."""
    stores = {store for put in changes.journals for store in put.spec.fragment.stores}
    for store in sorted(stores):
        if problem := await brokers.fragment_store_health(store):
            raise Unavailable(
                f"the store {store} is unhealthy, and nothing was changed: {problem}",
                hint="Correct --store, or make the bucket or directory, and its rights. Then check it: "
                f"gazctl journals store-health {shlex.quote(str(store))}",
            )


async def _listed(
    declaration: Declaration,
    settings: SpecSettings,
    brokers: Client,
    shards: tuple[ListedShard, ...],
) -> list[ListedJournal]:
    """Return the journals that the declaration names, and all journals in directories of recovery logs."""
    selectors = [declared.selector for declared in declaration.journals]
    selectors += [LabelSelector.of(name=name) for name in declaration.dead_letters]
    logs = {spec.name for spec in log_specs(declaration, settings)}
    logs |= {shard.spec.recovery_log for shard in shards if shard.spec.recovery_log}
    for prefix in sorted({log.rpartition("/")[0] for log in logs}):
        selectors.append(LabelSelector.parse(f"name:prefix={prefix}/"))
    listed: dict[str, ListedJournal] = {}
    for selector in selectors:
        for journal in (await brokers.list_journals(selector)).journals:
            listed[journal.spec.name] = journal
    return list(listed.values())


async def put_declared(
    find: Callable[[], Awaitable[DeclaredChanges]],
    brokers: Client,
    members: ShardClient | None = None,
) -> DeclaredChanges:
    """Put the journals of the changes that ``find`` returns, and with ``members`` also the shards.

    If another program changes the same journals or shards meanwhile, call ``find`` again. Return the changes
    of the last call. Raise ``Conflict`` after `_ATTEMPTS` attempts. A cancellation may leave some changes
    applied: the next call finds the other changes.
    """
    for attempt in range(_ATTEMPTS):
        changes = await find()
        try:
            await _put(changes, brokers, members)
        except Conflict as error:
            if status_of(error) != Status.ETCD_TRANSACTION_FAILED.name:
                raise
            if attempt == _ATTEMPTS - 1:
                raise _overtaken(changes, shards=members is not None) from error
            await brokers.clock.sleep(backoff_s(attempt))
        else:
            break
    return changes


async def _put(changes: DeclaredChanges, brokers: Client, members: ShardClient | None) -> None:
    """Put journals, and then shards. Raise ``Conflict`` if any of them has changed since it was listed."""
    if changes.journals:
        journals = [
            JournalChange(upsert=put.spec, expect_mod_revision=put.revision)
            for put in changes.journals
        ]
        await brokers.apply_journals(journals, batch_size=TXN_CHANGES)
    if members is not None and changes.shards:
        shards = [
            ShardChange(upsert=put.spec, expect_mod_revision=put.revision) for put in changes.shards
        ]
        await members.apply_shards(shards, batch_size=TXN_CHANGES)


def _overtaken(changes: DeclaredChanges, *, shards: bool) -> Conflict:
    differences = changes.lines(shards=shards)[:-1]
    return Conflict(
        f"another program changes the same journals or shards: {_ATTEMPTS} times one differed from what was "
        "listed right before",
        hint="Find the program that applies specifications again and again, and stop it. What differs still: "
        + "; ".join(differences[:_SHOWN_MAX]),
        differing=len(differences),
    )
