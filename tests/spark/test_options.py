"""Options: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import pytest

from gazette.errors import Invalid
from gazette.message.message_uuid import clock_at
from gazette.spark.options import ReadOptions, StreamOptions, WriteOptions
from gazette.spark.source import GazetteDataSource

STORE = {"store": "file:///data/fragments", "journal": "topic/a"}
BROKER = {"broker.address": "http://localhost:8080", "selector": "prefix=topic/"}


def test_what_options_mean():
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
    ("options", "message"),
    [
        ({**STORE, "stor": "x"}, "option stor: there is no such option"),
        ({"journal": "topic/a"}, "option broker.address: must be given, or else store"),
        ({"store": "/data"}, "option journal: give either names of journals, or a selector"),
        ({**STORE, "selector": "prefix=a/"}, "option journal: give either names"),
        ({"store": "/data", "selector": "name=topic/a"}, "option selector: is not known by stores"),
        ({**BROKER, "selector": "=,="}, "option selector: "),
        (
            {**STORE, "store": "ftp://x/"},
            r"option store: invalid scheme \(ftp\) \(it is 'ftp://x/'\)",
        ),
        ({**STORE, "path": "topic/a"}, "option journal: is given twice"),
        ({**STORE, "begin": "abc"}, "option begin: must be an offset.*it is 'abc'"),
        ({**STORE, "begin": "-1"}, "option begin: must be an offset"),
        ({**STORE, "end": "true"}, "option end: must be an offset"),
        (
            {**STORE, "end": '{"topic/b": 1}'},
            "option end: names journals that are not read: topic/b",
        ),
        ({**STORE, "begin_time": "noon"}, "option begin_time: must be a time"),
        ({**STORE, "begin_time": "9", "end_time": "8"}, "option end_time: must not be before"),
        ({**STORE, "isolation": "dirty"}, "must be one of read_committed, read_uncommitted"),
        ({**STORE, "malformed": "drop"}, "option malformed: must be one of fail, skip"),
        ({**STORE, "value": "xml"}, "option value: must be one of json, csv, protobuf"),
        ({**STORE, "value": "protobuf"}, "option message: must be given for value=protobuf"),
        ({**STORE, "value": "json", "message": "a:B"}, "option value: must be protobuf"),
        ({**STORE, "run_bytes": "1GB"}, "option run_bytes: must be a number"),
        ({**STORE, "run_bytes": "0"}, "option run_bytes: must be at least 1"),
        ({**STORE, "acks": "maybe"}, "option acks: must be true or false"),
        ({**STORE, "direct": "false"}, "option direct: must not be false"),
        ({**STORE, "max_bytes": "1"}, "option max_bytes: there is no such option"),
    ],
)
def test_what_is_said_of_bad_options(options, message):
    with pytest.raises(Invalid, match=f"(?s){message}") as raised:
        ReadOptions.parse(options)
    assert raised.value.hint


def test_what_to_do_is_told():
    """Tracebacks are all that Spark shows."""
    with pytest.raises(Invalid) as raised:
        GazetteDataSource({**STORE, "stor": "x"}).schema()
    assert raised.value.__notes__ == ["What to do: Did you mean store?"]


def test_streams():
    options = StreamOptions.parse({**STORE, "max_bytes": "1000", "refresh": "0.5"})
    assert (options.max_bytes, options.refresh_s, options.starting) == (1000, 0.5, "earliest")
    with pytest.raises(Invalid, match="option end_time: is for tables"):
        StreamOptions.parse({**STORE, "end_time": "1"})
    with pytest.raises(Invalid, match="option max_fragments: must not be given with max_bytes"):
        StreamOptions.parse({**STORE, "max_bytes": "1", "max_fragments": "1"})


def test_writes():
    options = WriteOptions.parse(
        {**BROKER, "checkpointLocation": "file:///cp/", "mapping": "modulo", "key": "word"},
        streaming=True,
    )
    assert (options.commits, options.mapping) == ("/cp/gazette-commits", "modulo")
    for given, streaming, message in [
        ({**BROKER, "checkpointLocation": "s3://b/cp"}, True, "option commits: must be given"),
        (BROKER, True, "option commits: must be given"),
        ({**BROKER, "commits": "/c"}, False, "option commit_id: goes together with commits"),
        (
            {**BROKER, "commits": "/c", "commit_id": "../x"},
            False,
            "option commit_id: must be letters",
        ),
        ({**BROKER, "mapping": "modulo"}, False, "option key: must be given for mapping=modulo"),
        ({**BROKER, "key": "word"}, False, "option mapping: must be modulo or rendezvous"),
        ({"journal": "topic/a"}, False, "option broker.address: must be given"),
        ({**BROKER, "value": "text"}, False, "option value: must be json, csv or protobuf"),
    ]:
        with pytest.raises(Invalid, match=message):
            WriteOptions.parse(given, streaming=streaming)
