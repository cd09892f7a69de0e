"""Says which code was simulated: results of the same code may be added up, wherever they were found."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_WITH_TEXT: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_digests() -> tuple[str, str]:
    """Return digests of what this process has imported: of brokers and consumers, and of their simulation."""
    shipped: dict[str, str] = {}
    simulation: dict[str, str] = {}
    for name, module in sys.modules.items():
        path = getattr(module, "__file__", None) or ""
        if not path.endswith(".py"):
            continue
        if name.startswith(("gazette.testing.", "tools.simulation.")):
            simulation[name] = Path(path).read_text()
        elif name.startswith("gazette."):
            shipped[name] = Path(path).read_text()
    return digest_of(shipped), digest_of(simulation)


def digest_of(sources: Mapping[str, str]) -> str:
    """Return a digest of modules, in 12 hexadecimal digits.

    Comments, docstrings and spaces are no part of it.
    """
    digest = hashlib.sha256()
    for name, source in sorted(sources.items()):
        digest.update(f"{name} {_meaning(source)}\n".encode())
    return digest.hexdigest()[:12]


def _meaning(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _WITH_TEXT):
            node.body = [one for one in node.body if not _is_text(one)] or [ast.Pass()]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)
