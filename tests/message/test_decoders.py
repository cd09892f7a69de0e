"""Decoding to a class by msgspec: in several threads at once, and by names and tags that are not ASCII.

These faults of msgspec show only in a process that has neither decoded nor encoded the class before. So each
case runs in a process of its own.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest

from gazette.labels import CONTENT_JSON_LINES
from gazette.message.framing.framing import framing_of

ROOT = Path(__file__).parents[2] / "gazette"

HEAD = """
import dataclasses, faulthandler, sys, threading, typing
import msgspec
from gazette import Message
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.framing.framing import MalformedMessage, framing_of
from gazette.message.values import ValueEncoding
faulthandler.enable()
"""

THREADS = r"""
sys.setswitchinterval(1e-6)
FIELDS = [(f"x{n}", int) for n in range(5)]

def classes(number):
    inner = {
        "Message": lambda: type("Inner", (Message,), {"__annotations__": dict(FIELDS)}),
        "struct": lambda: msgspec.defstruct("Inner", FIELDS),
        "dataclass": lambda: dataclasses.make_dataclass("Inner", FIELDS),
        "TypedDict": lambda: typing.TypedDict("Inner", dict(FIELDS)),
        "NamedTuple": lambda: typing.NamedTuple("Inner", FIELDS),
    }[sys.argv[1]]()
    return msgspec.defstruct("Outer", [("uuid", str), ("a", inner), ("b", list[inner])])

ITEM = b"[1,1,1,1,1]" if sys.argv[1] == "NamedTuple" else b'{"x0":1,"x1":1,"x2":1,"x3":1,"x4":1}'
LINE = b'{"uuid":"","a":%b,"b":[%b]}' % (ITEM, ITEM)
for number in range(150):
    outer = classes(number)
    begin, right = threading.Barrier(4), []

    def read():
        begin.wait()
        (message,) = framing_of(CONTENT_JSON_LINES, outer).decode(LINE + b"\n", 0).messages
        right.append(message == ValueEncoding(outer).decode(LINE, "a value"))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert right == [True] * 4
"""

NAMES = r"""
@dataclasses.dataclass
class Inner:
    größe: float = 0.0

class Typed(typing.TypedDict):
    größe: float

class Named(typing.TypedDict, total=False):
    größe: float

@dataclasses.dataclass
class Measured:
    uuid: str = ""
    π: float = 0.0
    部分: list[Inner] = dataclasses.field(default_factory=list)
    ключ: dict[str, Typed | None] = dataclasses.field(default_factory=dict)
    ключи: tuple[Named, ...] = ()

LINE = '{"uuid":"","π":3.14,"部分":[{"größe":1.5}],"ключ":{"a":{"größe":2.5}},"ключи":[{"größe":3.5}]}'
if sys.argv[1] == "message":
    (read,) = framing_of(CONTENT_JSON_LINES, Measured).decode(LINE.encode() + b"\n", 0).messages
else:
    read = ValueEncoding(Measured).decode(LINE.encode(), "a value")
assert (read.π, read.部分[0].größe) == (3.14, 1.5), read
assert (read.ключ, read.ключи) == ({"a": {"größe": 2.5}}, ({"größe": 3.5},)), read
"""

TAGS = r"""
CASES = {
    "tag": (dict(tag="größe"), '{"type":"größe","uuid":""}', '{"type":"other","uuid":""}'),
    "field": (dict(tag="A", tag_field="тип"), '{"тип":"A","uuid":""}', '{"тип":"B","uuid":""}'),
    "array": (dict(tag="größe", array_like=True), '["größe",""]', '["other",""]'),
}
options, good, bad = CASES[sys.argv[1]]
tagged = msgspec.defstruct("Tagged", [("uuid", str)], **options)
framing = framing_of(CONTENT_JSON_LINES, tagged)
assert framing.decode(good.encode() + b"\n", 0).messages == [tagged("")]
try:
    framing.decode(bad.encode() + b"\n", 0)
