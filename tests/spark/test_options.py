"""Options: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DayTimeIntervalType,
    NullType,
    StructField,
    StructType,
    YearMonthIntervalType,
)

from gazette.errors import Bug, Invalid, NotAllowed, Unavailable
from gazette.history import source as access
from gazette.message.framing.frames import MalformedMessage, TruncatedFrame
from gazette.message.uuid import clock_at
from gazette.protocol.pb import broker_pb2
from gazette.spark.error_hints import with_hints
from gazette.spark.message_class import MODULES_VARIABLE, message_class
from gazette.spark.source.ddl import parse_columns
from gazette.spark.source.options import ReadOptions, StreamOptions, WriteOptions
from gazette.spark.source.source import GazetteDataSource
from gazette.testing.stored import write_journal
from tests.facts import raises

STORE = {"store": "file:///data/fragments", "journal": "topic/a"}
BROKER = {"broker.address": "http://localhost:8080", "selector": "prefix=topic/"}


def test_what_options_mean() -> None:
    options = ReadOptions.parse(
        {
            **STORE,
            "Journal": "topic/a, topic/b",
            "BEGIN": '{"topic/a": 10}',
            "end": "500",
            "begin_time": "2023-11-14T22:13:20Z",
            "end_time": "1700000001.5",
            "columns": "offset,word",
        }
    )
    assert options.selection.journals == ("topic/a", "topic/b")
    assert options.selection.stores == ("file:///data/fragments/",)
    assert (options.selection.begin, options.selection.end_all) == ({"topic/a": 10}, 500)
    assert options.clock_begin == clock_at(1_700_000_000_000_000_000)
    assert options.clock_end == clock_at(1_700_000_001_500_000_000)
    assert options.selection.begin_time_s == 1_700_000_000
    assert options.access.direct
    assert ReadOptions.parse({"path": "topic/a", "store": "/data"}).selection.stores == (
        "file:///data/",
    )
    assert not ReadOptions.parse(BROKER).access.direct


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({**STORE, "stor": "x"}, "stor"),
        ({"journal": "topic/a"}, "broker.address store"),
        ({"store": "/data"}, "journal selector"),
        ({**STORE, "selector": "prefix=a/"}, "journal selector"),
        ({"store": "/data", "selector": "name=topic/a"}, "selector"),
        ({**BROKER, "selector": "=,="}, "selector"),
        (
            {**STORE, "store": "ftp://x/"},
            "store (ftp) 'ftp://x/'",
        ),
        ({**STORE, "path": "topic/a"}, "journal"),
        ({**STORE, "begin": "abc"}, "begin 'abc'"),
        ({**STORE, "begin": "-1"}, "begin '-1'"),
        ({**STORE, "end": "true"}, "end 'true'"),
        (
            {**STORE, "end": '{"topic/b": 1}'},
            "end topic/b",
        ),
        ({**STORE, "begin_time": "noon"}, "begin_time 'noon'"),
        ({**STORE, "begin_time": "9", "end_time": "8"}, "end_time"),
        ({**STORE, "begin_time": "infinity"}, "begin_time 'infinity'"),
        ({**STORE, "begin_time": "nan"}, "begin_time 'nan'"),
        ({**STORE, "journal": "a/b"}, "journal 'a/b'"),
        ({**STORE, "journal": "/topic/a"}, "journal '/topic/a'"),
        ({**STORE, "journal": "topic/a,topic/a"}, "journal topic/a,topic/a"),
        ({**STORE, "message": "nope"}, "message 'nope'"),
        (
            {**STORE, "message": "nope:Nope"},
            "message nope 'nope:Nope'",
        ),
        ({**STORE, "message": "nope_pb2:Nope"}, "message 'nope_pb2'"),
        (
            {**STORE, "message": "os_pb2.path:Nope"},
            "message os_pb2.path",
        ),
        (
            {**STORE, "message": "gazette.protocol.pb.broker_pb2:DESCRIPTOR"},
            "message DESCRIPTOR",
        ),
        ({**STORE, "isolation": "dirty"}, "isolation read_committed read_uncommitted"),
        (
            {**STORE, "mode": "drop"},
            "mode permissive dropmalformed failfast",
        ),
        ({**STORE, "value": "xml"}, "value json csv protobuf"),
        ({**STORE, "value": "protobuf"}, "message value=protobuf"),
        ({**STORE, "value": "json", "message": "a:B"}, "value protobuf"),
        ({**STORE, "run_bytes": "1GB"}, "run_bytes '1GB'"),
        ({**STORE, "run_bytes": "0"}, "run_bytes 1"),
        ({**STORE, "acks": "maybe"}, "acks true false"),
        ({**STORE, "direct": "false"}, "direct false"),
        ({**STORE, "max_bytes": "1"}, "max_bytes"),
    ],
)
def test_what_is_said_of_bad_options(options: dict[str, str], facts: str) -> None:
    option, *said = facts.split()
    with raises(Invalid, path=f"option {option}") as raised:
        ReadOptions.parse(options)
    assert [one for one in said if one not in str(raised.value)] == []
    assert raised.value.hint


@pytest.mark.parametrize(
    ("text", "unix_ns"),
    [
        ("1700000000.0000003", 1_700_000_000_000_000_300),
        ("2023-11-14T22:13:20.000003Z", 1_700_000_000_000_003_000),
        ("2023-11-14T22:13:20", 1_700_000_000_000_000_000),
        ("2023-11-14 17:13:20-05:00", 1_700_000_000_000_000_000),
        ("2023-11-15T03:43:20.500+05:30", 1_700_000_000_500_000_000),
        ("9999-12-31T23:59:59.999999Z", 253_402_300_799_999_999_000),
        ("0001-01-01T00:00:00Z", -62_135_596_800_000_000_000),
    ],
)
def test_times_have_zones_and_no_rounding(text: str, unix_ns: int) -> None:
    options = ReadOptions.parse({**STORE, "begin_time": text})
    assert options.clock_begin == clock_at(unix_ns)
    assert options.clock_begin >> 64 == 0


def test_what_to_do_is_reported() -> None:
    """Tracebacks are all that Spark shows."""
    with pytest.raises(Invalid) as raised:
        GazetteDataSource({**STORE, "stor": "x"}).schema()
    assert raised.value.__notes__ == ["What to do: Did you mean store?"]


def test_streams() -> None:
    options = StreamOptions.parse({**STORE, "max_bytes": "1000", "refresh": "0.5"})
    assert (options.max_bytes, options.refresh_s, options.starting) == (1000, 0.5, "earliest")
    with raises(Invalid, path="option end_time"):
        StreamOptions.parse({**STORE, "end_time": "1"})
    with raises(Invalid, path="option max_fragments", says="max_bytes"):
        StreamOptions.parse({**STORE, "max_bytes": "1", "max_fragments": "1"})


def test_writes() -> None:
    options = WriteOptions.parse(
        {**BROKER, "checkpointLocation": "file:///cp/", "mapping": "modulo", "key": "word"},
        streaming=True,
    )
    assert (options.commits, options.mapping) == ("/cp/gazette-commits", "modulo")
    for given, streaming, facts in [
        ({**BROKER, "checkpointLocation": "s3://b/cp"}, True, "commits"),
        (BROKER, True, "commits"),
        ({**BROKER, "commits": "/c"}, False, "commit_id commits"),
        (
            {**BROKER, "commits": "/c", "commit_id": "../x"},
            False,
            "commit_id '../x'",
        ),
        ({**BROKER, "mapping": "modulo"}, False, "key mapping=modulo"),
        ({**BROKER, "key": "word"}, False, "mapping modulo rendezvous"),
        ({"journal": "topic/a"}, False, "broker.address"),
        ({**BROKER, "value": "text"}, False, "value json csv protobuf"),
    ]:
        option, *said = facts.split()
        with raises(Invalid, path=f"option {option}") as raised:
            WriteOptions.parse(given, streaming=streaming)
        assert [one for one in said if one not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (Invalid("wrong", hint="Right it."), "Right it."),
        (
            MalformedMessage("no message", begin=0, end=1, raw=b""),
            "Repair or stop its producer. `mode=PERMISSIVE` reads such messages as null",
        ),
        (
            TruncatedFrame("in parts", begin=0, end=1, raw=b""),
            "Set run_bytes to more than the journal holds",
        ),
        (NotAllowed("no", code="UNAUTHENTICATED"), "Set the option broker.auth_keys"),
    ],
)
def test_errors_are_reported_without_what_led_to_them(error: Exception, hint: str) -> None:
    """Their traceback is in the middle of Java's."""

    @with_hints()
    def fails() -> None:
        try:
            int("x")
        except ValueError as cause:
            raise error from cause

    with pytest.raises(type(error)) as raised:
        fails()
    lines = "".join(traceback.format_exception(raised.value)).splitlines()
    assert "invalid literal" not in "".join(lines)
    assert len([line for line in lines if line.startswith("  File")]) <= 4
    assert lines[-1].startswith(f"What to do: {hint}")


