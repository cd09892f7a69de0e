"""Log lines: one per record, with the facts that it carries, in the form that was asked for."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gazette.errors import Unavailable
from gazette.runtime.log_limit import OncePerMinute
from gazette.runtime.log_setup import LEVELS, setup
from tools.house.sources import sources

ROOT = Path(__file__).parent.parent
_METHODS = {"debug", "info", "warning", "error", "critical", "exception", "log"}


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    chatty = {name: logging.getLogger(name).level for name in ("urllib3", "asyncio")}
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in chatty.items():
        logging.getLogger(name).setLevel(before)


def test_text_lines_have_time_level_name_and_facts(stream: io.StringIO) -> None:
    setup("info", "text", stream=stream)
    log = logging.getLogger("gazette.test")
    log.debug("not this")
    log.warning("lease of %s lost", "x", extra={"revision": 5})
    (line,) = stream.getvalue().splitlines()
    time, _, rest = line.partition(" ")
    assert time.endswith("Z")
    assert len(time) == len("2026-01-31T12:00:00.000Z")
    assert rest == "warning gazette.test: lease of x lost revision=5"


def test_texts_of_strangers_do_not_control_the_terminal(stream: io.StringIO) -> None:
    setup("info", "text", stream=stream)
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        logging.getLogger("gazette.test").exception("%(said)s", {"said": "\x1b]0;x\x07"})
    assert r"\x1b]0;x\x07" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_color_is_only_around_the_level(stream: io.StringIO) -> None:
    setup("info", "color", stream=stream)
    logging.getLogger("gazette.test").error("broken")
    assert "\x1b[31merror\x1b[0m gazette.test: broken\n" in stream.getvalue()


def test_json_lines_are_objects_with_facts_and_errors(stream: io.StringIO) -> None:
    setup("trace", "json", stream=stream)
    log = logging.getLogger("gazette.test")
    log.log(LEVELS["trace"], "detail", extra={"path": io.StringIO})
    try:
        raise ValueError("cause")
    except ValueError:
        log.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["level"], first["msg"], first["logger"]) == ("trace", "detail", "gazette.test")
    assert first["path"] == str(io.StringIO)
    assert second["level"] == "error"
    assert (second["error"], second["error_type"]) == ("cause", "ValueError")
    assert second["traceback"].endswith("ValueError: cause")


def test_what_a_message_names_is_a_field(stream: io.StringIO) -> None:
    setup("info", "json", stream=stream)
    log = logging.getLogger("gazette.test")
    error = Unavailable("no answer", hint="Start it.", peer="b", journal="another")
    log.warning("pulse of %(journal)s: %(error)s", {"journal": "a/b", "error": error})
    log.warning("after %(seconds).0f s: %(reason)s", {"seconds": 1.25, "reason": KeyError()})
    log.warning("in the form of libraries: %s", error)
    one, two, three = (json.loads(line) for line in stream.getvalue().splitlines())
    assert one.pop("time").endswith("Z")
    assert one == {
        "level": "warning",
        "logger": "gazette.test",
        "msg": "pulse of a/b: no answer (peer=b, journal=another)",
        "journal": "a/b",
        "error": "no answer (peer=b, journal=another)",
        "error_type": "Unavailable",
        "hint": "Start it.",
        "peer": "b",
    }
    assert (two["seconds"], two["reason"], two["error_type"]) == (1.25, "KeyError()", "KeyError")
    assert (three["hint"], three["journal"]) == ("Start it.", "another")


def test_no_value_costs_a_line_or_makes_it_no_json(stream: io.StringIO) -> None:
    """Whatever code logs by name: numbers that JSON has not, keys that are no texts, circles."""
    setup("info", "json", stream=stream)
    log = logging.getLogger("gazette.test")
    circle: list[object] = []
    circle.append(circle)
    for value in (float("nan"), float("inf"), {(1, 2): 3}, circle):
        log.info("it is %(value)s of %(count)d", {"value": value, "count": 7})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    lines = [json.loads(one, parse_constant=refuse) for one in stream.getvalue().splitlines()]
    assert [line["value"] for line in lines] == ["nan", "inf", "{(1, 2): 3}", "[[...]]"]
    assert [line["count"] for line in lines] == [7] * 4
    assert all(line["level"] == "info" for line in lines)


def test_text_has_the_hints_of_errors(stream: io.StringIO) -> None:
    setup("info", "text", stream=stream)
    log = logging.getLogger("gazette.test")
    log.warning("x: %(error)s", {"error": Unavailable("no answer", hint="Start it.")})
    log.warning("x: %(error)s", {"error": Unavailable("no answer")})
    log.critical("x: %(error)s", {"error": Unavailable("no answer")})
    log.warning("half of a pair: %(error)s", {"error": "\ud800"})
    lines = [line.partition("gazette.test: ")[2] for line in stream.getvalue().splitlines()]
    assert lines == [
        "x: no answer. Start it.",
        "x: no answer",
        f"x: no answer. {Unavailable.default_hint}",
        "half of a pair: \\ud800",
    ]


def test_log_calls_name_what_they_are_about() -> None:
    """In one form, by names that docs/operating.md explains."""
    page = (ROOT / "docs" / "operating.md").read_text()
    section = page[page.index("### Logs") :].partition("\n## ")[0]
    documented = set(re.findall(r"`([a-z_]+)`", section))
    calls = 0
    for one in sources(ROOT, "gazette"):
        for node in ast.walk(one.tree):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "log"
                and node.func.attr in _METHODS
            ):
                continue
            calls += 1
            where = f"{one.name}:{node.lineno}"
            values = node.args[2:] if node.func.attr == "log" else node.args[1:]
            for word in node.keywords:
                if word.arg == "extra":  # Facts are in the message; a cause is not a fact.
                    assert isinstance(word.value, ast.Dict), where
                    assert [ast.literal_eval(key) for key in word.value.keys if key] == ["cause"]
            if not values:
                continue
            value = values[0]
            assert isinstance(value, ast.Dict), f"{where}: values by name, in one dict"
            names = {key.value for key in value.keys if isinstance(key, ast.Constant)}
            assert len(names) == len(value.keys), where
            assert names <= documented, f"{where}: {names - documented} is not in docs/operating.md"
    assert calls > 60


def test_libraries_that_speak_of_every_request_are_kept_to_warnings(stream: io.StringIO) -> None:
    setup("debug", "text", stream=stream)
    logging.getLogger("urllib3.connectionpool").info("started")
    logging.getLogger("asyncio").debug("selector")
    assert stream.getvalue() == ""
    setup("error", "text", stream=stream)
    logging.getLogger("urllib3.connectionpool").warning("slow")
    assert stream.getvalue() == ""


def test_callers_that_are_gone_are_no_news(stream: io.StringIO) -> None:
    class ExecuteBatchError(Exception):
        """As gRPC's core has it."""

    setup("info", "text", stream=stream)
    for name, error in (("grpc._cython.cygrpc", ExecuteBatchError()), ("x", ValueError("y"))):
        logging.getLogger(name).error("raised by %s", name, exc_info=error)
    assert "cygrpc" not in stream.getvalue()
    assert "raised by x" in stream.getvalue()


