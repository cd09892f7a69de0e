"""Credentials of calls: tokens for claims. Unless its signer renews it, a token is used for half its life."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from typing import Final

from gazette.auth import Capability, Claims, NoAuth, Renewing, Signer, bearer
from gazette.protocol.ids import split_journal_meta
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.runtime.clock import Clock

Metadata = tuple[tuple[str, str], ...]

LONG_LIFETIME_S: Final = 3600.0
"""Lifetime of tokens for reads, appends and lists, in seconds. A stream ends when its token does."""
FRESH_S: Final = LONG_LIFETIME_S / 2
"""Seconds from the begin of a call for which its token is valid, if signed for `LONG_LIFETIME_S` by us."""
SHORT_LIFETIME_S: Final = 60.0
"""Lifetime in seconds of tokens for short calls: Apply, questions for problems, all calls to consumers."""

_TOKENS_MAX: Final = 4096


class Credentials:
    """The metadata of calls, by claims. A token is reused for the first half of its lifetime; a `Renewing`
    signer is asked at each call. Loop-bound."""

    def __init__(self, signer: Signer | None, clock: Clock) -> None:
        self._signer: Signer = NoAuth() if signer is None else signer
        self.are_needed: Final = not isinstance(self._signer, NoAuth)
        """False in a cluster without keys: the metadata of all calls is empty."""
        self._is_renewing: Final = isinstance(self._signer, Renewing)
        self._clock = clock
        self._tokens: OrderedDict[tuple[Claims, float], tuple[float, Metadata]] = OrderedDict()
        """The Unix time of signing and the metadata, by claims and lifetime."""

    def metadata(self, claims: Claims, lifetime_s: float = LONG_LIFETIME_S) -> Metadata:
        """Return metadata for a call that needs ``claims``, whose own expiry is ignored. Raise the signer's
        errors: a `Renewing` signer may have no valid token."""
        if claims.expires_at is not None:
            claims = replace(claims, expires_at=None)
        if self._is_renewing:
            return bearer(self._signer.sign(claims, lifetime_s))
        key = (claims, lifetime_s)
        now = self._clock.now()
        signing_and_metadata = self._tokens.get(key)
        # The difference is negative if the clock was set back. A token from far in the future is not used.
        if signing_and_metadata is not None and abs(now - signing_and_metadata[0]) < lifetime_s / 2:
            self._tokens.move_to_end(key)
            return signing_and_metadata[1]
        metadata = bearer(self._signer.sign(claims, lifetime_s))
        self._tokens[key] = (now, metadata)
        self._tokens.move_to_end(key)
        while len(self._tokens) > _TOKENS_MAX:
            self._tokens.popitem(last=False)
        return metadata


@lru_cache(maxsize=1024)
def journal_claims(capability: int, journal: str) -> Claims:
    """Return claims to one journal. Omit the metadata segment of its name, which no label can hold."""
    return Claims.of_journal(capability, split_journal_meta(journal)[0])


def shard_claims(capability: int, *shard_ids: str) -> Claims:
    """Return claims to some shards."""
    return Claims(capability, LabelSelector.of(*(("id", shard_id) for shard_id in shard_ids)))


def list_claims(selector: LabelSelector) -> Claims:
    """Return claims to list the journals or shards that a selector matches."""
    return Claims(Capability.LIST, selector)


def apply_claims() -> Claims:
    """Return claims to change any specification."""
    return Claims(Capability.APPLY, EVERYTHING)
