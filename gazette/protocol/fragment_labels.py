"""Labels that say which fragments below a journal's directory belong to it. Values are percent-encoded."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote

from gazette.errors import Invalid
from gazette.labels import FOREIGN_FRAGMENTS, FORMER_POSTFIX
from gazette.protocol.label_set import LabelSet
from gazette.protocol.text.go_template import is_complete

_SAFE: Final = "/+-=._"
_VALUE_BYTES_MAX: Final = 1024


def former_templates(labels: LabelSet) -> list[str]:
    """Return the former templates that a journal's labels keep."""
    return [unquote(value) for value in labels.values_of(FORMER_POSTFIX)]


def foreign_directories(labels: LabelSet) -> list[str]:
    """Return the directories that a journal's labels declare foreign, relative to the journal's own."""
    return [unquote(value) for value in labels.values_of(FOREIGN_FRAGMENTS)]


def with_former_template(labels: LabelSet, template: str) -> LabelSet:
    """Return the labels with one more former template. Raise ``Invalid`` for a template that is too long."""
    return labels.with_added(FORMER_POSTFIX, _encoded(template, "PathPostfixTemplate"))


def with_foreign_directory(labels: LabelSet, directory: str) -> LabelSet:
    """Return the labels with a directory added as foreign. Raise ``Invalid`` for a directory that is too
    long."""
    return labels.with_added(FOREIGN_FRAGMENTS, _encoded(directory.strip("/"), FOREIGN_FRAGMENTS))


def _encoded(text: str, path: str) -> str:
    value = quote(text, safe=_SAFE)
    if len(value) > _VALUE_BYTES_MAX:
        raise Invalid(
            f"a label cannot keep it: percent-encoded it has {len(value)} bytes, of at most "
            f"{_VALUE_BYTES_MAX}",
            path=path,
            hint="A former template must stay known, so that its fragments are found. Create a journal of "
            "another name, or move the fragments and replace the template in etcd.",
        )
    return value


def validate_fragment_labels(labels: LabelSet) -> None:
    """Raise ``Invalid`` unless all former templates are complete."""
    for template in former_templates(labels):
        # Do not parse the template: perhaps only the original or an earlier version understands it.
        if not is_complete(template):
            raise Invalid(f"unclosed action ({template})", path=FORMER_POSTFIX)
