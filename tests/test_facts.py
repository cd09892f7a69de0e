"""The helper for facts of errors fails when a fact is missing or another one."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio
import pytest

from gazette.errors import Broken, GazetteError, Invalid, Unavailable
from tests.facts import call_refused, is_advised, logged, raises

ERROR = Invalid("no bytes at 7", path="offset", hint="See --begin.", journal="a/b", begin=7)


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        ((), {}),
        (("journal", "begin"), {}),
        ((), {"journal": "a/b", "begin": 7, "path": "offset", "says": "7", "advises": "--begin"}),
    ],
)
def test_what_an_error_has(names: tuple[str, ...], asked: dict[str, Any]) -> None:
    with raises(Invalid, *names, **asked):
        raise ERROR


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        (("end",), {}),
        ((), {"journal": "a/c"}),
        ((), {"end": 9}),
        ((), {"path": "begin"}),
        ((), {"says": "8"}),
        ((), {"advises": "--end"}),
    ],
)
def test_what_an_error_does_not_have(names: tuple[str, ...], asked: dict[str, Any]) -> None:
    with pytest.raises(AssertionError), raises(Invalid, *names, **asked):
        raise ERROR


def test_an_error_of_another_kind_passes_through() -> None:
    with pytest.raises(Broken, match="elsewhere"), raises(Invalid):
        raise Broken("elsewhere")


def test_a_general_hint_is_no_advice() -> None:
    assert is_advised(ERROR)
    for error in (Unavailable("away"), GazetteError("", hint="")):
        assert not is_advised(error)


def refusal(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, metadata, metadata, "Name: too long (9)", None)


def test_a_call_is_refused_with_a_code_and_names() -> None:
    unknown = grpc.StatusCode.UNKNOWN
    with call_refused(unknown, "Name", "9"):
        raise refusal(unknown)
    for code, says in ((grpc.StatusCode.INTERNAL, "Name"), (unknown, "Labels")):
        with pytest.raises(AssertionError), call_refused(code, "9", says):
            raise refusal(unknown)


def test_a_line_of_the_log_has_facts(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("gazette.tests.facts")
    log.warning("a line without any")
    log.warning("%(journal)s ends at %(end)d", {"journal": "a/b", "end": 7})
    assert logged(caplog, "end", journal="a/b") == {"journal": "a/b", "end": 7}
    logging.getLogger("tests").warning("of another program, at %(begin)d", {"begin": 1})
    for name, facts in (("begin", {}), ("end", {"end": 8}), ("end", {"begin": None})):
        with pytest.raises(AssertionError):
            logged(caplog, name, **facts)
