"""Specifications of journals, and the algebra by which specifications share fields."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, TypeVar

from gazette.errors import Invalid
from gazette.labels import CONTENT_TYPE, MESSAGE_SUBTYPE, MESSAGE_TYPE, META_NAME, META_PREFIX
from gazette.protocol import label_set, postfix_template
from gazette.protocol.fragment import Codec, Fragment, FragmentStoreUrl
from gazette.protocol.fragment_labels import validate_fragment_labels
from gazette.protocol.ids import META_DELIMITER, JournalName, Offset, validate_journal_name
from gazette.protocol.label_set import EMPTY_LABELS, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.postfix_template import PostfixContext, codec_data, label_data
from gazette.protocol.text import duration
from gazette.protocol.text.go_template import NamedInt, Struct
from gazette.protocol.text.validation import require_fit, within

REPLICATION_MAX: Final = 5
FRAGMENT_BYTES_MIN: Final = 1 << 10
FRAGMENT_BYTES_MAX: Final = 1 << 34
REFRESH_INTERVAL_MIN_NS: Final = duration.SECOND
REFRESH_INTERVAL_MAX_NS: Final = 24 * duration.HOUR
FLUSH_INTERVAL_MIN_NS: Final = duration.MINUTE

_MIME_TOKEN = re.compile(r"[!#$%&'*+\-.0-9A-Z^_`a-z{|}~]+")


class JournalFlag(IntEnum):
    """Permitted uses of a journal. Named after the flags of open(2)."""

    NOT_SPECIFIED = 0
    """Equal to ``O_RDWR``."""
    O_RDONLY = 1
    O_WRONLY = 2
    O_RDWR = 4


_READABLE: Final = frozenset({JournalFlag.NOT_SPECIFIED, JournalFlag.O_RDONLY, JournalFlag.O_RDWR})
_WRITABLE: Final = frozenset({JournalFlag.NOT_SPECIFIED, JournalFlag.O_WRONLY, JournalFlag.O_RDWR})


class SuspendLevel(IntEnum):
    """Degree of suspension of a journal that receives no appends."""

    NONE = 0
    PARTIAL = 1
    """One replica, which only serves reads."""
    FULL = 2
    """No replicas."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """Suspension of a journal, and the offset from which it resumes."""

    level: SuspendLevel = SuspendLevel.NONE
    offset: Offset = 0

    def validate(self) -> None:
        if self.offset < 0:
            raise Invalid(f"invalid Offset ({self.offset}; expected >= 0)", path="Offset")

    def to_pb(self) -> broker_pb2.JournalSpec.Suspend:
        return broker_pb2.JournalSpec.Suspend(
            level=self.level.value,  # type: ignore[arg-type]
            offset=self.offset,
        )

    def template_data(self) -> Struct:
        """Return the suspension as templates of path postfixes see it."""
        return Struct(
            {
                "Level": lambda: NamedInt(self.level, self.level.name),
                "Offset": lambda: self.offset,
            }
        )

    @classmethod
    def from_pb(cls, pb: broker_pb2.JournalSpec.Suspend) -> Suspend:
        try:
            return cls(SuspendLevel(pb.level), pb.offset)
        except ValueError:
            raise Invalid(f"invalid Level variant ({pb.level})", path="Level") from None


@dataclass(frozen=True, slots=True)
class FragmentSpec:
    """Size, compression, storage and retention of a journal's fragments. Durations are in nanoseconds."""

    length: int = 0
    codec: Codec = Codec.INVALID
    stores: tuple[str, ...] = ()
    """URLs of blob stores. Fragments are written to the first store, and read from all stores."""
    refresh_interval_ns: int = 0
    retention_ns: int = 0
    flush_interval_ns: int = 0
    path_postfix_template: str = ""

    def validate(self) -> None:
        if not FRAGMENT_BYTES_MIN <= self.length <= FRAGMENT_BYTES_MAX:
            raise Invalid(
                f"invalid Length ({self.length}; "
                f"expected {FRAGMENT_BYTES_MIN} <= length <= {FRAGMENT_BYTES_MAX})"
            )
        require_fit("Retention", self.retention_ns)
        require_fit("FlushInterval", self.flush_interval_ns)
        with within("CompressionCodec"):
            self.codec.validate()
        for index, store in enumerate(self.stores):
            with within(f"Stores[{index}]"):
                url = FragmentStoreUrl.parse(store)
            # Check only the first store, since fragments are written only there.
            if (
                index == 0
                and url.scheme == "file"
                and self.codec is Codec.GZIP_OFFLOAD_DECOMPRESSION
            ):
                raise Invalid(
                    f"GZIP_OFFLOAD_DECOMPRESSION is incompatible with file:// stores ({store})"
                )
        if not REFRESH_INTERVAL_MIN_NS <= self.refresh_interval_ns <= REFRESH_INTERVAL_MAX_NS:
            raise Invalid(
                f"invalid RefreshInterval ({duration.format_go_duration(self.refresh_interval_ns)}; "
                f"expected {duration.format_go_duration(REFRESH_INTERVAL_MIN_NS)} <= interval <= "
                f"{duration.format_go_duration(REFRESH_INTERVAL_MAX_NS)})"
            )
        if self.flush_interval_ns != 0 and self.flush_interval_ns < FLUSH_INTERVAL_MIN_NS:
            raise Invalid(
                f"invalid FlushInterval ({duration.format_go_duration(self.flush_interval_ns)}; "
                f"expected >= {duration.format_go_duration(FLUSH_INTERVAL_MIN_NS)})"
            )

    def to_pb(self) -> broker_pb2.JournalSpec.Fragment:
        return broker_pb2.JournalSpec.Fragment(
            length=self.length,
            compression_codec=self.codec.value,  # type: ignore[arg-type]
            stores=self.stores,
            refresh_interval=duration.to_pb(self.refresh_interval_ns),
            retention=duration.to_pb(self.retention_ns),
            flush_interval=duration.to_pb(self.flush_interval_ns),
            path_postfix_template=self.path_postfix_template,
        )

    @classmethod
    def from_pb(cls, pb: broker_pb2.JournalSpec.Fragment) -> FragmentSpec:
        with within("CompressionCodec"):
            codec = Codec.from_pb(pb.compression_codec)
        return cls(
            length=pb.length,
            codec=codec,
            stores=tuple(pb.stores),
            refresh_interval_ns=duration.from_pb(pb.refresh_interval),
            retention_ns=duration.from_pb(pb.retention),
            flush_interval_ns=duration.from_pb(pb.flush_interval),
            path_postfix_template=pb.path_postfix_template,
        )


