"""Uses of private parts, and replaced parts, in tests: users lack these parts, and they may change."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tools.house.sources import Source

STANDARD: Final = frozenset({"_exit", "_asdict", "_fields", "_make", "_replace"})
"""Documented names of the standard library that only look private."""
_BY_TEXT: Final = frozenset({"getattr", "setattr", "delattr", "hasattr", "attrgetter"})
_REPLACE: Final = frozenset({"setattr", "setitem", "delattr", "delitem"})


@dataclass(frozen=True, slots=True)
class Uses:
    """Numbers of uses by file."""

    privates: Counter[str] = field(default_factory=Counter)
    """Attributes of others with a private name, and private names that are imported."""
    patches: Counter[str] = field(default_factory=Counter)
    """Calls of ``monkeypatch`` that replace something of a module or an object."""

    def show(self) -> Iterator[str]:
        """Yield the lines of a report: the files with most uses first."""
        yield f"private uses: {self.privates.total()}; replaced parts: {self.patches.total()}"
        for name, _ in (self.privates + self.patches).most_common():
            yield f"{self.privates[name]:5}{self.patches[name]:5}  {name}"


def count_uses(files: Iterable[Source]) -> Uses:
    """Count the uses in files."""
    uses = Uses()
    for one in files:
        nodes = [*ast.walk(one.tree)]
        uses.privates[one.name] += sum(map(_privates, nodes))
        uses.patches[one.name] += sum(map(_is_patch, nodes))
    return uses


def is_private(name: str) -> bool:
    """Return True for one with one leading underscore that is not ``STANDARD``."""
    return name.startswith("_") and not name.startswith("__") and name not in STANDARD


def _privates(node: ast.AST) -> int:
    if isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return not own and is_private(node.attr)
    if isinstance(node, ast.ImportFrom):
        inside = any(map(is_private, (node.module or "").split(".")))
        return sum(inside or is_private(alias.name) for alias in node.names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_TEXT:
        texts = (one.value for one in node.args if isinstance(one, ast.Constant))
        return any(isinstance(text, str) and is_private(text) for text in texts)
    return 0


def _is_patch(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _REPLACE
    )
