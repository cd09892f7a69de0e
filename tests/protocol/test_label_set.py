"""Label sets, their algebra, and selectors with their text form."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette import labels as well_known
from gazette.errors import Invalid
from gazette.protocol.label_set import (
    EMPTY_LABELS,
    EVERYTHING,
    Label,
    LabelSelector,
    LabelSet,
    intersect,
    subtract,
    union,
    validate_single_valued,
)
from gazette.protocol.pb import broker_pb2

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAMES = ("aa", "bb", "cc")
VALUES = ("x", "xy", "xyz", "y")


@st.composite
def label_sets(draw: st.DrawFn) -> LabelSet:
    groups = draw(
        st.dictionaries(
            st.sampled_from(NAMES),
            st.one_of(st.just({""}), st.sets(st.sampled_from(VALUES), min_size=1)),
        )
    )
    return LabelSet.of(*((name, value) for name, values in groups.items() for value in values))


@st.composite
def selector_sets(draw: st.DrawFn) -> LabelSet:
    names = draw(st.sets(st.sampled_from(NAMES)))
    chosen: list[Label] = []
    for name in names:
        values = draw(st.one_of(st.just({""}), st.sets(st.sampled_from(VALUES), min_size=1)))
        chosen += [Label(name, value, draw(st.booleans())) for value in values]
    return LabelSet(tuple(sorted(chosen)))


selectors = st.builds(LabelSelector, selector_sets(), selector_sets())


def groups_of(labels: LabelSet) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for label in labels.labels:
        groups.setdefault(label.name, []).append(label.value)
    return groups


def matches_by_brute_force(selector: LabelSelector, target: LabelSet) -> bool:
    """Apply the definition, by enumeration of all pairs of a selector's and a target's labels."""

    def names_matched(side: LabelSet) -> set[str]:
        return {
            wanted.name
            for wanted in side.labels
            for label in target.labels
            if wanted.name == label.name
            and (
                wanted.value == ""
                or wanted.value == label.value
                or (wanted.prefix and label.value[: len(wanted.value)] == wanted.value)
            )
        }

    wanted = {label.name for label in selector.include.labels}
    return names_matched(selector.include) == wanted and not names_matched(selector.exclude)


@PROPERTY
@given(selectors, label_sets())
def test_matching_is_what_enumeration_says(selector: LabelSelector, target: LabelSet) -> None:
    assert selector.matches(target) == matches_by_brute_force(selector, target)


@PROPERTY
@given(selectors)
def test_selectors_round_trip_through_every_form(selector: LabelSelector) -> None:
    selector.validate()
    assert LabelSelector.parse(str(selector)) == selector
    assert LabelSelector.from_pb(selector.to_pb()) == selector
    assert LabelSelector.from_json(selector.to_json()) == selector


@PROPERTY
@given(label_sets(), label_sets())
def test_algebra_is_that_of_dictionaries_of_whole_value_lists(a: LabelSet, b: LabelSet) -> None:
    left, right = groups_of(a), groups_of(b)
    assert groups_of(union(a, b)) == dict(sorted((right | left).items()))
    same = {name: values for name, values in left.items() if right.get(name) == values}
    assert groups_of(intersect(a, b)) == same
    rest = {name: values for name, values in left.items() if right.get(name) != values}
    assert groups_of(subtract(a, b)) == rest
    for result in (union(a, b), intersect(a, b), subtract(a, b)):
        result.validate()


@PROPERTY
@given(label_sets(), label_sets())
def test_what_is_shared_and_what_is_not_make_up_the_whole(a: LabelSet, b: LabelSet) -> None:
    assert union(subtract(a, b), intersect(a, b)) == a
    assert union(a, EMPTY_LABELS) == union(EMPTY_LABELS, a) == a
    assert subtract(a, a) == EMPTY_LABELS
    assert intersect(a, a) == a


@PROPERTY
@given(label_sets(), st.sampled_from(NAMES), st.sampled_from(("", *VALUES)))
def test_single_labels_are_set_added_and_removed(labels: LabelSet, name: str, value: str) -> None:
    before = groups_of(labels)
    assert groups_of(labels.with_value(name, value)) == dict(
        sorted((before | {name: [value]}).items())
    )
    added = sorted({*before.get(name, []), value})
    assert groups_of(labels.with_added(name, value)) == dict(
        sorted((before | {name: added}).items())
    )
    assert groups_of(labels.without(name)) == {k: v for k, v in before.items() if k != name}
    assert labels.values_of(name) == tuple(before.get(name, []))
    assert labels.value_of(name) == (before[name][0] if name in before else None)


@PROPERTY
@given(label_sets())
def test_label_sets_round_trip_on_the_wire(labels: LabelSet) -> None:
    labels.validate()
    assert LabelSet.from_pb(broker_pb2.LabelSet.FromString(labels.to_pb().SerializeToString())) == (
        labels
    )


def test_a_name_may_ask_for_a_prefix() -> None:
    labels = LabelSet.of(("name:prefix", "a/"), ("name", "b"))
    assert labels.labels == (Label("name", "a/", prefix=True), Label("name", "b"))
    assert labels.with_value("name:prefix", "c").labels == (Label("name", "c", prefix=True),)
    assert EMPTY_LABELS.with_added("name:prefix", "c").labels == (Label("name", "c", prefix=True),)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ([("a", "x")], "Labels[0].Name: invalid length (1; expected 2 <= length <= 64)"),
        ([("a" * 65, "")], "Labels[0].Name: invalid length (65; expected 2 <= length <= 64)"),
        ([("aa", ""), ("b b", "")], "Labels[1].Name: not a valid token (b b)"),
        ([("a=b", "")], "Labels[0].Name: not a valid token (a=b)"),
        ([("aa", "x y")], "Labels[0].Value: not a valid token (x y)"),
        (
            [("aa", "v" * 1025)],
            "Labels[0].Value: invalid length (1025; expected 0 <= length <= 1024)",
        ),
        (
            [("bb", "x"), ("aa", "y")],
            "Labels not in unique, sorted order (index 1; label name aa <= bb)",
        ),
        (
            [("aa", "y"), ("aa", "x")],
            "Labels not in unique, sorted order (index 1; label aa value x <= y)",
        ),
        (
            [("aa", "x"), ("aa", "x")],
            "Labels not in unique, sorted order (index 1; label aa value x <= x)",
        ),
        (
            [("aa", ""), ("aa", "x")],
            "Label has empty & non-empty values (index 1; label aa value x)",
        ),
    ],
)
def test_label_sets_that_are_refused(labels: list[tuple[str, str]], problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        LabelSet(tuple(Label(*label) for label in labels)).validate()
    assert str(caught.value) == problem


def test_values_need_not_be_clean_paths() -> None:
    LabelSet.of(("aa", "/x//../y=%"), ("aa", "z")).validate()


def test_a_prefix_is_refused_outside_of_a_selector() -> None:
    labels = LabelSet((Label("aa", "x", prefix=True),))
    with pytest.raises(Invalid, match=r"^Labels\[0\]: Prefix may not be set outside"):
        labels.validate()
    LabelSelector(include=labels, exclude=labels).validate()


def test_one_value_given_both_exactly_and_as_a_prefix_is_refused() -> None:
    with pytest.raises(Invalid, match=r"^Include: Labels not in unique, sorted order"):
        LabelSelector.parse("aa=x, aa:prefix=x")


def test_well_known_labels_have_one_value() -> None:
    validate_single_valued(LabelSet.of((well_known.TAG, "a"), (well_known.TAG, "b")))
    with pytest.raises(Invalid, match="expected single-value Label has multiple values"):
        validate_single_valued(LabelSet.of((well_known.REGION, "a"), (well_known.REGION, "b")))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", ""),
        ("foo", "foo"),
        ("foo = bar", "foo=bar"),
        ("foo == bar", "foo=bar"),
        ("foo=bar,", "foo=bar"),
        ("foo=", "foo"),
        ("foo = , bar", "bar,foo"),
        ("foo != bar", "foo!=bar"),
        ("foo in (one, two)", "foo in (one,two)"),
        ("foo in (one)", "foo=one"),
        ("foo notin (one,two)", "foo notin (one,two)"),
        ("foo not in (two,one)", "foo notin (one,two)"),
        ("!foo", "!foo"),
        (" !foo , bar ", "bar,!foo"),
        ("foo:prefix = a/b", "foo:prefix=a/b"),
        ("foo:prefix in (a, b), foo=c", "foo=c,foo:prefix in (a,b)"),
        ("!foo:prefix", "!foo:prefix"),
        ("zz, foo notin (bar), aa=b", "aa=b,zz,foo!=bar"),
        ("foo in (one,two,)", "foo in (one,two)"),
        ("日本=x", "日本=x"),
        ("env in (production, qa), tier not in (frontend,backend), partition",
         "env in (production,qa),partition,tier notin (backend,frontend)"),
    ],
)  # fmt: skip
def test_selector_texts_and_how_they_are_written(text: str, canonical: str) -> None:
    assert str(LabelSelector.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (",", 'could not match "," to a label selector expression'),
        ("f", 'could not match "f" to a label selector expression'),
        ("foo=bar baz", 'could not match "foo=bar baz" to a label selector expression'),
        ("ok, foo  = bar", 'could not match " foo  = bar" to a label selector expression'),
        ("foo  in (a)", 'could not match "foo  in (a)" to a label selector expression'),
        ("foo in ()", 'could not match "foo in ()" to a label selector expression'),
        ("foo\n", 'could not match "foo\\n" to a label selector expression'),
        (
            "foo in (a, b c)",
            'parsing "foo in (a, b c)": could not match " b c" to a label selector set expression',
        ),
        (
            "foo in (, a)",
            "Include: Label has empty & non-empty values (index 1; label foo value a)",
        ),
        ("f" * 65, "Include.Labels[0].Name: invalid length (65; expected 2 <= length <= 64)"),
    ],
)
def test_selector_texts_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        LabelSelector.parse(text)
    assert str(caught.value) == problem


def test_empty_sides_match_everything_and_exclude_nothing() -> None:
    assert EVERYTHING.matches(EMPTY_LABELS)
    assert EVERYTHING.matches(LabelSet.of(("aa", "x")))
    assert LabelSelector.of(("aa", "x"), name="b").include == LabelSet.of(
        ("aa", "x"), ("name", "b")
    )


def test_both_sides_of_a_selector_are_on_the_wire_even_when_empty() -> None:
    assert EVERYTHING.to_pb().SerializeToString() == bytes.fromhex("0a001200")


@pytest.mark.parametrize(
    "value",
    [
        {"include": []},
        {"include": {"labels": {}}},
        {"include": {"labels": ["x"]}},
        {"exclude": {"labels": [{"name": 1}]}},
        {"exclude": {"labels": [{"name": "aa", "prefix": "yes"}]}},
    ],
)
def test_json_of_another_shape_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        LabelSelector.from_json(value)


def test_json_may_leave_out_what_is_empty() -> None:
    assert EVERYTHING.to_json() == {"include": {"labels": None}, "exclude": {"labels": None}}
    assert LabelSelector.from_json({}) == LabelSelector.from_json({"include": {}}) == EVERYTHING
