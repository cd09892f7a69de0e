"""Measure the encoding of proposals by hand beside the generated code, in alternating rounds.

    python benchmarks/bench_proposals.py

A primary encodes a proposal and an answer for each small append, and each replica encodes the proposal once
more to compare it. Prints microseconds of each way, and the ratio of each round: its median, least and most.
`encode_fragment` and `ProposalEncoder` stay only while the ratio is below 0.9.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import timeit
from collections.abc import Callable
from typing import Final

from gazette.protocol.content import ProposalEncoder, append_commit
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.label_set import EMPTY_LABELS
from gazette.protocol.pb import broker_pb2

_FRAGMENT: Final = Fragment(
    "bench/small/00", 1 << 20, 1 << 24, hashlib.sha1(b"content").digest(), Codec.SNAPPY
)
_ENCODER: Final = ProposalEncoder()
_CALLS: Final = 5_000


def proposal_by_hand() -> bytes:
    return _ENCODER.encode(_FRAGMENT, EMPTY_LABELS)


def proposal_generated() -> bytes:
    return broker_pb2.ReplicateRequest(
        proposal=_FRAGMENT.to_pb(), registers=EMPTY_LABELS.to_pb(), acknowledge=True
    ).SerializeToString()


def answer_by_hand() -> bytes:
    return append_commit(_FRAGMENT)


def answer_generated() -> bytes:
    return broker_pb2.AppendResponse(commit=_FRAGMENT.to_pb()).SerializeToString()


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds")
    rounds = parser.parse_args().rounds
    for name, by_hand, generated in (
        ("proposal", proposal_by_hand, proposal_generated),
        ("answer", answer_by_hand, answer_generated),
    ):
        assert by_hand() == generated()
        taken = [(_us(by_hand), _us(generated)) for _ in range(rounds)]
        ratios = sorted(hand / code for hand, code in taken)
        us = [statistics.median(times) for times in zip(*taken, strict=True)]
        sys.stdout.write(
            f"{name}: by hand {us[0]:.2f} µs, generated code {us[1]:.2f} µs, "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})\n"
        )


def _us(call: Callable[[], bytes]) -> float:
    return timeit.timeit(call, number=_CALLS) / _CALLS * 1e6


if __name__ == "__main__":
    main()
