"""Hints for the common mistakes of applications: what a finding shows, and the line of the user's code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.runtime.user_code import is_user_file, shown_path

HINTS: Final = {
    "self": "State in `self` is lost when another member takes the shard over. Keep it in the store.",
    "global": "A global name is of one process. Another owner of the shard has another value. Keep it in the"
    " store.",
    "random": "Random numbers differ each time a message is consumed. Derive them from the message, or from"
    " its UUID.",
    "time": "The clock of the system is another one at each attempt. Use `shard.now`, `envelope.time` or a"
    " field of the message.",
    "network": "A callback may run again for the same message, and its calls to other systems are not undone."
    " Publish a message, and let another program call.",
    "publish": "Only `publisher.publish_uncommitted` is a part of the transaction. Another publisher"
    " publishes again when messages are consumed again.",
    "connection": "Only `store.execute` and `store.transaction()` are a part of the transaction. Another"
    " connection of the database commits for itself, and again when messages are consumed again.",
    "set": "The order of a set, and `hash()`, differ from process to process. Sort, or use a dict.",
    "retry": "Effects before a failed attempt, or before `DeferToNextTransaction`, stay. Let the error end"
    " the transaction, or raise before any effect.",
    "swallow": "An error of the store or the publisher was caught, and the transaction went on without that"
    " effect. Catch the errors of your own code only.",
    "float": "Sums of floats depend on where transactions or tables end. Add the values one by one, or use"
    " integers or `Decimal`.",
    "batches": "The result depends on where transactions or tables end, which differs from run to run. If"
    " it may, give --transactions recorded.",
    "table": "The result depends on where tables end, which differs from run to run. Treat all rows alike:"
    " the first row of a table is no special one.",
    "thread": "A thread of its own goes on after the callback has returned, and after the shard has moved. Do"
    " the work in the callback.",
    "cache": "A cache has values of other transactions, and of former owners. Read them from the store.",
    "file": "Files and environment variables are no part of the state: another owner has others. Keep it in"
    " the store.",
    "process": "Addresses, and numbers of a process, differ from owner to owner. Use values of the message.",
    "varies": "The same messages give another result each time. Look for globals, files, addresses and random"
    " numbers.",
    "raises": "A callback raises for a message of the declared types, or for the state at that moment. Let it"
    " handle both, or say by --load which messages come.",
    "closed": "A destroyed store was used: that of another shard, or of a former owner. Use the store that"
    " the callback gets.",
    "restart": "The state that a new owner recovers is another one. Keep all state in the store.",
    "query": "A query gets a store or a view, and reads it by its own methods. A cache in front of it answers"
    " old states. So does a view that does not follow its log.",
    "travel": "The recovery log holds another state than the store had. Change the state by the methods of"
    " the store, and no file beside it.",
    "backfill": "A backfill must build the state that a shard has after the same messages.",
    "memory": "The result depends on what was not in the store: attributes, globals, files, or errors that"
    " were caught.",
    "hang": "A callback does not return, or the seed has more to do than --timeout permits.",
    "death": "The process ended in your code, or in a library of C that it calls.",
}
"""The hint of each mistake."""

_ORDER: Final = {
    "time": ("time",),
    "varies": ("random", "global", "time", "process", "file", "cache", "self"),
    "set": ("set", "process", "file"),
    "batches": ("table", "float", "retry", "self", "global", "cache"),
    "extra output": ("publish", "self", "global", "cache"),
    "restart": ("self", "global", "cache"),
    "memory": ("self", "global", "publish", "connection", "retry", "swallow", "cache", "file"),
    "query": ("query", "cache"),
    "failed call": ("swallow", "retry", "self", "global", "publish", "cache"),
}
"""The mistakes that a cause may come from, the likeliest first."""
_CALLBACKS: Final = frozenset(
    {
        "consume_message",
        "consume_messages",
        "consume_table",
        "on_timer",
        "begin_transaction",
        "finalize_transaction",
        "finished_transaction",
    }
)
_MUTATORS: Final = frozenset(
    {
        "append",
        "add",
        "update",
        "pop",
        "extend",
        "insert",
        "remove",
        "clear",
        "setdefault",
        "discard",
    }
)
_RANDOM: Final = frozenset(
    {"random", "secrets", "uuid1", "uuid4", "urandom", "Random", "SystemRandom"}
)
_TIMES: Final = frozenset(
    {"time", "time_ns", "monotonic", "now", "utcnow", "today", "perf_counter"}
)
_OF_PROCESS: Final = frozenset({"id", "getpid", "get_ident", "get_native_id", "gethostname"})
_OF_FILES: Final = frozenset(
    {"open", "getenv", "read_text", "read_bytes", "write_text", "write_bytes"}
)
_OF_ONE_ROW: Final = frozenset({"first", "last", "head", "tail", "mean"})
"""Functions of Arrow whose result depends on where a table ends."""
_CACHES: Final = frozenset({"cache", "lru_cache", "cached_property"})
_CONNECTS: Final = frozenset({"begin", "connect", "raw_connection"})
_PUBLISHES: Final = frozenset({"standalone_publisher", "publish_committed", "publish_from_loop"})


@dataclass(frozen=True, slots=True)
class Suspect:
    """A line of the user's code that may be a mistake."""

    mistake: str
    place: str