@dataclass(frozen=True, slots=True)
class JournalSpec:
    """Specification of a journal.

    A field that is zero is unset. ``validate`` refuses an unset replication, length, codec and refresh
    interval. A partial specification, such as a node of a YAML tree, may lack them. ``max_append_rate`` is in
    bytes per second; 0 means no limit.
    """

    name: JournalName
    replication: int = 0
    labels: LabelSet = EMPTY_LABELS
    fragment: FragmentSpec = FragmentSpec()
    flags: int = JournalFlag.NOT_SPECIFIED
    max_append_rate: int = 0
    suspend: Suspend | None = None

    @property
    def may_read(self) -> bool:
        return self.flags in _READABLE

    @property
    def may_write(self) -> bool:
        return self.flags in _WRITABLE

    @property
    def suspend_level(self) -> SuspendLevel:
        return SuspendLevel.NONE if self.suspend is None else self.suspend.level

    def desired_replication(self, max_replication: int) -> int:
        """Return the number of replicas that the allocator should assign, including the primary."""
        match self.suspend_level:
            case SuspendLevel.FULL:
                desired = 0
            case SuspendLevel.PARTIAL:
                desired = 1
            case SuspendLevel.NONE:
                desired = self.replication
        return min(desired, max_replication)

    def labels_with_name(self) -> LabelSet:
        """Return the labels that selectors match: those of the journal, and its name as label ``name``."""
        return label_set.union(LabelSet.of((META_NAME, self.name)), self.labels)

    def validate(self) -> None:
        """Require a complete specification that can be applied. Raise ``Invalid`` for the first problem."""
        self.validate_stored()
        with within("Fragment"), within("PathPostfixTemplate"):
            _try_postfix(self.fragment.path_postfix_template)
        with within("Labels"):
            validate_fragment_labels(self.labels)

    def validate_stored(self) -> None:
        """Raise ``Invalid`` for the first wrong field of a specification that another process has applied.

        Do not check its present and former templates, which may work elsewhere. If a template fails here,
        fragments only lack a postfix.
        """
        with within("Name"):
            validate_journal_name(self.name)
        _, delimiter, meta = self.name.partition(META_DELIMITER)
        if delimiter:
            raise Invalid(
                f"Name cannot have a metadata path segment ({delimiter}{meta}; expected no segment)"
            )
        if not 1 <= self.replication <= REPLICATION_MAX:
            raise Invalid(
                f"invalid Replication ({self.replication}; "
                f"expected 1 <= Replication <= {REPLICATION_MAX})"
            )
        with within("Labels"):
            self.labels.validate()
        for reserved in (META_NAME, META_PREFIX):
            if self.labels.values_of(reserved):
                raise Invalid(f'Labels cannot include label "{reserved}"')
        with within("Labels"):
            validate_journal_labels(self.labels)
        with within("Fragment"):
            self.fragment.validate()
        if self.flags not in JournalFlag.__members__.values():
            raise Invalid(f"invalid combination ({self.flags})", path="Flags")
        if self.max_append_rate < 0:
            raise Invalid(f"invalid MaxAppendRate ({self.max_append_rate}; expected >= 0)")
        require_fit("MaxAppendRate", self.max_append_rate)
        if self.suspend is not None:
            with within("Suspend"):
                self.suspend.validate()

    def to_pb(self) -> broker_pb2.JournalSpec:
        return broker_pb2.JournalSpec(
            name=self.name,
            replication=self.replication,
            labels=self.labels.to_pb(),
            fragment=self.fragment.to_pb(),
            flags=self.flags,
            max_append_rate=self.max_append_rate,
            suspend=None if self.suspend is None else self.suspend.to_pb(),
        )

    def template_data(self) -> Struct:
        """Return the specification in the form that a template of path postfixes reads."""
        labels = label_data(self.labels)
        fragment_spec, flags, suspend = self.fragment, self.flags, self.suspend
        flag = next((member.name for member in JournalFlag if member == flags), str(int(flags)))
        fragment = Struct(
            {
                "Length": lambda: fragment_spec.length,
                "CompressionCodec": lambda: codec_data(fragment_spec.codec),
                "Stores": lambda: list(fragment_spec.stores),
                "RefreshInterval": lambda: _duration_data(fragment_spec.refresh_interval_ns),
                "Retention": lambda: _duration_data(fragment_spec.retention_ns),
                "FlushInterval": lambda: _duration_data(fragment_spec.flush_interval_ns),
                "PathPostfixTemplate": lambda: fragment_spec.path_postfix_template,
            }
        )
        return Struct(
            {
                **labels.fields,
                "Name": lambda: self.name,
                "Replication": lambda: self.replication,
                "LabelSet": lambda: labels,
                "Fragment": lambda: fragment,
                "Flags": lambda: NamedInt(flags, flag),
                "MaxAppendRate": lambda: self.max_append_rate,
                "Suspend": lambda: None if suspend is None else suspend.template_data(),
            },
            labels.methods,
        )

    @classmethod
    def from_pb(cls, pb: broker_pb2.JournalSpec) -> JournalSpec:
        """Return the specification. Raise ``Invalid`` for an unknown codec or level of suspension, and for a
        duration beyond 64 bits of nanoseconds."""
        with within("Fragment"):
            fragment = FragmentSpec.from_pb(pb.fragment)
        suspend = None
        if pb.HasField("suspend"):
            with within("Suspend"):
                suspend = Suspend.from_pb(pb.suspend)
        return cls(
            name=pb.name,
            replication=pb.replication,
            labels=LabelSet.from_pb(pb.labels),
            fragment=fragment,
            flags=pb.flags,
            max_append_rate=pb.max_append_rate,
            suspend=suspend,
        )


