"""Hints of a shard in etcd: a recovery reads them, the primary writes them, and older hints are backups.

{hint_prefix}/{shard}.primary      hints that the primary writes from time to time
{hint_prefix}/{shard}.backup.0     hints of the state that the last promotion recovered
{hint_prefix}/{shard}.backup.N     hints of states that earlier promotions recovered

If a backup has hints without files, the hints of the primary replace it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.values import Compare, Op
from gazette.errors import Corrupt, GazetteError, Invalid
from gazette.protocol.hints import (
    FEWER_FILES,
    HINTS_BYTES_MAX,
    FSMHints,
    HintsForm,
    decode_hints,
    encode_hints,
)
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.runtime.clock import Clock

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_ON_LOOP_BYTES: Final = 128 << 10
_FILE_BYTES: Final = 153
"""Approximate bytes of a file in JSON."""
_SHORT_BYTES: Final = 4096
"""Size in bytes that hints without files never reach."""


@dataclass(frozen=True, slots=True)
class StoredHints:
    """The hints at one key. ``error`` says why the value of the key does not give hints."""

    key: str
    hints: FSMHints | None
    mod_revision: int
    value: bytes = b""
    error: str = ""
    unchecked: bool = False
    """True if the value was not decoded: it is too long for hints without files."""


def checked_hints(value: bytes, recovery_log: str) -> FSMHints:
    """Decode hints, and check them. Raise ``Invalid`` for hints of another log, and for hints that contradict
    themselves. Raise ``Corrupt`` for a value that holds no hints."""
    hints = decode_hints(value)
    if hints.log != recovery_log:
        raise Invalid(
            f"hints are of another recovery log ({hints.log}; expected {recovery_log})",
            hint="A shard's recovery_log_prefix must not change while it has hints.",
        )
    RecoveryFSM(hints)
    return hints


async def read_hints(etcd: Etcd, spec: ShardSpec, *, check: bool = True) -> tuple[StoredHints, ...]:
    """Read all slots of a shard's hints at one revision: the primary's slot, then the backups.

    Without ``check``, leave long values undecoded, for callers that only move values or look for hints
    without files. Raise ``Unavailable`` if etcd does not answer.
    """
    keys = (spec.hint_primary_key, *spec.hint_backup_keys)
    stored: list[StoredHints] = []
    for key, kv in zip(keys, await etcd.get_each(*keys), strict=True):
        if kv is None:
            stored.append(StoredHints(key, None, 0))
            continue
        if not check and len(kv.value) > _SHORT_BYTES:
            stored.append(StoredHints(key, None, kv.mod_revision, kv.value, unchecked=True))
            continue
        try:
            hints = await _computed(len(kv.value), checked_hints, kv.value, spec.recovery_log)
        except (Invalid, Corrupt) as error:
            stored.append(StoredHints(key, None, kv.mod_revision, kv.value, str(error)))
        else:
            stored.append(StoredHints(key, hints, kv.mod_revision, kv.value))
    return tuple(stored)


async def _computed(size: int, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, on a thread if ``size`` is large: hints for 100 GiB of state take a second."""
    if size <= _ON_LOOP_BYTES:
        return fn(*args, **kwargs)
    return await asyncio.to_thread(fn, *args, **kwargs)


def usable_hints(stored: tuple[StoredHints, ...], spec: ShardSpec) -> tuple[FSMHints, ...]:
    """Return the hints to recover from, best first. For a new shard, return empty hints.

    A recovery tries the next hints of the list if the log has lost bytes that the first hints need. Skip
    damaged hints with a warning. If *all* stored hints are damaged, raise ``Corrupt``: a start from an empty
    state would drop the shard's state.
    """
    usable = list(dict.fromkeys(slot.hints for slot in stored if slot.hints is not None))
    damaged = [slot for slot in stored if slot.error]
    for slot in damaged:
        log.warning(
            "hints %(key)s of shard %(shard)s are damaged: %(error)s",
            {"key": slot.key, "shard": spec.id, "error": slot.error},
        )
    if usable:
        # Hints without files make a player read the log from its first byte, so they come last.
        return tuple(sorted(usable, key=lambda hints: not hints.live_nodes))
    if damaged:
        raise Corrupt(
            f"no hints of the shard can be used: {damaged[0].error}",
            shard=spec.id,
            keys=", ".join(slot.key for slot in damaged),
            hint="Restore one of these keys. Delete them all only to start the shard from nothing.",
        )
    return (FSMHints(log=spec.recovery_log),)


async def store_recorded_hints(
    etcd: Etcd,
    spec: ShardSpec,
    hints: FSMHints,
    assignment_key: str,
    create_revision: int,
    size: HintsSize | None = None,
) -> bool:
    """Write the primary's hints if this member still is the primary. Otherwise write nothing, and return
    False.

    Also write the hints into each backup without files. A backup without files keeps the log from being
    pruned, and a promotion fills only one backup. The comparison of the assignment's revision keeps a zombie
    from writing. ``size`` warns of large hints. Raise ``Invalid`` for hints that are too large. Raise
    ``Unavailable`` if etcd does not answer: the primary's hints may be written even then.
    """
    still_assigned = Compare.create_revision(assignment_key, "=", create_revision)
    form, value = await _encoded(hints)
    if size is not None:
        size.note(spec, hints, form, len(value))
    result = await etcd.txn((still_assigned,), (Op.put(spec.hint_primary_key, value),))
    if not result.succeeded or not hints.live_nodes or not spec.hint_backup_keys:
        return result.succeeded
    for slot in (await read_hints(etcd, spec, check=False))[1:]:
        if _is_empty(slot):
            # Write each slot in its own transaction, since all slots together may be more than etcd
            # accepts. A slot that was written meanwhile keeps its value.
            await etcd.txn((still_assigned, _unchanged(slot)), (Op.put(slot.key, value),))
    return True


