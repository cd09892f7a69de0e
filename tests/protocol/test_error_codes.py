"""Errors keep their meaning from a service to its caller."""

from __future__ import annotations

import grpc
import pytest

from gazette.errors import (
    Broken,
    Bug,
    Closed,
    Conflict,
    Corrupt,
    Fenced,
    GazetteError,
    Invalid,
    InvalidValue,
    Moved,
    NotAllowed,
    NotFound,
    NotYet,
    TooLarge,
    Unavailable,
)
from gazette.protocol.error_codes import (
    code_of,
    error_of,
    http_status_of,
    protocol_code_of,
    refusal_of,
)


@pytest.mark.parametrize(
    ("error", "protocol", "ours", "status"),
    [
        (Unavailable, "UNAVAILABLE", "UNAVAILABLE", 503),
        (Closed, "UNAVAILABLE", "UNAVAILABLE", 503),
        (Moved, "UNKNOWN", "UNAVAILABLE", 503),
        (NotYet, "UNKNOWN", "UNAVAILABLE", 503),
        (NotAllowed, "UNKNOWN", "UNAUTHENTICATED", 401),
        (NotFound, "UNKNOWN", "NOT_FOUND", 404),
        (Invalid, "UNKNOWN", "INVALID_ARGUMENT", 400),
        (InvalidValue, "UNKNOWN", "INVALID_ARGUMENT", 400),
        (TooLarge, "INVALID_ARGUMENT", "INVALID_ARGUMENT", 400),
        (Corrupt, "DATA_LOSS", "UNKNOWN", 500),
        (Broken, "UNKNOWN", "UNKNOWN", 500),
        (Bug, "UNKNOWN", "UNKNOWN", 500),
        (Conflict, "UNKNOWN", "UNKNOWN", 500),
        (Fenced, "UNKNOWN", "UNKNOWN", 500),
    ],
)
def test_each_error_has_a_code(
    error: type[GazetteError], protocol: str, ours: str, status: int
) -> None:
    assert protocol_code_of(error("it")).name == protocol
    assert code_of(error("it")).name == ours
    assert http_status_of(code_of(error("it"))) == status


@pytest.mark.parametrize("error", [Unavailable, NotAllowed, Invalid])
def test_callers_of_our_services_see_the_error_again(error: type[GazetteError]) -> None:
    assert error_of(code_of(error("it"))) is error


@pytest.mark.parametrize("error", [NotAllowed, NotFound, Invalid])
def test_a_refusal_is_the_answer_of_each_process(error: type[GazetteError]) -> None:
    assert refusal_of(code_of(error("it"))) is error


def test_codes_that_say_nothing_to_callers() -> None:
    assert error_of(grpc.StatusCode.UNKNOWN) is Broken
    assert refusal_of(grpc.StatusCode.UNAVAILABLE) is GazetteError
    assert http_status_of(grpc.StatusCode.UNKNOWN) == 500
