"""Options: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import re
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
from gazette.history.ddl import parse_columns
from gazette.history.spark.error_hints import with_hints
from gazette.history.spark.message_class import MODULES_VARIABLE, message_class
from gazette.history.spark.options import Options, credential_options
from gazette.history.spark.source.options import (
    READ,
    STREAM,
    WRITE,
    ReadOptions,
    StreamOptions,
    WriteOptions,
)
from gazette.history.spark.source.source import GazetteDataSource
from gazette.history.spark.state.state import KNOWN
from gazette.message.framing.frames import MalformedMessage, TruncatedFrame
from gazette.message.uuid import clock_at
from gazette.protocol.pb import broker_pb2
from gazette.testing.stored import write_journal
from tests.facts import raises

STORE = {"store": "file:///data/fragments", "journal": "topic/a"}
BROKER = {"broker.address": "http://localhost:8080", "selector": "prefix=topic/"}


def test_what_options_mean() -> None:
    options = ReadOptions.parse(
        {
            **STORE,
            "Journal": "topic/a, topic/b",
            "STARTINGOFFSETS": '{"topic/a": 10}',
            "endingOffsets": "500",
            "startingTimestamp": "2023-11-14T22:13:20Z",
            "endingTimestamp": "1700000001.5",
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
        ({**STORE, "startingOffsets": "abc"}, "startingOffsets 'abc'"),
        ({**STORE, "startingOffsets": "-1"}, "startingOffsets '-1'"),
        ({**STORE, "endingOffsets": "true"}, "endingOffsets 'true'"),
        (
            {**STORE, "endingOffsets": '{"topic/b": 1}'},
            "endingOffsets topic/b",
        ),
        ({**STORE, "startingTimestamp": "noon"}, "startingTimestamp 'noon'"),
        ({**STORE, "startingTimestamp": "9", "endingTimestamp": "8"}, "endingTimestamp"),
        ({**STORE, "startingTimestamp": "infinity"}, "startingTimestamp 'infinity'"),
        ({**STORE, "startingTimestamp": "nan"}, "startingTimestamp 'nan'"),
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
        ({**STORE, "maxPartitionBytes": "1GB"}, "maxPartitionBytes '1GB'"),
        ({**STORE, "maxPartitionBytes": "0"}, "maxPartitionBytes 1"),
        ({**STORE, "acks": "maybe"}, "acks true false"),
        ({**STORE, "direct": "false"}, "direct false"),
        ({**STORE, "startingTimestamp": "1700000000000"}, "startingTimestamp milliseconds"),
        ({**STORE, "startingTimestamp": "-1e999"}, "startingTimestamp milliseconds"),
        ({**STORE, "startingOffsets": "latest"}, "startingOffsets latest streams"),
        ({**STORE, "failOnDataLoss": "maybe"}, "failOnDataLoss true false"),
        ({**STORE, "maxBytesPerTrigger": "1"}, "maxbytespertrigger"),
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
    options = ReadOptions.parse({**STORE, "startingTimestamp": text})
    assert options.clock_begin == clock_at(unix_ns)
    assert options.clock_begin >> 64 == 0


def test_what_to_do_is_reported() -> None:
    """Tracebacks are all that Spark shows."""
    with pytest.raises(Invalid) as raised:
        GazetteDataSource({**STORE, "stor": "x"}).schema()
    assert raised.value.__notes__ == ["What to do: Did you mean store?"]


def test_streams() -> None:
    options = StreamOptions.parse({**STORE, "maxBytesPerTrigger": "1000", "refresh": "0.5"})
    assert (options.max_bytes, options.refresh_s, options.latest) == (1000, 0.5, False)
    with raises(Invalid, path="option endingTimestamp"):
        StreamOptions.parse({**STORE, "endingTimestamp": "1"})
    with raises(Invalid, path="option producerHorizon", says="too large"):
        StreamOptions.parse({**STORE, "producerHorizon": "1e999"})
    both = {"maxBytesPerTrigger": "1", "maxRowsPerTrigger": "1"}
    with raises(Invalid, path="option maxRowsPerTrigger", says="maxBytesPerTrigger"):
        StreamOptions.parse({**STORE, **both})
    latest = {"startingOffsets": "Latest", "refresh": "0"}
    assert StreamOptions.parse({**STORE, **latest}).latest
    with raises(Invalid, path="option startingTimestamp", says="latest"):
        StreamOptions.parse({**STORE, **latest, "startingTimestamp": "1"})


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("begin_time", "startingTimestamp"),
        ("starting", "startingOffsets"),
        ("max_fragments", "maxBytesPerTrigger"),
        ("maxOffsetsPerTrigger", "maxRowsPerTrigger"),
        ("gaps", "failOnDataLoss"),
        ("meta_prefix", "metaPrefix"),
        ("broker.auth_keys", "broker.authKeys"),
        ("pushdown", "Leave it out"),
        ("infer_bytes", "Leave it out"),
        ("selectr", "Did you mean selector?"),
    ],
)
def test_former_names_are_errors_that_say_the_present_one(name: str, new: str) -> None:
    with raises(Invalid, path=f"option {name.lower()}", advises=new):
        StreamOptions.parse({**STORE, name: "1"})


def test_options_are_spelt_as_those_of_spark() -> None:
    """In camelCase, and an unknown one is answered by all of them."""
    names = {*READ, *STREAM, *WRITE, *KNOWN}
    spelling = re.compile(r"(\w+\.)?[a-z]+([A-Z][a-z]+)*")
    assert [name for name in names if not spelling.fullmatch(name)] == []
    with raises(Invalid, path="option zzz") as raised:
        ReadOptions.parse({**STORE, "zzz": "1"})
    listed = raised.value.hint.removeprefix("Known: ").rstrip(".").split(", ")
    assert listed == [*READ]


def test_options_of_create_table_are_not_kept() -> None:
    """Spark passes none of them to a query, and all of its own properties to what infers columns."""
    for given, path in [
        ({}, "option journal"),
        ({**STORE, "provider": "gazette", "owner": "me"}, "provider"),
    ]:
        with raises(Invalid, path=path, advises="WITH ("):
            ReadOptions.parse(given)


def test_writes() -> None:
    options = WriteOptions.parse(
        {**BROKER, "checkpointLocation": "file:///cp/", "mapping": "modulo", "key": "word"},
        streaming=True,
    )
    assert (options.commits, options.mapping) == ("/cp/gazette-commits", "modulo")
    for given, streaming, facts in [
        ({**BROKER, "checkpointLocation": "s3://b/cp"}, True, "commits"),
        (BROKER, True, "commits"),
        ({**BROKER, "commits": "/c"}, False, "commitId commits"),
        (
            {**BROKER, "commits": "/c", "commitId": "../x"},
            False,
            "commitId '../x'",
        ),
        ({**BROKER, "mapping": "modulo"}, False, "key mapping=modulo"),
        ({**BROKER, "mapping": "random", "journalColumn": "to"}, False, "mapping journalColumn"),
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
            "Set maxPartitionBytes to more than the journal holds",
        ),
        (NotAllowed("no", code="UNAUTHENTICATED"), "Set the option broker.authKeys"),
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


@pytest.mark.parametrize("name", ["broker.authTokn", "authToken", "broker.auth_tokens"])
def test_the_value_of_a_misspelt_option_is_not_shown(name: str) -> None:
    with raises(Invalid, path=f"option {name.lower()}") as raised:
        Options({name: "a-secret"}, credential_options("broker"))
    assert "a-secret" not in str(raised.value)


def test_the_value_of_a_credential_is_not_shown() -> None:
    options = Options({"broker.authKeys": "a-secret"}, credential_options("broker"))
    with raises(Invalid, path="option broker.authKeys") as raised:
        options.fail("broker.authKeys", "must be base64")
    assert "a-secret" not in str(raised.value)
