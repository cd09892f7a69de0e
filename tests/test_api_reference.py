"""The API reference of the pages has each public name, and no name that does not exist."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.house.sources import parsed

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "api"
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
MENTION = re.compile(r"`(gazette\.[\w.]+)`")
LISTED_ELSEWHERE = {"gazette.__version__", "gazette.runconsumer"}
"""Public names without an entry: a string, and a module whose function has one."""


def names_of_reference(pages: Iterable[Path]) -> set[str]:
    """Return the names with an entry, and those that the text says are another name of one."""
    text = "\n".join(page.read_text() for page in pages)
    return {*DIRECTIVE.findall(text), *MENTION.findall(text)}


def exported_names(package: Path) -> Iterator[str]:
    """Yield the names in ``__all__`` of a package, of those below it, and of its own modules."""
    for path in sorted({*package.rglob("__init__.py"), *package.glob("*.py")}):
        home = path.parent if path.name == "__init__.py" else path.with_suffix("")
        module = ".".join(home.relative_to(package.parent).parts)
        for node in parsed(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                yield from (f"{module}.{name}" for name in ast.literal_eval(node.value))


def imported_names(text: str) -> Iterator[str]:
    """Yield the names that the Python examples of a page import from this package."""
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gazette"):
                yield from (f"{node.module}.{one.name}" for one in node.names)


@cache
def public_names() -> frozenset[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = {name for page in pages for name in imported_names(page.read_text())}
    return frozenset({*exported_names(ROOT / "gazette"), *named} - LISTED_ELSEWHERE)


@cache
def top_level(module: Path) -> frozenset[str]:
    """Return the names of classes, functions, constants and imports of a module."""
    return frozenset(_top_level(parsed(module.read_text())))


def exists(name: str, root: Path = ROOT) -> bool:
    """Return True if a module, or a class, function or constant of a module, has the name."""
    path = root.joinpath(*name.split("."))
    if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
        return True
    module = path.parent / "__init__.py"
    if not module.exists():
        module = path.parent.with_suffix(".py")
    return module.exists() and path.name in top_level(module)


def _top_level(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (one.asname or one.name for one in node.names)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (one.id for one in targets if isinstance(one, ast.Name))


def test_the_reference_has_every_public_name() -> None:
    assert public_names() - names_of_reference(REFERENCE.glob("*.md")) == set()


def test_every_name_of_the_reference_exists() -> None:
    names = names_of_reference(REFERENCE.glob("*.md"))
    assert {name for name in names if not exists(name)} == set()


def test_every_page_of_the_reference_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [
        page.name for page in REFERENCE.iterdir() if f": api/{page.name}\n" not in navigation
    ] == []


def test_a_name_that_is_missing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n::: gazette.Application\n\n`gazette.spark.Backfill` is another.\n")
    found = names_of_reference([page])
    assert found == {"gazette.Application", "gazette.spark.Backfill"}
    assert "gazette.Message" in public_names() - found


def test_names_that_pages_import_are_public() -> None:
    page = "Text\n```python\nfrom gazette.labels import TAG\nimport os\n```\n"
    assert list(imported_names(page)) == ["gazette.labels.TAG"]


@pytest.mark.parametrize("name", ["gazette.Aplication", "gazette.labels.NONE", "gazette.none.Name"])
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert not exists(name)
