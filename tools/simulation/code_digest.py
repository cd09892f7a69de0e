"""Says which code was simulated: results of the same code may be added up, wherever they were found."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("gazette.", "tools.simulation.")
_WITH_TEXT: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_digest() -> str:
    """Return the digest of what this process has imported of brokers, consumers and their simulation."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    return digest_of(
        {
            name: Path(path).read_text()
            for name, path in files.items()
            if name.startswith(_PACKAGES) and path.endswith(".py")
        }
    )


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
