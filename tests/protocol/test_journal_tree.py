"""Journal specifications as a YAML tree: strict to read, and lossless through hoisting."""

from __future__ import annotations

from collections.abc import Iterator
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
)
from gazette.protocol.journal_tree import JournalNode, extract_tree, shared_prefix
from gazette.protocol.label_set import Label, LabelSet
from gazette.protocol.text import duration

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

YAML = """\
comment: all of foo
name: foo/
replication: 3
labels:
- name: a-name
  value: a-val
fragment:
  length: 1234
  compression_codec: SNAPPY
  stores:
  - s3://a-bucket/
  - gs://another-bucket/
  refresh_interval: 1m0s
  retention: 1h0m0s
  flush_interval: 2m0s
  path_postfix_template: foo={{ .Spool.Begin }}
flags: O_RDWR
max_append_rate: 11223344
children:
- delete: true
  name: foo/bar
- name: foo/baz/1
  suspend:
    level: PARTIAL
    offset: 5
- name: foo/baz/2
  labels:
  - name: other-name
    value: ""
  revision: 1234
"""
SHARED = JournalSpec(
    name="",
    replication=3,
    labels=LabelSet.of(("a-name", "a-val")),
    fragment=FragmentSpec(
        length=1234,
        codec=Codec.SNAPPY,
        stores=("s3://a-bucket/", "gs://another-bucket/"),
        refresh_interval_ns=duration.MINUTE,
        retention_ns=duration.HOUR,
        flush_interval_ns=2 * duration.MINUTE,
        path_postfix_template="foo={{ .Spool.Begin }}",
    ),
    flags=JournalFlag.O_RDWR,
    max_append_rate=11223344,
)

small = st.integers(0, 2)
names = st.lists(st.sampled_from(["aaa", "bbb", "c-c", "dd"]), min_size=2, max_size=5).map("/".join)
specs = st.builds(
    JournalSpec,
    name=st.just(""),
    replication=small,
    labels=st.sets(
        st.tuples(st.sampled_from(["aa", "bb"]), st.sampled_from(["x", "yes", "1.10"]))
    ).map(lambda pairs: LabelSet.of(*pairs)),
    fragment=st.builds(
        FragmentSpec,
        length=small,
        codec=st.sampled_from(Codec),
        stores=st.sampled_from([(), ("s3://a/",), ("s3://a/", "s3://b/")]),
        refresh_interval_ns=st.sampled_from([0, 1, duration.MINUTE]),
        retention_ns=st.sampled_from([0, -1, duration.HOUR]),
        path_postfix_template=st.sampled_from(["", "a: b", "{{ .Name }}\n", "null"]),
    ),
    flags=st.sampled_from(JournalFlag),
    max_append_rate=small,
    suspend=st.none() | st.builds(Suspend, st.sampled_from(SuspendLevel), small),
)
journals = st.dictionaries(
    names,
    st.builds(
        JournalNode,
        spec=specs,
        comment=st.sampled_from(["", "why", "a\nb", "# no"]),
        delete=st.sampled_from([None, True, False]),
        revision=st.integers(-1, 2),
    ),
    min_size=1,
    max_size=8,
).map(
    lambda nodes: [
        replace(node, spec=replace(node.spec, name=name)) for name, node in nodes.items()
    ]
)


def flat(node: JournalNode) -> list[JournalNode]:
    return list(node.journals())


def by_name(nodes: list[JournalNode]) -> list[JournalNode]:
    return sorted(nodes, key=lambda node: node.spec.name)


def directories(node: JournalNode) -> Iterator[JournalNode]:
    if node.is_directory:
        yield node
        for child in node.children:
            yield from directories(child)