def validate_journal_labels(labels: LabelSet) -> None:
    """Raise ``Invalid`` unless the well-known labels have at most one value each, and fit each other."""
    label_set.validate_single_valued(labels)
    content_type = labels.value_of(CONTENT_TYPE)
    if content_type is not None:
        _validate_media_type(content_type)
    if labels.values_of(MESSAGE_TYPE):
        if content_type is None:
            raise Invalid(f"expected {CONTENT_TYPE} label alongside {MESSAGE_TYPE}")
    elif labels.values_of(MESSAGE_SUBTYPE):
        raise Invalid(f"expected {MESSAGE_TYPE} label alongside {MESSAGE_SUBTYPE}")


def _validate_media_type(text: str) -> None:
    # A label's value cannot hold ";" or a space, so it has no parameters to parse.
    main_type = _MIME_TOKEN.match(text)
    problem = ""
    if main_type is None:
        problem = "no media type"
    elif suffix := text[main_type.end() :]:
        subtype = _MIME_TOKEN.match(suffix, 1)
        if suffix[0] != "/":
            problem = "expected slash after first token"
        elif subtype is None:
            problem = "expected token after slash"
        elif subtype.end() < len(suffix):
            problem = "unexpected content after media subtype"
    if problem:
        raise Invalid(f"parsing {CONTENT_TYPE}: mime: {problem}")


