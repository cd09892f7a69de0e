"""Journal specifications: what is valid, what replication they want, and their algebra."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import (
    FragmentSpec,
    JournalFlag,
    JournalSpec,
    Suspend,
    SuspendLevel,
    intersect_specs,
    subtract_specs,
    union_specs,
)
from gazette.protocol.label_set import Label, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.text import duration

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

FRAGMENT = FragmentSpec(
    length=1 << 28,
    codec=Codec.GZIP,
    stores=("s3://bucket/prefix/", "file:///old/"),
    refresh_interval_ns=5 * duration.MINUTE,
    retention_ns=24 * duration.HOUR,
    flush_interval_ns=duration.HOUR,
    path_postfix_template='date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}',
)
SPEC = JournalSpec(
    name="a/journal",
    replication=3,
    labels=LabelSet.of(("content-type", "application/x-ndjson"), ("aa", "b"), ("aa", "c")),
    fragment=FRAGMENT,
    flags=JournalFlag.O_RDWR,
    max_append_rate=1 << 20,
    suspend=Suspend(SuspendLevel.PARTIAL, 1234),
)

small = st.integers(0, 2)
fragment_specs = st.builds(
    FragmentSpec,
    length=small,
    codec=st.sampled_from(Codec),
    stores=st.sampled_from([(), ("s3://a/",), ("s3://a/", "s3://b/")]),
    refresh_interval_ns=small,
    retention_ns=st.integers(-1, 1),
    flush_interval_ns=small,
    path_postfix_template=st.sampled_from(["", "a", "b"]),
)
specs = st.builds(
    JournalSpec,
    name=st.sampled_from(["a/journal", "b/journal"]),
    replication=small,
    labels=st.sets(st.tuples(st.sampled_from(["aa", "bb"]), st.sampled_from("xy"))).map(
        lambda pairs: LabelSet.of(*pairs)
    ),
    fragment=fragment_specs,
    flags=st.sampled_from(JournalFlag),
    max_append_rate=small,
    suspend=st.none() | st.builds(Suspend, st.sampled_from(SuspendLevel), small),
)


def changed(**fields: object) -> JournalSpec:
    return replace(SPEC, **fields)  # type: ignore[arg-type]


def with_fragment(**fields: object) -> JournalSpec:
    return replace(SPEC, fragment=replace(FRAGMENT, **fields))  # type: ignore[arg-type]


def test_a_complete_specification_is_valid() -> None:
    SPEC.validate()
    changed(suspend=None, labels=LabelSet()).validate()


OFFLOAD = Codec.GZIP_OFFLOAD_DECOMPRESSION


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (changed(name="bad name"), "Name: not a valid token (bad name)"),
        (changed(name="../x/y"), "Name: cannot traverse outside its parent (../x/y)"),
        (
            changed(name="a/journal;meta"),
            "Name cannot have a metadata path segment (;meta; expected no segment)",
        ),
        (changed(replication=0), "invalid Replication (0; expected 1 <= Replication <= 5)"),
        (changed(replication=6), "invalid Replication (6; expected 1 <= Replication <= 5)"),
        (
            changed(labels=LabelSet((Label("bb"), Label("aa")))),
            "Labels: Labels not in unique, sorted order (index 1; label name aa <= bb)",
        ),
        (changed(labels=LabelSet.of(("name", "x"))), 'Labels cannot include label "name"'),
        (changed(labels=LabelSet.of(("prefix", ""))), 'Labels cannot include label "prefix"'),
        (
            changed(labels=LabelSet.of(("content-type", "a/b"), ("content-type", "c/d"))),
            (
                "Labels: expected single-value Label has multiple values "
                "(index 1; label content-type value c/d)"
            ),
        ),
        (
            changed(labels=LabelSet.of(("app.gazette.dev/message-type", "x"))),
            "Labels: expected content-type label alongside app.gazette.dev/message-type",
        ),
        (
            changed(labels=LabelSet.of(("app.gazette.dev/message-subtype", "x"))),
            (
                "Labels: expected app.gazette.dev/message-type label alongside "
                "app.gazette.dev/message-subtype"
            ),
        ),
        (
            with_fragment(length=1023),
            "Fragment: invalid Length (1023; expected 1024 <= length <= 17179869184)",
        ),
        (
            with_fragment(length=(1 << 34) + 1),
            "Fragment: invalid Length (17179869185; expected 1024 <= length <= 17179869184)",
        ),
        (with_fragment(codec=Codec.INVALID), "Fragment.CompressionCodec: invalid value (INVALID)"),
        (
            with_fragment(stores=("s3://a/", "ftp://b/")),
            "Fragment.Stores[1]: invalid scheme (ftp)",
        ),
        (
            with_fragment(codec=OFFLOAD, stores=("file:///a/",)),
            "Fragment: GZIP_OFFLOAD_DECOMPRESSION is incompatible with file:// stores (file:///a/)",
        ),
        (
            with_fragment(refresh_interval_ns=10**9 - 1),
            "Fragment: invalid RefreshInterval (999.999999ms; expected 1s <= interval <= 24h0m0s)",
        ),
        (
            with_fragment(refresh_interval_ns=86_401 * 10**9),
            "Fragment: invalid RefreshInterval (24h0m1s; expected 1s <= interval <= 24h0m0s)",
        ),
        (
            with_fragment(flush_interval_ns=59 * 10**9),
            "Fragment: invalid FlushInterval (59s; expected >= 1m0s)",
        ),
        (
            with_fragment(path_postfix_template="{{ .Bogus }}"),
            "Fragment.PathPostfixTemplate: can't evaluate field Bogus in a struct",
        ),
        (changed(flags=3), "Flags: invalid combination (3)"),
        (changed(max_append_rate=-1), "invalid MaxAppendRate (-1; expected >= 0)"),
        (
            changed(suspend=Suspend(SuspendLevel.FULL, -1)),
            "Suspend.Offset: invalid Offset (-1; expected >= 0)",
        ),
    ],
)
def test_specifications_that_are_refused(spec: JournalSpec, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        spec.validate()
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    "spec",
    [
        with_fragment(length=1024),
        with_fragment(length=1 << 34),
        with_fragment(flush_interval_ns=0),
        with_fragment(flush_interval_ns=60 * 10**9),
        with_fragment(retention_ns=-1),
        with_fragment(stores=()),
        # Case: only the first store is written to.
        with_fragment(codec=OFFLOAD, stores=("s3://a/", "file:///b/")),
        changed(replication=1),
        changed(replication=5),
        changed(max_append_rate=0),
        changed(suspend=Suspend(SuspendLevel.FULL, 0)),
        changed(flags=JournalFlag.NOT_SPECIFIED),
        changed(labels=LabelSet.of(("app.gazette.dev/tag", "a"), ("app.gazette.dev/tag", "b"))),
    ],
)
def test_specifications_at_the_bounds_are_valid(spec: JournalSpec) -> None:
    spec.validate()


@pytest.mark.parametrize(
    ("content_type", "problem"),
    [
        ("text/csv", ""),
        ("text", ""),
        ("a%b/c", ""),
        ("", "no media type"),
        ("/csv", "no media type"),
        ("é/x", "no media type"),
        ("a=b/c", "expected slash after first token"),
        ("text/", "expected token after slash"),
        ("a/b/c", "unexpected content after media subtype"),
    ],
)
def test_a_content_type_is_a_media_type(content_type: str, problem: str) -> None:
    spec = changed(labels=LabelSet.of(("content-type", content_type)))
    if not problem:
        spec.validate()
        return
    with pytest.raises(Invalid) as caught:
        spec.validate()
    assert str(caught.value) == f"Labels: parsing content-type: mime: {problem}"


@pytest.mark.parametrize(
    ("flags", "may_read", "may_write"),
    [
        (JournalFlag.NOT_SPECIFIED, True, True),
        (JournalFlag.O_RDONLY, True, False),
        (JournalFlag.O_WRONLY, False, True),
        (JournalFlag.O_RDWR, True, True),
        (3, False, False),
    ],
)
def test_flags_say_what_a_journal_permits(flags: int, may_read: bool, may_write: bool) -> None:
    spec = changed(flags=flags)
    assert (spec.may_read, spec.may_write) == (may_read, may_write)


def test_suspension_and_the_process_limit_lower_replication() -> None:
    assert changed(suspend=None).desired_replication(9) == 3
    assert changed(suspend=None).desired_replication(2) == 2
    assert changed(suspend=Suspend()).desired_replication(9) == 3
    assert changed(suspend=Suspend(SuspendLevel.PARTIAL)).desired_replication(9) == 1
    assert changed(suspend=Suspend(SuspendLevel.FULL)).desired_replication(9) == 0


def test_selectors_see_the_name_as_a_label() -> None:
    spec = changed(labels=LabelSet.of(("aa", "b"), ("zz", "")))
    assert spec.labels_with_name() == LabelSet.of(("aa", "b"), ("name", "a/journal"), ("zz", ""))


@PROPERTY
@given(specs)
def test_the_wire_form_round_trips(spec: JournalSpec) -> None:
    wire = spec.to_pb().SerializeToString()
    assert JournalSpec.from_pb(broker_pb2.JournalSpec.FromString(wire)) == spec


def test_sub_messages_are_on_the_wire_even_when_empty() -> None:
    wire = JournalSpec("").to_pb().SerializeToString()
    assert wire == bytes.fromhex("1a00 2206 220 02a00 3200".replace(" ", ""))


def test_enums_from_the_future_are_refused_where_they_are_decoded() -> None:
    pb = SPEC.to_pb()
    pb.fragment.compression_codec = 77  # type: ignore[assignment]
    with pytest.raises(Invalid, match=r"^Fragment.CompressionCodec: invalid value \(77\)$"):
        JournalSpec.from_pb(pb)
    pb = SPEC.to_pb()
    pb.suspend.level = 77  # type: ignore[assignment]
    with pytest.raises(Invalid, match=r"^Suspend.Level: invalid Level variant \(77\)$"):
        JournalSpec.from_pb(pb)


FIELDS = ("replication", "flags", "max_append_rate")
FRAGMENT_FIELDS = (
    "length",
    "codec",
    "stores",
    "refresh_interval_ns",
    "retention_ns",
    "flush_interval_ns",
    "path_postfix_template",
)


def values(spec: JournalSpec) -> list[object]:
    return [getattr(spec, field) for field in FIELDS] + [
        getattr(spec.fragment, field) for field in FRAGMENT_FIELDS
    ]


@PROPERTY
@given(specs, specs)
def test_the_algebra_is_that_of_its_fields(a: JournalSpec, b: JournalSpec) -> None:
    pairs = list(zip(values(a), values(b), strict=True))
    assert values(union_specs(a, b)) == [x or y for x, y in pairs]
    for value, (x, y) in zip(values(intersect_specs(a, b)), pairs, strict=True):
        assert value == x if x == y else not value
    for value, (x, y) in zip(values(subtract_specs(a, b)), pairs, strict=True):
        assert not value if x == y else value == x


@PROPERTY
@given(specs, specs)
def test_names_and_suspensions_are_not_inherited(a: JournalSpec, b: JournalSpec) -> None:
    assert (union_specs(a, b).name, union_specs(a, b).suspend) == (a.name, a.suspend)
    assert subtract_specs(a, b).suspend == a.suspend
    assert intersect_specs(a, b).suspend is None


@PROPERTY
@given(specs, specs)
def test_what_was_taken_out_can_be_put_back(a: JournalSpec, b: JournalSpec) -> None:
    assert union_specs(subtract_specs(a, b), intersect_specs(a, b)) == a
