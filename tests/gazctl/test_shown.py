"""A support bundle shows no secret, wherever it is. It shows the names and messages that support needs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette import labels
from gazette.errors import Unavailable
from gazette.gazctl.shown import Shown
from gazette.protocol.pb import broker_pb2, consumer_pb2
from gazette.runtime.log_setup import JsonFormatter, TextFormatter
from gazette.runtime.redaction import CUT
from tests.secrets import FORMS, NAMES, SECRETS, require_absent

NAMES_OF_FIELDS = {
    "protocol.JournalSpec.name",
    "protocol.ProcessSpec.ID.zone",
    "protocol.ProcessSpec.ID.suffix",
    "consumer.ShardSpec.id",
    "consumer.ShardSpec.Source.journal",
    "consumer.ShardSpec.recovery_log_prefix",
    "consumer.ShardSpec.hint_prefix",
}
"""All that is shown as it is."""


def filled(kind: type[Message], text: str, depth: int = 0) -> Any:
    """Return a message that has a text in each field that may hold one, but names."""
    message: Any = kind()
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is not None:
            inner = getattr(message, field.name)
            if depth > 5:
                continue
            made = filled(type(inner.add() if field.is_repeated else inner), text, depth + 1)
            (inner[0] if field.is_repeated else inner).CopyFrom(made)
        elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            name = "a/name" if field.full_name in NAMES_OF_FIELDS else text
            value: Any = name.encode() if field.type == field.TYPE_BYTES else name
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
        elif not field.is_repeated:
            setattr(message, field.name, 1)
    return message


@pytest.mark.parametrize("kind", [broker_pb2.ListResponse, consumer_pb2.ListResponse])
@settings(max_examples=40, deadline=None)
@given(secret=SECRETS, form=st.sampled_from([*FORMS.values(), str]))
def test_a_secret_in_a_specification_is_not_shown(
    kind: type[Message], secret: str, form: Callable[[str], str]
) -> None:
    """It is in any field but a name: a label, store, template, error, or a field of a later version."""
    shown = Shown()
    text = shown.specifications(filled(kind, form(secret)))
    require_absent(secret, text, Shown().specifications(filled(kind, form("x"))))
    assert shown.names == {"a/name"}
    assert CUT in text
    assert json.loads(text)


def test_specifications_show_names_numbers_and_known_labels() -> None:
    listed: Any = broker_pb2.ListResponse()
    journal = listed.journals.add()
    journal.spec.name, journal.spec.replication = "a/journal", 3
    journal.spec.labels.labels.add(name=labels.CONTENT_TYPE, value=labels.CONTENT_JSON_LINES)
    journal.spec.labels.labels.add(name="team", value="hunter2")
    journal.spec.fragment.stores.append("s3://bucket/prefix/?profile=x")
    journal.route.endpoints.append("http://broker:8080")
    shown = Shown()
    (found,) = json.loads(shown.specifications(listed))["journals"]
    assert (found["spec"]["name"], found["spec"]["replication"]) == ("a/journal", 3)
    first, second = found["spec"]["labels"]["labels"]
    assert (first["name"], first["value"]) == (labels.CONTENT_TYPE, labels.CONTENT_JSON_LINES)
    assert (second["name"], second["value"]) == (CUT, CUT)
    assert found["spec"]["fragment"]["stores"] == [f"s3://bucket/{CUT}"]
    assert shown.names == {"a/journal", "http://broker:8080"}
    assert listed.journals[0].spec.labels.labels[1].value == "hunter2"  # It is a copy that was cut.


PAGES: dict[str, Callable[[str, str], str]] = {
    "metrics of an application": lambda n, s: f'orders{{{_label(n)}="{_escaped(s)}"}} 1\n',
    "metrics": lambda n, s: f'gazette_x_total{{journal="{_escaped(s)}",{_label(n)}="a"}} 1.5\n',
    "metrics, help": lambda n, s: f"# HELP gazette_x {n}={s}\n# TYPE gazette_x counter\n",
    "stacks, task": lambda n, s: f'task {n} {s}\n  File "/a/app.py", line 1, in f\n    pass\n',
    "stacks, source": lambda n, s: f'thread 1\n  File "/a/app.py", line 1, in f\n    {n} = "{s}"\n',
    "stacks, error": lambda n, s: f"task a\n  {n}: {s}\n",
    "ready": lambda n, s: f"failed: {n} {s}\n",
    "log, foreign text": lambda n, s: f"2026/11/22 10:00:00 {n}={s}\n",
    "log, foreign logger": lambda n, s: f"2026-11-22T10:00:00Z info {s}: {n}\n",
    "log, foreign json": lambda n, s: json.dumps({"msg": n, n: s, "level": s, "time": s}) + "\n",
    "log, json of another kind": lambda n, s: json.dumps([n, s]) + "\n",
    "log, json cut off": lambda n, s: json.dumps({"msg": n, n: s})[:-3] + "\n",
    "log, other text": lambda n, s: f"{n}\n{s}\n",
}


def _label(name: str) -> str:
    return "".join(one if one.isalnum() else "_" for one in name)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@pytest.mark.parametrize("page", PAGES)
@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(NAMES), secret=SECRETS, form=st.sampled_from([*FORMS.values(), str]))
def test_a_secret_in_a_page_is_not_shown(
    page: str, name: str, secret: str, form: Callable[[str], str]
) -> None:
    shown = Shown()
    shown.names.add("a/journal")
    text = getattr(shown, page.partition(",")[0].split()[0])(PAGES[page](name, form(secret)))
    require_absent(
        secret, text, getattr(shown, page.partition(",")[0].split()[0])(PAGES[page](name, "x"))
    )


def logged(formatter: logging.Formatter, call: Callable[[logging.Logger], None], name: str) -> str:
    """Return what a logger writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.getLoggerClass()(name)
    logger.addHandler(handler)
    call(logger)
    return stream.getvalue()


