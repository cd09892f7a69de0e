"""Print random passages of code and pages, or random functions, for a reader to judge.

Usage: ``python -m tools.sample_passages [--seed 14] [--count 60] [--functions] [PATH ...]``. Passages of code
are docstrings, comments and messages; those of pages are paragraphs, items and rows. Rewrite each one that
has to be read twice, and others like it.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_WORDS_MIN: Final = 8
"""Shorter passages say too little to be misunderstood."""

_MESSAGES: Final = {"debug", "info", "warning", "error", "exception", "fatal"}


def passages(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of each passage of a module or of a page."""
    source = path.read_text()
    if path.suffix == ".md":
        yield from _paragraphs(source)
        return
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and (text := _text(node.value)):
            yield node.lineno, "docstring", text
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node.lineno, "error", _arguments(node.exc)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _MESSAGES:
            yield node.lineno, "log", _arguments(node)
    yield from _comments(source)


def functions(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and source of each function of a module."""
    source = path.read_text() if path.suffix == ".py" else ""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, "function", ast.get_source_segment(source, node) or ""


def _paragraphs(page: str) -> Iterator[tuple[int, str, str]]:
    """Yield paragraphs, items of lists, and rows of tables; neither headings nor code."""
    page = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), page, flags=re.DOTALL)
    begin, texts = 0, list[str]()
    for number, line in enumerate([*page.splitlines(), ""], 1):
        if texts and (not line.strip() or re.match(r"\s*(- |\d+\. |\|)", line)):
            yield begin, "page", "\n".join(texts)
            texts = []
        if line.strip() and not line.startswith(("#", "    ", "<!--", "|--")):
            begin = begin if texts else number
            texts.append(line)


def _comments(source: str) -> Iterator[tuple[int, str, str]]:
    begin, last, texts = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if line != last + 1 and texts:
                yield begin, "comment", " ".join(texts)
                texts = []
            if not texts:
                begin = line
            last = line
            texts.append(token.string.lstrip("#: "))
    if texts:
        yield begin, "comment", " ".join(texts)


def _arguments(call: ast.Call) -> str:
    values = [*call.args, *(one.value for one in call.keywords if one.arg == "hint")]
    return " | ".join(text for value in values if (text := _text(value)))


def _text(node: ast.expr) -> str:
    """Return the text of a literal, with the expressions of an f-string in braces; else an empty one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}"
            if isinstance(part, ast.FormattedValue)
            else _text(part)
            for part in node.values
        )
    return ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--functions", action="store_true")
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("gazette")])
    args = parser.parse_args(argv)
    find = functions if args.functions else passages
    found = [
        (path, line, kind, text if args.functions else re.sub(r"\s+", " ", text))
        for root in args.paths
        for path in sorted([*root.rglob("*.py"), *root.rglob("*.md")])
        if "/pb/" not in path.as_posix()
        for line, kind, text in find(path)
        if len(text.split()) >= _WORDS_MIN and (args.functions or "noqa" not in text)
    ]
    chosen = random.Random(args.seed).sample(found, min(args.count, len(found)))
    for path, line, kind, text in sorted(chosen):
        print(f"{path}:{line} ({kind}) {text}")  # noqa: T201
    print(f"{len(chosen)} of {len(found)} passages, seed {args.seed}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
