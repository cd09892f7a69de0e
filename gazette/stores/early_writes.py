"""Refusal of writes to a store before its checkpoint is restored: no transaction would commit them."""

from __future__ import annotations

from gazette.errors import NotAllowed


def wrote_too_early(store: object, shard_id: str, hint: str = "") -> NotAllowed:
    """Return the error of a store that was written to before its first ``restore_checkpoint``."""
    return NotAllowed(
        f"the {type(store).__name__} was written to in new_store, before its checkpoint was restored",
        shard=shard_id,
        hint=f"Write the state in begin_transaction or consume_message. {hint}".rstrip(),
    )
