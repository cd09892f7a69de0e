"""Rules for the keys of messages, in the labels of their journals. Pure.

A declaration labels its journals. A publisher that has only the journals derives keys from these labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

from gazette.errors import Invalid
from gazette.labels import MESSAGE_KEY, MESSAGE_KEY_TYPE, MESSAGE_PARTITIONS
from gazette.message.key_fields import reader_by_wire_name
from gazette.message.key_hash import hash_of_key
from gazette.message.keys import ANY, CanonicalKey, KeyEncoding, encoding_named
from gazette.protocol.ids import JournalName, split_journal_meta
from gazette.protocol.label_set import LabelSet
from gazette.runtime.numbers import is_digits

_FUNCTION: Final = "function="
_PARTITION: Final = re.compile(r"(.+)/part-([0-9]{3,})")


@dataclass(frozen=True, slots=True)
class KeyRule:
    """A rule that maps messages to journals: by the hash of the key, modulo ``partitions``."""

    key: str
    """Value of the label `MESSAGE_KEY`: an encoded field, or ``function=`` and a name."""
    key_type: str
    """Name of the `KeyEncoding`."""
    partitions: int

    @classmethod
    def of_field(cls, name: str, encoding: KeyEncoding, partitions: int) -> KeyRule:
        """Return the rule for a field of messages."""
        return cls(quote(name, safe=""), encoding.name, partitions)

    @classmethod
    def of_function(cls, function: Callable[[Any], Any], partitions: int) -> KeyRule:
        """Return the rule for a function. Other programs learn only its name."""
        name = getattr(function, "__name__", type(function).__name__).strip("<>")
        return cls(_FUNCTION + quote(name, safe=""), ANY.name, partitions)

    @classmethod
    def of_labels(cls, labels: LabelSet) -> KeyRule | None:
        """Return the rule of a journal; None if no label names a key. Raise ``Invalid`` for a bad label."""
        key = labels.value_of(MESSAGE_KEY)
        if not key:
            return None
        count = labels.value_of(MESSAGE_PARTITIONS) or ""
        if not is_digits(count) or not int(count):
            raise Invalid(
                f"{count!r} is no number of partitions",
                path=MESSAGE_PARTITIONS,
                hint="Apply the declaration of the journals, which labels them.",
            )
        return cls(key, labels.value_of(MESSAGE_KEY_TYPE) or ANY.name, int(count))

    @property
    def labels(self) -> tuple[tuple[str, str], ...]:
        """Labels of journals with this rule."""
        return (
            (MESSAGE_KEY, self.key),
            (MESSAGE_KEY_TYPE, self.key_type),
            (MESSAGE_PARTITIONS, str(self.partitions)),
        )

    def number_of(self, key: CanonicalKey) -> int:
        """Return the number of the partition of a key."""
        return hash_of_key(key) % self.partitions

    @property
    def field(self) -> str | None:
        """Name of the field that is the key. None for a function."""
        return None if self.key.startswith(_FUNCTION) else unquote(self.key)

    def __str__(self) -> str:
        field = self.field
        return f"field {field!r}" if field is not None else f"the function {self.function}()"

    @property
    def function(self) -> str:
        """Name of the function that returns the key. Empty for a field."""
        return "" if self.field is not None else unquote(self.key.removeprefix(_FUNCTION))


class LabelledKeys:
    """Keys of messages, derived by a `KeyRule`. Any thread may use it."""

    def __init__(self, rule: KeyRule) -> None:
        self.rule = rule
        self._encoding: KeyEncoding | None = None
        self._getters: dict[type, Callable[[Any], Any]] = {}

    def key_of(self, message: Any, given: Any = None) -> CanonicalKey:
        """Return the key of a message. ``given`` is the key that its publisher gives, or None.

        Raise ``Invalid`` if the key is not known, cannot be a key, or differs from ``given``. If the key is
        not known and there is only one partition, return the empty text.
        """
        encoding = self._encoding = self._encoding or encoding_named(self.rule.key_type)
        given_key = None if given is None else encoding.encode(given)
        if self.rule.field is None or isinstance(message, bytes):
            if given_key is None and self.rule.partitions > 1:
                raise self._unknown(message)
            return given_key or ""
        key = self._key_of_field(message, encoding)
        if given_key is not None and given_key != key:
            raise Invalid(
                f"the key is {given_key!r}, and {self.rule} of the message gives {key!r}",
                path="key",
                hint="Leave the key out: the journals are labelled with the field that is the key.",
            )
        return key

    def _key_of_field(self, message: Any, encoding: KeyEncoding) -> CanonicalKey:
        name, message_type = self.rule.field, type(message)
        assert name is not None
        get = self._getters.get(message_type)
        if get is None:
            get = self._getters[message_type] = reader_by_wire_name(message_type, name)
        value = get(message)
        try:
            return encoding.encode(value)
        except Invalid as error:
            raise Invalid(error.message, path=f"key {name}", hint=error.hint) from error

    def _unknown(self, message: Any) -> Invalid:
        if self.rule.field is None:
            return Invalid(
                f"the key of the message is not known: {self.rule} of an application returns it",
                path="key",
                hint="Give the key, or the Source or Output of the application as the output.",
            )
        return Invalid(
            f"the key of {type(message).__name__} is not known: it is {self.rule} of the message",
            path="key",
            hint="Give the key, or publish an object with its fields.",
        )


def one_rule(journals: Sequence[JournalName], labels: Sequence[LabelSet]) -> KeyRule:
    """Return the rule of journals that are all the partitions of one declaration.

    Raise ``Invalid`` if a partition is absent, or if a journal is no partition of the declaration.
    """
    rules = {KeyRule.of_labels(label_set) for label_set in labels}
    directories = sorted({name.rpartition("/")[0] for name in journals})
    rule = rules.pop()
    if rule is None or rules or len(directories) > 1:
        raise Invalid(
            "the journals are not the partitions of one declaration, and at least one has a key",
            path="output",
            hint=f"Give those of one declaration: {', '.join(f'{path}/part-' for path in directories[:9])}. "
            "If all these journals should belong to one declaration, apply it again.",
            journal=journals[0],
        )
    if rule.partitions != len(journals):
        raise Invalid(
            f"the output has {len(journals)} of {rule.partitions} declared partitions",
            path="output",
            hint="Give a selector that matches all partitions. If some do not exist, apply the declaration.",
            journal=journals[0],
        )
    return rule


def partition_number(journal: JournalName) -> int | None:
    """Return the number in the name of a partition: 7 for ``words/part-007``. None for any other name."""
    match = _PARTITION.fullmatch(split_journal_meta(journal)[0])
    return None if match is None else int(match[2])
