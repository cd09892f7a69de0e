"""The answers to appends: responses, and the statuses of failed appends."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import grpc

from gazette.broker.append.events import Ending, Outcome
from gazette.broker.append.flow_control import AppendFlow
from gazette.broker.context import BrokerContext
from gazette.client.rpc.errors import is_refusal_of_rights
from gazette.errors import GazetteError, NotAllowed, Unavailable
from gazette.protocol.append_session import introduction
from gazette.protocol.content import append_commit
from gazette.protocol.error_codes import protocol_code_of
from gazette.protocol.label_set import LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.status import Status
from gazette.runtime.metrics import WRITE_HEAD

_KEPT_REGISTERS_MAX: Final = 4
"""Greatest number of registers in a response whose encoded form is cached."""


def under_lease(context: BrokerContext, ended: Outcome) -> Outcome:
    """Return the outcome. If this broker decided it, and its lease may have ended since, return a failure.

    A broker that was paused beyond its lease may refuse an append by registers or a head that are outdated.
    """
    if ended.ending is not Ending.COMMITTED and ended.ending is not Ending.REFUSED:
        return ended
    try:
        context.lease.check()
    except Unavailable as error:
        uncertain = ended.ending is Ending.COMMITTED
        return Outcome(Ending.FAILED, error=error, context="answer", uncertain=uncertain)
    return ended


def failure_of(ended: Outcome) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return code, text and trailing metadata of a failed append. If a session ledger refused the append,
    the metadata name that ledger."""
    error = ended.error
    assert error is not None
    trailing = introduction(error.facts.get("ledger", ""), error.facts.get("created", 0))
    return _code_of(error, ended), f"{ended.context}: {error}", trailing


def encoded(ended: Outcome, header: bytes, flow: AppendFlow | None) -> bytes:
    """Return the encoded response to an append that has not failed.

    The parts are encoded one by one and joined: an encoded message may have its fields in any order.
    """
    chunks = (0, 0) if flow is None else (flow.total_chunks, flow.delayed_chunks)
    is_cacheable = len(ended.registers.labels) <= _KEPT_REGISTERS_MAX and not ended.store_error
    encode = _kept_rest if is_cacheable else _rest
    response = header + encode(ended.status, ended.registers, ended.store_error, *chunks)
    if ended.commit is not None and ended.status is Status.OK:
        response += append_commit(ended.commit)
    return response


def _rest(
    status: Status, registers: LabelSet, store_error: str, total_chunks: int, delayed_chunks: int
) -> bytes:
    """Encode a response without its header and its commit."""
    with_registers = status is Status.OK or status is Status.REGISTER_MISMATCH
    return broker_pb2.AppendResponse(
        status=status.value,  # type: ignore[arg-type]
        registers=registers.to_pb() if with_registers else None,
        store_health_error=store_error,
        total_chunks=total_chunks,
        delayed_chunks=delayed_chunks,
    ).SerializeToString()


_kept_rest: Final = lru_cache(maxsize=1 << 8)(_rest)
"""Encodes from a cache: responses of one journal often have equal parts."""


def _code_of(error: GazetteError, ended: Outcome) -> grpc.StatusCode:
    """Return the status code of a failed append.

    Clients repeat an append that is UNAVAILABLE. An append that may have been committed gets UNKNOWN: clients
    must not repeat it blindly.
    """
    if isinstance(error, NotAllowed) and not is_refusal_of_rights(error):
        return grpc.StatusCode.UNAUTHENTICATED
    if "ledger" in error.facts:
        return grpc.StatusCode.ABORTED
    if ended.uncertain:
        return grpc.StatusCode.UNKNOWN
    # A peer has refused this broker's own token: see `passed_on`.
    is_ours = isinstance(error, NotAllowed)
    return grpc.StatusCode.UNAVAILABLE if is_ours else protocol_code_of(error)


def note_head(ended: Outcome) -> None:
    """Record the end of a commit as the journal's write head, in metrics."""
    if ended.ending is Ending.COMMITTED and ended.commit is not None and not ended.repeated:
        _head_of(ended.commit.journal).set(ended.commit.end)


_head_of: Final = lru_cache(maxsize=1 << 10)(WRITE_HEAD.labels)
"""Gauges by journal. To find a gauge takes the metrics library longer than to set it."""
