"""The checked declaration of an application: `Declaration`, plain data for specifications. No IO.

`gazette.consumer.declare.specs` makes specifications of journals and shards from a `Declaration`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

import msgspec

from gazette.consumer.application import MessageProducer
from gazette.consumer.application_name import name_of
from gazette.consumer.contract.poison import PoisonPolicy
from gazette.consumer.declare.message_types import type_name
from gazette.consumer.declare.source import (
    Output,
    Source,
    declared_in,
    journals_of,
    selector_of,
    sources_of,
)
from gazette.errors import Invalid
from gazette.labels import (
    CONTENT_TYPE,
    DECLARED_BY,
    MESSAGE_KEY,
    MESSAGE_PARTITIONS,
    MESSAGE_TIME,
    MESSAGE_TYPE,
    MESSAGE_UUID,
)
from gazette.message.key_rule import KeyRule
from gazette.message.labelled_time import label_of_time
from gazette.message.uuid_place import DEFAULT_PLACE, declared_place
from gazette.protocol.label_set import Label, LabelSelector, LabelSet
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.protocol.text.duration import MICROSECOND
from gazette.protocol.text.validation import within

log = logging.getLogger(__name__)

REMOVABLE: Final = (MESSAGE_KEY, MESSAGE_TIME)
"""Labels that a later declaration may remove."""


class DeclaredJournals(msgspec.Struct, frozen=True):
    """A source or an output as plain data for specifications."""

    name: str
    partitions: int
    key: KeyRule | None
    """The rule that maps equal keys to the same partition. None if no key is declared."""
    content_type: str
    message_type: str
    """Value of the label `MESSAGE_TYPE`."""
    retention_ns: int
    """Age in nanoseconds from which fragments may be pruned; 0 keeps everything."""
    uuid: str = ""
    """Value of the label `MESSAGE_UUID`. Empty for the field ``uuid``, and for messages without a UUID."""
    names_uuid: bool = False
    """True if ``uuid`` or ``gazette_uuid`` names the place; False if the type has only a field ``uuid``."""
    message_time: str = ""
    """Value of the label `MESSAGE_TIME`. Empty if the time is the clock of the publisher."""
    application: str = ""
    """Name of the application, with only characters that labels and names of journals may have."""

    @property
    def labels(self) -> LabelSet:
        """Labels of the journals. Each label has one value, except `DECLARED_BY`, which has a value for each
        label that a later declaration may remove."""
        key = () if self.key is None else self.key.labels
        uuid = ((MESSAGE_UUID, self.uuid),) if self.uuid else ()
        time = ((MESSAGE_TIME, self.message_time),) if self.message_time else ()
        recorded = [name for name, _ in (*key, *time) if name in REMOVABLE]
        return LabelSet.of(
            (CONTENT_TYPE, self.content_type),
            (MESSAGE_TYPE, self.message_type),
            (MESSAGE_PARTITIONS, str(self.partitions)),
            *key,
            *uuid,
            *time,
            *((DECLARED_BY, self.record_of(name)) for name in recorded),
        )

    def record_of(self, label: str) -> str:
        """Return the value of `DECLARED_BY` for a ``label`` that this application has declared."""
        return f"{self.application}/{label.rpartition('/')[2]}"

    @property
    def journals(self) -> tuple[str, ...]:
        """Names of the partitions, in order."""
        return journals_of(self.name, self.partitions)

    @property
    def selector(self) -> LabelSelector:
        """Selector of the partitions."""
        return selector_of(self.name)


class Declaration(msgspec.Struct, frozen=True):
    """Everything that an application's class declares, checked as a whole. Plain data."""

    application: str
    """Name of the application."""
    sources: tuple[DeclaredJournals, ...]
    outputs: tuple[DeclaredJournals, ...]
    recovery_logs: bool = True
    """False for stores that are durable without a log, such as ``SQLStore``."""
    dead_letters: tuple[str, ...] = ()
    """Dead-letter journals of the shards' poison policies, if they are neither sources nor outputs."""

    @property
    def shards(self) -> int:
        """Number of shards: the number of partitions of each source."""
        return self.sources[0].partitions

    @property
    def slug(self) -> str:
        """Name of the application, with only characters that journal names and keys of etcd may have."""
        return _slug(self.application)

    @property
    def journals(self) -> tuple[DeclaredJournals, ...]:
        """Sources, and outputs that are not also sources."""
        names = {source.name for source in self.sources}
        return (*self.sources, *(output for output in self.outputs if output.name not in names))


def declaration_of(application: Any, *, name: str = "") -> Declaration:
    """Return the declaration of an application. Raise ``Invalid`` for parts that contradict each other.

    ``name`` replaces the name of the application, as ``--consumer.application`` does.
    """
    cls = type(application)
    recovery_logs = getattr(application, "recovery_logs", True)
    if not isinstance(recovery_logs, bool):
        raise Invalid(
            f"{recovery_logs!r} is neither True nor False",
            path=f"{cls.__qualname__}.recovery_logs",
            hint="Set recovery_logs = False if the store is durable without a log.",
        )
    sources = sources_of(application)
    outputs: list[Output[Any]] = declared_in(cls, (Output,))
    _check_whole(sources, outputs, application)
    name = name or name_of(application)
    declaration = Declaration(
        name,
        tuple(_plain(source, name) for source in sources),
        tuple(_plain(output, name) for output in outputs),
        recovery_logs,
    )
    return msgspec.structs.replace(
        declaration, dead_letters=_dead_letters(application, declaration)
    )


@dataclass(frozen=True, slots=True)
class _DeclaredShard:
    """The attributes of a shard that `Application.poison_policy` may read before the shard runs."""

    spec: ShardSpec

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def fqn(self) -> str:
        return self.spec.id


