"""No module makes objects, or code, from data that came from elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.house.sources import sources

ROOT = Path(__file__).parents[1]
PACKAGES = ("gazette", "pyspark_gazette", "pyspark_gazette_state")
RUN_CODE = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "jsonpickle", "marshal", "shelve",
    "multiprocessing", "joblib",
}  # fmt: skip
"""Modules that can make any object of bytes, or call any function."""
CALLS = {"eval", "exec", "compile", "unsafe_load", "full_load", "read_pickle"}
"""Functions that do. Of modules: ``re.compile`` is not one of them."""
ALLOWED = {
    "gazette/history/backfill/local.py": (
        "pickle",
        "pipes to the processes that a backfill started",
    ),
    "gazette/history/backfill/content.py": (
        "pickle",
        "a temporary file without a name, read by its writer",
    ),
    "gazette/history/json_lines.py": ("pickle", "only the name of an error of Numba"),
    "gazette/message/field_classes.py": (
        "eval",
        "an expression over fields whose names are identifiers",
    ),
    "gazette/message/value_fingerprint.py": (
        "marshal",
        "writes only: two values are compared by it",
    ),
    "gazette/history/spark/tasks.py": (
        "pyspark.cloudpickle",
        "tasks of a job's own session, as Spark's RDDs",
    ),
}
"""Modules that may, with what they use, and where the bytes come from."""


def uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in CALLS:
                yield node.func.id
        elif isinstance(node, ast.Attribute) and node.attr in CALLS - {"compile", "eval", "exec"}:
            yield node.attr
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("yaml.load", "yaml.Loader"):
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.arg
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [ast.unparse(argument).strip("'\"") for argument in node.args[:1]]
        yield from (name for name in names if RUN_CODE & set(name.split(".")))


def test_only_named_modules_unpickle() -> None:
    found = {
        one.name: sorted(set(uses(one.tree))) for one in sources(ROOT, *PACKAGES, generated=True)
    }
    assert {path: names for path, names in found.items() if names} == {
        path: [module] for path, (module, _) in ALLOWED.items()
    }


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "from pyspark import cloudpickle", "eval('1')",
        "import multiprocessing.connection", "exec(text)", "yaml.load(text)", "yaml.unsafe_load(x)",
        "importlib.import_module('pickle')", "numpy.load(file, allow_pickle=True)",
    ],
)  # fmt: skip
def test_what_it_finds(text: str) -> None:
    assert list(uses(ast.parse(text)))


def test_the_page_on_security_names_them() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    for path in ALLOWED:
        assert f"`{path}`" in page
