"""The modules of `gazette` import each other in no circle, also while type checking."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "gazette"
TABLES = "gazette.lazy"
"""The module that imports others of the package by name: those of its callers' tables."""
IMPORTERS_OF_USERS = {
    "gazette.backfill.definition": "the module of a backfill",
    "gazette.gazctl.declared_output": "the module of --declared",
    "gazette.history.columns": "the module of a message class",
    "gazette.run.target": "the module of an application",
}
"""Modules that import by name what a user names, which is no module of this package."""


@dataclass(frozen=True, slots=True)
class Edge:
    """An import of one module by another."""

    importer: str
    imported: str
    line: int
    kind: str
    """``at import``, ``while type checking``, ``in a function`` or ``in a table``."""

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported} {self.kind}"


def module_paths(root: Path, package: str) -> dict[str, Path]:
    """Return the files of the package's modules, by the names of the modules."""
    paths = {}
    for path in (root / package).rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imported(node: ast.Import | ast.ImportFrom, modules: Mapping[str, object]) -> list[str]:
    """Return those of ``modules`` that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert node.module is not None, "imports are absolute"
        found = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in modules else node.module for name in found]
    return [name for name in dict.fromkeys(names) if name in modules]


def named(tree: ast.AST, modules: Mapping[str, object], form: str) -> Iterator[tuple[int, str]]:
    """Yield the lines and the names of those of ``modules`` that texts of this form name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.fullmatch(form, node.value)
            if found and found[1] in modules:
                yield node.lineno, found[1]


def edges(
    module: str, tree: ast.AST, modules: Mapping[str, object], tables: Iterable[ast.AST] = ()
) -> Iterator[Edge]:
    """Yield the imports of ``modules`` by one module, wherever they stand in it.

    A module that imports others by name does so by a table: its own, or those of ``tables``.
    """
    if any(isinstance(node, ast.ImportFrom) and node.module == TABLES for node in ast.walk(tree)):
        listed = dict.fromkeys(
            [
                *named(tree, modules, r"([\w.]+)(?::\w+)?"),
                *(one for table in tables for one in named(table, modules, r"([\w.]+):\w+")),
            ]
        )
        yield from (Edge(module, name, line, "in a table") for line, name in listed)

    def visit(node: ast.AST, kind: str) -> Iterator[Edge]:
        for child in ast.iter_child_nodes(node):
            inner = kind
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = "in a function"
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = "while type checking"
            if isinstance(child, ast.Import | ast.ImportFrom):
                names = imported(child, modules)
                yield from (
                    Edge(module, name, child.lineno, kind) for name in names if name != module
                )
            yield from visit(child, inner)

    yield from visit(tree, "at import")


def circular(graph: list[Edge]) -> list[Edge]:
    """Return the edges that are part of a circle: those inside a strongly connected component."""
    after: dict[str, set[str]] = {}
    for edge in graph:
        after.setdefault(edge.importer, set()).add(edge.imported)
    reached: dict[str, set[str]] = {}
    for module in after:
        seen, todo = set[str](), [module]
        while todo:
            new = after.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reached[module] = seen
    return [edge for edge in graph if edge.importer in reached.get(edge.imported, ())]