def test_a_tree_is_read_pushed_down_hoisted_and_written() -> None:
    tree = JournalNode.parse(YAML)
    tree.validate()
    pushed = tree.push_down()
    first, second, third = flat(pushed)
    assert first == JournalNode(replace(SHARED, name="foo/bar"), delete=True)
    assert second == JournalNode(
        replace(SHARED, name="foo/baz/1", suspend=Suspend(SuspendLevel.PARTIAL, 5))
    )
    labels = LabelSet.of(("a-name", "a-val"), ("other-name", ""))
    assert third == JournalNode(replace(SHARED, name="foo/baz/2", labels=labels), revision=1234)
    assert pushed.spec == JournalSpec("foo/")
    assert pushed.hoist() == tree
    assert pushed.hoist().to_yaml() == YAML


@PROPERTY
@given(journals)
def test_hoisting_is_undone_by_pushing_down(nodes: list[JournalNode]) -> None:
    tree = extract_tree(nodes)
    tree.validate()
    assert flat(tree) == by_name(nodes)
    hoisted = tree.hoist()
    assert flat(hoisted.push_down()) == flat(tree.push_down())
    for directory in directories(hoisted):
        assert directory.spec.suspend is None


@PROPERTY
@given(journals)
def test_every_tree_round_trips_through_yaml(nodes: list[JournalNode]) -> None:
    tree = extract_tree(nodes).hoist()
    assert JournalNode.parse(tree.to_yaml()) == tree


@PROPERTY
@given(journals)
def test_what_every_child_has_is_held_once(nodes: list[JournalNode]) -> None:
    for directory in directories(extract_tree(nodes).hoist()):
        for field in ("replication", "flags", "max_append_rate"):
            values = [getattr(child.spec, field) for child in directory.children]
            assert not any(values) or len(set(values)) > 1
        for child in directory.children:
            assert not (set(child.spec.labels.labels) & set(directory.spec.labels.labels))


@PROPERTY
@given(journals)
def test_a_directory_is_made_where_names_part_and_nowhere_else(nodes: list[JournalNode]) -> None:
    for directory in directories(extract_tree(nodes)):
        assert len(directory.children) > 1
        rests = [child.spec.name.removeprefix(directory.spec.name) for child in directory.children]
        # Case: children that have a component in common would be one directory.
        components = [rest.partition("/")[0] for rest in rests if "/" in rest]
        assert len(set(components)) == len(components)


def test_the_shape_of_an_extracted_tree() -> None:
    tree = extract_tree(
        JournalNode(JournalSpec(f"root/{name}"))
        for name in (
            "aaa/000",
            "aaa/111/foo/i",
            "aaa/111/foo/j",
            "aaa/222",
            "bbb/333/a/x",
            "bbb/333/a/y",
            "bbb/333/z",
            "bbb/444",
        )
    )
    assert [directory.spec.name for directory in directories(tree)] == [
        "root/",
        "root/aaa/",
        "root/aaa/111/foo/",
        "root/bbb/",
        "root/bbb/333/",
        "root/bbb/333/a/",
    ]


def test_names_that_share_nothing_are_put_under_an_empty_one() -> None:
    tree = extract_tree([JournalNode(JournalSpec("b/x")), JournalNode(JournalSpec("a/x"))])
    assert tree.spec.name == ""
    assert [child.spec.name for child in tree.children] == ["a/x", "b/x"]
    assert extract_tree([]) == JournalNode(JournalSpec(""))


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [
        ("foo/bar", "foo/baz", 4),
        ("foo/bar/baz", "foo/bar/bing", 8),
        ("foo/bar/baz/match", "foo/bar/baz/match", 12),
        ("foo/bar/", "foo/baz/", 4),
        ("foo/bar/", "foo/bar/", 8),
        ("miss/", "match/", 0),
        ("foo", "foo/bar", 0),
        ("", "foo/", 0),
    ],
)
def test_shared_prefixes_are_of_whole_components(a: str, b: str, length: int) -> None:
    assert shared_prefix(a, b) == shared_prefix(b, a) == length