def _duration_data(nanos: int) -> NamedInt:
    return NamedInt(nanos, duration.format_go_duration(nanos))


def _try_postfix(text: str) -> None:
    # Evaluate the template with an empty and with a full context. So an invalid layout, such as one with a
    # space, is found when the specification is applied, and not when a fragment is stored.
    template = postfix_template.parse(text)
    for context in (_ZERO_CONTEXT, _FULL_CONTEXT):
        template.evaluate(context)


_ZERO_CONTEXT: Final = PostfixContext(
    fragment=Fragment(journal="", begin=0, end=0, codec=Codec.INVALID),
    first_append_time=None,
    registers=EMPTY_LABELS,
    spec=JournalSpec(name="").template_data(),
)
_FULL_CONTEXT: Final = PostfixContext(
    fragment=Fragment(
        journal="a/journal",
        begin=1 << 40,
        end=1 << 41,
        codec=Codec.ZSTANDARD,
        mod_time=1_600_000_000,
    ),
    first_append_time=1_599_999_999.75,
    registers=EMPTY_LABELS,
    spec=JournalSpec(
        name="a/journal",
        replication=3,
        fragment=FragmentSpec(length=1 << 28, codec=Codec.ZSTANDARD),
        flags=JournalFlag.O_RDWR,
        max_append_rate=1 << 20,
    ).template_data(),
)

_JOURNAL_FIELDS: Final = ("replication", "flags", "max_append_rate")
_FRAGMENT_FIELDS: Final = (
    "length",
    "codec",
    "stores",
    "refresh_interval_ns",
    "retention_ns",
    "flush_interval_ns",
    "path_postfix_template",
)
Value = TypeVar("Value", JournalSpec, FragmentSpec)


def union_specs(a: JournalSpec, b: JournalSpec) -> JournalSpec:
    """Return ``a``, with each unset field taken from ``b``. Labels are united by name.

    Name and suspension are always taken from ``a``: neither is inherited.
    """
    return replace(
        _filled(a, b, _JOURNAL_FIELDS),
        labels=label_set.union(a.labels, b.labels),
        fragment=_filled(a.fragment, b.fragment, _FRAGMENT_FIELDS),
    )


def intersect_specs(a: JournalSpec, b: JournalSpec) -> JournalSpec:
    """Return ``a`` without the fields that differ in ``b``, and without a suspension."""
    return replace(
        _cleared(a, b, _JOURNAL_FIELDS, when_equal=False),
        labels=label_set.intersect(a.labels, b.labels),
        fragment=_cleared(a.fragment, b.fragment, _FRAGMENT_FIELDS, when_equal=False),
        suspend=None,
    )


def subtract_specs(a: JournalSpec, b: JournalSpec) -> JournalSpec:
    """Return ``a`` without the fields that are equal in ``b``."""
    return replace(
        _cleared(a, b, _JOURNAL_FIELDS, when_equal=True),
        labels=label_set.subtract(a.labels, b.labels),
        fragment=_cleared(a.fragment, b.fragment, _FRAGMENT_FIELDS, when_equal=True),
    )


_UNSET: Final[dict[str, Any]] = {"codec": Codec.INVALID, "stores": (), "path_postfix_template": ""}


def _filled(a: Value, b: Value, fields: tuple[str, ...]) -> Value:
    return replace(a, **{field: getattr(a, field) or getattr(b, field) for field in fields})


def _cleared(a: Value, b: Value, fields: tuple[str, ...], *, when_equal: bool) -> Value:
    """Return ``a`` without fields that are equal in ``b`` (``when_equal``), or without those that differ."""
    cleared: dict[str, Any] = {
        field: _UNSET.get(field, 0)
        for field in fields
        if (getattr(a, field) == getattr(b, field)) is when_equal
    }
    return replace(a, **cleared)
