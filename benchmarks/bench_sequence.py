"""The rate at which journals become committed messages: ``python benchmarks/bench_sequence.py [--json]``.

Bytes in chunks, as a reader gets them, are decoded to envelopes and sequenced, all in one thread.
Beside it the ceiling of the same run: ``msgspec`` decoding whole buffers into the same structs,
and the same work one message at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import msgspec

from gazette.labels import CONTENT_JSON_LINES
from gazette.message.envelope import EnvelopeDecoder
from gazette.message.framing.framing import framing_of
from gazette.message.message import Message
from gazette.message.sequencer.sequencer import Sequencer
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    Clock,
    UuidMint,
    clock_at,
)

CHUNK_BYTES = 128 << 10
RING = 8192


class Word(Message):
    word: str
    count: int


def journal_of(messages: int, *, transaction: int = 0, producers: int = 1, run: int = 50) -> bytes:
    """Return messages in transactions of that many, or outside of them; producers alternate in runs."""
    framing = framing_of(CONTENT_JSON_LINES, Word)
    clock = Clock(clock_at(1_700_000_000 * 10**9))
    mints = [UuidMint(bytes([1, 0, 0, 0, 0, n]), clock) for n in range(producers)]
    buffer = bytearray()
    for number in range(messages):
        flags = OUTSIDE_TXN
        if transaction:
            flags = ACK_TXN if number % transaction == transaction - 1 else CONTINUE_TXN
        mint = mints[number // (transaction or run) % producers]
        message = framing.codec.stamp(Word("some text that is a message", number), mint, flags)
        framing.encode_into(message, buffer)
    return bytes(buffer)


def sequence(journal: bytes, ring: int = RING) -> int:
    """Return how many messages committed."""
    framing = framing_of(CONTENT_JSON_LINES, Word)
    decoder = EnvelopeDecoder("bench/journal", framing, 0)
    sequencer: Sequencer[Word] = Sequencer({}, ring)
    committed = 0
    for begin in range(0, len(journal), CHUNK_BYTES):
        decoder.feed(journal[begin : begin + CHUNK_BYTES])
        while batch := decoder.decode():
            index = 0
            while index < len(batch):
                index = sequencer.queue_batch(batch, index)
                if (wanted := sequencer.replay_range) is not None:
                    again = EnvelopeDecoder("bench/journal", framing, wanted.begin)
                    again.feed(journal[wanted.begin : wanted.end])
                    sequencer.start_replay(iter(again.decode, []))
                while taken := sequencer.dequeue(4096):
                    committed += len(taken)
    return committed


def sequence_one_by_one(journal: bytes) -> int:
    framing = framing_of(CONTENT_JSON_LINES, Word)
    decoder = EnvelopeDecoder("bench/journal", framing, 0)
    sequencer: Sequencer[Word] = Sequencer({}, RING)
    committed = 0
    for begin in range(0, len(journal), CHUNK_BYTES):
        decoder.feed(journal[begin : begin + CHUNK_BYTES])
        while batch := decoder.decode():
            for envelope in batch:
                sequencer.queue(envelope)
                while sequencer.step() is not None:
                    committed += 1
    return committed


def decode_only(journal: bytes) -> int:
    decoder = msgspec.json.Decoder(Word)
    count, rest = 0, b""
    for begin in range(0, len(journal), CHUNK_BYTES):
        chunk = rest + journal[begin : begin + CHUNK_BYTES]
        end = chunk.rfind(b"\n") + 1
        count += len(decoder.decode_lines(chunk[:end]))
        rest = chunk[end:]
    return count


def rate(repeat: int, messages: int, work: Callable[[], int]) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        count = work()
        times.append(time.perf_counter() - begin)
        assert count == messages, f"{count} of {messages} messages committed"
    return messages / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    count = arguments.messages
    journals = {
        "outside of transactions": journal_of(count),
        "outside, 4 producers in runs of 50": journal_of(count, producers=4),
        "transactions of 1000": journal_of(count, transaction=1000),
        "transactions of 1000, 4 producers": journal_of(count, transaction=1000, producers=4),
        "transactions of 10": journal_of(count, transaction=10),
        "transactions of 20000 (replayed)": journal_of(count, transaction=20_000),
    }
    plain = journals["outside of transactions"]
    figures = {
        "msgspec decode_lines only": rate(arguments.repeat, count, lambda: decode_only(plain))
    }
    for name, journal in journals.items():
        figures[name] = rate(arguments.repeat, count, partial(sequence, journal))
    figures["one by one, outside of transactions"] = rate(
        arguments.repeat, count, lambda: sequence_one_by_one(plain)
    )
    if arguments.json:
        print(json.dumps({"bytes": len(plain) / count, "messages_per_s": figures}))
        return
    print(f"messages of {len(plain) / count:.0f} bytes")
    ceiling = figures["msgspec decode_lines only"]
    for name, figure in figures.items():
        print(f"{name:42s} {figure / 1e6:6.2f} M messages/s  {figure / ceiling:6.2f} of decoding")


if __name__ == "__main__":
    main()