except MalformedMessage:
    pass
else:
    raise AssertionError("another tag is accepted")
"""

UNION = r"""
A = msgspec.defstruct("A", [("uuid", str)], tag=True, tag_field="тип")
B = msgspec.defstruct("B", [("uuid", str)], tag=True, tag_field="тип")
framing = framing_of(CONTENT_JSON_LINES, A | B)
assert framing.decode('{"тип":"B","uuid":""}'.encode() + b"\n", 0).messages == [B("")]
"""

FORK = r"""
import os
begun, forking = threading.Event(), threading.Event()
os.register_at_fork(before=forking.set)

def annotation():
    begun.set()
    assert forking.wait(20)
    return int

@dataclasses.dataclass
class Slow:
    a: "annotation()"

thread = threading.Thread(target=ValueEncoding, args=(Slow,))
thread.start()
assert begun.wait(20)
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(20, exit=True)
    assert ValueEncoding(Slow).decode(b'{"a":1}') == Slow(1)
    os._exit(0)
thread.join()
assert os.waitpid(child, 0)[1] == 0
"""


def run(script: str, argument: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script, argument], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["Message", "struct", "dataclass", "TypedDict", "NamedTuple"])
def test_threads_may_decode_to_a_class_at_once(kind: str) -> None:
    run(THREADS, kind)


@pytest.mark.parametrize("what", ["message", "value"])
def test_a_field_is_read_whose_name_is_not_ascii(what: str) -> None:
    run(NAMES, what)


@pytest.mark.parametrize("what", ["tag", "field", "array"])
def test_a_tag_is_known_that_is_not_ascii(what: str) -> None:
    run(TAGS, what)


def test_a_union_is_read_whose_tag_field_is_not_ascii() -> None:
    run(UNION, "")


def test_a_child_may_decode_that_is_forked_while_a_thread_makes_a_decoder() -> None:
    run(FORK, "")


class Late(pydantic.BaseModel, defer_build=True):
    uuid: str = ""


def test_a_model_is_complete_before_a_thread_reads_it() -> None:
    """Before 2.14, threads that complete a model at once read messages of its base class, or none."""
    assert not Late.__pydantic_complete__
    framing_of(CONTENT_JSON_LINES, Late)
    assert Late.__pydantic_complete__


_MAKERS = {"msgspec.json.Decoder", "msgspec.msgpack.Decoder", "msgspec.convert"}
_DECODE = {"msgspec.json.decode", "msgspec.msgpack.decode"}


def decoded_elsewhere(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that show a type to msgspec, to decode or convert to it, or to tell of it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        is_typed = len(node.args) > 1 or any(one.arg == "type" for one in node.keywords)
        if (
            called.endswith("inspect.type_info")
            or (called in _MAKERS and node.args)
            or (called in _DECODE and is_typed)
        ):
            yield node.lineno


def test_all_decoders_are_made_in_one_place() -> None:
    found = {
        (str(path.relative_to(ROOT)), line)
        for path in ROOT.rglob("*.py")
        for line in decoded_elsewhere(ast.parse(path.read_text()))
    }
    # These two convert to classes of Python itself, of which msgspec learns nothing.
    plain = {"message/keys.py", "message/labelled_time.py"}
    assert {path for path, _ in found} == {"runtime/decoders.py", *plain}, found


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("msgspec.json.decode(data)\nmsgspec.json.decode(data, type=Word)", [2]),
        ("msgspec.msgpack.Decoder()\nmsgspec.msgpack.Decoder(Word)", [2]),
        ("msgspec.convert(value, Word)\nhpack.Decoder(1)", [1]),
        ("type_info(Word)\nmsgspec.inspect.type_info(Word)\ninspect.type_info(Word)", [2, 3]),
    ],
)
def test_which_decoders_it_finds(text: str, lines: list[int]) -> None:
    assert [*decoded_elsewhere(ast.parse(text))] == lines
