"""Where a restored shard goes on in sources that may have been created again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.consumer.shard.source_lives import (
    SourceRestart,
    in_present_lives,
    restarts_of,
    with_restarts,
)
from gazette.errors import Corrupt, Invalid
from gazette.labels import SOURCE_RESTART
from gazette.protocol.checkpoint import Checkpoint, ProducerState, SourceCheckpoint
from gazette.protocol.journal_life import JournalLife
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSource, ShardSpec
from tests.facts import raises

A, B = "a/source.x", "b/source=%1"
READ = SourceCheckpoint(700, {b"\x01" * 6: ProducerState(5, 650)})
SPEC = ShardSpec(
    "shard", (ShardSource(A), ShardSource(B)), "logs", "/hints", max_txn_duration_ns=10**9
)


def spec(*restarts: SourceRestart) -> ShardSpec:
    return replace(SPEC, labels=with_restarts(LabelSet.of(("team", "one")), restarts))


def test_a_checkpoint_without_lives_takes_the_present_ones() -> None:
    """It is of the original, or of an earlier version."""
    lives = {A: JournalLife(1, 5), B: JournalLife(1, 6)}
    before = Checkpoint({A: READ})
    after = in_present_lives(before, lives, SPEC)
    assert (after.sources, after.lives) == (before.sources, lives)


def test_lives_of_another_etcd_are_adopted() -> None:
    before = Checkpoint({A: READ}, lives={A: JournalLife(1, 5)})
    after = in_present_lives(before, {A: JournalLife(2, 9)}, SPEC)
    assert (after.sources, after.lives) == ({A: READ}, {A: JournalLife(2, 9)})


@pytest.mark.parametrize("chosen", [None, SourceRestart(A, 8, 0), SourceRestart(B, 9, 0)])
def test_another_life_needs_a_choice_for_it(chosen: SourceRestart | None) -> None:
    before = Checkpoint({A: READ}, lives={A: JournalLife(1, 5)})
    shard = spec() if chosen is None else spec(chosen)
    facts: dict[str, Any] = {
        "created": 9,
        "created_before": 5,
        "journal": A,
        "shard": "shard",
        "offset": 700,
    }
    with raises(Corrupt, advises="--same-bytes", **facts):
        in_present_lives(before, {A: JournalLife(1, 9)}, shard)


@given(st.integers(0, 10**18 - 1) | st.none(), st.sampled_from([A, B]))
def test_a_choice_holds_for_one_life_of_one_source(offset: int | None, journal: str) -> None:
    other = B if journal == A else A
    before = Checkpoint({A: READ, B: READ}, {"out": b"ack"}, lives={journal: JournalLife(1, 5)})
    shard = spec(SourceRestart(journal, 7, 3), SourceRestart(journal, 9, offset))
    assert restarts_of(shard.labels) == {journal: SourceRestart(journal, 9, offset)}
    assert shard.labels.value_of("team") == "one"
    shard.validate()
    lives = {journal: JournalLife(1, 9), other: JournalLife(1, 4)}
    after = in_present_lives(before, lives, shard)
    wanted = READ if offset is None else SourceCheckpoint(offset)
    assert after.sources == {journal: wanted, other: READ}
    assert (after.lives, after.ack_intents) == (lives, before.ack_intents)
    again = Checkpoint.from_json(after.to_json())
    assert again == Checkpoint.from_bytes(after.to_bytes()) == after
    assert in_present_lives(again, lives, shard) == after


@pytest.mark.parametrize("value", ["", "1.2", "x.0.a", "1.-1.a", "1.same", "１.0.a"])
def test_a_label_that_is_no_choice_is_refused(value: str) -> None:
    with raises(Invalid, path=SOURCE_RESTART):
        restarts_of(LabelSet.of((SOURCE_RESTART, value)))


@pytest.mark.parametrize("lives", [b"[1]", b"[1,2,3]", b'["1",2]', b"[true,2]", b"7"])
def test_lives_that_are_none_are_corrupt(lives: bytes) -> None:
    with raises(Corrupt):
        Checkpoint.from_json(b'{"sources":{},"lives":{"j":' + lives + b"}}")
