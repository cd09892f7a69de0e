"""The cost of calls of etcd by our own HTTP/2, beside `grpc.aio`, in alternating rounds of one run.

::

    python benchmarks/bench_etcd.py [--calls 2000] [--rounds 3]

Each round starts an etcd for each side. It makes reads one after another, and then as many transactions by 50
tasks at once. It prints seconds and seconds of processor time of this process, for both.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

import grpc
import grpc.aio

from gazette.cluster.etcd.client import Etcd, EtcdSettings, Op
from gazette.http2.transport import Transport
from gazette.runtime.clock import SystemClock
from gazette.testing.etcd import etcd_for_tests

_TASKS: Final = 50
_VALUE: Final = b"x" * 200


class _GrpcAio:
    """The channels of `grpc.aio`."""

    ends_silent_calls = False

    def channel(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        options: Sequence[tuple[str, Any]],
    ) -> grpc.aio.Channel:
        del credentials  # This etcd has no TLS.
        return grpc.aio.insecure_channel(target, options=options)


async def _timed(work: Coroutine[Any, Any, Any]) -> tuple[float, float]:
    begun, used = perf_counter(), process_time()
    await work
    return perf_counter() - begun, process_time() - used


async def _measure(endpoint: str, transport: Transport, calls: int) -> list[tuple[float, float]]:
    settings = EtcdSettings((endpoint,))
    async with await Etcd.connect(settings, SystemClock(), transport=transport) as etcd:

        async def read() -> None:
            for number in range(calls):
                await etcd.get(f"read/{number}")

        async def write(task: int) -> None:
            for number in range(calls // _TASKS):
                await etcd.txn((), (Op.put(f"written/{task}/{number}", _VALUE),))

        async def write_all() -> None:
            await asyncio.gather(*map(write, range(_TASKS)))

        return [await _timed(read()), await _timed(write_all())]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sides: dict[str, Transport | None] = {"grpc.aio": _GrpcAio(), "ours": None}
    for _ in range(args.rounds):
        for name, transport in sides.items():
            with (
                tempfile.TemporaryDirectory() as directory,
                etcd_for_tests(Path(directory)) as server,
            ):
                reads, writes = asyncio.run(_measure(server.endpoint, transport, args.calls))
            print(
                f"{name:9} reads {reads[0]:.3f} s, {reads[1]:.3f} s CPU;"
                f" transactions {writes[0]:.3f} s, {writes[1]:.3f} s CPU",
                flush=True,
            )


if __name__ == "__main__":
    main()
