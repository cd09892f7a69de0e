"""Outputs of a publisher: the journals that a name, a selector or a set of partitions stands for.

A `Choice` selects one of an output's journals for a message: by labels, a declaration, or the caller's key.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import suppress
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

from gazette.client.client import Client
from gazette.client.journals import JournalList
from gazette.client.new_journals import once_known
from gazette.errors import Invalid, NotFound
from gazette.labels import CONTENT_TYPE, MESSAGE_TYPE
from gazette.message.key_rule import KeyRule, LabelledKeys, partition_number
from gazette.message.keys import CanonicalKey, KeyEncoding
from gazette.message.mapping import (
    Mapping,
    Partition,
    Partitions,
    PartitionsFunc,
    PartitionWatch,
    modulo_mapping,
    random_mapping,
    rendezvous_mapping,
)
from gazette.message.message import CSVRecord
from gazette.protocol.ids import JournalName, validate_journal_name
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSelector, LabelSet

MappingName: TypeAlias = Literal["modulo", "rendezvous"]

Choice: TypeAlias = Callable[[Any, Any], Partition]
"""Function from a message, and the key that the publisher gives or None, to a partition."""


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


Output: TypeAlias = str | LabelSelector | DeclaredOutput | Partitions | Callable[[], Partitions]
"""Journals to publish to: the name of one journal, a selector of several, a `gazette.Source` or
`gazette.Output`, or partitions that the caller keeps."""

_SINGLE_MAX: Final = 4096
_UNTYPED: Final = (bytes, dict, CSVRecord)
"""Message types whose name says nothing about the content of a message."""


class Daemons(Protocol):
    """The method of `gazette.runtime.tasks.TaskScope` that runs a watch of partitions."""

    def daemon(self, coro: Any, *, name: str) -> Any: ...


class KnownOutput:
    """An output whose journals are known. Any thread may use it."""

    def __init__(
        self,
        partitions: Callable[[], Partitions],
        message_types: dict[JournalName, str],
        choose: Choice,
        uuid: str = "",
        *,
        is_single: bool = False,
    ) -> None:
        self._uuid = uuid
        self.is_single = is_single
        """True for a named journal that takes messages with any key. Its partition never changes."""
        self.partitions = partitions
        self._message_types = message_types
        self._choose = choose

    def partition_of(self, message: Any, key: Any) -> Partition:
        """Return the journal for a message.

        Raise ``NotFound`` if there is no journal. Raise ``Invalid`` for a key that is not known, belongs to
        another journal, or is a value that cannot be a key. Raise ``Invalid`` also for a journal without a
        content type, and for a journal of messages of another type.
        """
        try:
            chosen = self._choose(message, key)
        except Invalid:
            # A message of another type may lack the field of the key: report the type, not the field.
            for partition in self.partitions().all[:1]:
                self._check_type(partition, type(message))
            raise
        self._check_type(chosen, type(message))
        return chosen.with_uuid(self._uuid) if self._uuid else chosen

    def _check_type(self, partition: Partition, kind: type) -> None:
        """Raise ``Invalid`` for a journal without a content type, or whose label names another type."""
        if not partition.content_type:
            raise Invalid(
                f"journal {partition.journal} has no label {CONTENT_TYPE}",
                path="output",
                hint="Label it by `gazctl journals edit`: application/x-ndjson is for lines of JSON.",
            )
        declared_type = self._message_types.get(partition.journal, "")
        if not declared_type or issubclass(kind, _UNTYPED):
            return
        if kind.__name__ not in declared_type.rpartition(".")[2].split("+"):
            raise Invalid(
                f"journal {partition.journal} holds messages of type {declared_type}, not {kind.__name__}",
                path="message",
                hint=f"Publish to another journal, or correct the label {MESSAGE_TYPE} of this one.",
            )


class Outputs:
    """The outputs that a publisher has used so far. Loop-bound, except where a method says so."""

    def __init__(
        self, client: Client, daemons: Daemons, mapping: MappingName, uuid: str = ""
    ) -> None:
        self._uuid = uuid
        self._client = client
        self._daemons = daemons
        self._mapping: MappingName = mapping
        self._rng = random.Random()
        self._known: dict[str | LabelSelector | DeclaredOutput, KnownOutput] = {}
        self.single: dict[tuple[JournalName, type], Partition] = {}
        """The partition of a named journal for a type of messages, if it takes any key. Checked once."""

    def partition_of(self, output: Output, message: Any, key: Any) -> Partition | None:
        """Return the journal for a message; None if `find` must come first. Any thread may call this.

        For the errors see `KnownOutput.partition_of`.
        """
        known_output = self.known(output)
        if known_output is None:
            return None
        partition = known_output.partition_of(message, key)
        if known_output.is_single and isinstance(output, str) and len(self.single) < _SINGLE_MAX:
            self.single[output, type(message)] = partition
        return partition

    def known(self, output: Output) -> KnownOutput | None:
        """Return the output; None if `find` must find it first. Any thread may call this. Raise ``Invalid``
        if ``output`` is no output."""
        outputs: dict[Any, KnownOutput] = self._known
        if isinstance(output, Hashable) and (known_output := outputs.get(output)) is not None:
            return known_output
        if isinstance(output, str | LabelSelector | DeclaredOutput):
            return None
        if isinstance(output, Partitions):
            return self._by_labels(lambda: output, {})
        if callable(output):
            return self._by_labels(output, {})
        raise Invalid(
            f"not an output: {output!r}",
            path="output",
            hint='Give the name of a journal, LabelSelector.parse("prefix=words/"), a Source or Output, '
            "or partitions.",
        )

    async def find(self, output: Output) -> None:
        """Find the journals of an output, and remember them. Watch the partitions of a selector or
        declaration from now on.

        Raise ``Invalid`` for a bad name or label. Raise ``NotFound`` if brokers know no journal for some
        time: see `gazette.client.waits.Grace`. Wait for brokers.
        """
        if self.known(output) is not None:
            return
        if isinstance(output, LabelSelector):
            known_output = await self._find_matching(output)
        elif isinstance(output, str):
            known_output = await self._find_journal(output)
        else:
            assert isinstance(output, DeclaredOutput), "all others are known"
            known_output = await self._find_declared(output)
        self._known.setdefault(output, known_output)

    async def _find_journal(self, output: JournalName) -> KnownOutput:
        try:
            validate_journal_name(output)
        except Invalid as error:
            raise Invalid(
                f"{output!r} is not the name of a journal: {error}",
                path="output",
                hint="For labels of journals, give LabelSelector.parse(…).",
            ) from error
        listed = await once_known(self._client, output, lambda: self._client.get_journal(output))
        spec = listed.spec
        # Leave the labels out: `choose` checks the key that they may name.
        partitions = Partitions(Partitions.of_specs([spec]).all)
        choose = choice_of_named(partitions.all[0], spec.labels)
        is_single = KeyRule.of_labels(spec.labels) is None
        return KnownOutput(
            lambda: partitions, _types_of([spec]), choose, self._uuid, is_single=is_single
        )

    async def _find_matching(self, selector: LabelSelector) -> KnownOutput:
        async def require_journal() -> None:
            if not (await self._client.list_journals(selector)).journals:
                raise NotFound(
                    "no journal matches the selector",
                    hint="Create journals that match (`gazctl journals apply`), or see their labels by "
                    "`gazctl journals list`.",
                    selector=str(selector),
                )

        await once_known(self._client, str(selector), require_journal)
        watch, message_types = await self._start_watch(selector, 1)
        return self._by_labels(watch, message_types)

    async def _find_declared(self, output: DeclaredOutput) -> KnownOutput:
        watch, message_types = await self._start_watch(output.selector, output.partitions)
        choose = choice_as_declared(output, watch)
        return KnownOutput(watch, message_types, choose, self._uuid)

    def _by_labels(
        self, partitions: Callable[[], Partitions], message_types: dict[JournalName, str]
    ) -> KnownOutput:
        choose = choice_by_labels(partitions, self._mapping, self._rng)
        return KnownOutput(partitions, message_types, choose, self._uuid)

    async def _start_watch(
        self, selector: LabelSelector, count: int
    ) -> tuple[PartitionWatch, dict[JournalName, str]]:
        """Watch a selector from now on. Return the watch of its partitions, and the types of their messages,
        by journal. Watch and types stay current. Wait for some time while brokers know fewer than ``count``
        partitions."""
        message_types: dict[JournalName, str] = {}
        watch = PartitionWatch(self._observed(selector, message_types))
        self._daemons.daemon(watch.run(), name=f"partitions {selector}")
        await watch.ready()

        async def require_all() -> None:
            if len(watch().all) < count:
                raise NotFound("brokers know fewer partitions", selector=str(selector))

        with suppress(NotFound):  # The later choice of a partition raises a better error.
            await once_known(self._client, str(selector), require_all)
        return watch, message_types

    async def _observed(
        self, selector: LabelSelector, message_types: dict[JournalName, str]
    ) -> AsyncIterator[JournalList]:
        async for listed in self._client.watch_journals(selector):
            message_types |= _types_of([journal.spec for journal in listed.journals])
            yield listed


def _types_of(specs: list[JournalSpec]) -> dict[JournalName, str]:
    return {spec.name: spec.labels.value_of(MESSAGE_TYPE) or "" for spec in specs}


def choice_by_labels(
    partitions: PartitionsFunc, mapping: MappingName, rng: random.Random
) -> Choice:
    """Return the choice by the key that labels name; if they name none, by the caller's key, or at random."""
    by_key = modulo_mapping if mapping == "modulo" else rendezvous_mapping
    by_given_key: Mapping[Any] = by_key(partitions, lambda key: key)
    at_random: Mapping[Any] = random_mapping(partitions, rng)

    def choose(message: Any, key: Any) -> Partition:
        current = partitions()
        if (keys := current.keys()) is not None:
            return current.of_key(keys.key_of(message, key))
        return at_random(message) if key is None else by_given_key(key)

    return choose