FORMATTERS: dict[str, logging.Formatter] = {
    "text": TextFormatter(color=False),
    "color": TextFormatter(color=True),
    "json": JsonFormatter(),
}
OWN: dict[str, Callable[..., None]] = {
    "value": lambda log, secret: log.info(
        "consumer %(member)s serves at %(endpoint)s", {"member": secret, "endpoint": secret}
    ),
    "error": lambda log, secret: log.warning(
        "a standby of %(shard)s did not answer: %(error)s",
        {"shard": "a/shard", "error": Unavailable(secret, secret=secret, hint=secret)},
    ),
    "facts": lambda log, secret: log.warning(
        "a standby's state is released", extra={"path": secret}
    ),
    "unknown message": lambda log, secret: log.warning("it is %s", secret),
    "error alone": lambda log, secret: log.warning("%(error)s", {"error": ValueError(secret)}),
    "traceback": lambda log, secret: _raise(log, secret),
}


def _raise(log: logging.Logger, secret: str) -> None:
    try:
        raise Unavailable(secret, secret=secret) from KeyError(secret)
    except Unavailable:
        log.exception("whole calls could not be taken")


@pytest.mark.parametrize("logger", ["gazette.broker.main", "orders"])
@pytest.mark.parametrize("message", OWN)
@pytest.mark.parametrize("formatter", FORMATTERS)
@settings(max_examples=8, deadline=None)
@given(secret=SECRETS, form=st.sampled_from([*FORMS.values(), str]))
def test_a_secret_in_a_log_is_not_shown(
    formatter: str, message: str, logger: str, secret: str, form: Callable[[str], str]
) -> None:
    shown = Shown()
    texts = [
        shown.log(logged(FORMATTERS[formatter], partial(OWN[message], secret=one), logger))
        for one in (form(secret), form("x"))
    ]
    require_absent(secret, *texts)
    assert texts[0]


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_logs_show_our_own_messages_with_known_names(formatter: str) -> None:
    shown = Shown()
    shown.names |= {"a/shard", "http://broker:8080"}

    def call(log: logging.Logger) -> None:
        error = Unavailable("hunter2")
        log.info(
            "consumer %(member)s serves at %(endpoint)s",
            {"member": "hunter2", "endpoint": "http://broker:8080"},
        )
        log.warning(
            "a standby of %(shard)s did not answer: %(error)s", {"shard": "a/shard", "error": error}
        )
        log.debug("%(count)d calls are cut off", {"count": 12})
        try:
            raise error
        except Unavailable:
            log.exception("whole calls could not be taken")

    text = shown.log(logged(FORMATTERS[formatter], call, "gazette.consumer.member"))
    assert f"consumer {CUT} serves at http://broker:8080" in text
    assert f"a standby of a/shard did not answer: {CUT}" in text
    assert "12 calls are cut off" in text
    assert "whole calls could not be taken" in text
    assert "test_shown.py" in text
    assert "Unavailable" in text
    assert text.count("gazette.consumer.member") == 4
    assert "hunter2" not in text


def test_metrics_and_stacks_show_what_they_are_of() -> None:
    shown = Shown()
    shown.names.add("a/journal")
    metrics = (
        "# HELP gazette_x_total words\n# TYPE gazette_x_total counter\n"
        'gazette_x_total{journal="a/journal",code="OK",le="+Inf"} 1.5e+06\n'
        'orders_total{customer="Smith",journal="a/journal"} 2.0 1395066363000\n'
    )
    assert shown.metrics(metrics) == (
        "# TYPE gazette_x_total counter\n"
        'gazette_x_total{journal="a/journal",code="OK",le="+Inf"} 1.5e+06\n'
        f'orders_total{{customer="{CUT}",journal="a/journal"}} 2.0\n'
    )
    stacks = (
        "task read a/journal\n"
        '  File "/usr/lib/site-packages/gazette/net/server.py", line 12, in serve\n'
        "    await one(password)\n"
        '  File "/home/smith/app.py", line 3, in <module>\n'
    )
    assert shown.stacks(stacks) == (
        f"task {CUT} a/journal\n"
        '  File "gazette/net/server.py", line 12, in serve\n'
        '  File "app.py", line 3, in <module>\n'
    )
    assert shown.ready("ready\n") == "ready\n"


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_is_read(text: str) -> None:
    shown = Shown()
    for show in (shown.metrics, shown.stacks, shown.ready, shown.log):
        show(text)
        show("{" + text)


@pytest.mark.parametrize(
    "unit", ["a", '{"', 'a{b="', 'File "/', "gazette/", "2026-01-01T00:00:00Z info gazette: a "]
)
def test_long_text_takes_time_in_proportion(unit: str) -> None:
    """A page of a member has up to 64 MiB. (The time limit of tests is what this would run into.)"""
    text, shown = unit * (200_000 // len(unit)), Shown()
    for show in (shown.metrics, shown.stacks, shown.ready, shown.log):
        show(text)
