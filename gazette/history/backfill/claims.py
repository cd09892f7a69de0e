"""Reads the states in databases, before a run builds new states. This module writes nothing.

`look` blocks; all other functions are pure. `gazette.stores.claims` says why a run must look first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from gazette.consumer.application import Application, checked_store
from gazette.errors import Bug, Fenced, Invalid
from gazette.history.backfill.build import has_state
from gazette.history.backfill.definition import Backfill
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.shard import ShardSpec
from gazette.stores.claims import BackfillClaim, HeldState
from gazette.stores.state_builder import OfflineShard, claimable


def look(
    backfill: Backfill, specs: Collection[ShardSpec], fqn: Callable[[str], str]
) -> dict[str, HeldState]:
    """Return, by shard without a recovery log, the state that its database holds.

    Raise ``Invalid`` for stores that cannot be claimed, and if the consumers' prefix is unknown. Raise
    ``Unavailable`` if the database cannot be reached.
    """
    states: dict[str, HeldState] = {}
    for spec in specs:
        if spec.recovery_log:
            continue
        application: Application[Any] = backfill.new_application()
        shard = OfflineShard(spec, fqn(spec.id), _no_commit, application)
        store = checked_store(application.new_store(shard, None))
        try:
            states[spec.id] = claimable(store, spec.id).held(shard)
        finally:
            store.destroy()
    return states


def require_claimable(held: Mapping[str, HeldState], token: str, *, overwrite: bool) -> None:
    """Check that a run with this token may write the states of shards, or has written these states.

    Without ``overwrite``, raise ``NotAllowed`` for a state that this run has not written. Raise ``Fenced``
    for a state that this run has written and a shard has opened since.
    """
    for shard, state in held.items():
        if state.is_followed(token):
            raise Fenced(
                "the shard has run since this run gave it its state, so the state stays",
                hint="To build it again all the same, give a new --run-id.",
                shard=shard,
            )
        if state.checkpoint != Checkpoint() and not state.is_of(token) and not overwrite:
            raise has_state(shard)


def require_in_force(held: Mapping[str, HeldState], token: str) -> None:
    """Raise ``Fenced`` unless databases still hold the states that a run with a manifest has committed."""
    for shard, state in held.items():
        if not state.is_of(token):
            raise Fenced(
                "another backfill has replaced the state that this run has built",
                hint="Run it again with a new --run-id, if this state is the one that shall count.",
                shard=shard,
            )


def require_comparable(backfill: Backfill, shards: Collection[str]) -> None:
    """Raise ``Invalid`` if ``--verify`` cannot compare the shards' states: `Backfill.content` is missing."""
    if shards and type(backfill).content is Backfill.content:
        raise Invalid(
            f"{type(backfill).__name__} does not say what --verify compares in a database",
            path="--verify",
            hint="Implement content() of the Backfill: the shard's rows, by store.execute().",
        )


def claims_of(held: Mapping[str, HeldState], token: str) -> dict[str, BackfillClaim]:
    """Return, by shard, the claims of the run's attempts."""
    return {shard: BackfillClaim(state.fence, token) for shard, state in held.items()}


def _no_commit() -> Any:
    raise Bug("a state that is only read does not change")
