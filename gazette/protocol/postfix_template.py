"""Templates of the path postfix under which a journal's fragments are stored.

Templates are in the language of Go's text/template, as far as `go_template` supports it:

    date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}/hour={{ .Spool.FirstAppendTime.Format "15" }}
    region={{ .Spool.Registers.ValueOf "region" }}

The data of a template are ``.Spool``, with the fields of its fragment, and the journal's specification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import floor
from typing import Any, Final

from gazette.errors import Invalid
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.ids import NAME_BYTES_MAX, validate_path_component
from gazette.protocol.label_set import LabelSet
from gazette.protocol.text import go_template
from gazette.protocol.text.go_template import NamedInt, Struct, Template
from gazette.protocol.text.go_time import format_go_time, utc

_FIELDS: Final = (
    'Use fields and methods such as {{ .Spool.FirstAppendTime.Format "2006-01-02" }}, '
    '{{ .Spool.Begin }}, {{ .Spool.Registers.ValueOf "name" }}, {{ .Name }} '
    'or {{ .LabelSet.ValueOf "name" }}.'
)
_SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class PostfixContext:
    """Data of one evaluation of a template.

    ``first_append_time`` is in Unix seconds, by the clock of the broker that stores the fragment.
    ``None`` is the zero time, in the year 1. ``spec`` has the fields of the journal's specification
    (``JournalSpec.template_data``).
    """

    fragment: Fragment
    first_append_time: float | None
    registers: LabelSet
    spec: Struct


@dataclass(frozen=True, slots=True)
class PostfixTemplate:
    """A parsed template."""

    text: str
    template: Template = field(repr=False, compare=False)

    def evaluate(self, context: PostfixContext) -> str:
        """Return the postfix: a path component, or ``""``.

        Leave out empty components, such as a register that is not set. Raise ``Invalid`` if the template
        fails. Raise ``Invalid`` also for a path with ``..``, or with symbols that a fragment's path may not
        have: a fragment could not be found there again.
        """
        try:
            text = self.template.execute(template_data(context))
        except Invalid as error:
            raise Invalid(error.message, hint=_FIELDS) from error
        components = [part for part in text.split("/") if part not in ("", ".")]
        if ".." in components:
            raise Invalid(f"cannot traverse outside the journal ({text})")
        path = "/".join(components)
        validate_path_component(path, 0, NAME_BYTES_MAX)
        return path


def parse(text: str) -> PostfixTemplate:
    """Parse a template. Raise ``Invalid`` for a wrong or unsupported text."""
    try:
        return PostfixTemplate(text, go_template.parse(text))
    except Invalid as error:
        raise Invalid(error.message, hint=_FIELDS) from error


def template_data(context: PostfixContext) -> Struct:
    """Return the fields and methods that templates see."""
    spec = context.spec
    return Struct(
        {**spec.fields, "Spool": lambda: _spool(context), "JournalSpec": lambda: spec}, spec.methods
    )


def _spool(context: PostfixContext) -> Struct:
    fragment = _fragment(context.fragment)
    fields: dict[str, Callable[[], Any]] = {
        **fragment.fields,
        "Fragment": lambda: fragment,
        "FirstAppendTime": lambda: _time(context.first_append_time),
        "Registers": lambda: label_data(context.registers),
    }
    return Struct(fields, fragment.methods)


def _fragment(fragment: Fragment) -> Struct:
    return Struct(
        {
            "Journal": lambda: fragment.journal,
            "Begin": lambda: fragment.begin,
            "End": lambda: fragment.end,
            "CompressionCodec": lambda: codec_data(fragment.codec),
            "BackingStore": lambda: fragment.backing_store,
            "ModTime": lambda: fragment.mod_time,
            "PathPostfix": lambda: fragment.path_postfix,
        },
        {
            "ContentName": _method(fragment.content_name),
            "ContentPath": _method(fragment.content_path),
            "ContentLength": _method(lambda: fragment.length),
        },
    )


def label_data(labels: LabelSet) -> Struct:
    """Return labels as templates see them."""
    return Struct(
        {
            "Labels": lambda: [
                Struct(
                    {
                        "Name": lambda label=label: label.name,  # type: ignore[misc]
                        "Value": lambda label=label: label.value,  # type: ignore[misc]
                        "Prefix": lambda label=label: label.prefix,  # type: ignore[misc]
                    }
                )
                for label in labels.labels
            ]
        },
        {
            "ValueOf": lambda name: labels.value_of(name) or "",
            "ValuesOf": lambda name: list(labels.values_of(name)),
        },
    )


def _time(seconds: float | None) -> Struct:
    """Return a time as templates see it, with methods of Go's ``time.Time``."""
    moment = utc(seconds)
    # The zero time has a negative timestamp, as in Go.
    unix = moment.timestamp()

    def scaled(units: int) -> Callable[[], int]:
        return _method(lambda: floor(unix) * units + moment.microsecond * units // 1_000_000)

    weekday = format_go_time("Monday", seconds)
    methods: dict[str, Callable[..., Any]] = {
        "Format": lambda layout: format_go_time(layout, seconds),
        "UTC": _method(lambda: _time(seconds)),
        "Local": _method(lambda: _time(seconds)),
        "Unix": scaled(1),
        "UnixMilli": scaled(1000),
        "UnixMicro": scaled(1_000_000),
        "UnixNano": scaled(_SECOND_NS),
        "Year": _method(lambda: moment.year),
        "Month": _method(lambda: NamedInt(moment.month, format_go_time("January", seconds))),
        "Day": _method(lambda: moment.day),
        "Weekday": _method(lambda: NamedInt(moment.isoweekday() % 7, weekday)),
        "YearDay": _method(lambda: moment.timetuple().tm_yday),
        "Hour": _method(lambda: moment.hour),
        "Minute": _method(lambda: moment.minute),
        "Second": _method(lambda: moment.second),
        "Nanosecond": _method(lambda: moment.microsecond * 1000),
        "IsZero": _method(lambda: seconds is None),
        "String": _method(lambda: _time_text(seconds)),
    }
    return Struct({}, methods, text=lambda: _time_text(seconds))


def _time_text(seconds: float | None) -> str:
    return format_go_time("2006-01-02 15:04:05.999999999 -0700 MST", seconds)


def _method(get: Callable[[], Any]) -> Callable[[], Any]:
    """Return a method of templates that takes no argument. With an argument, it raises ``TypeError``, like
    any Python function."""
    return lambda: get()


def codec_data(codec: Codec) -> NamedInt:
    """Return a codec as templates see it."""
    return NamedInt(codec.value, codec.name)
