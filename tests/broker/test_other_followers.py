"""Brokers that may upload bytes which a replica never received: `replication/other_followers`."""

from __future__ import annotations

from gazette.broker.replication.other_followers import Incarnation, OtherFollowers
from gazette.protocol.ids import ProcessId

B: Incarnation = (ProcessId("zone", "b"), 5)
C: Incarnation = (ProcessId("zone", "c"), 6)
D: Incarnation = (ProcessId("zone", "d"), 7)
NEW_C: Incarnation = (ProcessId("zone", "c"), 9)


def followed(*with_them: Incarnation) -> OtherFollowers:
    others = OtherFollowers()
    others.committed(frozenset(with_them))
    return others


def test_a_follower_that_stays_brings_its_bytes_along() -> None:
    assert not followed().any_gone(frozenset())
    assert not followed(C).any_gone(frozenset({B, C}))


def test_a_follower_that_is_gone_may_upload() -> None:
    assert followed(C).any_gone(frozenset({B, D}))
    assert followed(C).any_gone(frozenset({NEW_C})), "the next process of that id has nothing"


def test_a_follower_that_left_the_journal_and_returns_has_a_new_replica() -> None:
    others = followed(C)
    others.follow(frozenset({D}))
    assert others.any_gone(frozenset({D}))
    assert others.any_gone(frozenset({C, D}))


def test_content_of_a_later_primary_ends_doubts_about_former_followers() -> None:
    others = followed(C)
    others.follow(frozenset({D}))
    others.committed(frozenset({D}))
    assert not others.any_gone(frozenset({D}))
    assert others.any_gone(frozenset({C}))


def test_a_primary_that_is_in_step_with_all_forgets() -> None:
    others = followed(C)
    assert others.known
    others.clear()
    assert others.known == frozenset()
    assert not others.any_gone(frozenset())


def test_any_broker_may_have_followed_with_a_replica_that_did_not() -> None:
    others = OtherFollowers()
    assert others.known is None
    assert others.any_gone(frozenset({B, C}))
    others.follow(frozenset())
    assert others.known is None, "a primary that has appended nothing may know as little"
    others.committed(frozenset())
    assert others.known == frozenset()
    others.forget()
    assert others.known is None
