"""The modules of `gazette` import each other in no circle, also while type checking."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import grimp
import pytest

from tools.house.sources import GENERATED, sources, within

ROOT = Path(__file__).parents[1]
PACKAGE = "gazette"
TABLES = "gazette.lazy"
"""The module that imports others of the package by name: those of its callers' tables."""
NAME = r"[\w.]+(:\w+)?"
IMPORTERS_OF_USERS = {
    "gazette.history.backfill.definition": "the module of a backfill",
    "gazette.gazctl.declared_output": "the module of --declared",
    "gazette.history.columns": "the module of a message class",
    "gazette.run.simulated": "the module of --load or --invariant",
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


@dataclass(frozen=True, slots=True)
class Imports:
    """The imports of one module."""

    statements: tuple[tuple[str, ast.Import | ast.ImportFrom], ...]
    """Statements, each with the kind of its edges."""
    names: tuple[tuple[int, str], ...]
    """Lines with texts that may name a module, or something in one behind a colon."""
    by_name: tuple[int, ...]
    """Lines that use a function which imports a module by its name."""

    @property
    def has_table(self) -> bool:
        """True if the module imports others by a table."""
        return any(getattr(node, "module", None) == TABLES for _, node in self.statements)


def imports_of(tree: ast.Module) -> Imports:
    """Return the imports of a module, wherever they stand in it."""
    nodes = [*ast.walk(tree)]
    return Imports(
        tuple(import_statements(tree, "at import")),
        tuple(
            (node.lineno, node.value)
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if re.fullmatch(NAME, node.value)
        ),
        tuple(imports_by_name(nodes)),
    )


def import_statements(
    node: ast.AST, kind: str
) -> Iterator[tuple[str, ast.Import | ast.ImportFrom]]:
    """Yield the imports within a node, with their kinds."""
    for child in within(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield kind, child
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from import_statements(child, "in a function")
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from import_statements(child, "while type checking")
        else:
            yield from import_statements(child, kind)


def imported(node: ast.Import | ast.ImportFrom, modules: Collection[str]) -> list[str]:
    """Return those of ``modules`` that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert node.module is not None, "imports are absolute"
        found = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in modules else node.module for name in found]
    return [name for name in dict.fromkeys(names) if name in modules]


def edges(
    module: str, one: Imports, modules: Collection[str], tables: Iterable[Imports] = ()
) -> Iterator[Edge]:
    """Yield the imports of ``modules`` by one module.

    A module that imports others by name does so by a table: its own, or those of ``tables``.
    """
    if one.has_table:
        own = (found for found in one.names if found[1].partition(":")[0] in modules)
        others = (found for table in tables for found in table.names if ":" in found[1])
        listed = ((line, name.partition(":")[0]) for line, name in (*own, *others))
        yield from (
            Edge(module, name, line, "in a table")
            for line, name in dict.fromkeys(listed)
            if name in modules
        )
    for kind, node in one.statements:
        names = imported(node, modules)
        yield from (Edge(module, name, node.lineno, kind) for name in names if name != module)


def circular(graph: Sequence[Edge]) -> list[Edge]:
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


@cache
def package() -> Mapping[str, Imports]:
    """Return the imports of the modules of the package, by their names."""
    found = sources(ROOT, PACKAGE, generated=True)
    return {one.module: imports_of(one.tree) for one in found}


@cache
def of_package() -> Sequence[Edge]:
    rooms: dict[str, list[Imports]] = {}
    for module, one in package().items():
        rooms.setdefault(room_of(module), []).append(one)
    return [
        edge
        for module, one in package().items()
        for edge in edges(module, one, package(), rooms[room_of(module)])
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


@pytest.mark.parametrize("room", ["broker", "consumer", "net"])
def test_the_parts_of_a_room_import_each_other_in_no_circle(room: str) -> None:
    """A part is a directory or a module directly in the room."""
    inside = f"{PACKAGE}.{room}."
    assert not circular(parts_of(of_package(), inside))


def parts_of(graph: Sequence[Edge], inside: str) -> list[Edge]:
    """Return the edges between different parts of a room, by the names of the parts."""

    def part(module: str) -> str:
        return module.removeprefix(inside).partition(".")[0]

    return [
        replace(edge, importer=part(edge.importer), imported=part(edge.imported))
        for edge in graph
        if edge.importer.startswith(inside)
        and edge.imported.startswith(inside)
        and part(edge.importer) != part(edge.imported)
    ]


def test_a_circle_of_parts_is_found() -> None:
    there = Edge("p.a.one.x", "p.a.two.y", 1, "at import")
    back = Edge("p.a.two.z", "p.a.one.w", 1, "at import")
    aside = Edge("p.a.two.z", "p.b.one.w", 1, "at import")
    assert not circular(parts_of([there, aside], "p.a."))
    assert len(circular(parts_of([there, back, aside], "p.a."))) == 2


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
        edge
        for name, text in modules.items()
        for edge in edges(name, imports_of(ast.parse(text)), modules)
    ]
    assert [str(edge) for edge in circular(graph)] == found


def imports_by_name(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines that use a function which imports a module by its name."""
    functions = {"import_module", "__import__", "module_from_spec", "run_module", "resolve_name"}
    for node in nodes:
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
    found = {module: one.by_name for module, one in package().items()}
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
    assert [*imports_of(ast.parse(text)).by_name] == lines


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
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in (ROOT / PACKAGE).rglob("*.py")
        if path.name != "__init__.py" and not path.name.endswith(GENERATED)
    }
    assert listed <= modules
    missing = sorted(modules - impure - listed)
    assert not missing, f"add to the contract Pure in .importlinter: {' '.join(missing)}"
