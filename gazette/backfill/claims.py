"""What a run knows of states in databases before it builds any: it looks, and changes nothing.

Blocking; decisions are pure. `gazette.stores.claims` has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from gazette.backfill.build import has_state
from gazette.backfill.definition import Backfill
from gazette.consumer.application import Application, checked_store
from gazette.errors import Bug, Fenced, Invalid
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.shard import ShardSpec
from gazette.stores.claims import BackfillClaim, Held
from gazette.stores.state_builder import OfflineShard, claimable


def look(
    backfill: Backfill, specs: Collection[ShardSpec], fqn: Callable[[str], str]
) -> dict[str, Held]:
    """What databases hold of those shards that have no recovery log, by shard.

    Raises ``Invalid`` for stores that cannot be claimed, or without the prefix of shards' keys;
    ``Unavailable``.
    """
    held: dict[str, Held] = {}
    for spec in specs:
        if spec.recovery_log:
            continue
        application: Application[Any] = backfill.new_application()
        shard = OfflineShard(spec, fqn(spec.id), _no_commit)
        store = checked_store(application.new_store(shard, None))
        try:
            held[spec.id] = claimable(store, spec.id).held(shard)
        finally:
            store.destroy()
    return held


def require_claimable(held: Mapping[str, Held], token: str, *, overwrite: bool) -> None:
    """Require that a run with this token may write states, or has written them.

    Raises ``NotAllowed`` for those that would have to be overwritten, ``Fenced`` for those of the run
    that somebody has opened since.
    """
    for shard, one in held.items():
        if one.is_followed(token):
            raise Fenced(
                "the shard has run since this run gave it its state, which is not touched any more",
                hint="If it is to be built anew nonetheless, take a new --run-id.",
                shard=shard,
            )
        if one.checkpoint != Checkpoint() and not one.is_of(token) and not overwrite:
            raise has_state(shard)


def require_in_force(held: Mapping[str, Held], token: str) -> None:
    """Require that databases hold what a run with a manifest has committed. Raises ``Fenced``."""
    for shard, one in held.items():
        if not one.is_of(token):
            raise Fenced(
                "another backfill has replaced the state that this run has built",
                hint="Run it again with a new --run-id, if this one is to be in force.",
                shard=shard,
            )


def require_comparable(backfill: Backfill, shards: Collection[str]) -> None:
    """Require that the states of these shards in a database can be compared. Raises ``Invalid``."""
    if shards and type(backfill).content is Backfill.content:
        raise Invalid(
            f"{type(backfill).__name__} does not say what --verify is to compare in a database",
            path="--verify",
            hint="Implement content() of the Backfill: the shard's rows, by store.execute().",
        )


def claims_of(held: Mapping[str, Held], token: str) -> dict[str, BackfillClaim]:
    """With which the run's attempts may write, by shard."""
    return {shard: BackfillClaim(one.fence, token) for shard, one in held.items()}


def _no_commit() -> Any:
    raise Bug("a state that is looked at does not change")
