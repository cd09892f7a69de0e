"""Which journal owns the objects below a journal's directory.

The path of an object does not fully decide to which journal it belongs. Fragments of journal ``a`` may be in
subdirectories, by its ``path_postfix_template``. All fragments of journal ``a/b`` are in a subdirectory of
``a``, too. So ``a/b/<name>`` is a fragment of ``a`` with postfix ``b``, or a fragment of ``a/b``. The rule:

1. An object directly in ``a/`` is a fragment of ``a``.
2. An object at or below the directory of another journal is never a fragment of ``a``, even if that journal
   is known to have been deleted. The same holds for a directory that a label of ``a`` declares foreign.
3. Otherwise, an object in ``a/<postfix>/`` is a fragment of ``a`` if a template can have written the postfix:
   the present template, or a former one that a label of ``a`` keeps. The object is also a fragment of ``a``
   if all components of the postfix are ``key=value``.
4. All others are unexplained. They may be fragments of ``a``, by an unknown template. A deleted journal may
   have left them, or a person may have put them there. So brokers never treat unexplained objects as absent.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum
from typing import TYPE_CHECKING, Final

from gazette.errors import Invalid
from gazette.labels import FOREIGN_FRAGMENTS, FORMER_POSTFIX
from gazette.protocol import label_set
from gazette.protocol.fragment_labels import (
    foreign_directories,
    former_templates,
    with_former_template,
)
from gazette.protocol.label_set import LabelSet
from gazette.protocol.postfix_shape import PostfixShape, shape_of
from gazette.protocol.text.go_template import is_complete

if TYPE_CHECKING:
    from gazette.protocol.ids import JournalName
    from gazette.protocol.journal import JournalSpec

ALL_FOREIGN: Final = "."
"""Value of the label for all directories that no template explains."""

_KEY_VALUES: Final = re.compile(r"[^/=]+=[^/]*(/[^/=]+=[^/]*)*")


class Attribution(Enum):
    """The owner of an object."""

    OWN = 1
    OTHER = 2
    UNKNOWN = 3


class FragmentOwner:
    """Applies the rule above for one journal. Of ``others``, only journals below this journal count."""

    def __init__(self, spec: JournalSpec, others: Collection[JournalName] = ()) -> None:
        self.journal = spec.name
        head = f"{spec.name}/"
        foreign = foreign_directories(spec.labels)
        self._others = {name[len(head) :] for name in others if name.startswith(head)}
        self._others.update(foreign)
        self._unknown = Attribution.OTHER if ALL_FOREIGN in foreign else Attribution.UNKNOWN
        self._shapes = _shapes(spec)
        self._owners: dict[str, Attribution] = {}

    def owns(self, postfix: str) -> bool:
        """Return True if a fragment at that postfix (``""``: none) is the journal's own."""
        return self.of(postfix) is Attribution.OWN

    def of(self, postfix: str) -> Attribution:
        """Return the owner of a fragment at that postfix. Cache the owner: many fragments share a postfix."""
        owner = self._owners.get(postfix)
        if owner is None:
            owner = self._owners[postfix] = self._decide(postfix)
        return owner

    def _decide(self, postfix: str) -> Attribution:
        if not postfix:
            return Attribution.OWN
        if self._others and any(path in self._others for path in _paths_to(postfix)):
            return Attribution.OTHER
        if any(shape.matches(postfix) for shape in self._shapes) or _KEY_VALUES.fullmatch(postfix):
            return Attribution.OWN
        return self._unknown


def _paths_to(path: str) -> list[str]:
    """Return all parent directories of a path, and the path."""
    components = path.split("/")
    return ["/".join(components[:count]) for count in range(1, len(components) + 1)]


def _shapes(spec: JournalSpec) -> list[PostfixShape]:
    """Return the shapes of present and former templates. Leave out templates that cannot write any path."""
    shapes = []
    for template in (spec.fragment.path_postfix_template, *former_templates(spec.labels)):
        try:
            shapes.append(shape_of(template, spec.name))
        except Invalid:
            continue
    return shapes


def keep_explanations(labels: LabelSet, former: JournalSpec, template: str) -> LabelSet:
    """Return the labels of a specification that replaces ``former`` and has ``template``.

    The returned labels keep the former template, which wrote the postfixes of former fragments. Former
    labels about fragments stay if ``labels`` does not give them. Raise ``Invalid`` if a label cannot keep
    the former template.
    """
    names = (FORMER_POSTFIX, FOREIGN_FRAGMENTS)
    former_labels = LabelSet(tuple(label for label in former.labels.labels if label.name in names))
    labels = label_set.union(labels, former_labels)
    former_template = former.fragment.path_postfix_template
    if former_template in ("", template) or not is_complete(former_template):
        return labels
    return with_former_template(labels, former_template)