def _is_empty(slot: StoredHints) -> bool:
    """Return True if a slot has no value, or hints without files. A damaged value is not empty."""
    if slot.error or slot.unchecked:
        return False
    return slot.hints is None or not slot.hints.live_nodes


async def store_recovered_hints(
    etcd: Etcd,
    clock: Clock,
    spec: ShardSpec,
    hints: FSMHints,
    assignment_key: str,
    create_revision: int,
) -> None:
    """Move each backup to the next slot, and write the hints of this recovery into the first backup. Do
    nothing for a shard without backups.

    Write no backup of hints without files, which a shard's first owner has: they need the log from its first
    byte on, so the log could never be pruned. After any error of etcd, retry until the hints are written or
    the assignment is gone (``GazetteError``): pruning relies on the backups, and the shard serves meanwhile.
    Raise ``Invalid`` if etcd accepts no hints of this size. A cancelled call may have written the hints.
    """
    if not spec.hint_backup_keys or not hints.live_nodes:
        return
    _, value = await _encoded(hints)
    attempt = 0
    while True:
        try:
            if await _rotate(etcd, spec, value, assignment_key, create_revision):
                return
        except GazetteError as error:
            log.warning(
                "recovered hints of shard %(shard)s are not stored yet, and are tried again: %(error)s",
                {"shard": spec.id, "error": error},
            )
        attempt += 1
        await clock.sleep(min(5.0, 0.05 * 2 ** min(attempt, 10)))
        if await _moved(etcd, assignment_key, create_revision):
            raise GazetteError(
                "the shard's assignment has ended before its recovered hints were stored",
                shard=spec.id,
            )


async def _moved(etcd: Etcd, assignment_key: str, create_revision: int) -> bool:
    """Return True if etcd says that the assignment is gone, or was made again. Return False if etcd does not
    answer."""
    try:
        kv = await etcd.get(assignment_key)
    except GazetteError:
        return False  # Nothing is known. If etcd stays away, the end of the lease ends this shard.
    return kv is None or kv.create_revision != create_revision


async def _rotate(
    etcd: Etcd, spec: ShardSpec, value: bytes, assignment_key: str, create_revision: int
) -> bool:
    """Move each backup to the next slot, and write the first backup. Return False if a slot or the assignment
    was changed meanwhile.

    Write each slot in its own transaction, since all together may be more than etcd accepts. Write the last
    slot first, so that only the value of the last slot is lost. Two neighbours with equal values show that an
    earlier rotation was interrupted there: continue that rotation.
    """
    backups = (await read_hints(etcd, spec, check=False))[1:]
    if backups[0].value == value:
        return True
    last = 0
    while not _is_empty(backups[last]) and last + 1 < len(backups):
        last += 1
        if backups[last].value == backups[last - 1].value:
            break
    still_assigned = Compare.create_revision(assignment_key, "=", create_revision)
    values = [value, *(slot.value for slot in backups[:last])]
    for slot, new_value in reversed(list(zip(backups[: last + 1], values, strict=True))):
        result = await etcd.txn((still_assigned, _unchanged(slot)), (Op.put(slot.key, new_value),))
        if not result.succeeded:
            return False
    return True


def _unchanged(slot: StoredHints) -> Compare:
    return Compare.mod_revision(slot.key, "=", slot.mod_revision)


async def _encoded(hints: FSMHints) -> tuple[HintsForm, bytes]:
    return await _computed(_FILE_BYTES * len(hints.live_nodes), encode_hints, hints)


class HintsSize:
    """Warns of hints of one shard that grow too large for etcd, once for each form of hints."""

    def __init__(self) -> None:
        self._warned: HintsForm | None = None
        """Form of the hints in the last warning; None while hints are small enough."""

    def note(self, spec: ShardSpec, hints: FSMHints, form: HintsForm, size: int) -> None:
        """Log a warning, once for each form, if hints as JSON need more than half of what etcd accepts."""
        if form is HintsForm.JSON and 2 * size <= HINTS_BYTES_MAX:
            self._warned = None
            return
        if form is self._warned:
            return
        self._warned = form
        log.warning(
            "hints of shard %(shard)s name %(files)d files and take %(size)d of %(max)d bytes that etcd"
            " accepts, as %(form)s%(readers)s. %(hint)s",
            {
                "shard": spec.id,
                "files": len(hints.live_nodes),
                "size": size,
                "max": HINTS_BYTES_MAX,
                "form": form.value,
                "readers": ", which the original cannot read"
                if form is HintsForm.COMPRESSED
                else "",
                "hint": FEWER_FILES,
            },
        )
