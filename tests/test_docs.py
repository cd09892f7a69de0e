"""What the pages say is so: links resolve, modules exist, and the README's application runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
MODULE = re.compile(r"`(gazette/[\w/]+\.py|gazette/[\w/]+/)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    for target, _ in LINK.findall(text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for module in MODULE.findall(text):
        assert (ROOT / module).exists(), f"{page.name} names {module}"


def test_the_application_of_the_readme_is_the_tested_one() -> None:
    """It is `examples/first_application.py`, without its annotations."""
    readme = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert readme is not None
    example = (ROOT / "examples" / "first_application.py").read_text()
    assert skeleton(readme.group(1)) == skeleton(example)


def skeleton(source: str) -> str:
    """A program without imports, annotations and docstrings."""
    tree = ast.parse(source)
    body = [
        node
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    tree.body = body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
        if isinstance(node, ast.ClassDef):
            node.bases = []
    return ast.unparse(tree)


def test_every_package_is_in_the_architecture() -> None:
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    for package in sorted((ROOT / "gazette").iterdir()):
        if (package / "__init__.py").exists() and package.name != "etcdpb":
            assert f"gazette/{package.name}/" in architecture, package.name


def test_every_trap_has_a_line_and_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    brokers, _, _ = text.partition("## Consumers")
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", brokers, re.MULTILINE)] == [
        *range(1, 95)
    ]
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert (ROOT / path).exists(), path
        if name:
            source = (ROOT / path).read_text()
            assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{path}::{name}"
