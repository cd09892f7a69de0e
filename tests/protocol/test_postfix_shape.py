"""The shape of a template: it matches all that the template can write, and little else."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.protocol import postfix_template
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.postfix_shape import shape_of
from gazette.protocol.postfix_template import PostfixContext

DAY = '{{ .Spool.FirstAppendTime.Format "2006/01/02" }}'
JOURNAL = "a/journal"
NUMBERS = ("2006", "06", "01", "1", "02", "2", "002", "15", "03", "3", "04", "4", "05", "5")
OTHERS = ("Jan", "January", "Mon", "Monday", "PM", "pm", "MST", "Z07:00", "-0700", ".000", ".999")
ELEMENTS = (*NUMBERS, *OTHERS)
LAYOUTS = st.lists(st.sampled_from([*ELEMENTS, "-", "/", "_", "x", "T"]), max_size=6).map("".join)
TIMES = LAYOUTS.map(lambda layout: f'{{{{ .Spool.FirstAppendTime.Format "{layout}" }}}}')
ACTIONS = st.one_of(
    TIMES,
    st.sampled_from(
        [
            "{{ .Spool.Begin }}",
            "{{ .Spool.FirstAppendTime.Unix }}",
            "{{ .Spool.FirstAppendTime.UTC.Month }}",
            "{{ .Spool.CompressionCodec }}",
            "{{ $.Name }}",
            '{{ .Spool.Registers.ValueOf "r" }}',
            '{{ .LabelSet.ValueOf "l" }}',
            '{{ or (.Spool.Registers.ValueOf "r") "none" }}',
            '{{ if eq (.LabelSet.ValueOf "l") "a" }}{{ "x" }}{{ else if not .Replication }}y{{ end }}',
            '{{ if .Spool.Registers.ValueOf "r" }}yes/{{ .Name }}{{ else }}no{{ end }}',
            '{{ with .Spool.Registers.ValueOf "r" }}r={{ . }}{{ end }}',
            "{{ with .Spool }}{{ .Begin }}{{ $.Spool.End }}{{ end }}",
        ]
    ),
)
TEXTS = st.text("ab12=-_./", max_size=4)
TEMPLATES = st.lists(st.one_of(ACTIONS, TEXTS), max_size=5).map("".join)
WORDS = st.text("ab1/.", max_size=5)


@st.composite
def contexts(draw: st.DrawFn) -> PostfixContext:
    offset = draw(st.integers(0, 1 << 62))
    label, register = draw(WORDS), draw(WORDS)
    seconds = draw(st.one_of(st.none(), st.floats(-6e10, 2e11)))
    return PostfixContext(
        Fragment(JOURNAL, offset, offset + 1, codec=draw(st.sampled_from(list(Codec)[1:]))),
        seconds,
        LabelSet.of(("r", register)),
        JournalSpec(JOURNAL, labels=LabelSet.of(("l", label))).template_data(),
    )


@given(template=TEMPLATES, context=contexts())
def test_a_shape_matches_what_its_template_writes(template: str, context: PostfixContext) -> None:
    """A path that is left out would be a fragment that is not found again."""
    try:
        path = postfix_template.parse(template).evaluate(context)
    except Invalid:
        return
    assert shape_of(template, JOURNAL).matches(path), path


@pytest.mark.parametrize(
    ("template", "path", "matches"),
    [
        (DAY, "2025/06/01", True),
        (DAY, "2025/06", False),
        (DAY, "2025/06/01/x", False),
        (DAY, "sub", False),
        (DAY, "deleted/journal", False),
        (DAY.replace("/", "-"), "2025-06-01", True),
        ('{{ .Spool.FirstAppendTime.Format "Jan-02" }}', "Jun-01", True),
        ('{{ .Spool.FirstAppendTime.Format "_2006" }}', "_2025", True),
        ('{{ .Spool.FirstAppendTime.Format "Jan-02" }}', "Jux-01", False),
        ("{{ if .Name }}one{{ else }}two/{{ .Spool.Begin }}{{ end }}", "two/12", True),
        ("{{ if .Name }}one{{ else }}two/{{ .Spool.Begin }}{{ end }}", "two/x", False),
        ("v1/{{ .Name }}", "v1/a/journal", True),
        ("v1/{{ .Name }}", "v1/b/journal", False),
        ("/{{ .Spool.Begin }}//x/", "7/x", True),
        ("", "x", False),
        # Only the original, or an earlier version, understands it. It may have written anything.
        ('{{ printf "%04d" .Spool.FirstAppendTime.Year }}', "2025", True),
        ("{{ range .Labels }}{{ .Name }}/{{ end }}", "any/path", True),
        ('{{ printf "{{" }}', "{{", True),
        ("{{ .Bogus", "x", None),
        ("{{ .Name }}{{ .Bogus", "x", None),
    ],
)
def test_little_else_matches(template: str, path: str, matches: bool | None) -> None:
    """So what is left of a deleted journal does not become part of the one above it."""
    if matches is None:  # No process can have used it.
        with pytest.raises(Invalid):
            shape_of(template, JOURNAL)
        return
    assert shape_of(template, JOURNAL).matches(path) is matches


def test_a_template_of_an_enemy_costs_little() -> None:
    """The author of a specification chooses the template, and others the path."""
    hostile: list[Any] = [
        "{{ .X }}a" * 100,
        "{{ if .X }}a{{ else }}aa{{ end }}" * 100,
        "{{ if .X }}" * 45 + "a" + "{{ end }}" * 45,
    ]
    began = time.process_time()
    for template in hostile:
        assert not shape_of(template, JOURNAL).matches("a" * 511 + "b")
    assert time.process_time() - began < 20


def test_the_shape_is_of_one_journal() -> None:
    spec = replace(JournalSpec(JOURNAL), name="other/journal")
    assert shape_of("{{ .Name }}", spec.name).matches("other/journal")
    assert not shape_of("{{ .Name }}", JOURNAL).matches("other/journal")
