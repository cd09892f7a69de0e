"""Tokens: for which claims, and how long one is used."""

from __future__ import annotations

import base64

from gazette.auth import Capability, Claims, KeyedAuth, NoAuth, StaticToken
from gazette.client.rpc.credentials import (
    Credentials,
    apply_claims,
    journal_claims,
    list_claims,
    shard_claims,
)
from gazette.protocol.label_set import EVERYTHING, LabelSelector, LabelSet
from gazette.testing.clock import ManualClock


class CountingSigner:
    def __init__(self) -> None:
        self.signed: list[tuple[Claims, float]] = []

    def sign(self, claims: Claims, lifetime_s: float) -> str:
        self.signed.append((claims, lifetime_s))
        return f"token-{len(self.signed)}"


def test_a_token_is_used_for_half_its_lifetime() -> None:
    clock, signer = ManualClock(), CountingSigner()
    credentials = Credentials(signer, clock)
    claims = journal_claims(Capability.READ, "a/journal")
    assert credentials.metadata(claims) == (("authorization", "Bearer token-1"),)
    clock.advance(1799)
    assert credentials.metadata(claims) == (("authorization", "Bearer token-1"),)
    clock.advance(1)
    assert credentials.metadata(claims) == (("authorization", "Bearer token-2"),)
    clock.jump(-7200)  # A token of the future would be refused.
    assert credentials.metadata(claims) == (("authorization", "Bearer token-3"),)


def test_only_a_cluster_without_keys_needs_none() -> None:
    """A token that is empty now may come later."""
    claims, clock = journal_claims(Capability.READ, "a/journal"), ManualClock()
    for signer, are_needed in ((None, False), (NoAuth(), False), (StaticToken(""), True)):
        credentials = Credentials(signer, clock)
        assert credentials.are_needed is are_needed
        assert credentials.metadata(claims) == ()


def test_tokens_differ_by_claims_and_lifetime() -> None:
    signer = CountingSigner()
    credentials = Credentials(signer, ManualClock())
    credentials.metadata(apply_claims(), 60.0)
    credentials.metadata(apply_claims(), 3600.0)
    credentials.metadata(list_claims(EVERYTHING), 60.0)
    credentials.metadata(Claims(Capability.APPLY, EVERYTHING, expires_at=5.0), 60.0)
    assert [lifetime for _, lifetime in signer.signed] == [60.0, 3600.0, 60.0]


def test_claims_name_the_journal_without_its_metadata() -> None:
    """``;`` is no symbol of a label's value."""
    claims = journal_claims(Capability.APPEND, "a/journal;with/meta")
    assert claims.selector.include == LabelSet.of(("name", "a/journal"))
    claims.selector.validate()


def test_claims_of_shards_name_them_all() -> None:
    claims = shard_claims(Capability.APPLY, "shard-b", "shard-a")
    assert claims.selector == LabelSelector.of(("id", "shard-a"), ("id", "shard-b"))


def test_what_is_signed_is_what_a_broker_verifies() -> None:
    clock = ManualClock()
    auth = KeyedAuth.parse(clock, base64.b64encode(bytes(range(32))).decode())
    ((_, header),) = Credentials(auth, clock).metadata(journal_claims(Capability.READ, "a/journal"))
    assert auth.verify(header, Capability.READ).selector == LabelSelector.of(name="a/journal")


def test_without_keys_there_is_no_header_and_a_static_token_is_sent_as_it_is() -> None:
    clock = ManualClock()
    assert Credentials(None, clock).metadata(apply_claims()) == ()
    static = Credentials(StaticToken("abc"), clock)
    assert static.metadata(apply_claims()) == (("authorization", "Bearer abc"),)
