"""Labels, sets of labels, and selectors that match sets."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from gazette.errors import Invalid
from gazette.labels import SINGLE_VALUED
from gazette.protocol.ids import validate_path_token, validate_token
from gazette.protocol.pb import broker_pb2
from gazette.protocol.text.validation import within

PREFIX_SUFFIX: Final = ":prefix"
"""Suffix of a label's name in a selector: the label matches each value that begins with its own."""

_NAME_BYTES_MIN: Final = 2
_NAME_BYTES_MAX: Final = 64
_VALUE_BYTES_MAX: Final = 1024


@dataclass(frozen=True, slots=True, order=True)
class Label:
    """A name and a value. ``prefix`` is permitted only in selectors."""

    name: str
    value: str = ""
    prefix: bool = False

    @classmethod
    def of(cls, name: str, value: str = "") -> Label:
        """Return a label. If ``name`` ends in ``:prefix``, set ``prefix`` instead of this ending."""
        bare_name = name.removesuffix(PREFIX_SUFFIX)
        return cls(bare_name, value, prefix=bare_name != name)

    def validate(self, *, allow_prefix: bool = False) -> None:
        with within("Name"):
            validate_token(self.name, _NAME_BYTES_MIN, _NAME_BYTES_MAX)
        with within("Value"):
            validate_path_token(self.value, 0, _VALUE_BYTES_MAX)
        if self.prefix and not allow_prefix:
            raise Invalid("Prefix may not be set outside of a LabelSelector")

    def to_pb(self) -> broker_pb2.Label:
        return broker_pb2.Label(name=self.name, value=self.value, prefix=self.prefix)

    @classmethod
    def from_pb(cls, pb: broker_pb2.Label) -> Label:
        return cls(pb.name, pb.value, pb.prefix)


_name_of: Callable[[Label], str] = attrgetter("name")


@dataclass(frozen=True, slots=True)
class LabelSet:
    """Labels in strictly ascending order of name, then value. A name may have several values.

    The constructor does not sort, so that ``validate`` can refuse a received set that is out of order. ``of``
    and the ``with_…`` methods keep the set sorted.
    """

    labels: tuple[Label, ...] = ()

    @classmethod
    def of(cls, *pairs: tuple[str, str]) -> LabelSet:
        """Return the set of ``(name, value)`` pairs, in any order. Names may end in ``:prefix``."""
        return cls(tuple(sorted({Label.of(name, value) for name, value in pairs})))

    def __bool__(self) -> bool:
        return bool(self.labels)

    @property
    def encoded_bytes(self) -> int:
        """Bytes of the set as a protobuf message."""
        return self.to_pb().ByteSize()

    def values_of(self, name: str) -> tuple[str, ...]:
        """Return all values of ``name``, ascending; empty if the set does not have the name."""
        begin, end = self._range_of(name)
        return tuple(label.value for label in self.labels[begin:end])

    def value_of(self, name: str) -> str | None:
        """Return the least value of ``name``; None if the set does not have the name."""
        begin, end = self._range_of(name)
        return self.labels[begin].value if begin < end else None

    def with_value(self, name: str, value: str) -> LabelSet:
        """Return this set with ``value`` as the only value of ``name``."""
        label = Label.of(name, value)
        begin, end = self._range_of(label.name)
        return LabelSet((*self.labels[:begin], label, *self.labels[end:]))

    def with_added(self, name: str, value: str) -> LabelSet:
        """Return this set with ``value`` added to the values of ``name``."""
        label = Label.of(name, value)
        index = bisect_left(self.labels, label)
        if index < len(self.labels) and self.labels[index] == label:
            return self
        return LabelSet((*self.labels[:index], label, *self.labels[index:]))

    def without(self, name: str) -> LabelSet:
        """Return this set without the values of ``name``."""
        begin, end = self._range_of(name)
        return LabelSet(self.labels[:begin] + self.labels[end:]) if begin < end else self

    def validate(self, *, allow_prefix: bool = False) -> None:
        previous: Label | None = None
        for index, label in enumerate(self.labels):
            with within(f"Labels[{index}]"):
                label.validate(allow_prefix=allow_prefix)
            if previous is not None:
                _validate_order(index, previous, label)
            previous = label

    def to_pb(self) -> broker_pb2.LabelSet:
        return broker_pb2.LabelSet(labels=[label.to_pb() for label in self.labels])

    @classmethod
    def from_pb(cls, pb: broker_pb2.LabelSet) -> LabelSet:
        if not pb.labels:
            return EMPTY_LABELS
        return cls(tuple(Label(label.name, label.value, label.prefix) for label in pb.labels))

    def _range_of(self, name: str) -> tuple[int, int]:
        begin = end = bisect_left(self.labels, name, key=_name_of)
        while end < len(self.labels) and self.labels[end].name == name:
            end += 1
        return begin, end


EMPTY_LABELS: Final = LabelSet()


