"""The meaning of a failed etcd RPC: for its write, for its token, and for the next attempt."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from gazette.cluster.etcd.values import Compacted
from gazette.errors import (
    Conflict,
    Corrupt,
    GazetteError,
    Invalid,
    NotAllowed,
    NotFound,
    NotYet,
    Unavailable,
)

Code = grpc.StatusCode

# The transport gives this text only if no connection could be made, so nothing was sent.
_NOT_SENT = ("failed to connect",)

# etcd gives these answers before it proposes the request to its peers.
_NOT_PROPOSED = (
    "etcdserver: no leader",
    "etcdserver: not leader",
    "etcdserver: not capable",
    "etcdserver: rpc not supported for learner",
    "etcdserver: too many requests",
)

_STALE_TOKEN = ("etcdserver: invalid auth token", "etcdserver: revision of auth store is old")
_NO_USER = "etcdserver: user name is empty"
_AUTH_REFUSED = "etcdserver: authentication failed"
AUTH_NOT_ENABLED = "etcdserver: authentication is not enabled"
_COMPACTED = "required revision has been compacted"
_NO_SPACE = "database space exceeded"
_TOO_MANY_OPS = "etcdserver: too many operations in txn request"

_TRANSIENT = frozenset(
    (
        Code.UNAVAILABLE,
        Code.DEADLINE_EXCEEDED,
        # A member that stops cancels its context, or resets streams. Running calls end with these codes.
        Code.UNKNOWN,
        Code.CANCELLED,
        Code.INTERNAL,
        Code.ABORTED,
    )
)

_HINT_CREDENTIALS = (
    "Check the user and password for etcd (or the common name of the client certificate), and the roles "
    "that etcd has for them."
)


class ResponseTooLarge(Invalid):
    """The answer exceeds the limit of this client: ask for less at once."""


class StreamEnded(Exception):
    """The server ended a stream without a reason."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error to raise. ``transient``: another member, or the same member later, may succeed.

    ``maybe_applied``: the write may have happened. ``stale_token``: a call with a new token may succeed.
    """

    error: GazetteError
    transient: bool = False
    maybe_applied: bool = False
    stale_token: bool = False


def classify(cause: grpc.aio.AioRpcError | StreamEnded, *, has_user: bool) -> Failure:
    """Return the meaning of an RPC failure. ``has_user``: a password is at hand to get another token."""
    if isinstance(cause, StreamEnded):
        reason = str(cause) or "etcd ended the stream"
        return Failure(Unavailable(reason), transient=True, maybe_applied=True)
    code, details = cause.code(), cause.details() or ""
    if details.startswith(_STALE_TOKEN) or (has_user and details.startswith(_NO_USER)):
        return Failure(_refused(details), stale_token=has_user)
    if details.startswith((*_NOT_SENT, *_NOT_PROPOSED)):
        return Failure(Unavailable(details), transient=True)
    if code in _TRANSIENT:
        return Failure(Unavailable(details or code.name), transient=True, maybe_applied=True)
    return Failure(_permanent(code, details))


def _refused(details: str) -> NotAllowed:
    return NotAllowed("etcd refused the request", hint=_HINT_CREDENTIALS, reason=details)


def _permanent(code: grpc.StatusCode, details: str) -> GazetteError:
    match code:
        case Code.OUT_OF_RANGE if _COMPACTED in details:
            return Compacted("the revision was compacted")
        case Code.OUT_OF_RANGE:
            return NotYet("etcd has not reached the revision", reason=details)
        case Code.NOT_FOUND:
            return NotFound("etcd does not have the key, lease or user", reason=details)
        case Code.FAILED_PRECONDITION | Code.ALREADY_EXISTS:
            return Conflict("etcd refused the request in its present state", reason=details)
        case Code.PERMISSION_DENIED | Code.UNAUTHENTICATED:
            return _refused(details)
        case Code.INVALID_ARGUMENT if details.startswith((_NO_USER, _AUTH_REFUSED)):
            return _refused(details)
        case Code.INVALID_ARGUMENT:
            hint = (
                "Split the transaction, or raise etcd's --max-txn-ops."
                if _TOO_MANY_OPS in details
                else None
            )
            return Invalid("etcd rejected the request", hint=hint, reason=details)
        case Code.RESOURCE_EXHAUSTED if _NO_SPACE in details:
            return Unavailable(
                "etcd has no space left, and takes no writes",
                hint="Compact and defragment etcd, then disarm its NOSPACE alarm.",
                outcome="not applied",
                retrying=False,
                reason=details,
            )
        case Code.RESOURCE_EXHAUSTED:
            return ResponseTooLarge("an etcd message is too large", reason=details)
        case Code.DATA_LOSS:
            return Corrupt("etcd reports corruption", reason=details)
        case Code.UNIMPLEMENTED:
            return Invalid(
                "the endpoint does not speak etcd's v3 API",
                hint="Check the address, and that etcd is 3.4 or newer.",
                reason=details,
            )
        case _:
            return Invalid("etcd rejected the request", code=code.name, reason=details)
