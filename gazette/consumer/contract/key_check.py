"""Check that messages belong to the shard that reads them: their keys must map to its partition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

from gazette.consumer.contract.array_pass import MessageRows
from gazette.errors import GazetteError, Invalid
from gazette.lazy_numpy import numpy as np
from gazette.message.envelope import Envelope
from gazette.message.key_hash import fnv32a_of_all
from gazette.message.keys import ANY, TEXT, CanonicalKey, KeyEncoding
from gazette.message.mapping import Mapping
from gazette.message.uuid import ACK_TXN

MisplacedPolicy: TypeAlias = Literal["count", "fail", "republish"]
"""The policy of a shard for a message that belongs to another partition."""

_OWN_MAX: Final = 1 << 16
_journal_of: Final[Callable[[Envelope[Any]], str]] = attrgetter("journal")


class Misplaced(GazetteError):
    """A message is not in the partition of its key."""

    default_hint = (
        "Publish through the Source or Output, a selector of all partitions, or `gazctl produce`. "
        'To have shards move such messages to their partitions, declare misplaced="republish".'
    )


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """One partition of a source with a key, and the mapping that decides which keys belong there."""

    number: int
    """Number of the partition."""
    partitions: int
    key_of: Callable[[Any], CanonicalKey]
    """Function from a message to its key. Raises ``Invalid`` for no key, and errors of the application."""
    mapping: Mapping[Any]
    """Mapping of messages to the partitions of the source."""
    policy: MisplacedPolicy = "count"
    encoding: KeyEncoding = ANY
    attribute: str = ""
    """Attribute of the message that is its key, if equal values have equal keys. Empty: call `key_of`."""

    @property
    def is_text(self) -> bool:
        """True if a text is its own key."""
        return self.encoding in (TEXT, ANY)


class KeyCheck:
    """The check of one partition's messages. Remembers keys that belong to the partition."""

    def __init__(self, place: KeyPlace) -> None:
        self.place = place
        self._own_values: set[Any] = set()
        self._read_value: Callable[[Envelope[Any]], Any] = (
            attrgetter(f"message.{place.attribute}") if place.attribute else self._key_or_error
        )

    def misplaced(self, batch: Sequence[Envelope[Any]]) -> list[int]:
        """Return the positions of messages that belong to other partitions, or that have no valid key."""
        try:
            if self._owns_all(batch):
                return []
            values = list(map(self._read_value, batch))
            # If all values of a batch are known to belong here, one set operation is enough.
            if self._own_values.issuperset(values):
                return []
            is_own = self._own_mask(values)
            self._remember(compress(values, is_own))
        except (AttributeError, TypeError, UnicodeEncodeError):
            # Some acknowledgements have no attributes, and some values cannot be in a set.
            return self._misplaced_singly(batch)
        foreign: list[int] = np.flatnonzero(~is_own).tolist()
        return [position for position in foreign if batch[position].flags != ACK_TXN]

    def _owns_all(self, batch: Sequence[Envelope[Any]]) -> bool:
        """Return True if columns show that the keys of all messages belong to the partition."""
        if not self.place.attribute or not isinstance(batch, MessageRows):
            return False
        values = batch.distinct(self.place.attribute)
        if values is None:
            return False
        unknown = list({*values} - self._own_values)
        if unknown and not self._own_mask(unknown).all():
            return False
        self._remember(unknown)
        return True

    def _remember(self, own: Iterable[Any]) -> None:
        if len(self._own_values) > _OWN_MAX:
            self._own_values.clear()
        self._own_values.update(own)

    def _own_mask(self, values: list[Any]) -> Any:
        """Return an array of bool: True for each value whose key belongs to the partition."""
        if self.place.is_text and set(map(type, values)) == {str}:
            # Hashing all texts at once is faster than looking up which texts are known.
            return self._partition_numbers(values) == self.place.number
        unknown_values = list({*values} - self._own_values)
        keys: list[Any] = [self._encoded(value) for value in unknown_values]
        valid = [index for index, key in enumerate(keys) if key is not None]
        is_own = np.zeros(len(unknown_values), bool)
        is_own[valid] = (
            self._partition_numbers([keys[index] for index in valid]) == self.place.number
        )
        foreign = set(compress(unknown_values, ~is_own))
        return np.fromiter((value not in foreign for value in values), bool, len(values))

    def _partition_numbers(self, keys: Sequence[CanonicalKey]) -> Any:
        return fnv32a_of_all(keys) % np.uint32(self.place.partitions)

    def _misplaced_singly(self, batch: Sequence[Envelope[Any]]) -> list[int]:
        """Return the result of `misplaced`, checking message by message. Leave acknowledgements out."""
        positions = []
        for position, envelope in enumerate(batch):
            if envelope.flags == ACK_TXN:
                continue
            key = self._key_or_error(envelope)
            if isinstance(key, Exception) or self._partition_numbers([key])[0] != self.place.number:
                positions.append(position)
        return positions

    def _encoded(self, value: Any) -> CanonicalKey | None:
        """Return the key of a value; None if the value cannot be a key."""
        if not self.place.attribute:  # The value is the key, or the error of `key_of`.
            return None if isinstance(value, Exception) else value
        try:
            return self.place.encoding.encode(value)
        except Invalid:
            return None

    def _key_or_error(self, envelope: Envelope[Any]) -> Any:
        """Return the key of a message, or the error that `KeyPlace.key_of` raised."""
        try:
            return self.place.key_of(envelope.message)
        except Exception as error:  # noqa: BLE001 - a function of the user may raise anything
            return error

    def error_of(self, envelope: Envelope[Any]) -> Misplaced:
        """Return the error for a misplaced message."""
        key = self._key_or_error(envelope)
        if isinstance(key, Exception):
            text = str(key) if isinstance(key, Invalid) else f"{type(key).__name__}: {key}"
            reason = f"its key cannot be computed ({text})"
        else:
            number = int(self._partition_numbers([key])[0])
            reason = f"its key {key!r} belongs to partition {number}, not to {self.place.number}"
        return Misplaced(
            f"a message is misplaced: {reason}",
            journal=envelope.journal,
            begin=envelope.begin,
            end=envelope.end,
        )


class KeyChecks:
    """The checks of one shard's sources, made at their first use."""

    def __init__(self, place_of: Callable[[str], KeyPlace | None]) -> None:
        self._place_of = place_of
        self._checks: dict[str, KeyCheck | None] = {}

    def of(self, journal: str) -> KeyCheck | None:
        """Return the check of a source; None if messages with any key belong to it."""
        if journal not in self._checks:
            place = self._place_of(journal)
            self._checks[journal] = None if place is None else KeyCheck(place)
        return self._checks[journal]

    def consumed(self, batch: Sequence[Envelope[Any]]) -> Sequence[Envelope[Any]]:
        """Return the messages of a batch that a shard would consume, by the policies of their sources.

        Leave out messages that the shard would republish. Raise `Misplaced` if the policy of a misplaced
        message is ``fail``.
        """
        kept: list[Envelope[Any]] = []
        for journal, group in groupby(batch, _journal_of):
            run, check = list(group), self.of(journal)
            if check is not None and check.place.policy != "count":
                misplaced = set(check.misplaced(run))
                if misplaced and check.place.policy == "fail":
                    raise check.error_of(run[min(misplaced)])
                run = [message for index, message in enumerate(run) if index not in misplaced]
            kept += run
        return kept


def values_have_keys(encoding_name: str) -> bool:
    """Return True if equal values have equal keys under an encoding, so that sets may hold values."""
    return ANY.name not in encoding_name
