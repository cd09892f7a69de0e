"""Changes of specifications, in one transaction of etcd or in several."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

from gazette.client.journals import JournalChange
from gazette.client.shards import ShardChange
from gazette.errors import Conflict, GazetteError, Invalid
from gazette.gazctl.context import Context
from gazette.protocol.route import Header

C = TypeVar("C", JournalChange, ShardChange)

TXN_OPS_DEFAULT: Final = 128
"""Operations that etcd accepts in one transaction by default."""
ANY_REVISION: Final = -1
_SHOWN_MAX: Final = 10


def check_batch_size(size: int) -> None:
    if size < 0:
        raise Invalid(f"invalid size ({size}; expected >= 0)", path="--max-txn-size")


async def apply_in_batches(
    context: Context,
    address: str,
    changes: Sequence[C],
    size: int,
    call: Callable[[Sequence[C]], Awaitable[Header]],
    revisions: Callable[[], Awaitable[Mapping[str, int]]],
) -> None:
    """Make changes by ``call``, ``size`` of them at a time (0: all), and report them.

    Raise the errors of ``call``. Their hints say how many changes were made before, explain conflicts by the
    present ``revisions``, and advise smaller transactions.
    """
    step, done = size or len(changes), 0
    try:
        for begin in range(0, len(changes), step):
            async with context.answering(address):
                header = await call(changes[begin : begin + step])
            done = min(begin + step, len(changes))
    except GazetteError as error:
        batch = changes[done : done + step]
        if isinstance(error, Conflict):
            error.hint = _explanation(batch, await revisions())
        elif len(batch) > TXN_OPS_DEFAULT:
            error.hint = (
                f"The transaction has {len(batch)} changes, and etcd accepts "
                f"{TXN_OPS_DEFAULT} by default. Apply them in several: "
                f"--max-txn-size={TXN_OPS_DEFAULT // 2}."
            )
        if done:
            error.hint = f"The first {done} of {len(changes)} changes were made. {error.hint}"
        raise
    deleted = sum(1 for change in changes if change.delete)
    context.terminal.note(
        f"applied at revision {header.etcd.revision}: "
        f"{len(changes) - deleted} put, {deleted} deleted"
    )


def _explanation(
    changes: Sequence[JournalChange] | Sequence[ShardChange], present: Mapping[str, int]
) -> str:
    """Return a text with the specifications that are not at the expected revision."""
    expected = {_name_of(change): change.expect_mod_revision for change in changes}
    wrong: list[str] = [
        f"{name} {_revision_text(present.get(name, 0))}, expected: it {_revision_text(revision)}"
        for name, revision in sorted(expected.items())
        if revision not in (ANY_REVISION, present.get(name, 0))
    ]
    if len(wrong) > _SHOWN_MAX:
        wrong[_SHOWN_MAX:] = [f"and {len(wrong) - _SHOWN_MAX} more"]
    advice = "List them again and repeat the change, or give revision -1 to change any revision."
    return "\n".join([*wrong, advice])


def _name_of(change: JournalChange | ShardChange) -> str:
    if change.upsert is None:
        return change.delete
    return change.upsert.name if isinstance(change, JournalChange) else change.upsert.id


def _revision_text(revision: int) -> str:
    return f"is at revision {revision}" if revision else "does not exist"
