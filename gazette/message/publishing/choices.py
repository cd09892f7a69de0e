"""Choices of a partition for a message: by labels of journals, by a declaration, or by the caller's key."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from gazette.errors import Invalid
from gazette.message.key_rule import KeyRule, LabelledKeys, partition_number
from gazette.message.keys import CanonicalKey, KeyEncoding
from gazette.message.mapping import (
    Mapping,
    Partition,
    Partitions,
    PartitionsFunc,
    modulo_mapping,
    random_mapping,
    rendezvous_mapping,
)
from gazette.protocol.label_set import LabelSelector, LabelSet

MappingName: TypeAlias = Literal["modulo", "rendezvous"]

Choice: TypeAlias = Callable[[Any, Any], Partition]
"""Function from a message and its publisher's key, or None, to a partition."""


@runtime_checkable
class DeclaredOutput(Protocol):
    """A `gazette.Source` or `gazette.Output`."""

    @property
    def message_type(self) -> Any: ...
    @property
    def partitions(self) -> int: ...
    @property
    def selector(self) -> LabelSelector: ...
    @property
    def key_rule(self) -> KeyRule | None: ...
    @property
    def key_encoding(self) -> KeyEncoding: ...
    def key_of(self, message: Any, /) -> CanonicalKey: ...
    def mapping(self, partitions: PartitionsFunc | None = None, /) -> Mapping[Any]: ...


def choice_by_labels(
    partitions: PartitionsFunc, mapping: MappingName, rng: random.Random
) -> Choice:
    """Return the choice by the key that labels name. Without such labels: by the given key, or at random."""
    by_key = modulo_mapping if mapping == "modulo" else rendezvous_mapping
    said: Mapping[Any] = by_key(partitions, lambda key: key)
    at_random: Mapping[Any] = random_mapping(partitions, rng)

    def choose(message: Any, key: Any) -> Partition:
        current = partitions()
        if (keys := current.keys()) is not None:
            return current.of_key(keys.key_of(message, key))
        return at_random(message) if key is None else said(key)

    return choose


def choice_of_named(partition: Partition, labels: LabelSet) -> Choice:
    """Return the choice of one named journal, for messages whose key belongs to it.

    Raise ``Invalid`` for a journal with a key whose name does not say which partition it is.
    """
    rule = KeyRule.of_labels(labels)
    if rule is None:
        return lambda _message, _key: partition
    number = partition_number(partition.journal)
    if number is None:
        raise Invalid(
            f"a key maps messages to {partition.journal}, whose name does not say which partition it is",
            path="output",
            hint="Publish to all partitions by a selector.",
        )
    return choice_of_one(partition, rule, number)


def choice_of_one(partition: Partition, rule: KeyRule, number: int) -> Choice:
    """Return the choice of the partition with that number, for messages whose key belongs to it."""
    keys = LabelledKeys(rule)

    def choose(message: Any, key: Any) -> Partition:
        found = keys.key_of(message, key)
        if (other := rule.number_of(found)) != number:
            raise Invalid(
                f"the key {found!r} belongs to partition {other}, and this is partition {number}",
                path="output",
                hint="Publish to all partitions, by a selector, Source or Output: the key chooses.",
                journal=partition.journal,
            )
        return partition

    return choose


def choice_as_declared(output: DeclaredOutput, partitions: PartitionsFunc) -> Choice:
    """Return the choice of a `Source` or `Output` among the partitions that exist."""
    mapping = output.mapping(partitions)
    checked: Partitions | None = None

    def choose(message: Any, key: Any) -> Partition:
        nonlocal checked
        current = partitions()
        if checked is not current:
            _check_declared(output, current)
            checked = current
        if key is not None and output.key_rule is not None:
            said, declared = output.key_encoding.encode(key), output.key_of(message)
            if said != declared:
                raise Invalid(
                    f"the key is {said!r}, and the declaration gives {declared!r}",
                    path="key",
                    hint="Leave the key out: the declaration has it.",
                )
        return mapping(message)

    return choose


def _check_declared(output: DeclaredOutput, current: Partitions) -> None:
    """Raise ``Invalid`` unless the journals are those of the declaration."""
    if len(current.all) != output.partitions:
        raise Invalid(
            f"there are {len(current.all)} of {output.partitions} declared partitions",
            path="output",
            hint="Apply the declaration, or correct its number of partitions.",
            selector=str(output.selector),
        )
    keys, rule = current.keys(), output.key_rule
    if keys is not None and keys.rule != rule:
        raise Invalid(
            f"the journals are mapped by {keys.rule}, and the declaration says "
            f"{rule or 'that they have no key'}",
            path="output",
            hint="Declare the key that the journals are labelled with, or apply the declaration.",
            selector=str(output.selector),
        )
