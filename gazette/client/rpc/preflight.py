"""Checks of a client's address: `require_reachable`, and `require_kind`.

Calls wait for a connection, as brokers and members come and go. A wrong address, or a server that
was never started, must be reported at once instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import grpc
import grpc.aio

from gazette.client.rpc.errors import open_channel
from gazette.errors import Closed, Invalid, Unavailable

if TYPE_CHECKING:
    from gazette.client.client import Client
    from gazette.client.shards import ShardClient

_UNREACHABLE: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_SILENT: Final = "it does not answer"
_PROBE: Final = "/gazctl.Probe/Probe"
"""A method that no server has. Even its refusal proves that the call has arrived."""
_METHODS: Final = {"broker": "/protocol.Journal/ListFragments", "consumer": "/consumer.Shard/Stat"}
"""For each kind of server, a method that only this kind has. An empty request to it has no effect."""
_OTHER: Final = {"broker": "consumer", "consumer": "broker"}


async def require_reachable(
    client: Client | ShardClient, what: str, *, connect_s: float, wait_s: float = 0, hint: str
) -> None:
    """Connect to one of the client's addresses. Wait at most ``connect_s`` seconds for each address.

    If no address answers, wait at most ``wait_s`` seconds more for one of them. Raise ``Unavailable`` with
    the reason of each address, and with ``hint``.
    """
    reasons: dict[str, str] = {}
    while (address := client.address) not in reasons:
        channel = cast("Any", client.channels.grpc_channel(address))
        probe = channel.unary_unary(_PROBE)
        try:
            with open_channel("probe"):
                await probe(b"", timeout=connect_s)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _UNREACHABLE:
                return
            reasons[address] = _reason(error)
        except Closed:
            reasons[address] = _SILENT
        else:
            return
        client.addresses.pass_over(address)
    if wait_s and await _comes_back(client, wait_s):
        return
    failures = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
    raise Unavailable(f"cannot reach the {what} at {failures}", hint=hint)


async def require_kind(
    client: Client | ShardClient, what: str, *, timeout_s: float, origin: str = ""
) -> None:
    """Require that the reachable server is a ``what``: a broker, or a consumer.

    If it is another server, raise ``Invalid`` for ``--WHAT.address``. The hint ends with ``origin``, which
    says where the address comes from.
    """
    if await _is_served(client, what, timeout_s):
        return
    other = _OTHER[what]
    found = f"is a {other}" if await _is_served(client, other, timeout_s) else "is another server"
    raise Invalid(
        f"the server at {client.address} {found}, and this command calls a {what}",
        path=f"--{what}.address",
        hint=f"Give the address of a {what}: `gazette run` prints those of both.{origin}",
    )


async def _is_served(client: Client | ShardClient, what: str, timeout_s: float) -> bool:
    """Return False if the server lacks a method that each server of the kind ``what`` has. Return True for
    any other answer, and if no answer comes in time."""
    channel = cast("Any", client.channels.grpc_channel(client.address))
    try:
        # The server refuses the empty request. Only the reason counts.
        with open_channel("probe"):
            await channel.unary_unary(_METHODS[what])(b"", timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return error.code() is not grpc.StatusCode.UNIMPLEMENTED
    except Closed:
        pass
    return True


async def _comes_back(client: Client | ShardClient, wait_s: float) -> bool:
    """Wait for a server at the client's address. Return False if none answers within ``wait_s`` seconds."""
    channel = cast("Any", client.channels.grpc_channel(client.address))
    try:
        with open_channel("probe"):
            await channel.unary_unary(_PROBE)(b"", timeout=wait_s, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        return error.code() not in _UNREACHABLE
    except Closed:
        return False
    return True


def _reason(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return _SILENT
    # gRPC's own text nests: the operating system's text comes last.
    reason = (error.details() or error.code().name).rpartition("last error: ")[2]
    return reason.removeprefix("UNKNOWN: ")
