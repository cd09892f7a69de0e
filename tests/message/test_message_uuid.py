"""UUIDs, clocks and producers, against vectors computed independently."""

from __future__ import annotations

import random
import threading
import uuid as stdlib_uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.message.uuid import (
    ACK_TXN,
    CLOCK_MAX,
    CONTINUE_TXN,
    NIL_UUID,
    OUTSIDE_TXN,
    Clock,
    UuidMint,
    build_uuid,
    clock_at,
    clock_span,
    clock_unix_ns,
    flags_text,
    new_producer_id,
    parse_columns,
    parse_text,
    parse_uuid,
    texts_to_bytes,
    uuid_text,
)

PRODUCER = bytes.fromhex("0102030405ff")

clocks = st.integers(0, 2**64 - 1)
uuids = st.builds(build_uuid, st.binary(min_size=6, max_size=6), clocks, st.integers(0, 0x3FF))


def test_update_and_two_ticks_give_the_known_uuid() -> None:
    clock = Clock()
    clock.update(1567304621_981273734)
    clock.tick()
    assert clock.tick() == 0x1E9CC5F83FC2F950
    text = uuid_text(build_uuid(PRODUCER, clock.value, 0b1010101010))
    assert text == "83fc2f95-cc5f-11e9-82aa-0102030405ff"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (OUTSIDE_TXN, "83667480-cc5f-11e9-8c00-0102030405ff"),
        (CONTINUE_TXN, "83667480-cc5f-11e9-8c01-0102030405ff"),
        (ACK_TXN, "83667480-cc5f-11e9-8c02-0102030405ff"),
    ],
)
def test_sequence_bits_and_flags_have_their_places(flags: int, text: str) -> None:
    clock = clock_at(1567304621 * 10**9) + 3
    built = build_uuid(PRODUCER, clock, flags)
    assert uuid_text(built) == text
    assert parse_uuid(parse_text(text)) == (PRODUCER, clock, flags)


def test_small_clocks_and_the_epoch() -> None:
    built = build_uuid(bytes.fromhex("010000000000"), 160, CONTINUE_TXN)
    assert uuid_text(built) == "0000000a-0000-1000-8001-010000000000"
    assert clock_at(0) == 0x1B21DD2138140000


def test_times_that_no_clock_has_are_its_bounds() -> None:
    """Else what is asked to be before the year 9999 would have to be before some time of today."""
    years = [-62_135_596_800, -12_219_292_800, 0, 1_700_000_000, 103_072_694_400, 253_402_300_799]
    clocks = [clock_at(seconds * 10**9) for seconds in years]
    assert clocks == sorted(clocks)
    assert clocks[0] == clocks[1] == 0
    assert clocks[-1] + 160 <= CLOCK_MAX


def test_samples_of_an_older_release_differ_by_one_in_the_sequence() -> None:
    message = parse_uuid(parse_text("0d2b9119-f9b7-11e9-8c01-6fb7f64cdd31"))
    ack = parse_uuid(parse_text("0d2b9119-f9b7-11e9-9002-6fb7f64cdd31"))
    assert (message.flags, ack.flags) == (CONTINUE_TXN, ACK_TXN)
    assert message.producer == ack.producer
    assert (message.clock & 0xF, ack.clock - message.clock) == (3, 1)


@given(uuids)
def test_what_was_built_is_parsed(built: Any) -> None:
    parsed = parse_uuid(built)
    assert build_uuid(*parsed) == built
    assert 0 <= parsed.clock < 2**64
    standard = stdlib_uuid.UUID(bytes=built)
    assert (standard.version, standard.variant) == (1, stdlib_uuid.RFC_4122)
    assert standard.time == parsed.clock >> 4
    assert str(standard) == uuid_text(built)


@pytest.mark.parametrize(
    ("producer", "clock", "flags"),
    [(PRODUCER, 0, 0x400), (PRODUCER, 0, -1), (b"short", 0, 0), (PRODUCER, 2**64, 0)],
)
def test_parts_that_do_not_fit_are_refused(producer: bytes, clock: int, flags: int) -> None:
    with pytest.raises(Invalid):
        build_uuid(producer, clock, flags)


def test_a_clock_never_goes_back() -> None:
    clock = Clock(clock_at(10**18))
    before = clock.value
    clock.update(10**18 - 1000)
    assert clock.value == before
    assert clock.tick() == before + 160
    # An update clears the sequence bits; a second one within the same 100 ns changes nothing.
    clock = Clock(clock_at(10**18) + 5)
    clock.update(10**18 + 99)
    assert clock.value == clock_at(10**18) + 5
    clock.update(10**18 + 100)
    assert clock.value == clock_at(10**18 + 100)
    assert clock.value & 0xF == 0


def test_ticks_are_microseconds_and_wrap_at_64_bits() -> None:
    clock = Clock(clock_at(0))
    for _ in range(1000):
        clock.tick()
    assert clock_unix_ns(clock.value) == 1_000_000
    assert clock_span(1_000_000) == 1000 * 160
    assert Clock(2**64 - 1).tick() == 159


