"""Journals that an application reads and writes, declared in its class: `Source` and `Output`.

    class WordCount(Application[SQLiteStore]):
        words = Source("words", Word, partitions=4, key="word")
        counts = Output("counts", Count, partitions=2, key="word")

No IO: `gazette.consumer.declare.specs` makes specifications of journals and shards from a declaration.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import cached_property
from types import UnionType
from typing import Any, Final, Generic, TypeVar, get_args, get_origin

from gazette.consumer.application import Application
from gazette.consumer.contract.key_check import KeyPlace, MisplacedPolicy, values_have_keys
from gazette.consumer.declare.message_types import (
    classes_of,
    content_type_of,
    fields_of,
    type_name,
    with_declared,
)
from gazette.errors import Invalid
from gazette.message.framing.framing import framing_of
from gazette.message.key_fields import KeyField, declared_field
from gazette.message.key_hash import hash_of_key
from gazette.message.key_rule import KeyRule
from gazette.message.keys import ANY, TEXT, CanonicalKey, KeyEncoding, canonical_key
from gazette.message.mapping import (
    Mapping,
    Partition,
    Partitions,
    PartitionsFunc,
    modulo_mapping,
    random_mapping,
)
from gazette.message.message_time import MessageTime
from gazette.message.time_fields import check_time_field
from gazette.protocol.ids import split_journal_meta, validate_journal_name
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSelector
from gazette.runtime.near_names import near_name

M = TypeVar("M")

PARTITIONS_MAX: Final = 1000
"""Greatest number of partitions: up to ``part-999``, their names sort by number."""
RECOVERY_DIRECTORY: Final = "recovery"
"""Directory of the recovery logs. No declared name may begin with this directory."""


@dataclass(frozen=True)
class _Declared(Generic[M]):
    """The journals of one declared name: the partitions ``name/part-000`` and so on."""

    name: str
    """Directory of the journals: ``words`` has the journals ``words/part-000`` and so on."""
    message_type: type[M] | UnionType
    """A `gazette.Message` (or any ``msgspec.Struct``), dataclass, pydantic model or protobuf class. Type
    checkers need a union spelled out: ``Source[Put | Delete]("rows", Put | Delete)``."""
    _: KW_ONLY
    partitions: int = 1
    """Number of journals. Choose it in advance for production: a greater number later moves keys."""
    key: str | Callable[[M], Any] | None = None
    """Field of the message, or function from a message to its key. For a CSV record, the number of a column.
    Messages with equal keys go to the same partition, in order. If None, the partition is random."""
    content_type: str = ""
    """Framing. If empty, protobuf for protobuf classes, CSV for `CSVRecord`, otherwise lines of JSON."""
    uuid: str = ""
    """Place of the UUID in messages: names in JSON, joined by dots, such as ``_meta.uuid``. If empty, the
    place is the type's ``gazette_uuid``, or else its field ``uuid``."""
    time: str | Callable[[M], Any] | MessageTime | None = None
    """Field of the message, or function, with the time of its event, for watermarks, windows and joins. If
    None, the time is the clock of the publisher. Numbers need a `MessageTime`."""
    retention: timedelta | None = None
    """Age of stored fragments from which ``gazctl journals prune`` removes them. If None, it removes none."""

    def __post_init__(self) -> None:
        """Raise ``Invalid`` with the name of a field that cannot be used."""
        if not isinstance(self.name, str):
            raise self._invalid("name", f"{self.name!r} is not text", "Give a name such as words.")
        if not self.content_type:
            object.__setattr__(self, "content_type", content_type_of(self.message_type))
        self._check_name()
        self._check_partitions()
        self._check_type()
        self._check_key()
        self._check_time()
        self._check_retention()

    @property
    def journals(self) -> tuple[str, ...]:
        """Names of the partitions, in order."""
        return journals_of(self.name, self.partitions)

    @property
    def selector(self) -> LabelSelector:
        """Selector of the partitions, for ``service.partitions``."""
        return selector_of(self.name)

    @property
    def uuid_place(self) -> str:
        """Place of the UUID in messages; empty for messages without UUIDs."""
        place = framing_of(self.content_type, self.message_type, place=self.uuid).codec.place
        return "" if place is None else place.text

    def has(self, journal: str) -> bool:
        """Return True if a journal lies below the declared name, or has exactly this name."""
        return journal == self.name or journal.startswith(f"{self.name}/")

    @property
    def message_time(self) -> MessageTime | None:
        """Place of the time in messages. None if the time is the clock of their publisher."""
        return MessageTime.of(self.time)

    @property
    def message_types(self) -> tuple[type, ...]:
        """Classes of the messages: several for a union."""
        return classes_of(self.message_type)

    @property
    def key_rule(self) -> KeyRule | None:
        """Rule for keys in the labels of the journals; None if no key is declared."""
        if (field := self._key_field) is not None:
            return KeyRule.of_field(field.name, field.encoding, self.partitions)
        return KeyRule.of_function(self.key, self.partitions) if callable(self.key) else None

    @property
    def key_encoding(self) -> KeyEncoding:
        """Encoding of values of the key, and of their texts."""
        field = self._key_field
        return ANY if field is None else field.encoding

    def key_of(self, message: M) -> CanonicalKey:
        """Return the key of a message, encoded for hashing.

        Raise ``Invalid`` if no key is declared, for a message of another type, and for a value that cannot
        be a key. An error of the key's function reaches the caller.
        """
        value = self._key_value(message)
        field = self._key_field
        if field is None:
            return canonical_key(value)
        try:
            return field.encoding.encode(value)
        except Invalid as error:
            raise field.named(error) from error

    def partition_of_key(self, value: Any) -> str:
        """Return the journal to which messages with the key ``value`` belong.

        Raise ``Invalid`` if no key is declared, or for a value that cannot be a key.
        """
        self._read_key  # noqa: B018 - it raises without a key.
        return self.journals[hash_of_key(self.key_encoding.encode(value)) % self.partitions]

    def _key_value(self, message: M) -> Any:
        try:
            return self._read_key(message)
        except Exception:
            # For a message of another type, raise an error about its type, not about a missing attribute.
            self._partition(self.name).require_type(type(message))
            raise

    def mapping(
        self, partitions: PartitionsFunc | None = None, rng: random.Random | None = None
    ) -> Mapping[M]:
        """Return the mapping of messages to partitions: by the key, or at random if no key is declared.

        Publishers raise ``Invalid`` for a message of another type. Sources with the same number of partitions
        map equal keys to partitions of the same number, so that one shard reads all of them. ``partitions``
        returns the existing partitions, as ``service.partitions`` does. If it is None, use the declared
        partitions. ``rng`` is by default that of the operating system.
        """
        if partitions is None:
            declared = Partitions(map(self._partition, self.journals))
            return self._mapping(lambda: declared, rng)
        return self._mapping(with_declared(partitions, self._declared), rng)

    def __call__(self, message: M) -> Partition:
        """Return the declared partition for a message: a source or an output is also a mapping."""
        return self._declared_mapping(message)

    @cached_property
    def _declared_mapping(self) -> Mapping[M]:
        return self.mapping()

    def _mapping(self, partitions: PartitionsFunc, rng: random.Random | None) -> Mapping[M]:
        if self.key is None:
            return random_mapping(partitions, random.SystemRandom() if rng is None else rng)
        field = self._key_field
        if field is None:
            return modulo_mapping(partitions, self.key_of)
        # A key that is a text needs no encoding, which makes the mapping faster.
        key = self._key_value if field.encoding is TEXT else self.key_of
        return modulo_mapping(partitions, key, field.encoding)

    def _partition(self, journal: str) -> Partition:
        return self._declared(Partition(journal, self.content_type))

    def _declared(self, partition: Partition) -> Partition:
        """Return a partition with the declared types, place of UUIDs and time of its messages.

        Raise ``Invalid`` if the label of its journal names another place of UUIDs.
        """
        time = self.message_time or partition.time
        return partition.with_uuid(self.uuid)._replace(message_types=self.message_types, time=time)

    def __set_name__(self, owner: type, _name: str) -> None:
        """Give ``owner`` methods that answer from its declarations, if it has not defined them itself."""
        if getattr(owner, "uuid_place_of", None) is Application.uuid_place_of:
            setattr(owner, "uuid_place_of", _declared_uuid)  # noqa: B010

    def _check_name(self) -> None:
        hint = "Use letters, digits, - _ . and /, such as words or shop/orders."
        if not self.name:
            raise self._invalid("name", "the name is empty", hint)
        clean = re.sub(r"[^\w\-+/.]", "-", self.name).strip("/")
        if clean and clean != self.name:
            hint = f"Write {clean!r}."
        try:
            validate_journal_name(f"{self.name}/part-000")
        except Invalid as error:
            raise self._invalid("name", error.message, hint) from error
        # A semicolon begins a metadata segment, which specifications must not have.
        if ";" in self.name or self.name.endswith("/"):
            raise self._invalid("name", "not a directory of journals", hint)
        if self.name.split("/")[0] == RECOVERY_DIRECTORY:
            raise self._invalid(
                "name", f"{RECOVERY_DIRECTORY}/ is for recovery logs", "Use another name."
            )

    def _check_partitions(self) -> None:
        # Callers without a type checker may give any value. True is an int, but no number of partitions.
        count: Any = self.partitions
        valid = isinstance(count, int) and not isinstance(count, bool)
        if not (valid and 1 <= count <= PARTITIONS_MAX):
            raise self._invalid(
                "partitions",
                f"{count!r} partitions (expected 1 to {PARTITIONS_MAX})",
                "Begin with a small multiple of the processes that you expect, such as 4.",
            )

    def _check_type(self) -> None:
        message_type: Any = self.message_type
        if message_type is dict or get_origin(message_type) is dict:
            raise self._invalid(
                "message_type",
                "a dict has no type whose fields could be checked",
                "Write a class with its fields: class Row(gazette.Message), with id: int below it.",
            )
        try:
            framing_of(self.content_type, self.message_type, place=self.uuid)
        except Invalid as error:
            field = "uuid" if self.uuid and error.path in ("uuid", self.uuid) else "message_type"
            raise self._invalid(field, error.message, error.hint) from error
        except TypeError as error:
            raise self._invalid(
                "message_type",
                f"{self.message_type!r} cannot be decoded: {error}",
                "Give a class that derives from gazette.Message.",
            ) from error

    @cached_property
    def _key_field(self) -> KeyField | None:
        """The field that is the key; None if the key is a function, or if no key is declared."""
        return declared_field(self.message_type, self.key) if isinstance(self.key, str) else None

    @cached_property
    def _read_key(self) -> Callable[[Any], Any]:
        """Function from a message to the value of its key. Raise ``Invalid`` if no key is declared."""
        if self.key is None:
            raise self._invalid("key", "no key is declared", "Declare key= to map messages by it.")
        field = self._key_field
        if field is not None:
            return field.get
        assert callable(self.key)
        return self.key

    def _check_key(self) -> None:
        if self.key is None or callable(self.key):
            return
        self._check_key_name()
        try:
            _ = self._key_field
        except Invalid as error:
            raise self._invalid("key", error.message, error.hint) from error

    def _check_key_name(self) -> None:
        if not isinstance(self.key, str):
            raise self._invalid(
                "key",
                f"{self.key!r} is no key",
                "Give the name of a field, or a function of the message.",
            )
        self._check_field("key", self.key)

    def _check_field(self, argument: str, name: str) -> None:
        fields = fields_of(self.message_type)
        if fields is None or name in fields:
            return
        nearest = near_name(name, fields)
        hint = f"Write {nearest!r}." if nearest else f"Its fields: {', '.join(sorted(fields))}."
        raise self._invalid(argument, f"{type_name(self.message_type)} has no field {name!r}", hint)

    def _check_time(self) -> None:
        try:
            time = self.message_time
            if time is None:
                return
            if isinstance(time.field, str):
                self._check_field("time", time.field)
            for message_class in self.message_types:
                check_time_field(message_class, time)
        except Invalid as error:
            if error.path and "(" in error.path:
                raise  # `_check_field` has named the declaration already.
            raise self._invalid(error.path or "time", error.message, error.hint) from error

    def _check_retention(self) -> None:
        retention: Any = self.retention
        if retention is None:
            return
        if not isinstance(retention, timedelta) or retention <= timedelta(0):
            raise self._invalid(
                "retention",
                f"{self.retention!r} is no positive duration",
                "Give a timedelta, such as timedelta(days=30), or None to keep everything.",
            )

    def _invalid(self, field: str, message: str, hint: str) -> Invalid:
        return Invalid(message, path=f"{type(self).__name__}({self.name!r}).{field}", hint=hint)


