"""The proof of stream-sum: `Verifier`. Pure: the caller says what was published, and what was read.

It knows the right sum of every stream, because the caller announces each stream. From what read-committed
readers then give it, it finds

- sums that are wrong, of streams that were not published, or published more than once;
- transactions that are *torn*: of which one journal shows a part, and another does not show its own;
- receipts that come twice, or leave one out: a commit that was lost, or took effect twice;
- and, when it is asked, sums that are missing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from stream_sum.messages import Receipt, Sum
from stream_sum.state import Totals


@dataclass(frozen=True, slots=True)
class Expected:
    """The sum that a stream must have."""

    seq_no: int
    value: int
    ended_at: float
    """Time at which its last chunk was acknowledged, by the caller's clock, in seconds."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not happen. ``kind`` is one word; ``details`` are for people and files."""

    kind: str
    details: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kind}: " + ", ".join(f"{k}={v}" for k, v in self.details.items())


@dataclass(slots=True)
class _Transaction:
    """The part of a transaction that was read."""

    receipt: Receipt | None = None
    sums: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    digest: int = 0

    def is_whole(self) -> bool:
        receipt = self.receipt
        return receipt is not None and receipt.sums == self.sums and receipt.digest == self.digest

    def is_over(self) -> bool:
        """Return True if the transaction has more than its receipt says."""
        receipt = self.receipt
        return receipt is not None and any(
            count > receipt.sums.get(journal, 0) for journal, count in self.sums.items()
        )


class Verifier:
    """Learns of streams by ``expect``, and of what was read by ``on_sum`` and ``on_receipt``.

    ``alone``: the journals were empty before, and no other process publishes streams. Otherwise streams
    that are not known are those of others, and receipts may begin anywhere.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self._alone = alone
        self.violations: list[Violation] = []
        self.verified = 0
        """Streams whose sum was right."""
        self.transactions: dict[str, int] = {}
        """Last receipt, by shard."""
        self.sums: defaultdict[str, int] = defaultdict(int)
        """Number of sums, by shard."""
        self._expected: dict[bytes, Expected] = {}
        self._seen: dict[bytes, Sum] = {}
        self._open: dict[tuple[str, int], _Transaction] = {}
        self._whole: set[tuple[str, int]] = set()

    def _violated(self, kind: str, **details: Any) -> None:
        self.violations.append(Violation(kind, details))

    def expect(self, key: bytes, seq_no: int, value: int, *, ended_at: float = 0.0) -> None:
        """Expect a stream to end with this sum.

        Call it before the last chunk of the stream is published. At the latest, call it before the
        results of that chunk are given.
        """
        self._expected[key] = Expected(seq_no, value, ended_at)

    def ended(self, key: bytes, at: float) -> None:
        """Note that the last chunk of a stream was acknowledged."""
        expected = self._expected.get(key)
        if expected is not None:
            self._expected[key] = Expected(expected.seq_no, expected.value, at)

    def on_sum(self, journal: str, one: Sum) -> Expected | None:
        """Take a committed sum. Return the expected one, if the sum is the first and right."""
        stream = one.key.hex()
        where = {"stream": stream, "journal": journal, "shard": one.shard}
        if one.transaction:
            self._note(one.shard, one.transaction, journal, one.value)
        self.sums[one.shard] += 1
        if (first := self._seen.get(one.key)) is not None:
            self._violated("duplicate", **where, uuids=[first.uuid, one.uuid])
            return None
        self._seen[one.key] = one
        expected = self._expected.pop(one.key, None)
        if expected is None:
            if self._alone:
                self._violated("unknown", **where, uuid=one.uuid)
            return None
        if (one.seq_no, one.value) != (expected.seq_no, expected.value):
            self._violated(
                "wrong",
                **where,
                got=(one.seq_no, f"{one.value:016x}"),
                expected=(expected.seq_no, f"{expected.value:016x}"),
            )
            return None
        self.verified += 1
        return expected

    def _note(self, shard: str, number: int, journal: str, value: int) -> None:
        if (shard, number) in self._whole:
            self._violated(
                "torn", shard=shard, transaction=number, journal=journal, more="after it was whole"
            )
            return
        transaction = self._open.setdefault((shard, number), _Transaction())
        transaction.sums[journal] += 1
        transaction.digest ^= value
        self._check(shard, number, transaction)

    def on_receipt(self, receipt: Receipt) -> None:
        """Take a committed receipt, in the order of its journal."""
        shard, number = receipt.shard, receipt.transaction
        last = self.transactions.get(shard, 0 if self._alone else number - 1)
        if number != last + 1:
            kind = "repeated" if number <= last else "lost"
            self._violated(kind, shard=shard, receipt=number, last=last, uuid=receipt.uuid)
        self.transactions[shard] = max(last, number)
        if (shard, number) in self._whole:
            return  # It was repeated, and reported.
        transaction = self._open.setdefault((shard, number), _Transaction())
        if transaction.receipt is not None:
            return
        transaction.receipt = receipt
        self._check(shard, number, transaction)

    def _check(self, shard: str, number: int, transaction: _Transaction) -> None:
        if transaction.is_whole():
            self._whole.add((shard, number))
            del self._open[shard, number]
        elif transaction.is_over():
            self._torn(shard, number, transaction)
            del self._open[shard, number]
            self._whole.add((shard, number))

    def _torn(self, shard: str, number: int, transaction: _Transaction) -> None:
        receipt = transaction.receipt
        self._violated(
            "torn",
            shard=shard,
            transaction=number,
            receipt=None if receipt is None else receipt.sums,
            sums=dict(transaction.sums),
        )

    @property
    def pending(self) -> int:
        """Streams whose sum has not been seen."""
        return len(self._expected)

    @property
    def open_transactions(self) -> int:
        """Those of which something was seen, and not all."""
        return len(self._open)

    def overdue(self, now: float, after_s: float) -> list[Violation]:
        """Return streams that ended longer ago than that, and have no sum yet. Nothing is recorded."""
        return [
            Violation("late", {"stream": key.hex(), "seconds": round(now - one.ended_at, 1)})
            for key, one in self._expected.items()
            if one.ended_at and now - one.ended_at > after_s
        ]

    def finish(self) -> None:
        """Report what is incomplete as a violation, after everything was published and read."""
        for key, one in self._expected.items():
            self._violated("missing", stream=key.hex(), chunks=one.seq_no)
        for (shard, number), transaction in self._open.items():
            self._torn(shard, number, transaction)
        self._expected.clear()
        self._open.clear()

    def check_totals(self, shard: str, totals: Totals) -> None:
        """Require that the state of a shard, after everything was read, is the fold of what it published."""
        said = (totals.transactions, totals.sums, totals.open_streams)
        seen = (self.transactions.get(shard, 0), self.sums.get(shard, 0), 0)
        if said != seen:
            names = ("transactions", "sums", "open_streams")
            self._violated(
                "state",
                shard=shard,
                store=dict(zip(names, said, strict=True)),
                journals=dict(zip(names, seen, strict=True)),
            )
