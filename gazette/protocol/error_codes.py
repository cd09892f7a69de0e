"""Errors, codes of gRPC and statuses of HTTP: the only tables between them.

There are two tables of codes. Services of the protocol answer as the Go original does: nearly every
failure is UNKNOWN with a text. Services of our own (queries, JSON over HTTP) have a code per kind of error.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import grpc

from gazette.errors import (
    Broken,
    Closed,
    Corrupt,
    GazetteError,
    Invalid,
    NotAllowed,
    NotFound,
    Retryable,
    TooLarge,
    Unavailable,
)

_Codes: TypeAlias = tuple[tuple[tuple[type[GazetteError], ...], grpc.StatusCode], ...]

_OF_PROTOCOL: Final[_Codes] = (
    # With this code, clients do not repeat the request, which is beyond a limit.
    ((TooLarge,), grpc.StatusCode.INVALID_ARGUMENT),
    # With this code, clients try another process.
    ((Unavailable, Closed), grpc.StatusCode.UNAVAILABLE),
    ((Corrupt,), grpc.StatusCode.DATA_LOSS),
)
_OF_OURS: Final[_Codes] = (
    ((NotAllowed,), grpc.StatusCode.UNAUTHENTICATED),
    ((Retryable, Closed), grpc.StatusCode.UNAVAILABLE),
    ((NotFound,), grpc.StatusCode.NOT_FOUND),
    ((Invalid,), grpc.StatusCode.INVALID_ARGUMENT),
)
_HTTP: Final = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.CANCELLED: 408,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
}
_ERRORS: Final[dict[grpc.StatusCode, type[GazetteError]]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Unavailable,
    # A server that stops gives this code to calls that have arrived and were not served yet.
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.INVALID_ARGUMENT: Invalid,
    grpc.StatusCode.UNIMPLEMENTED: Invalid,
}


def protocol_code_of(error: GazetteError) -> grpc.StatusCode:
    """Return the code of a failed call to a service of the protocol."""
    return _code_of(error, _OF_PROTOCOL)


def code_of(error: GazetteError) -> grpc.StatusCode:
    """Return the code of a failed call to a service of our own."""
    return _code_of(error, _OF_OURS)


def http_status_of(code: grpc.StatusCode) -> int:
    """Return the HTTP status of a call that ended with a code; 500 for a code that the table lacks."""
    return _HTTP.get(code, 500)


def error_of(code: grpc.StatusCode) -> type[GazetteError]:
    """Return the error of a call to any service; ``Broken`` for a code without a meaning for callers."""
    return _ERRORS.get(code, Broken)


def refusal_of(code: grpc.StatusCode) -> type[GazetteError]:
    """Return the error for a code by which a service of our own refuses a call permanently.

    Any other process would refuse the call, too. Return `GazetteError` if the code is not permanent.
    """
    final = (types[0] for types, mapped in _OF_OURS if mapped is code and Retryable not in types)
    return next(final, GazetteError)


def _code_of(error: GazetteError, table: _Codes) -> grpc.StatusCode:
    codes = (code for types, code in table if isinstance(error, types))
    return next(codes, grpc.StatusCode.UNKNOWN)
