"""The hints of a shard in etcd: read for a recovery, written by its primary, kept as backups.

::

    {hint_prefix}/{shard}.primary      written by the primary from time to time
    {hint_prefix}/{shard}.backup.0     what the last promotion recovered from
    {hint_prefix}/{shard}.backup.N     … and those before it
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from gazette.clock import Clock
from gazette.errors import Corrupt, GazetteError, Invalid
from gazette.etcd import Etcd
from gazette.etcd_values import Compare, Op, Operation, RangeResult
from gazette.protocol.hints import FSMHints, decode_hints
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.fsm import RecoveryFSM

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredHints:
    """The hints at one key. ``error`` says why there are none although the key has a value."""

    key: str
    hints: FSMHints | None
    mod_revision: int
    value: bytes = b""
    error: str = ""


def checked_hints(value: bytes, recovery_log: str) -> FSMHints:
    """Decode hints and make sure that a log can be played by them. Raises ``Invalid``, ``Corrupt``."""
    hints = decode_hints(value)
    if hints.log != recovery_log:
        raise Invalid(
            f"hints are of another recovery log ({hints.log}; expected {recovery_log})",
            hint="A shard's recovery_log_prefix must not change while it has hints.",
        )
    RecoveryFSM(hints)
    return hints


async def read_hints(etcd: Etcd, spec: ShardSpec) -> tuple[StoredHints, ...]:
    """All slots of a shard, at one revision: the primary's, then the backups. Raises ``Unavailable``."""
    keys = (spec.hint_primary_key, *spec.hint_backup_keys)
    result = await etcd.txn((), tuple(Op.get(key) for key in keys))
    stored: list[StoredHints] = []
    for key, read in zip(keys, result.results, strict=True):
        assert isinstance(read, RangeResult)
        if not read.kvs:
            stored.append(StoredHints(key, None, 0))
            continue
        kv = read.kvs[0]
        try:
            hints = checked_hints(kv.value, spec.recovery_log)
        except (Invalid, Corrupt) as error:
            stored.append(StoredHints(key, None, kv.mod_revision, kv.value, str(error)))
        else:
            stored.append(StoredHints(key, hints, kv.mod_revision, kv.value))
    return tuple(stored)


def usable_hints(stored: tuple[StoredHints, ...], spec: ShardSpec) -> tuple[FSMHints, ...]:
    """The hints to recover from, the first being the best; for a new shard, hints of nothing.

    Those that follow are for the case that the log has lost what the ones before them need. Damaged ones
    are passed over with a warning. If *all* that exist are damaged this raises ``Corrupt``: starting from
    nothing would drop the shard's state.
    """
    usable = list(dict.fromkeys(one.hints for one in stored if one.hints is not None))
    damaged = [one for one in stored if one.error]
    for bad in damaged:
        log.warning(
            "hints %(key)s of shard %(shard)s are damaged: %(error)s",
            {"key": bad.key, "shard": spec.id, "error": bad.error},
        )
    if usable:
        # Hints without files say to read the log from its first byte: whatever has files is better.
        return tuple(sorted(usable, key=lambda hints: not hints.live_nodes))
    if damaged:
        raise Corrupt(
            f"no hints of the shard can be used: {damaged[0].error}",
            shard=spec.id,
            keys=", ".join(one.key for one in damaged),
            hint="Restore one of these keys. Delete them all only to start the shard from nothing.",
        )
    return (FSMHints(log=spec.recovery_log),)


async def store_recorded_hints(
    etcd: Etcd, spec: ShardSpec, hints: FSMHints, assignment_key: str, create_revision: int
) -> bool:
    """Write the primary's hints, if we still are the primary; whether that was so.

    They also go into backups that have none yet, or some without files: as long as there is such a one a
    log cannot be pruned, and it took as many promotions as there are backups to fill them. A zombie's
    hints are dropped by the comparison. Raises ``Unavailable``.
    """
    ours = Compare.create_revision(assignment_key, "=", create_revision)
    value = hints.to_json()
    result = await etcd.txn((ours,), (Op.put(spec.hint_primary_key, value),))
    if not result.succeeded or not hints.live_nodes or not spec.hint_backup_keys:
        return result.succeeded
    empty = [slot for slot in (await read_hints(etcd, spec))[1:] if _is_empty(slot)]
    if empty:
        # Should somebody else have written one of them meanwhile, then all wait for the next time.
        await etcd.txn(
            (ours, *(Compare.mod_revision(slot.key, "=", slot.mod_revision) for slot in empty)),
            tuple(Op.put(slot.key, value) for slot in empty),
        )
    return True


def _is_empty(slot: StoredHints) -> bool:
    return not slot.error and (slot.hints is None or not slot.hints.live_nodes)


async def store_recovered_hints(
    etcd: Etcd,
    clock: Clock,
    spec: ShardSpec,
    hints: FSMHints,
    assignment_key: str,
    create_revision: int,
) -> None:
    """Put what was recovered from into the first backup, and move the others on.

    Hints without files, those of a shard's first owner, are not worth a backup: they say to read the
    log from its first byte, and would keep it from ever being pruned. Retried until it is done or the
    assignment is gone, whatever etcd answers: pruning relies on it, and the shard serves meanwhile.
    Cancellation: it may have been written.
    """
    if not spec.hint_backup_keys or not hints.live_nodes:
        return
    attempt = 0
    while True:
        try:
            if await _rotate(etcd, spec, hints, assignment_key, create_revision):
                return
        except GazetteError as error:
            log.warning(
                "recovered hints of shard %(shard)s are stored again: %(error)s",
                {"shard": spec.id, "error": error},
            )
        attempt += 1
        await clock.sleep(min(5.0, 0.05 * 2 ** min(attempt, 10)))
        if await _moved(etcd, assignment_key, create_revision):
            raise GazetteError(
                "the shard was assigned to somebody else during its recovery", shard=spec.id
            )


async def _moved(etcd: Etcd, assignment_key: str, create_revision: int) -> bool:
    try:
        kv = await etcd.get(assignment_key)
    except GazetteError:
        return False  # Not known: the lease ends all this if it lasts.
    return kv is None or kv.create_revision != create_revision


async def _rotate(
    etcd: Etcd, spec: ShardSpec, hints: FSMHints, assignment_key: str, create_revision: int
) -> bool:
    backups = (await read_hints(etcd, spec))[1:]
    value = hints.to_json()
    compares = [Compare.create_revision(assignment_key, "=", create_revision)]
    operations: list[Operation] = []
    for slot in backups:
        compares.append(Compare.mod_revision(slot.key, "=", slot.mod_revision))
        operations.append(Op.put(slot.key, value))
        if _is_empty(slot):
            break  # An empty slot takes the last one that moves.
        value = slot.value
    return (await etcd.txn(tuple(compares), tuple(operations))).succeeded