def test_a_defect_keeps_what_led_to_it() -> None:
    @with_hints()
    def fails() -> None:
        try:
            int("x")
        except ValueError as cause:
            raise Bug("broken") from cause

    with pytest.raises(Bug) as raised:
        fails()
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize(
    "kind", ["interval day to second", "array<interval year to month>", "void"]
)
def test_types_that_messages_do_not_have(kind: str, tmp_path: Path) -> None:
    write_journal(tmp_path, "file:///", "topic/a", [b"{}\n"])
    given = {"store": f"file://{tmp_path}/", "journal": "topic/a", "isolation": "read_uncommitted"}
    types = {
        "interval day to second": DayTimeIntervalType(),
        "array<interval year to month>": ArrayType(YearMonthIntervalType()),
        "void": NullType(),
    }
    schema = StructType([StructField("d", StructType([StructField("x", types[kind])]))])
    with raises(Invalid, path="d.x"):
        GazetteDataSource(given).reader(schema).partitions()


@pytest.mark.parametrize("entry", ["schema", "read", "stream", "write"])
def test_a_broker_that_is_not_there_is_reported(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not waited for, whichever asks first: a driver, or a task."""
    monkeypatch.setattr(access, "_WAIT_S", 0.2)
    given = {"broker.address": "http://127.0.0.1:1,http://127.0.0.1:2", "journal": "topic/a"}
    source = GazetteDataSource(given)
    schema = from_arrow_schema(parse_columns("n long"))
    with raises(Unavailable, says="http://127.0.0.1:1") as raised:
        match entry:
            case "schema":
                source.schema()
            case "read":
                source.reader(schema).partitions()
            case "stream":
                source.streamReader(schema).initialOffset()
            case "write":
                source.writer(schema, False).write(iter([]))
    assert "127.0.0.1:2: " in str(raised.value)
    assert "What to do: Check that it runs there" in raised.value.__notes__[0]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write modules that workers can import, and which must not run."""
    (tmp_path / "planted.py").write_text("class Word: DESCRIPTOR = 1")
    (tmp_path / "planted_package").mkdir()
    (tmp_path / "planted_package/__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("planted")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "name",
    [
        "planted:Word",
        "planted_package:Word",
        "planted_package.absent_pb2:Word",
        "planted.x_pb2:Word",
    ],
)
@pytest.mark.parametrize(
    "parse",
    [ReadOptions.parse, StreamOptions.parse, partial(WriteOptions.parse, streaming=False)],
    ids=["read", "stream", "write"],
)
def test_no_module_runs_because_an_option_names_it(
    planted: None, parse: Callable[[dict[str, str]], Any], name: str
) -> None:
    with pytest.raises(Invalid, match="option message"):
        parse({"broker.address": "http://b", "journal": "topic/a", "message": name})
    assert not [name for name in sys.modules if name.startswith("planted")]


def test_the_environment_lists_further_modules(
    planted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODULES_VARIABLE, "another, planted")
    with raises(Invalid, path="message", says="planted:Word"):
        message_class("planted:Word")
    assert "planted" in sys.modules
    assert message_class("gazette.protocol.pb.broker_pb2:Fragment") is broker_pb2.Fragment
