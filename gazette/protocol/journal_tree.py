"""Journal specifications as a tree, in which a directory holds the fields that its children share.

Operators read and write this form as YAML. A directory is a node whose name ends in ``/`` or is
empty. Any other node is a journal. A journal's specification is its own fields, and the fields of
its directories where its own are unset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Any, Final

import yaml

from gazette.errors import Invalid
from gazette.protocol.fragment import Codec
from gazette.protocol.ids import Revision, validate_journal_name
from gazette.protocol.journal import (
    FragmentSpec,
    JournalFlag,
    JournalSpec,
    Suspend,
    SuspendLevel,
    intersect_specs,
    subtract_specs,
    union_specs,
)
from gazette.protocol.text import strict_yaml
from gazette.protocol.text.strict_yaml import Fields
from gazette.protocol.text.validation import INT32, within

_NODE_FIELDS: Final = (
    "comment",
    "delete",
    "name",
    "replication",
    "labels",
    "fragment",
    "flags",
    "max_append_rate",
    "suspend",
    "revision",
    "children",
)
_FRAGMENT_FIELDS: Final = (
    "length",
    "compression_codec",
    "stores",
    "refresh_interval",
    "retention",
    "flush_interval",
    "path_postfix_template",
)


@dataclass(frozen=True, slots=True)
class JournalNode:
    """A directory with its children, or a journal.

    ``spec`` may be partial. ``delete`` requests the deletion of the journal, or of every journal
    below; ``None`` takes the value of the directory above. ``revision`` is the revision of etcd at which
    the journal was read. It is 0 for a journal to create, and -1 to compare no revision.
    """

    spec: JournalSpec
    comment: str = ""
    delete: bool | None = None
    revision: Revision = 0
    children: tuple[JournalNode, ...] = ()
    no_stores: bool = False
    """True if ``stores`` was given as an empty list. Then the directory's stores are not inherited."""

    @classmethod
    def parse(cls, text: str) -> JournalNode:
        """Parse YAML, without validating the tree. Raise ``Invalid``, with the line, for a field that is
        unknown or malformed."""
        return strict_yaml.decode(text, _decode_node)

    @classmethod
    def of(cls, specs: Iterable[tuple[JournalSpec, Revision]]) -> JournalNode:
        """Return the tree of complete specifications with revisions. Directories get shared fields."""
        nodes = [cls(spec, revision=revision) for spec, revision in specs]
        return extract_tree(nodes).hoist()

    @property
    def is_directory(self) -> bool:
        return not self.spec.name or self.spec.name.endswith("/")

    def journals(self) -> Iterator[JournalNode]:
        """Yield the journals of the tree, in order."""
        if not self.is_directory:
            yield self
            return
        for child in self.children:
            yield from child.journals()

    def validate(self) -> None:
        """Raise ``Invalid`` unless names make an ordered tree. Skip specifications: they may be partial."""
        if not self.is_directory:
            with within("Name"):
                validate_journal_name(self.spec.name)
            if self.children:
                raise Invalid(f"expected no Children with non-directory Node ({self.spec.name})")
            return
        if self.revision:
            raise Invalid(f"unexpected Revision ({self.revision})")
        if not self.children:
            raise Invalid("expected one or more Children")
        for index, child in enumerate(self.children):
            name = child.spec.name
            if not name.startswith(self.spec.name):
                raise Invalid(f"expected parent Name to prefix child ({self.spec.name} vs {name})")
            if index and self.children[index - 1].spec.name >= name:
                raise Invalid(
                    f"expected Children to be ordered (ind {index}; "
                    f"{self.children[index - 1].spec.name} vs {name})"
                )
            child.validate()

    def push_down(self) -> JournalNode:
        """Return this tree with complete journals, and directories that hold only their names."""
        if not self.is_directory:
            return replace(self, no_stores=False)
        children = []
        for child in self.children:
            spec = union_specs(child.spec, self.spec)
            if child.no_stores:
                spec = replace(spec, fragment=replace(spec.fragment, stores=()))
            delete = self.delete if child.delete is None else child.delete
            children.append(replace(child, spec=spec, delete=delete).push_down())
        return JournalNode(
            JournalSpec(self.spec.name), comment=self.comment, children=tuple(children)
        )

    def hoist(self) -> JournalNode:
        """Return this tree with each field that all children share moved to their directory.

        This is the inverse of ``push_down``. Call ``push_down`` first: the fields of directories are
        replaced. Suspensions stay with their journals.
        """
        if not self.is_directory or not self.children:
            return self
        children = [child.hoist() for child in self.children]
        shared = reduce(intersect_specs, (child.spec for child in children))
        deletes = {child.delete for child in children}
        delete = deletes.pop() if len(deletes) == 1 else None
        return replace(
            self,
            spec=replace(shared, name=self.spec.name, suspend=None),
            delete=delete,
            children=tuple(
                replace(
                    child,
                    spec=subtract_specs(child.spec, shared),
                    delete=None if delete is not None else child.delete,
                )
                for child in children
            ),
        )

    def to_yaml(self) -> str:
        """Return the YAML that ``parse`` reads, without unset fields."""
        return strict_yaml.dump(_encode_node(self))