@dataclass(frozen=True)
class Source(_Declared[M]):
    """Journals that an application reads. A class attribute of an `Application`.

    Shard number N reads partition number N of every source. Messages decode to the declared type: do
    not set ``message_type`` or ``message_type_of`` of the application.
    """

    misplaced: MisplacedPolicy = "count"
    """Policy for a message whose key belongs to another partition.

    - ``count``: consume the message, count it and log a warning.
    - ``fail``: fail the shard, or skip the message if a `PoisonPolicy` says so.
    - ``republish``: do not consume the message, but publish it to its partition in the same transaction. Then
      tables and other applications see it twice.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.misplaced not in get_args(MisplacedPolicy):
            policies = ", ".join(get_args(MisplacedPolicy))
            raise self._invalid(
                "misplaced", f"{self.misplaced!r} is no policy", f"Give {policies}."
            )
        if self.misplaced == "republish" and not self.uuid_place:
            raise self._invalid(
                "misplaced",
                "messages without a UUID cannot be republished in a transaction",
                "Give the type a field `uuid: str`, or derive it from gazette.Message.",
            )

    def key_place(self, journal: str) -> KeyPlace | None:
        """Return the keys that belong to a partition; None if no key is declared, and for other journals."""
        name = split_journal_meta(journal)[0]
        if self.key is None or name not in self.journals:
            return None
        field = self._key_field
        attribute = field.attribute if field and values_have_keys(field.encoding.name) else ""
        return KeyPlace(
            self.journals.index(name),
            self.partitions,
            self.key_of,
            self.mapping(),
            self.misplaced,
            self.key_encoding,
            attribute,
        )

    def __set_name__(self, owner: type, name: str) -> None:
        # Set methods that the class does not define, in any order: an `AppDriver` uses them, too.
        if getattr(owner, "message_type_of", None) is Application.message_type_of:
            setattr(owner, "message_type_of", _declared_type)  # noqa: B010
        if getattr(owner, "message_time_of", None) is Application.message_time_of:
            setattr(owner, "message_time_of", _declared_time)  # noqa: B010
        super().__set_name__(owner, name)
        if getattr(owner, "keyed_journals", None) is Application.keyed_journals:
            setattr(owner, "keyed_journals", _keyed_journals)  # noqa: B010
        if getattr(owner, "key_encoding", None) is Application.key_encoding:
            setattr(owner, "key_encoding", _key_encoding)  # noqa: B010
        if getattr(owner, "key_place", None) is Application.key_place:
            setattr(owner, "key_place", _key_place)  # noqa: B010


@dataclass(frozen=True)
class Output(_Declared[M]):
    """Journals that an application publishes to. A class attribute of an `Application`.

        def consume_message(self, shard, store, envelope, publisher):
            publisher.publish_uncommitted(self.counts, Count(...))

    Members need no right to create these journals: `gazette run` or ``apply`` creates them.
    """


def _declared_type(application: Application[Any], journal: JournalSpec) -> type[Any]:
    """Answer `Application.message_type_of` by the application's sources."""
    return source_of(application, journal.name).message_type  # type: ignore[return-value]