def choice_of_named(partition: Partition, labels: LabelSet) -> Choice:
    """Return the choice of one named journal, for messages whose key belongs to it.

    Raise ``Invalid`` if labels name a key, and the journal's name does not say which partition it is.
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
    """Return the choice of ``partition``, which has ``number``, for messages whose key belongs to it."""
    keys = LabelledKeys(rule)

    def choose(message: Any, key: Any) -> Partition:
        canonical = keys.key_of(message, key)
        if (key_number := rule.number_of(canonical)) != number:
            raise Invalid(
                f"the key {canonical!r} belongs to partition {key_number}, and this is partition {number}",
                path="output",
                hint="Publish to all partitions, by a selector, Source or Output: the key chooses.",
                journal=partition.journal,
            )
        return partition

    return choose


def choice_as_declared(output: DeclaredOutput, partitions: PartitionsFunc) -> Choice:
    """Return the choice of a `Source` or `Output` among the partitions that exist. The choice raises
    ``Invalid`` if they are not the declared partitions, or if the caller's key is not the message's key."""
    mapping = output.mapping(partitions)
    checked: Partitions | None = None

    def choose(message: Any, key: Any) -> Partition:
        nonlocal checked
        current = partitions()
        if checked is not current:
            _check_declared(output, current)
            checked = current
        if key is not None and output.key_rule is not None:
            given_key, declared_key = output.key_encoding.encode(key), output.key_of(message)
            if given_key != declared_key:
                raise Invalid(
                    f"the key is {given_key!r}, and the declaration gives {declared_key!r}",
                    path="key",
                    hint="Leave the key out: the declaration has it.",
                )
        return mapping(message)

    return choose


def _check_declared(output: DeclaredOutput, current: Partitions) -> None:
    """Raise ``Invalid`` unless the journals have the number and the key of the declaration."""
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