def of_package() -> list[Edge]:
    modules = module_paths(ROOT, PACKAGE)
    trees = {module: ast.parse(path.read_text()) for module, path in sorted(modules.items())}
    rooms: dict[str, list[ast.Module]] = {}
    for module, tree in trees.items():
        rooms.setdefault(room_of(module), []).append(tree)
    return [
        edge
        for module, tree in trees.items()
        for edge in edges(module, tree, modules, rooms[room_of(module)])
    ]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_no_module_is_part_of_a_circle() -> None:
    graph = of_package()
    assert {edge.kind for edge in graph} == {
        "at import",
        "while type checking",
        "in a function",
        "in a table",
    }
    found = circular(graph)
    assert not found, "\n".join(["imports in a circle:", *map(str, found)])


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ({"a": "import p.b", "b": "import p.c", "c": ""}, []),
        (
            {"a": "from p import b", "b": "from p.c import x", "c": "import p.a"},
            ["p.a:1 imports p.b at import", "p.b:1 imports p.c at import", "p.c:1 imports p.a at import"],
        ),
        (
            {"a": "import p.b", "b": "if TYPE_CHECKING:\n    from p.a import x", "c": "import p.a"},
            ["p.a:1 imports p.b at import", "p.b:2 imports p.a while type checking"],
        ),
        (
            {"a": "import p.b", "b": "async def f():\n    from p import a", "c": "import p.a"},
            ["p.a:1 imports p.b at import", "p.b:2 imports p.a in a function"],
        ),
        ({"a": "import p.b.d, asyncio", "b": "", "c": "import p.a"}, []),
        (
            {"a": "from gazette.lazy import lazy_names\nx = {'f': 'p.b'}", "b": "import p.a", "c": ""},
            ["p.a:2 imports p.b in a table", "p.b:1 imports p.a at import"],
        ),
        ({"a": "x = ('p.b:run', 7)", "b": "y = 'p.a', 'p.a:run'", "c": "'p.a:run'"}, []),
    ],
)  # fmt: skip
def test_what_it_finds(texts: dict[str, str], found: list[str]) -> None:
    modules = {f"p.{name}": text for name, text in texts.items()}
    graph = [
        edge for name, text in modules.items() for edge in edges(name, ast.parse(text), modules)
    ]
    assert [str(edge) for edge in circular(graph)] == found


def imports_by_name(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that use a function which imports a module by its name."""
    functions = {"import_module", "__import__", "module_from_spec", "run_module", "resolve_name"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.Name | ast.Attribute):
            names = {node.id if isinstance(node, ast.Name) else node.attr}
        else:
            continue
        if names & functions:
            yield node.lineno


def test_no_module_imports_another_one_by_name() -> None:
    """A circle through `import_module` is seen by no check of imports, and found by users."""
    found = {
        module: [*imports_by_name(ast.parse(path.read_text()))]
        for module, path in module_paths(ROOT, PACKAGE).items()
    }
    importers = {module for module, lines in found.items() if lines}
    assert importers == {TABLES, *IMPORTERS_OF_USERS}, {
        module: found[module] for module in importers ^ {TABLES, *IMPORTERS_OF_USERS}
    }


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import importlib\nimportlib.import_module('gazette.client')", [2]),
        ("from importlib import import_module as get\nget('gazette.client')", [1]),
        ("f = getattr(builtins, 'x')\nf = __import__", [2]),
        ("import importlib.util\nimportlib.util.find_spec('numpy')", []),
    ],
)
def test_which_imports_by_name_it_finds(text: str, lines: list[int]) -> None:
    assert [*imports_by_name(ast.parse(text))] == lines


def layers() -> list[set[str]]:
    """Return the rooms of each layer of the contract, from the top down."""
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    rows = config["importlinter:contract:layers"]["layers"].split("\n")
    return [{one.strip() for one in row.split("|")} for row in rows if row.strip()]


def test_tables_name_modules_below_only() -> None:
    """`lint-imports` sees no tables."""
    height = {room: at for at, rooms in enumerate(reversed(layers())) for room in rooms}
    up = [
        edge
        for edge in of_package()
        if edge.kind == "in a table" and edge.importer != PACKAGE
        for importer, imported in [(room_of(edge.importer), room_of(edge.imported))]
        if importer != imported and height[importer] <= height[imported]
    ]
    assert not up, "\n".join(["tables that name what is above:", *map(str, up)])


def contract_of_pure_modules() -> tuple[set[str], set[str]]:
    """Return the modules of the contract `Pure`, and those that they may not import."""
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    contract = config["importlinter:contract:pure"]
    return set(contract["source_modules"].split()), set(contract["forbidden_modules"].split())


def test_every_pure_module_is_in_the_contract() -> None:
    """Modules that also import neither threads, loggers nor plug-ins cannot but be pure."""
    listed, forbidden = contract_of_pure_modules()
    graph = grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)
    impure = (forbidden | {"threading", "logging", "importlib"}) & graph.modules
    impure |= set().union(*map(graph.find_downstream_modules, impure))
    modules = {
        module
        for module, path in module_paths(ROOT, PACKAGE).items()
        if path.name != "__init__.py" and "_pb2" not in path.name
    }
    assert listed <= modules
    missing = sorted(modules - impure - listed)
    assert not missing, f"add to the contract Pure in .importlinter: {' '.join(missing)}"
