"""Names draw from one alphabet, are bounded in bytes, and never leave the path they are put under."""

from __future__ import annotations

import posixpath
import unicodedata

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.protocol.ids import (
    ProcessId,
    split_journal_meta,
    validate_journal_name,
    validate_offsets,
    validate_path_component,
    validate_shard_id,
    validate_token,
)

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

symbols = st.text(st.sampled_from("ab/.-_+=%;# \n\tÉ世Ⅷ½\u0301\x7f"), max_size=12)


@pytest.mark.parametrize(
    "name",
    ["abcd", "a/journal", "a/b=c%20/d", "a/journal;meta", "a/journal;m/e=t", "日本/x", "x" * 512],
)
def test_journal_names_that_are_valid(name: str) -> None:
    validate_journal_name(name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("abc", "invalid length (3; expected 4 <= length <= 512)"),
        ("x" * 513, "invalid length (513; expected 4 <= length <= 512)"),
        ("é" * 257, "invalid length (514; expected 4 <= length <= 512)"),
        ("a journal", "not a valid token (a journal)"),
        ("a#journal", "not a valid token (a#journal)"),
        ("a/journal\n", "not a valid token (a/journal\n)"),
        ("/a/journal", "cannot begin with '/' (/a/journal)"),
        ("//a/journal", "must be a clean path (//a/journal)"),
        ("a/journal/", "must be a clean path (a/journal/)"),
        ("a//journal", "must be a clean path (a//journal)"),
        ("a/./journal", "must be a clean path (a/./journal)"),
        ("a/../journal", "must be a clean path (a/../journal)"),
        ("../x/y", "cannot traverse outside its parent (../x/y)"),
        ("a/journal;", "metadata path segment: invalid length (0; expected 1 <= length <= 512)"),
        ("a/journal;b;c", "metadata path segment: not a valid token (b;c)"),
        ("a/journal;/m", "metadata path segment: cannot begin with '/' (/m)"),
        ("a/journal;../m", "metadata path segment: cannot traverse outside its parent (../m)"),
        ("ab;meta", "invalid length (2; expected 4 <= length <= 512)"),
    ],
)
def test_journal_names_that_are_refused(name: str, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        validate_journal_name(name)
    assert str(caught.value) == problem


def test_metadata_is_what_follows_the_first_semicolon() -> None:
    assert split_journal_meta("a/journal") == ("a/journal", "")
    assert split_journal_meta("a/journal;b;c") == ("a/journal", "b;c")


@pytest.mark.parametrize("shard_id", ["abcd", "/x/y", "a//b", "x" * 512])
def test_a_shard_id_need_not_be_a_clean_path(shard_id: str) -> None:
    validate_shard_id(shard_id)


@pytest.mark.parametrize("shard_id", ["abc", "x" * 513, "a=bcd", "a bcd", "ab#cd"])
def test_shard_ids_that_are_refused(shard_id: str) -> None:
    with pytest.raises(Invalid):
        validate_shard_id(shard_id)


@PROPERTY
@given(symbols)
def test_a_token_is_letters_numbers_and_symbols(text: str) -> None:
    # Case: the alphabet, stated by category instead of by pattern.
    legal = all(unicodedata.category(c)[0] in "LN" or c in "-_+/." for c in text)
    try:
        validate_token(text, 0, 1000)
        accepted = True
    except Invalid:
        accepted = False
    assert accepted == legal


@PROPERTY
@given(symbols)
@example("..")
@example("../a")
@example("a/..b")
def test_a_path_component_stays_below_its_parent(text: str) -> None:
    try:
        validate_path_component(text, 0, 1000)
    except Invalid:
        return
    joined = posixpath.normpath(posixpath.join("/parent", text))
    assert joined == "/parent" or joined.startswith("/parent/")
    assert text in ("", ".") or joined == f"/parent/{text}"


def test_lone_surrogates_are_refused_and_do_not_crash() -> None:
    with pytest.raises(Invalid, match="not a valid token"):
        validate_journal_name("abc\ud800")


def test_process_ids_are_ordered_and_bounded() -> None:
    a, b = ProcessId("zone-a", "suffix-b"), ProcessId("zone-b", "suffix-a")
    assert a < b
    assert str(a) == "zone-a#suffix-b"
    assert ProcessId.from_pb(a.to_pb()) == a
    a.validate()
    for process_id, problem in [
        (ProcessId("", "suffix"), "Zone: invalid length (0; expected 1 <= length <= 32)"),
        (ProcessId("z" * 33, "suffix"), "Zone: invalid length (33; expected 1 <= length <= 32)"),
        (ProcessId("z#", "suffix"), "Zone: not a valid token (z#)"),
        (ProcessId("z", "abc"), "Suffix: invalid length (3; expected 4 <= length <= 128)"),
    ]:
        with pytest.raises(Invalid) as caught:
            process_id.validate()
        assert str(caught.value) == problem


def test_offsets_are_not_negative() -> None:
    validate_offsets({"a/journal;with/meta": 0, "b/journal": 5})
    with pytest.raises(Invalid, match=r"^Offsets\[a/journal\]: invalid offset \(-1; expected >= 0"):
        validate_offsets({"a/journal": -1})
    with pytest.raises(Invalid, match=r"^Offsets\[x\]: invalid length"):
        validate_offsets({"x": 1})