def _declared_time(application: Application[Any], journal: JournalSpec) -> MessageTime | None:
    """Answer `Application.message_time_of` by the application's sources."""
    if all(source.time is None for source in sources_of(application)):
        return None
    return source_of(application, journal.name).message_time


def sources_of(application: Any) -> list[Source[Any]]:
    """Return the sources of an application's class, beginning with its base classes."""
    return declared_in(type(application), (Source,))


def source_of(application: Application[Any], journal: str) -> Source[Any]:
    """Return the source that has a journal. Raise ``Invalid`` for a journal of no source."""
    sources = sources_of(application)
    for source in sources:
        if source.has(journal):
            return source
    names = ", ".join(source.name for source in sources)
    raise Invalid(
        f"no source of {type(application).__qualname__} has journal {journal}",
        path="sources",
        sources=names,
        hint=f"It declares {names}. Correct the sources of the shard, or declare this journal too.",
    )


def _declared_uuid(application: Application[Any], journal: JournalSpec) -> str:
    """Answer `Application.uuid_place_of` by the application's sources and outputs."""
    declared: list[Source[Any] | Output[Any]] = declared_in(type(application), (Source, Output))
    place = next((entry.uuid for entry in declared if entry.has(journal.name)), "")
    return place or Application.uuid_place_of(application, journal)


