"""What the pages say is so: links resolve, modules exist, and the README's application runs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from gazette.testing.remote_store_tests import RemoteStoreTests

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
MODULE = re.compile(r"`(gazette/[\w/]+\.py|gazette/[\w/]+/)`")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return frozenset(
        re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in headings
    )


def missing_targets(page: Path) -> Iterator[str]:
    """Yield the links of a page to what does not exist, and the modules that it names and nothing is."""
    text = page.read_text()
    for target, anchor in LINK.findall(text):
        if not target.startswith(("http://", "https://")):
            linked = page.parent / target if target else page
            has_anchors = anchor and linked.suffix == ".md" and linked.parent.name != "api"
            if not linked.exists():
                yield target
            elif has_anchors and anchor[1:] not in anchors(linked):
                yield f"{target}{anchor}"
    yield from (module for module in MODULE.findall(text) if not (ROOT / module).exists())


def test_links_and_modules_of_pages_exist() -> None:
    found = {page: missing for page in PAGES if (missing := [*missing_targets(page)])}
    assert found == {}


def test_a_target_that_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Its title\n[a](b.md#c) [d](page.md#its-title) [e](https://e) [f](#none) [g](page.md#g)\n"
        "`gazette/f.py` `gazette/auth.py`\n"
    )
    assert [*missing_targets(page)] == ["b.md", "#none", "page.md#g", "gazette/f.py"]


def test_one_page_says_how_to_install() -> None:
    """The others link to docs/installation.md, so that one page changes with the place of the packages."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    others = [*pages, *(ROOT / "examples").rglob("*.ipynb"), *(ROOT / "deploy").rglob("*.md")]
    named = [page for page in others if re.search(r"pip install[^`\n]*pygazette", page.read_text())]
    assert named == [ROOT / "docs" / "installation.md"]


def test_the_application_of_the_readme_is_the_tested_one() -> None:
    """It is `examples/first_application.py`, without its docstring."""
    readme = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert readme is not None
    example = (ROOT / "examples" / "first_application.py").read_text()
    assert readme.group(1) == example.partition("\n\n")[2]


@pytest.mark.timeout(180)
def test_the_tests_of_the_page_on_testing_pass(tmp_path: Path) -> None:
    """As a user would run them: in a project of their own, with the plugin."""
    page = (ROOT / "docs" / "testing.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "test_page.py").write_text("\n".join(blocks))
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    plugin = [] if _is_registered() else ["-p", "gazette.testing.plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    # Its own, and those that it inherits: one of them twice.
    own = "".join(blocks).count("def test_")
    inherited = [name for name in dir(RemoteStoreTests) if name.startswith("test_")]
    assert f"{own + len(inherited) + 1} passed" in done.stdout, done.stdout[-300:]


def _is_registered() -> bool:
    """Return True if the installed package names the plugin: an older installation does not."""
    found = importlib.metadata.entry_points(group="pytest11")
    return any(one.value == "gazette.testing.plugin" for one in found)


def test_the_plugin_imports_nothing_until_a_fixture_is_used() -> None:
    code = "import sys, gazette.testing.plugin; print(*[m for m in sys.modules if 'gazette' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == {
        "gazette",
        "gazette.lazy",
        "gazette.testing",
        "gazette.testing.plugin",
    }


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