def test_a_listing_becomes_a_tree() -> None:
    specs = [
        (replace(SHARED, name="foo/b"), 7),
        (replace(SHARED, name="foo/a", replication=1), 5),
    ]
    tree = JournalNode.of(specs)
    assert tree.spec == replace(SHARED, name="foo/", replication=0)
    assert [(n.spec.name, n.spec.replication, n.revision) for n in flat(tree)] == [
        ("foo/a", 1, 5),
        ("foo/b", 3, 7),
    ]


def test_an_explicit_empty_list_of_stores_is_not_overridden() -> None:
    tree = JournalNode.parse(
        """
        name: a/
        fragment: {stores: ["s3://x/"]}
        children:
        - {name: a/inherits}
        - name: a/none/
          fragment: {stores: []}
          children: [{name: a/none/1}, {name: a/none/2, fragment: {stores: ["s3://y/"]}}]
        """
    )
    assert [node.spec.fragment.stores for node in flat(tree.push_down())] == [
        ("s3://x/",),
        (),
        ("s3://y/",),
    ]
    assert JournalNode.parse(tree.to_yaml()) == tree


def test_labels_of_a_child_replace_those_of_the_same_name() -> None:
    tree = JournalNode.parse(
        """
        name: a/
        labels: [{name: aa, value: x}, {name: bb, value: y}]
        children:
        - {name: a/child, labels: [{name: aa, value: z}]}
        """
    )
    (child,) = flat(tree.push_down())
    assert child.spec.labels == LabelSet.of(("aa", "z"), ("bb", "y"))


def test_text_is_text_whatever_yaml_would_make_of_it() -> None:
    tree = JournalNode.parse(
        """
        name: 12345
        comment: yes
        labels:
        - {name: no, value: 1.10}
        - {name: date, value: 2020-01-01}
        - {name: none, value: ~}
        - {name: pp, value: x, prefix: true}
        """
    )
    assert (tree.spec.name, tree.comment) == ("12345", "yes")
    assert tree.spec.labels.labels == (
        Label("date", "2020-01-01"),
        Label("no", "1.10"),
        Label("none", ""),
        Label("pp", "x", prefix=True),
    )
    assert JournalNode.parse(tree.to_yaml()) == tree


def test_numbers_durations_and_enums_have_several_spellings() -> None:
    tree = JournalNode.parse(
        """
        name: a/journal
        replication: 0x3
        flags: 4
        suspend: {level: 2, offset: 1_000}
        fragment: {length: 1e9, refresh_interval: 60000000000, retention: 1.5h}
        """
    )
    assert tree.spec == JournalSpec(
        "a/journal",
        3,
        fragment=FragmentSpec(
            length=10**9, refresh_interval_ns=duration.MINUTE, retention_ns=90 * duration.MINUTE
        ),
        flags=JournalFlag.O_RDWR,
        suspend=Suspend(SuspendLevel.FULL, 1000),
    )
    # Case: a combination of flags that has no name.
    assert JournalNode.parse("name: a/b/c\nflags: 3\n").to_yaml() == "name: a/b/c\nflags: 3\n"


def test_integers_are_read_up_to_their_bounds() -> None:
    text = """
        replication: -2147483648
        flags: 4294967295
        max_append_rate: 9223372036854775807
        revision: -9223372036854775808
    """
    node = JournalNode.parse(text)
    assert node.spec.replication == -(1 << 31)
    assert node.spec.flags == (1 << 32) - 1
    assert (node.spec.max_append_rate, node.revision) == ((1 << 63) - 1, -(1 << 63))
    assert JournalNode.parse("replication: 2147483647\nflags: 0").spec.replication == (1 << 31) - 1