def _keyed_journals(application: Application[Any]) -> LabelSelector | None:
    """Answer `Application.keyed_journals` by the first source with a key.

    Any source would do: all have the same number of partitions, and shard N reads partition N of each.
    """
    sources = declared_in(type(application), (Source,))
    return next((source.selector for source in sources if source.key is not None), None)


def _key_place(application: Application[Any], journal: str) -> KeyPlace | None:
    """Answer `Application.key_place` by the application's sources."""
    places = (source.key_place(journal) for source in declared_in(type(application), (Source,)))
    return next((place for place in places if place is not None), None)


def _key_encoding(application: Application[Any]) -> KeyEncoding:
    """Answer `Application.key_encoding` by the first source with a key."""
    sources = declared_in(type(application), (Source,))
    return next((source.key_encoding for source in sources if source.key is not None), ANY)


def declared_in(kind: type, of: tuple[type[_Declared[Any]], ...]) -> list[Any]:
    """Return the declarations among the attributes of a class, beginning with its base classes."""
    declarations: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, of):
                declarations[name] = value
            else:
                declarations.pop(name, None)  # A subclass replaces a declaration by another value.
    unique: list[Any] = []
    for value in declarations.values():
        if not any(value is other for other in unique):
            unique.append(value)
    return unique


def journals_of(name: str, partitions: int) -> tuple[str, ...]:
    return tuple(f"{name}/part-{index:03d}" for index in range(partitions))


def selector_of(name: str) -> LabelSelector:
    return LabelSelector.parse(f"name:prefix={name}/part-")
