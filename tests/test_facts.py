"""The helper for facts of errors fails when a fact is missing or another one."""

from __future__ import annotations

from typing import Any

import pytest

from gazette.errors import Broken, GazetteError, Invalid, Unavailable
from tests.facts import is_advised, raises

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