class Timers(list[tuple[float, Any]]):
    """What was to be called later, and after how many seconds."""

    def __call__(self, delay_s: float, call: Any) -> None:
        self.append((delay_s, call))


class Repeated:
    """A logger behind the filter, and what it wrote."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []
        self.timers = Timers()
        handler = logging.Handler()
        handler.emit = lambda record: self.written.append(  # type: ignore[method-assign]
            (record.getMessage(), getattr(record, "left_out", 0))
        )
        self.handler = handler
        handler.addFilter(OncePerMinute(handler, later=self.timers))

    def log(self, at: float, message: str, cause: str = "pulse", name: str = "gazette.x") -> None:
        record = logging.makeLogRecord({"name": name, "msg": message, "created": at})
        if cause:
            record.cause = cause
        self.handler.handle(record)

    def take(self) -> list[tuple[str, int]]:
        written, self.written = self.written, []
        return written


def test_one_line_for_each_cause_and_minute_says_how_many_were_left_out() -> None:
    lines = Repeated()
    for index in range(308):
        lines.log(1000.0 + index / 10, f"pulse {index}")
        if index == 5:
            lines.log(1000.5, "another", cause="other")
            lines.log(1000.5, "always", cause="")
            lines.log(1000.5, "always", cause="")
    assert lines.take() == [("pulse 0", 0), ("another", 0), ("always", 0), ("always", 0)]
    ((delay_s, end_of_minute),) = lines.timers
    assert delay_s == pytest.approx(59.9)
    end_of_minute()
    assert lines.take() == [("pulse 307", 306)]
    # The next minute began with that line.
    lines.log(1070.0, "pulse 308")
    assert lines.take() == []
    lines.timers[1][1]()
    assert lines.take() == [("pulse 308", 0)]
    lines.log(1200.0, "much later")
    assert lines.take() == [("much later", 0)]


def test_without_a_timer_the_next_line_says_how_many_were_left_out() -> None:
    lines = Repeated()
    for at in (0.0, 1.0, 2.0, 61.0):
        lines.log(at, f"at {at:g}")
    assert lines.take() == [("at 0", 0), ("at 61", 2)]
    lines.log(50.0, "the clock went back")
    assert lines.take() == [("the clock went back", 0)]


def test_what_libraries_repeat_is_one_line() -> None:
    lines = Repeated()
    for index in range(5):
        lines.log(float(index), "socket.send() raised exception.", "", "asyncio")
    assert lines.take() == [("socket.send() raised exception.", 0)]


def test_causes_do_not_pile_up() -> None:
    lines = Repeated()
    for index in range(3000):
        lines.log(float(index) / 1000, "x", f"cause {index}")
    lines.take()
    # The last ones are known, from the newest on, and the others were forgotten: they are written again.
    for index in range(2999, -1, -1):
        lines.log(3.0, "again", f"cause {index}")
        if lines.take():
            break
    assert 1999 <= index < 2999


def test_a_cause_is_not_written(stream: io.StringIO) -> None:
    setup("info", "text", stream=stream)
    for _ in range(2):
        logging.getLogger("gazette.test").warning("again", extra={"cause": "why"})
    assert stream.getvalue().endswith("warning gazette.test: again\n")
    assert stream.getvalue().count("again") == 1


GRPC_NOISE = """
{first}
{second}
import asyncio, grpc.aio, socket

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = f"127.0.0.1:{{port}}"
    async with grpc.aio.secure_channel(target, grpc.ssl_channel_credentials()) as channel:
        try:
            await channel.unary_unary("/a/b")(b"", timeout=5)
        except grpc.aio.AioRpcError as error:
            print(error.code().name)

asyncio.run(main())
"""


@pytest.mark.parametrize("quiet", [True, False])
def test_the_core_of_grpc_does_not_write_past_the_log(quiet: bool) -> None:
    """If gazette is imported first; a variable that is set already stays."""
    first = "import gazette" if quiet else "import os; os.environ['GRPC_VERBOSITY'] = 'info'"
    program = GRPC_NOISE.format(first=first, second="import gazette")
    environ = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True
    )
    assert done.stdout == "UNAVAILABLE\n"
    assert ("Handshake failed" in done.stderr) is not quiet
    assert bool(done.stderr) is not quiet