def test_anchors_and_merge_keys_work() -> None:
    tree = JournalNode.parse(
        """
        name: a/
        children:
        - &first {name: a/1, replication: 2, flags: O_RDONLY}
        - {<<: *first, name: a/2, replication: 3}
        """
    )
    assert flat(tree)[1].spec == JournalSpec("a/2", 3, flags=JournalFlag.O_RDONLY)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nam: x", "line 1: unknown field nam"),
        ("name: x\nfragment:\n  lenght: 5", "line 3: unknown field lenght"),
        ("labels:\n- {name: aa, vaule: x}", "line 2: unknown field vaule"),
        ("suspend: {levle: NONE}", "line 1: unknown field levle"),
        ("children:\n- name: x\n  bogus: 1", "line 3: unknown field bogus"),
        ("name: x\nname: y", "line 2: field name is set more than once (name)"),
        ("- name: x", "line 1: expected a mapping"),
        ("just text", "line 1: expected a mapping (just text)"),
        ("name: [x]", "line 1: expected a single value"),
        ("children: x", "line 1: expected a list (x)"),
        ("replication: many", "line 1: expected an integer (many)"),
        ("replication: 1.5", "line 1: expected an integer (1.5)"),
        ("replication: .inf", "line 1: expected an integer (.inf)"),
        ("replication: 2147483648", "line 1: the integer is out of range (2147483648)"),
        ("replication: -2147483649", "line 1: the integer is out of range (-2147483649)"),
        ("flags: 4294967296", "line 1: the integer is out of range (4294967296)"),
        ("revision: -9223372036854775809", "line 1: the integer is out of range"),
        ("max_append_rate: 9223372036854775808", "line 1: the integer is out of range"),
        ("flags: -1", "line 1: the integer is out of range (-1)"),
        ("delete: maybe", "line 1: expected true or false (maybe)"),
        ("flags: O_NONE", "line 1: not a valid JournalFlag (options are NOT_SPECIFIED, O_RDONLY"),
        ("suspend: {level: SOME}", "line 1: not a valid SuspendLevel (options are NONE, PARTIAL"),
        ("suspend: {level: 7}", "Suspend.Level: invalid Level variant (7)"),
        # Case: of codecs only names are read.
        ("fragment: {compression_codec: 2}", "line 1: not a valid Codec (options are INVALID"),
        ("fragment: {retention: 1 day}", 'line 1: time: unknown unit " day" in duration'),
        ("name: {", "not YAML: "),
        ("--- {}\n--- {}", "not YAML: "),
        ("<<: 5", "line 1: expected a mapping to merge (5)"),
    ],
)
def test_yaml_that_is_refused(text: str, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        JournalNode.parse(text)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("depth", [101, 50_000])
def test_yaml_that_is_nested_too_deeply_is_refused(depth: int) -> None:
    with pytest.raises(Invalid, match="line 1: nested too deeply"):
        JournalNode.parse("{children: [" * depth + "]}" * depth)
    JournalNode.parse("{children: [" * 100 + "]}" * 100)


@pytest.mark.parametrize(
    "text", ["&a {children: [*a]}", "&a {<<: *a}", "{children: [&a {<<: {<<: *a}}]}"]
)
def test_an_alias_of_what_it_is_in_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        JournalNode.parse(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected one or more Children"),
        ("name: a/", "expected one or more Children"),
        ("name: abc", "Name: invalid length (3; expected 4 <= length <= 512)"),
        ("name: a//journal", "Name: must be a clean path (a//journal)"),
        (
            "name: a/journal\nchildren: [{name: a/journal/b}]",
            "expected no Children with non-directory Node (a/journal)",
        ),
        ("name: a/\nrevision: 5\nchildren: [{name: a/journal}]", "unexpected Revision (5)"),
        (
            "name: a/\nchildren: [{name: b/journal}]",
            "expected parent Name to prefix child (a/ vs b/journal)",
        ),
        (
            "name: a/\nchildren: [{name: a/y}, {name: a/x}]",
            "Name: invalid length (3; expected 4 <= length <= 512)",
        ),
        (
            "name: a/\nchildren: [{name: a/yy}, {name: a/xx}]",
            "expected Children to be ordered (ind 1; a/yy vs a/xx)",
        ),
        ("name: a/\nchildren: [{name: a/b/}]", "expected one or more Children"),
    ],
)
def test_trees_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        JournalNode.parse(text).validate()
    assert str(caught.value) == problem