def _validate_order(index: int, previous: Label, label: Label) -> None:
    """Require ascending labels, and no empty value of a name that has other values."""
    if previous.name > label.name:
        raise Invalid(
            f"Labels not in unique, sorted order (index {index}; "
            f"label name {label.name} <= {previous.name})"
        )
    if previous.name < label.name:
        return
    if previous.value >= label.value:
        raise Invalid(
            f"Labels not in unique, sorted order (index {index}; "
            f"label {label.name} value {label.value} <= {previous.value})"
        )
    if previous.value == "":
        raise Invalid(
            f"Label has empty & non-empty values (index {index}; "
            f"label {label.name} value {label.value})"
        )


def validate_single_valued(labels: LabelSet) -> None:
    """Raise ``Invalid`` if a well-known label that may have only one value has several."""
    for index in range(1, len(labels.labels)):
        label = labels.labels[index]
        if labels.labels[index - 1].name == label.name and label.name in SINGLE_VALUED:
            raise Invalid(
                f"expected single-value Label has multiple values (index {index}; "
                f"label {label.name} value {label.value})"
            )


def _grouped(labels: Iterable[Label]) -> dict[str, tuple[Label, ...]]:
    return {name: tuple(group) for name, group in groupby(labels, key=_name_of)}


def _values(labels: Iterable[Label]) -> tuple[str, ...]:
    return tuple(label.value for label in labels)


def union(left: LabelSet, right: LabelSet) -> LabelSet:
    """Return the labels of either set. If both sets have a name, take the values of ``left``."""
    if not right.labels:
        return left
    groups = _grouped(right.labels) | _grouped(left.labels)
    return LabelSet(tuple(label for name in sorted(groups) for label in groups[name]))


def intersect(left: LabelSet, right: LabelSet) -> LabelSet:
    """Return the labels of names that have the same list of values in both sets."""
    right_groups = _grouped(right.labels)
    return LabelSet(
        tuple(
            label
            for name, group in _grouped(left.labels).items()
            if name in right_groups and _values(group) == _values(right_groups[name])
            for label in group
        )
    )