def advice(cause: str, application: type, faults: Sequence[str] = ()) -> tuple[str, str]:
    """Return the hint of a cause, and the line of the user's code; the line may be empty."""
    if cause in ("memory", "extra output") and len(set(faults)) == 1:
        alone = {"fail a call": "failed call", "rebuild by a backfill": "backfill"}
        cause = alone.get(faults[0], cause)
    suspects = list(_suspects(application))
    for mistake in _ORDER.get(cause, (cause,)):
        for suspect in suspects:
            if suspect.mistake == mistake:
                return HINTS[mistake], suspect.place
    fallback = {"extra output": "publish", "failed call": "swallow"}
    return HINTS.get(fallback.get(cause, cause), ""), ""


def _suspects(application: type) -> Iterator[Suspect]:
    """Yield suspects in the user's modules, in callbacks first."""
    files: dict[str, ast.Module] = {}
    for base in application.__mro__:
        module = sys.modules.get(base.__module__)
        file = None if module is None else getattr(module, "__file__", None)
        if isinstance(file, str) and is_user_file(file) and file not in files:
            files[file] = ast.parse(Path(file).read_text())
    for file, tree in files.items():
        module_names = _mutable_names(tree)
        functions = [
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        functions.sort(key=lambda function: function.name not in _CALLBACKS)
        for function in functions:
            is_setup = function.name in ("__init__", "initialize")
            for mistake, line in _mistakes(function, module_names, is_setup=is_setup):
                if mistake == "connection" and (is_setup or function.name == "new_store"):
                    continue  # A connection at this place makes tables.
                yield Suspect(mistake, f"{shown_path(file)}:{line} in {function.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "float":
                yield Suspect("float", f"{shown_path(file)}:{node.lineno}")


def _mutable_names(tree: ast.Module) -> set[str]:
    """Return the names of values and classes at the top level of a module."""
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _mistakes(
    function: ast.FunctionDef | ast.AsyncFunctionDef, module_names: set[str], *, is_setup: bool
) -> Iterator[tuple[str, int]]:
    sets = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and _is_set(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for decorator in function.decorator_list:
        name = ast.unparse(decorator).partition("(")[0].rpartition(".")[2]
        if name in _CACHES:
            yield "cache", decorator.lineno
    is_table = function.name == "consume_table"
    for node in ast.walk(function):
        match node:
            case ast.Subscript(slice=ast.Constant(value=int())) if is_table:
                yield "table", node.lineno
            case ast.Subscript(slice=ast.UnaryOp(operand=ast.Constant(value=int()))) if is_table:
                yield "table", node.lineno
            case ast.Constant(value=str() as name) if is_table and name in _OF_ONE_ROW:
                yield "table", node.lineno
            case ast.Attribute(value=ast.Name(id="os"), attr="environ"):
                yield "file", node.lineno
            case ast.Global():
                yield "global", node.lineno
            case ast.Assign(targets=targets) if not is_setup:
                yield from _assigned(targets, module_names, node.lineno)
            case ast.AugAssign(target=target) if not is_setup:
                yield from _assigned([target], module_names, node.lineno)
            case ast.Call():
                yield from _called(node, sets, module_names, is_setup=is_setup)
            case ast.For(iter=iterated) | ast.comprehension(iter=iterated):
                if _is_set(iterated) or (isinstance(iterated, ast.Name) and iterated.id in sets):
                    yield "set", getattr(node, "lineno", iterated.lineno)
            case ast.Raise(exc=ast.Call(func=ast.Name(id="DeferToNextTransaction"))):
                yield "retry", node.lineno
            case ast.Raise(exc=ast.Name(id="DeferToNextTransaction")):
                yield "retry", node.lineno
            case ast.Try() if function.name in _CALLBACKS or not is_setup:
                yield from _caught(node, function)


def _assigned(
    targets: Sequence[ast.expr], module_names: set[str], line: int
) -> Iterator[tuple[str, int]]:
    for target in targets:
        owner: ast.AST = target
        while isinstance(owner, (ast.Subscript, ast.Attribute)):
            if isinstance(owner, ast.Attribute) and _is_self(owner.value):
                yield "self", line
                break
            owner = owner.value
        if owner is not target and isinstance(owner, ast.Name) and owner.id in module_names:
            yield "global", line


def _called(
    node: ast.Call, sets: set[str], module_names: set[str], *, is_setup: bool
) -> Iterator[tuple[str, int]]:
    function = node.func
    if isinstance(function, ast.Name):
        if function.id in _RANDOM:
            yield "random", node.lineno
        if function.id in ("time", "monotonic"):
            yield "time", node.lineno
        if function.id in _OF_PROCESS:
            yield "process", node.lineno
        if function.id in _OF_FILES:
            yield "file", node.lineno
        if function.id == "hash" or (
            function.id in ("list", "tuple", "enumerate", "iter")
            and node.args
            and (_is_set(node.args[0]) or _is_name_of(node.args[0], sets))
        ):
            yield "set", node.lineno
        if function.id == "next" and node.args and _is_name_of(node.args[0], module_names):
            yield "global", node.lineno
        return
    if not isinstance(function, ast.Attribute):
        return
    owner, name = function.value, function.attr
    text = ast.unparse(owner)
    if text in ("random", "secrets", "numpy.random", "np.random") or name in _RANDOM - {"random"}:
        yield "random", node.lineno
    if name in _TIMES and text in (
        "time",
        "datetime",
        "date",
        "datetime.datetime",
        "datetime.date",
    ):
        yield "time", node.lineno
    if name in _OF_PROCESS - {"id"}:
        yield "process", node.lineno
    if name in _OF_FILES:
        yield "file", node.lineno
    if name == "pop" and not node.args and (_is_set(owner) or _is_name_of(owner, sets)):
        yield "set", node.lineno
    if name in _CONNECTS and "engine" in text:
        yield "connection", node.lineno
    if name in _PUBLISHES:
        yield "publish", node.lineno
    if name == "join" and node.args and (_is_set(node.args[0]) or _is_name_of(node.args[0], sets)):
        yield "set", node.lineno
    if name in _MUTATORS and not is_setup:
        if isinstance(owner, ast.Attribute) and _is_self(owner.value):
            yield "self", node.lineno
        elif _is_name_of(owner, module_names):
            yield "global", node.lineno


def _caught(node: ast.Try, function: ast.AST) -> Iterator[tuple[str, int]]:
    loops = [loop for loop in ast.walk(function) if isinstance(loop, (ast.For, ast.While))]
    for handler in node.handlers:
        names = [] if handler.type is None else ast.unparse(handler.type).strip("()").split(", ")
        is_wide = handler.type is None or {"BaseException", "Exception"} & set(names)
        raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
        if any(node in ast.walk(loop) for loop in loops):
            yield "retry", handler.lineno
        elif is_wide and not raises:
            yield "swallow", handler.lineno


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_name_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_set(node: ast.AST) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    if isinstance(node, ast.BinOp):
        return _is_set(node.left) or _is_set(node.right)
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("set", "frozenset")
    )


def source_line(place: str) -> str:
    """Return the line of a place such as ``app.py:17 in parse``; empty without a line."""
    file, _, rest = place.partition(":")
    number = rest.split(" ")[0]
    if not number.isdigit() or not Path(file).is_file():
        return ""
    lines = Path(file).read_text().splitlines()
    return lines[int(number) - 1].strip() if int(number) <= len(lines) else ""
