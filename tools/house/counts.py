"""The counts of a source tree: lines by room, sizes, and excesses over limits."""

from __future__ import annotations

import ast
import statistics
import subprocess
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tools.house.budget import ARGUMENTS_MAX, FIELDS_MAX, FILE_MAX, FUNCTION_MAX, VAGUE
from tools.house.sources import GENERATED, Source, source, within

_SHOWN: Final = 6


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of one or more files, by kind."""

    files: int = 0
    all: int = 0
    code: int = 0
    docstrings: int = 0
    comments: int = 0
    blank: int = 0

    def __add__(self, other: Lines) -> Lines:
        return Lines(
            self.files + other.files,
            self.all + other.all,
            self.code + other.code,
            self.docstrings + other.docstrings,
            self.comments + other.comments,
            self.blank + other.blank,
        )

    @classmethod
    def of(cls, text: str, nodes: Sequence[ast.AST]) -> Lines:
        lines, docs, quoted = text.splitlines(), _docstring_lines(nodes), _quoted_lines(nodes)
        kinds = Counter(
            "docstrings"
            if number in docs
            else "blank"
            if not (stripped := line.lstrip())
            else "comments"
            if stripped[0] == "#" and number not in quoted
            else "code"
            for number, line in enumerate(lines, 1)
        )
        return cls(1, len(lines), **kinds)


@dataclass(slots=True)
class House:
    """Everything that was counted. Places are texts such as ``gazette/a/b.py:7 Name``."""

    rooms: dict[str, Lines] = field(default_factory=lambda: defaultdict(Lines))
    files: list[tuple[int, str]] = field(default_factory=list)
    functions: list[tuple[int, str]] = field(default_factory=list)
    wide_classes: list[tuple[int, str]] = field(default_factory=list)
    long_constructors: list[tuple[int, str]] = field(default_factory=list)
    wheels: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Lines of each distribution."""
    vague: Counter[str] = field(default_factory=Counter)
    """By name: variables and parameters whose name does not say what they hold."""

    @property
    def long_files(self) -> list[tuple[int, str]]:
        return [one for one in self.files if one[0] > FILE_MAX]

    def show(self) -> Iterator[str]:
        """Yield the lines of a report."""
        yield f"{'room':16}{'files':>7}{'lines':>8}{'code':>8}{'docs':>7}{'comment':>8}{'blank':>7}"
        ordered = sorted(self.rooms.items(), key=lambda room: -room[1].all)
        for name, lines in [*ordered, ("total", sum(self.rooms.values(), Lines()))]:
            yield (
                f"{name:16}{lines.files:7}{lines.all:8}{lines.code:8}{lines.docstrings:7}"
                f"{lines.comments:8}{lines.blank:7}"
            )
        sizes, spans = sorted(size for size, _ in self.files), sorted(n for n, _ in self.functions)
        yield f"files: median {statistics.median(sizes):.0f}; " + _worst(
            f"over {FILE_MAX} lines", self.long_files
        )
        long = [one for one in self.functions if one[0] > FUNCTION_MAX]
        yield (
            f"functions: {len(spans)}, median {statistics.median(spans):.0f}, "
            f"p90 {spans[int(len(spans) * 0.9)]}; " + _worst(f"over {FUNCTION_MAX} lines", long)
        )
        yield _worst(f"classes with more than {FIELDS_MAX} fields", self.wide_classes)
        title = f"constructors with more than {ARGUMENTS_MAX} arguments"
        yield _worst(title, self.long_constructors)
        wheels = sorted(self.wheels.items())
        yield "distributions: " + ", ".join(f"{name} {lines} lines" for name, lines in wheels)
        names = ", ".join(f"{name} {number}" for name, number in self.vague.most_common())
        yield f"vague names of variables: {self.vague.total()}" + (f" ({names})" if names else "")


def count(root: Path, package: str = "gazette") -> House:
    """Count the files of ``package`` that git knows below ``root``, without generated ones."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", package], capture_output=True, text=True, check=True
    )
    house, of_client = House(), _rooms_of_client(root)
    for name in listed.stdout.split():
        if name.endswith(".py") and not name.endswith(GENERATED) and (root / name).exists():
            _add(house, source(root / name, root), of_client)
    return house


def _rooms_of_client(root: Path) -> set[str]:
    """Return what ``pygazette`` leaves to ``pygazette-client``: paths of two parts."""
    project = root / "pyproject.toml"
    if not project.exists():
        return set()
    wheel = tomllib.loads(project.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    return {path.removeprefix("/") for path in wheel["exclude"]}


def room_of(name: str) -> str:
    """Return the room of a file: its folder in the package, or ``(root)``."""
    parts = name.split("/")
    return f"{parts[1]}/" if len(parts) > 2 else "(root)"


def over(rooms: Mapping[str, Lines], budget: Mapping[str, int]) -> list[str]:
    """Return a sentence for each room that has more lines than the budget, or is not in it."""
    return [
        f"{name} has {lines.all} lines; its budget in tools/house/budget.py is {budget.get(name, 0)}"
        for name, lines in sorted(rooms.items())
        if lines.all > budget.get(name, 0)
    ]


def _add(house: House, one: Source, of_client: set[str]) -> None:
    name, nodes = one.name, [*ast.walk(one.tree)]
    lines = Lines.of(one.text, nodes)
    house.rooms[room_of(name)] += lines
    is_client = "/".join(name.split("/")[:2]) in of_client
    house.wheels["pygazette-client" if is_client else "pygazette"] += lines.all
    house.files.append((lines.all, name))
    for node in nodes:
        if (
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE
        ) or (isinstance(node, ast.arg) and node.arg in VAGUE):
            house.vague[node.id if isinstance(node, ast.Name) else node.arg] += 1
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            place = f"{name}:{node.lineno} {node.name}"
            house.functions.append(((node.end_lineno or node.lineno) - node.lineno + 1, place))
            arguments = len(node.args.args) + len(node.args.kwonlyargs) - 1
            if node.name == "__init__" and arguments > ARGUMENTS_MAX:
                house.long_constructors.append((arguments, place))
        elif isinstance(node, ast.ClassDef) and (fields := len(_fields(node))) > FIELDS_MAX:
            house.wide_classes.append((fields, f"{name}:{node.lineno} {node.name}"))


def _fields(node: ast.ClassDef) -> set[str]:
    """Return the fields of a class: those that it declares, and those that its methods set."""
    found = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in _statements(node):
        if isinstance(each, ast.Assign | ast.AnnAssign):
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    found.add(target.attr)
    return found


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for each in within(node):
        yield each
        yield from _statements(each)


def _docstring_lines(nodes: Sequence[ast.AST]) -> set[int]:
    lines: set[int] = set()
    for node in nodes:
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else []:
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                lines |= set(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    return lines


def _quoted_lines(nodes: Sequence[ast.AST]) -> set[int]:
    """Return the lines that begin inside of a text, or between two parts of one."""
    lines: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr):
            lines |= set(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
    return lines


def _worst(title: str, found: list[tuple[int, str]]) -> str:
    worst = "; ".join(f"{n} {place}" for n, place in sorted(found, reverse=True)[:_SHOWN])
    return f"{title}: {len(found)}" + (f"; worst: {worst}" if worst else "")