def subtract(left: LabelSet, right: LabelSet) -> LabelSet:
    """Return the labels of ``left``, without names that have the same list of values in ``right``."""
    right_groups = _grouped(right.labels)
    return LabelSet(
        tuple(
            label
            for name, group in _grouped(left.labels).items()
            if _values(group) != _values(right_groups.get(name, ()))
            for label in group
        )
    )


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """Selector of label sets.

    The set must have a matching value for every name of ``include``, and for no name of ``exclude``. Several
    values of one name in a selector are alternatives. The value ``""`` matches any value. A label with
    ``prefix`` matches every value that begins with its own. An empty selector matches any set.
    """

    include: LabelSet = EMPTY_LABELS
    exclude: LabelSet = EMPTY_LABELS

    @classmethod
    def of(cls, *pairs: tuple[str, str], **names: str) -> LabelSelector:
        """Include each pair and each keyword: ``LabelSelector.of(name="a/journal")``."""
        return cls(LabelSet.of(*pairs, *names.items()))

    @classmethod
    def parse(cls, text: str) -> LabelSelector:
        """Parse the text form, ``env in (production, qa), tier not in (frontend), !test``. Raise ``Invalid``
        at the first term that is invalid."""
        selector = _parse(text)
        selector.validate()
        return selector

    def matches(self, labels: LabelSet) -> bool:
        """Return True if the labels match."""
        if not self.include.labels and not self.exclude.labels:
            return True  # A fast path: each append checks this, mostly with claims to all journals.
        values: dict[str, list[str]] = {}
        for label in labels.labels:
            values.setdefault(label.name, []).append(label.value)
        for name, group in groupby(self.exclude.labels, key=_name_of):
            if _any_matches(group, values.get(name, ())):
                return False
        for name, group in groupby(self.include.labels, key=_name_of):
            if not _any_matches(group, values.get(name, ())):
                return False
        return True

    def __str__(self) -> str:
        return ",".join(
            [*_terms(self.include, "", "=", "in"), *_terms(self.exclude, "!", "!=", "notin")]
        )

    def validate(self) -> None:
        with within("Include"):
            self.include.validate(allow_prefix=True)
        with within("Exclude"):
            self.exclude.validate(allow_prefix=True)

    def to_pb(self) -> broker_pb2.LabelSelector:
        return broker_pb2.LabelSelector(include=self.include.to_pb(), exclude=self.exclude.to_pb())

    @classmethod
    def from_pb(cls, pb: broker_pb2.LabelSelector) -> LabelSelector:
        return cls(LabelSet.from_pb(pb.include), LabelSet.from_pb(pb.exclude))

    def to_json(self) -> dict[str, Any]:
        """Return the form of a selector in a token's claims."""
        return {"include": _to_json(self.include), "exclude": _to_json(self.exclude)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LabelSelector:
        """Decode the form of ``to_json``. Raise ``Invalid`` for any other form.

        Refuse unknown fields: a selector without one of its fields would match more than was meant.
        """
        _refuse_unknown("selector", value, ("include", "exclude"))
        return cls(
            _from_json("include", value.get("include")), _from_json("exclude", value.get("exclude"))
        )


EVERYTHING: Final = LabelSelector()
"""Selector that matches every label set."""


def _any_matches(alternatives: Iterable[Label], values: Iterable[str]) -> bool:
    """Return True if one of the values matches one of the labels, which have the same name."""
    return any(
        not label.value or (value.startswith(label.value) if label.prefix else value == label.value)
        for label in alternatives
        for value in values
    )


def _terms(labels: LabelSet, bang: str, equal: str, member: str) -> list[str]:
    """Return the text of a selector's part, one term for each name."""
    suffixed = sorted(
        replace(label, name=label.name + PREFIX_SUFFIX) if label.prefix else label
        for label in labels.labels
    )
    terms = []
    for name, group in groupby(suffixed, key=_name_of):
        values = _values(group)
        if values == ("",):  # The empty value matches any value.
            terms.append(f"{bang}{name}")
        elif len(values) == 1:
            terms.append(f"{name}{equal}{values[0]}")
        else:
            terms.append(f"{name} {member} ({','.join(values)})")
    return terms


def _to_json(labels: LabelSet) -> dict[str, Any]:
    entries = []
    for label in labels.labels:
        entry: dict[str, Any] = {"name": label.name, "value": label.value, "prefix": label.prefix}
        entries.append({key: value for key, value in entry.items() if value})
    return {"labels": entries or None}


def _refuse_unknown(context: str, value: Mapping[Any, Any], known: tuple[str, ...]) -> None:
    for name in value:
        if name not in known:
            raise Invalid(
                f"unknown field {_quoted(str(name))} (expected {', '.join(known)})", path=context
            )


def _from_json(context: str, value: Any) -> LabelSet:
    if value is None:
        return EMPTY_LABELS
    if isinstance(value, Mapping):
        _refuse_unknown(context, value, ("labels",))
        entries = value.get("labels")
        if entries is None:
            return EMPTY_LABELS
        if isinstance(entries, list):
            return LabelSet(tuple(_label_from_json(context, entry) for entry in entries))
    raise Invalid("expected an object with a list of labels", path=context)


def _label_from_json(context: str, item: Any) -> Label:
    if isinstance(item, dict):
        _refuse_unknown(context, item, ("name", "value", "prefix"))
        name, value, prefix = item.get("name", ""), item.get("value", ""), item.get("prefix", False)
        if isinstance(name, str) and isinstance(value, str) and isinstance(prefix, bool):
            return Label(name, value, prefix)
    raise Invalid("expected labels of name, value and prefix", path=context)


# Terms of a selector's text. Each gap may have at most one space.
_NAME: Final = r" ?([\w\-+/.]{2,}(?::prefix)?)"
_VALUE: Final = r" ?([\w\-+/.=%]*)"
_SET: Final = r" ?\(([^)]+)\)"
_END: Final = r" ?(?:,|\Z)"

_EQUAL = re.compile(f"{_NAME} ?=?={_VALUE}{_END}")
_NOT_EQUAL = re.compile(f"{_NAME} ?!={_VALUE}{_END}")
_IN = re.compile(f"{_NAME} in{_SET}{_END}")
_NOT_IN = re.compile(f"{_NAME} not ?in{_SET}{_END}")
_EXISTS = re.compile(f"{_NAME}{_END}")
_NOT_EXISTS = re.compile(f" ?!{_NAME}{_END}")
_SET_VALUE = re.compile(f"{_VALUE}{_END}")

_TERMS: Final = (
    (_EQUAL, False),
    (_NOT_EQUAL, True),
    (_IN, False),
    (_NOT_IN, True),
    (_EXISTS, False),
    (_NOT_EXISTS, True),
)


def _parse(text: str) -> LabelSelector:
    """Return the selector of a text. Raise ``Invalid`` at its first malformed term."""
    sets = [EMPTY_LABELS, EMPTY_LABELS]  # The included labels, and the excluded labels.
    position = 0
    while position < len(text):
        term, exclude = _parse_term(text, position)
        if term.re in (_IN, _NOT_IN):
            with within(f"parsing {_quoted(text[position:])}"):
                values = _parse_set(term.group(2))
        else:
            values = [term.group(2)] if term.re.groups == 2 else [""]
        for value in values:
            sets[exclude] = sets[exclude].with_added(term.group(1), value)
        position = term.end()
    return LabelSelector(include=sets[False], exclude=sets[True])


def _parse_term(text: str, position: int) -> tuple[re.Match[str], bool]:
    for pattern, exclude in _TERMS:
        if term := pattern.match(text, position):
            return term, exclude
    raise Invalid(f"could not match {_quoted(text[position:])} to a label selector expression")


def _parse_set(text: str) -> list[str]:
    values = []
    position = 0
    while position < len(text):
        term = _SET_VALUE.match(text, position)
        if term is None:
            raise Invalid(
                f"could not match {_quoted(text[position:])} to a label selector set expression"
            )
        values.append(term.group(1))
        position = term.end()
    return values


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
