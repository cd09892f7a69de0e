"""Templates of path postfixes: the documented subset, and nothing that leaves the journal."""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.journal import FragmentSpec, JournalFlag, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.postfix_template import PostfixContext, parse, template_data
from gazette.protocol.text import go_template

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SPEC = JournalSpec(
    "spec/name",
    replication=3,
    labels=LabelSet.of(("label", "x"), ("other", "y/z")),
    fragment=FragmentSpec(length=4096, codec=Codec.GZIP),
    flags=JournalFlag.O_RDWR,
    max_append_rate=77,
)
CONTEXT = PostfixContext(
    fragment=Fragment("frag/journal", 123, 456, codec=Codec.SNAPPY, mod_time=99),
    first_append_time=1574202030.0,
    registers=LabelSet.of(("region", "eu"), ("empty", ""), ("path", "../../x")),
    spec=SPEC.template_data(),
)


@pytest.mark.parametrize(
    ("template", "postfix"),
    [
        ("", ""),
        ("plain/text=1", "plain/text=1"),
        (
            ('date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}/hour={{\n'
            '.Spool.FirstAppendTime.Format "15" }}'),
            "date=2019-11-19/hour=22",
        ),
        ("{{.Spool.FirstAppendTime.UTC.Format `2006`}}", "2019"),
        ("{{ .Spool.FirstAppendTime.Year }}-{{ .Spool.FirstAppendTime.YearDay }}", "2019-323"),
        ("{{ .Spool.FirstAppendTime.Month }}/{{ .Spool.FirstAppendTime.Weekday }}",
         "November/Tuesday"),
        (("{{ .Spool.FirstAppendTime.Day }}.{{ .Spool.FirstAppendTime.Hour }}"
         ".{{ .Spool.FirstAppendTime.Minute }}.{{ .Spool.FirstAppendTime.Second }}"),
         "19.22.20.30"),
        ("foo={{ .Spool.Begin }}-{{ .Spool.End }}", "foo=123-456"),
        ("{{ .Spool.Fragment.Begin }}", "123"),
        ("{{ .Spool.Journal }}/{{ .Spool.CompressionCodec }}/{{ .Spool.ModTime }}",
         "frag/journal/SNAPPY/99"),
        ('region={{ .Spool.Registers.ValueOf "region" }}', "region=eu"),
        ('a/{{ .Spool.Registers.ValueOf "none" }}/b', "a/b"),
        ('{{ .Spool.Registers.ValueOf "empty" }}', ""),
        ("{{ .Name }} {{- /* a comment */ -}} /{{ .JournalSpec.Name }}", "spec/name/spec/name"),
        ("{{/* a comment */}}x", "x"),
        ("{{ .Replication }}{{ .Flags }}{{ .MaxAppendRate }}{{ .Fragment.Length }}", "3O_RDWR774096"),
        ("{{ .Fragment.CompressionCodec }}", "GZIP"),
        (('{{ .LabelSet.ValueOf "label" }}/{{ .ValueOf "other" }}'
         '/{{ .JournalSpec.LabelSet.ValueOf "label" }}'), "x/y/z/x"),
        ('x {{- "/y" -}} \n z', "x/yz"),
        ('{{ "}}" -}}', None),
        ("a//b/./c/", "a/b/c"),
        ("/a", "a"),
    ],
)  # fmt: skip
def test_templates_of_the_subset(template: str, postfix: str | None) -> None:
    if postfix is None:
        with pytest.raises(Invalid, match="not a valid token"):
            parse(template).evaluate(CONTEXT)
    else:
        assert parse(template).evaluate(CONTEXT) == postfix


RECORDED = json.loads((Path(__file__).parent / "go_text_template.json").read_text())
"""Templates, and what Go's own package writes for them over the same data; null where it fails."""
RECORDED_CONTEXT = PostfixContext(
    fragment=Fragment("frag/journal", 123, 456, codec=Codec.SNAPPY, mod_time=99),
    first_append_time=1574202030.123456,
    registers=LabelSet.of(("region", "eu"), ("empty", "")),
    spec=JournalSpec(
        "spec/name",
        replication=3,
        labels=LabelSet.of(("label", "x"), ("other", "y/z"), ("other", "q")),
        fragment=FragmentSpec(
            length=4096,
            codec=Codec.GZIP,
            stores=("file:///a/", "s3://b/"),
            refresh_interval_ns=300 * 10**9,
            flush_interval_ns=90 * 10**9,
        ),
        flags=JournalFlag.O_RDWR,
        max_append_rate=77,
    ).template_data(),
)
BEYOND = re.compile(
    r"\b(?:range|break|continue|define|printf?|println|len|index|slice|html|js|urlquery|lt|le|gt|ge|nil)\b"
    r"|\$\w|\||\)\.|'|\\[^\"\\]|[0-9][.0-9a-z_]*[.a-z_][0-9]|\b0[0-9]|\+[0-9]"
)
"""Text of Go's templates that is refused: loops, variables, pipes, other functions and constants."""
NO_PATH = {
    "{{ . }}",
    "{{ $ }}",
    "{{ .Fragment.Stores }}",
    '{{ .ValuesOf "other" }}',
    "{{ .Suspend }}",
}
"""Go writes something that no path may have."""