def shards_of(declaration: Declaration) -> list[ShardSpec]:
    """Return the shards, ordered by id: number N reads partition number N of every source."""
    return [
        ShardSpec(
            f"shard-{index:03d}",
            sources=tuple(
                ShardSource(journal)
                for journal in sorted(source.journals[index] for source in declaration.sources)
            ),
        )
        for index in range(declaration.shards)
    ]


def _dead_letters(application: Any, declaration: Declaration) -> tuple[str, ...]:
    """Return the dead-letter journals of the shards' poison policies, except sources and outputs."""
    names = set()
    for spec in shards_of(declaration):
        try:
            policy = application.poison_policy(_DeclaredShard(spec))
        except Exception as error:  # noqa: BLE001 - of the application
            # The method may need objects that `initialize` makes. The shard calls it again later.
            log.warning(
                "a dead-letter journal that does not exist is not created, since poison_policy fails "
                "before the application is initialized: %(error)r",
                {"error": error},
            )
            break
        if isinstance(policy, PoisonPolicy):  # The shard refuses other values.
            names.add(policy.dead_letters)
    return tuple(sorted(names - {name for each in declaration.journals for name in each.journals}))


def _slug(application: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]+", "-", application).strip("-.") or "application"


def _plain(declared: Source[Any] | Output[Any], application: str) -> DeclaredJournals:
    """Return a source or output as plain data. ``application`` is the name of the application."""
    retention = declared.retention or timedelta(0)
    return DeclaredJournals(
        declared.name,
        declared.partitions,
        declared.key_rule,
        declared.content_type,
        message_type_label(declared),
        retention // timedelta(microseconds=1) * MICROSECOND,
        _uuid_label(declared),
        bool(declared_place(declared.message_type, declared.uuid)),
        _time_label(declared),
        _slug(application),
    )


def _time_label(declared: Source[Any] | Output[Any]) -> str:
    time = declared.message_time
    return "" if time is None else label_of_time(time, declared.message_types)


def _check_whole(
    sources: Sequence[Source[Any]], outputs: Sequence[Output[Any]], application: Any
) -> None:
    """Raise ``Invalid`` if there are no sources, or if sources and outputs contradict each other."""
    owner = type(application).__qualname__
    if not sources:
        if isinstance(application, MessageProducer):
            hint = "A MessageProducer reads no journals: write its shards as YAML, and apply them."
        else:
            hint = f'Declare what it reads: in {owner}, words = Source("words", Word).'
        raise Invalid("no source is declared", path=owner, hint=hint)
    for group in (sources, outputs):
        names = [declared.name for declared in group]
        for name in names:
            if names.count(name) > 1:
                raise Invalid(f"{name} is declared twice", path=owner, hint="Remove one of them.")
    sources_by_name = {source.name: source for source in sources}
    for output in outputs:
        if (source := sources_by_name.get(output.name)) is not None:
            _check_same(source, output, owner)
    _check_nesting({declared.name for declared in (*sources, *outputs)}, owner)
    first = sources[0]
    for other in sources[1:]:
        if other.partitions != first.partitions:
            raise Invalid(
                f"{first.name} has {first.partitions} partitions, and {other.name} has "
                f"{other.partitions}: shard number N reads partition number N of every source",
                path=f"{owner}.partitions",
                hint="Give all sources the same number, or make two applications of it.",
            )
    _check_message_type(sources, application)


def _check_same(source: Source[Any], output: Output[Any], kind: str) -> None:
    """Raise ``Invalid`` if a source and an output of one name differ in a field."""
    for field in fields(output):
        value, other = getattr(source, field.name), getattr(output, field.name)
        if value != other:
            raise Invalid(
                f"{source.name} is a source with {field.name} {value!r}, and an output with {other!r}",
                path=kind,
                hint="Declare both alike: they are the same journals.",
            )


def _check_nesting(names: Iterable[str], kind: str) -> None:
    """Raise ``Invalid`` if a declared name is the directory of another declared name."""
    # With a slash after each name, sorting puts a directory right before the names in it.
    ordered = sorted(names, key=lambda name: f"{name}/")
    for name, next_name in pairwise(ordered):
        if next_name.startswith(f"{name}/"):
            raise Invalid(
                f"{next_name} lies in the directory of {name}",
                path=kind,
                hint=f"Rename one of them, as to {name}-{next_name.removeprefix(f'{name}/')}.",
            )


def _check_message_type(sources: Sequence[Source[Any]], application: Any) -> None:
    message_type = getattr(application, "message_type", None)
    if message_type is None or any(message_type is source.message_type for source in sources):
        return
    declared = ", ".join(type_name(source.message_type) for source in sources)
    raise Invalid(
        f"message_type is {type_name(message_type)}, and sources declare {declared}",
        path=type(application).__qualname__,
        hint="Remove message_type: sources decode to the types that they declare.",
    )


def _uuid_label(declared: Source[Any] | Output[Any]) -> str:
    place = declared.uuid_place
    if place in ("", DEFAULT_PLACE):
        return ""
    with within(f"{type(declared).__name__}({declared.name!r}).uuid"):
        Label(MESSAGE_UUID, place).validate()
    return place


def message_type_label(declared: Source[Any] | Output[Any]) -> str:
    """Return the value of the label `MESSAGE_TYPE`: protobuf's full name, or the name of the class."""
    descriptor = getattr(declared.message_type, "DESCRIPTOR", None)
    name = type_name(declared.message_type) if descriptor is None else descriptor.full_name
    text = re.sub(r"[^\w\-+/.]", "-", str(name))
    Label(MESSAGE_TYPE, text).validate()
    return text
