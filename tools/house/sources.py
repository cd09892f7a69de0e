"""Source files with their syntax trees, for the rules and counts that read them.

No tree stays in memory after its turn: all trees of this repository take 400 MB, and reading one again
takes a millisecond.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

GENERATED: Final = ("_pb2.py", "_pb2_grpc.py")


@dataclass(frozen=True, slots=True)
class Source:
    """A file of Python. ``name`` is its path below the root, with slashes."""

    name: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """Name of the module."""
        parts = self.name.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(root: Path, *folders: str, generated: bool = False) -> Iterator[Source]:
    """Yield the files below folders of the root, in order of their names."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if generated or not path.name.endswith(GENERATED):
                yield source(path, root)


def source(path: Path, root: Path) -> Source:
    """Read a file, and parse it."""
    text = path.read_text()
    return Source(path.relative_to(root).as_posix(), text, parsed(text))


def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a text.

    The collector waits meanwhile: it would look at each new node, of which none is garbage. That takes
    four times as long as parsing.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if paused:
            gc.enable()


def within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements directly within a node, and the clauses that hold some. Leave out expressions."""
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        inner = getattr(node, name, ())
        if isinstance(inner, list):  # That of a lambda is an expression.
            yield from inner