def extract_tree(nodes: Iterable[JournalNode]) -> JournalNode:
    """Wrap nodes in directories: one for each path at which names of nodes diverge.

    Wrap nodes without a common path, and an empty list, in a directory with an empty name. Return a single
    node as it is.
    """
    ordered = sorted(nodes, key=lambda node: node.spec.name)
    return _extract(ordered) if ordered else JournalNode(JournalSpec(""))


def _extract(nodes: Sequence[JournalNode]) -> JournalNode:
    """Return sorted nodes as one tree. Begin a child where neighbours share no more path than all nodes."""
    if len(nodes) == 1:
        return nodes[0]
    lengths = [
        shared_prefix(nodes[index - 1].spec.name, nodes[index].spec.name)
        for index in range(1, len(nodes))
    ]
    least = min(lengths)
    cuts = [0, *(index + 1 for index, length in enumerate(lengths) if length == least), len(nodes)]
    children = [_extract(nodes[begin:end]) for begin, end in pairwise(cuts)]
    return JournalNode(JournalSpec(nodes[0].spec.name[:least]), children=tuple(children))


def shared_prefix(a: str, b: str) -> int:
    """Return the length of the longest path, ending in ``/``, that begins both names."""
    length = 0
    while (slash := a.find("/", length)) >= 0 and b.startswith(a[: slash + 1]):
        length = slash + 1
    return length


def _decode_node(node: yaml.Node | None) -> JournalNode:
    fields = Fields(node, _NODE_FIELDS)
    fragment, no_stores = _decode_fragment(fields)
    return JournalNode(
        spec=JournalSpec(
            name=fields.text("name"),
            replication=fields.integer("replication", INT32),
            labels=fields.labels("labels"),
            fragment=fragment,
            flags=fields.enum("flags", JournalFlag, numbers=True),
            max_append_rate=fields.integer("max_append_rate"),
            suspend=_decode_suspend(fields),
        ),
        comment=fields.text("comment"),
        delete=fields.boolean("delete"),
        revision=fields.integer("revision"),
        children=fields.items("children", _decode_node),
        no_stores=no_stores,
    )


def _decode_fragment(fields: Fields) -> tuple[FragmentSpec, bool]:
    """Return the specification of fragments, and True if ``stores`` was given as an empty list."""
    fragment = fields.fields("fragment", _FRAGMENT_FIELDS)
    if fragment is None:
        return FragmentSpec(), False
    stores = fragment.items("stores", strict_yaml.text_of)
    spec = FragmentSpec(
        length=fragment.integer("length"),
        codec=Codec(fragment.enum("compression_codec", Codec)),
        stores=stores,
        refresh_interval_ns=fragment.duration_ns("refresh_interval"),
        retention_ns=fragment.duration_ns("retention"),
        flush_interval_ns=fragment.duration_ns("flush_interval"),
        path_postfix_template=fragment.text("path_postfix_template"),
    )
    return spec, "stores" in fragment and not stores


def _decode_suspend(fields: Fields) -> Suspend | None:
    suspend = fields.fields("suspend", ("level", "offset"))
    if suspend is None:
        return None
    level = suspend.enum("level", SuspendLevel, numbers=True)
    try:
        return Suspend(SuspendLevel(level), suspend.integer("offset"))
    except ValueError:
        raise Invalid(f"invalid Level variant ({level})", path="Suspend.Level") from None


def _encode_node(node: JournalNode) -> dict[str, Any]:
    spec = node.spec
    value = {
        "comment": node.comment,
        "delete": node.delete,
        "name": spec.name,
        "replication": spec.replication,
        "labels": strict_yaml.encode_labels(spec.labels),
        "fragment": _encode_fragment(spec.fragment, node.no_stores),
        "flags": _encode_flags(spec.flags),
        "max_append_rate": spec.max_append_rate,
        "suspend": None if spec.suspend is None else _encode_suspend(spec.suspend),
        "revision": node.revision,
        "children": [_encode_node(child) for child in node.children],
    }
    # Leave out unset fields. `delete: false` and an empty suspension are set.
    return {
        key: field
        for key, field in value.items()
        if field or (key == "delete" and field is False) or (key == "suspend" and field is not None)
    }


def _encode_fragment(spec: FragmentSpec, no_stores: bool) -> dict[str, Any]:
    value = {
        "length": spec.length,
        "compression_codec": spec.codec.name if spec.codec is not Codec.INVALID else "",
        "stores": list(spec.stores),
        "refresh_interval": strict_yaml.encode_duration(spec.refresh_interval_ns),
        "retention": strict_yaml.encode_duration(spec.retention_ns),
        "flush_interval": strict_yaml.encode_duration(spec.flush_interval_ns),
        "path_postfix_template": spec.path_postfix_template,
    }
    return {key: field for key, field in value.items() if field or (key == "stores" and no_stores)}


def _encode_flags(flags: int) -> str | int:
    if not flags:
        return 0
    return JournalFlag(flags).name if flags in set(JournalFlag) else flags


def _encode_suspend(suspend: Suspend) -> dict[str, Any]:
    value = {"level": suspend.level.name if suspend.level else "", "offset": suspend.offset}
    return {key: field for key, field in value.items() if field}
