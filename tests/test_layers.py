"""The modules of `gazette` import each other in no circle, also while type checking."""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "gazette"


@dataclass(frozen=True, slots=True)
class Edge:
    """An import of one module by another."""

    importer: str
    imported: str
    line: int
    kind: str
    """``at import``, ``while type checking`` or ``in a function``."""

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


def edges(module: str, tree: ast.AST, modules: Mapping[str, object]) -> Iterator[Edge]:
    """Yield the imports of ``modules`` by one module, wherever they stand in it."""

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

    return visit(tree, "at import")


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
    return [
        edge
        for module, path in sorted(modules.items())
        for edge in edges(module, ast.parse(path.read_text()), modules)
    ]


def test_no_module_is_part_of_a_circle() -> None:
    graph = of_package()
    assert {edge.kind for edge in graph} == {"at import", "while type checking", "in a function"}
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
    ],
)  # fmt: skip
def test_what_it_finds(texts: dict[str, str], found: list[str]) -> None:
    modules = {f"p.{name}": text for name, text in texts.items()}
    graph = [
        edge for name, text in modules.items() for edge in edges(name, ast.parse(text), modules)
    ]
    assert [str(edge) for edge in circular(graph)] == found


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
