"""What others keep in etcd is decoded, also where it would be refused if it was applied here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gazette.broker.key_space import decode_journal
from gazette.errors import Invalid
from gazette.testing.broker import journal_spec


@pytest.mark.parametrize(
    "template", ["{{ .From .Another .Version }}", "{{ if", '{{ define "x" }}{{ end }}', "a b"]
)
def test_a_template_that_fails_here_does_not_hide_its_journal(template: str) -> None:
    spec = journal_spec("a/journal")
    spec = replace(spec, fragment=replace(spec.fragment, path_postfix_template=template))
    with pytest.raises(Invalid, match="PathPostfixTemplate"):
        spec.validate()
    assert decode_journal("a/journal", spec.to_pb().SerializeToString()) == spec


def test_a_journal_under_the_key_of_another_is_none() -> None:
    value = journal_spec("a/journal").to_pb().SerializeToString()
    with pytest.raises(Invalid, match="does not match its key"):
        decode_journal("an/other", value)
