"""Log lines: one per record, with the facts that it carries, in the form that was asked for."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from gazette.log_setup import LEVELS, setup


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    chatty = {name: logging.getLogger(name).level for name in ("uvicorn", "asyncio")}
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
    assert second["error"].endswith("ValueError: cause")


def test_libraries_that_speak_of_every_request_are_kept_to_warnings(stream: io.StringIO) -> None:
    setup("debug", "text", stream=stream)
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("asyncio").debug("selector")
    assert stream.getvalue() == ""
    setup("error", "text", stream=stream)
    logging.getLogger("uvicorn.error").warning("slow")
    assert stream.getvalue() == ""


def test_callers_that_are_gone_are_no_news(stream: io.StringIO) -> None:
    class ExecuteBatchError(Exception):
        """As gRPC's core has it."""

    setup("info", "text", stream=stream)
    for name, error in (("grpc._cython.cygrpc", ExecuteBatchError()), ("x", ValueError("y"))):
        logging.getLogger(name).error("raised by %s", name, exc_info=error)
    assert "cygrpc" not in stream.getvalue()
    assert "raised by x" in stream.getvalue()