@pytest.mark.parametrize(("template", "written"), RECORDED)
def test_templates_write_what_they_write_in_go(template: str, written: str | None) -> None:
    """Or they are refused: those that have something beyond what is supported, and no others."""
    code = re.sub(r"`[^`]*`|\"(?:[^\"\\]|\\[\"\\])*\"", "TEXT", template)
    if written is None or BEYOND.search(code) or template in NO_PATH:
        with pytest.raises(Invalid) as caught:
            go_template.parse(template).execute(template_data(RECORDED_CONTEXT))
        assert caught.value.message
    else:
        assert go_template.parse(template).execute(template_data(RECORDED_CONTEXT)) == written


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{{ printf "%d" .Spool.Begin }}', "printf"),
        ("{{ range .Labels }}{{ .Name }}{{ end }}", "range"),
        ("{{ $x := .Name }}{{ $x }}", "$x := .Name"),
        ("a{{ .Name | len }}b", "| len"),
        ("{{ if lt .Spool.Begin 9 }}{{ end }}", "lt"),
        ('{{ define "x" }}{{ end }}', "define"),
        ('{{ .ValueOf (.ValueOf "x") }}', "argument of a method"),
    ],
)
def test_what_is_not_supported_is_named_where_it_is_applied(template: str, name: str) -> None:
    """Nothing is stored elsewhere than brokers of the original store it, without a word."""
    spec = JournalSpec("a/journal", replication=1, fragment=FragmentSpec(1024, Codec.NONE))
    fragment = replace(spec.fragment, refresh_interval_ns=10**9, path_postfix_template=template)
    with pytest.raises(Invalid) as caught:
        replace(spec, fragment=fragment).validate()
    assert name in caught.value.message
    assert caught.value.path == "Fragment.PathPostfixTemplate"
    assert "FirstAppendTime.Format" in caught.value.hint
    replace(spec, fragment=fragment).validate_stored()


@pytest.mark.parametrize(
    "template",
    [
        "{{ range 1000000000 }}{{ end }}",
        '{{ printf "%1000000000d" 1 }}',
        "{{ (" * 100 + ".Name" + ")" * 100 + " }}",
        "{{ if true }}" * 100 + "{{ end }}" * 100,
        "{{ .Spool.__class__ }}",
        "{{ .Spool.fields }}",
        "{{ .Spool.FirstAppendTime.__globals__ }}",
        '{{ "x".__class__ }}',
    ],
)
def test_an_enemy_gets_nothing_and_nowhere(template: str) -> None:
    with pytest.raises(Invalid):
        parse(template).evaluate(CONTEXT)


@given(st.text(alphabet='{}.()$"`- abNif0endwitheqornot/*', max_size=60))
@PROPERTY
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(Invalid):
        assert isinstance(go_template.parse(text).execute(template_data(CONTEXT)), str)


@pytest.mark.parametrize("template", ["{{ .Bogus }}", "{{ .Spool.Begin", "{{ .Spool }}"])
def test_what_templates_may_use_is_said(template: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse(template).evaluate(CONTEXT)
    assert "FirstAppendTime.Format" in caught.value.hint


@pytest.mark.parametrize("flags", [*JournalFlag, 3])
def test_flags_are_written_by_name_where_they_have_one(flags: int) -> None:
    context = replace(CONTEXT, spec=replace(SPEC, flags=flags).template_data())
    name = JournalFlag(flags).name if flags != 3 else "3"
    assert parse("{{ .Flags }}").evaluate(context) == name


def test_a_value_cannot_leave_the_journal() -> None:
    with pytest.raises(Invalid, match="cannot traverse outside the journal"):
        parse('{{ .Spool.Registers.ValueOf "path" }}').evaluate(CONTEXT)


def test_a_postfix_is_bounded() -> None:
    context = replace(CONTEXT, registers=LabelSet.of(("region", "x" * 513)))
    with pytest.raises(Invalid, match="invalid length"):
        parse('{{ .Spool.Registers.ValueOf "region" }}').evaluate(context)


def test_a_layout_that_cannot_be_part_of_a_path_is_refused_with_the_specification() -> None:
    fragment = FragmentSpec(
        length=1024,
        codec=Codec.NONE,
        refresh_interval_ns=10**9,
        path_postfix_template='{{ .Spool.FirstAppendTime.Format "2006 01" }}',
    )
    spec = JournalSpec("a/journal", replication=1, fragment=fragment)
    with pytest.raises(Invalid) as caught:
        spec.validate()
    assert str(caught.value) == "Fragment.PathPostfixTemplate: not a valid token (0001 01)"
    # A broker that reads it from etcd keeps the journal.
    spec.validate_stored()


@PROPERTY
@given(st.text(st.sampled_from('{}-./ ab"`*=2006'), max_size=20))
def test_any_text_either_is_a_safe_path_or_is_refused(text: str) -> None:
    try:
        postfix = parse(text).evaluate(CONTEXT)
    except Invalid:
        return
    path = posixpath.normpath(posixpath.join("/root/journal", postfix))
    assert path == posixpath.join("/root/journal", postfix).rstrip("/")
    assert path.startswith("/root/journal")


@pytest.mark.parametrize(
    ("scale", "expected"), [("", "-1"), ("Milli", "-500"), ("Nano", "-500000000")]
)
def test_times_before_1970_count_down_from_it(scale: str, expected: str) -> None:
    context = replace(CONTEXT, first_append_time=-0.5)
    assert parse(f"{{{{ .Spool.FirstAppendTime.Unix{scale} }}}}").evaluate(context) == expected