def test_no_two_threads_get_the_same_tick() -> None:
    clock, ticks = Clock(clock_at(10**18)), []

    def work() -> None:
        mine = [clock.tick() for _ in range(2000)]
        ticks.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ticks)) == 8000


def test_producers_are_random_and_have_the_multicast_bit() -> None:
    rng = random.Random(7)
    producers = {new_producer_id(rng) for _ in range(100)}
    assert len(producers) == 100
    assert all(len(p) == 6 and p[0] & 1 for p in producers)
    assert {p[0] & 2 for p in producers} == {0, 2}


def test_flags_have_names() -> None:
    assert [flags_text(f) for f in (0, 1, 2, 0x2AA)] == [
        "OUTSIDE_TXN",
        "CONTINUE_TXN",
        "ACK_TXN",
        "Flags(0x2aa)",
    ]


def test_a_mint_ticks_and_its_text_is_that_of_its_bytes() -> None:
    # Case: within one suffix, across the 36th bit of the clock, and with sequence bits set.
    for start in (clock_at(10**18), (5 << 36) - 320, clock_at(10**18) + 7):
        texts = UuidMint(PRODUCER, Clock(start))
        raws = UuidMint(PRODUCER, Clock(start))
        for flags in (0, 0, 1, 2, 0x3FF, 0):
            assert texts.text(flags) == uuid_text(raws.raw(flags))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["text", "raw", "observe", "tick"]),
            st.sampled_from([0, 1, 2, 0x3FF]),
            st.integers(0, 10_000),
        ),
        max_size=40,
    ),
    clocks,
)
def test_texts_are_of_clocks_that_ascend_whatever_moves_the_clock(
    steps: list[tuple[str, int, int]], start: int
) -> None:
    """Three digits are kept apart from the rest: the kept rest must never be of another time."""
    clock = Clock(min(start, clock_at(10**18)))
    mint = UuidMint(PRODUCER, clock)
    seconds, last = 1e9, -1
    for what, flags, milliseconds in steps:
        if what == "observe":
            seconds += milliseconds / 1000
            mint.observe(seconds)
            assert clock.value >= clock_at(int(seconds * 1e9))
            continue
        if what == "tick":
            last = clock.tick()
            continue
        uuid = mint.raw(flags) if what == "raw" else parse_text(mint.text(flags))
        assert parse_uuid(uuid) == (PRODUCER, clock.value, flags)
        assert clock.value > last
        last = clock.value


@pytest.mark.parametrize("form", ["{0}", "urn:uuid:{0}", "URN:UUID:{0}", "{{{0}}}"])
def test_forms_of_text_that_go_reads(form: str) -> None:
    text = "83667480-cc5f-11e9-8c01-0102030405ff"
    assert parse_text(form.format(text)) == stdlib_uuid.UUID(text).bytes
    assert parse_text(form.format(text.upper())) == stdlib_uuid.UUID(text).bytes
    assert parse_text(text.replace("-", "")) == stdlib_uuid.UUID(text).bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "83667480-cc5f-11e9-8c01-0102030405f",
        "83667480-cc5f-11e9-8c01-0102030405fff",
        "83667480-cc5f-11e9-8c010-102030405ff",
        "8366748g-cc5f-11e9-8c01-0102030405ff",
        "83667480 cc5f 11e9 8c01 0102030405ff",
        "{83667480cc5f11e98c010102030405ff}",
        "urn:uuid:83667480cc5f11e98c010102030405ff",
        "8366748\u0660-cc5f-11e9-8c01-0102030405ff",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_text(text)
    if text:
        with pytest.raises(Invalid):
            texts_to_bytes(["83667480-cc5f-11e9-8c01-0102030405ff", text])


@settings(max_examples=60)
@given(st.lists(uuids, max_size=30), st.booleans())
def test_columns_equal_one_by_one(many: Any, same_producer: bool) -> None:
    if same_producer:
        many = [one[:10] + PRODUCER for one in many]
    columns = parse_columns(b"".join(many))
    assert list(zip(*columns[:3], strict=True)) == [tuple(parse_uuid(one)) for one in many]
    if same_producer and len(many) > 10:
        assert len(set(map(id, columns.producers))) == 1
    assert texts_to_bytes([uuid_text(one) for one in many]) == b"".join(many)


def test_texts_of_other_forms_are_read_one_by_one() -> None:
    text = "83667480-cc5f-11e9-8c01-0102030405ff"
    raw = parse_text(text)
    assert texts_to_bytes([text, "", text.upper(), "{" + text + "}"]) == raw + NIL_UUID + raw * 2


def test_texts_that_are_only_together_uuids_are_refused() -> None:
    """A digit that moved to the neighbour leaves the joined text as it should be."""
    text = "83667480-cc5f-11e9-8c01-0102030405ff"
    with pytest.raises(Invalid):
        texts_to_bytes([text[:-1], text[-1] + text])


def test_uuids_of_wrong_length_are_refused() -> None:
    with pytest.raises(Invalid):
        parse_uuid(b"short")
