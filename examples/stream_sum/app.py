"""Sums streams of chunks, exactly once: what stream-sum proves is in ``verifier.py``.

A stream is a sequence of chunks with one id, in one journal, between the chunks of others. At its end,
the shard that reads the journal publishes the sum over all of it. In the same transaction, and to
another journal, it publishes a receipt of all sums that the transaction published.
"""

from __future__ import annotations

import collections.abc
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from gazette import Application, Envelope, Publisher, Shard, ShardRequest, shard_route
from gazette.config.schema import setting
from gazette.consumer.service import ConsumerService
from gazette.errors import Corrupt
from gazette.labels import MESSAGE_TYPE
from gazette.message.mapping import Mapping, PartitionsFunc, modulo_mapping
from gazette.protocol.label_set import LabelSelector
from stream_sum.messages import Chunk, Receipt, Sum, crc64
from stream_sum.state import STORE_LABEL, Partial, StreamState, Totals, new_state

CHUNKS: Final = LabelSelector.parse(f"{MESSAGE_TYPE} = stream_sum.Chunk")
SUMS: Final = LabelSelector.parse(f"{MESSAGE_TYPE} = stream_sum.Sum")
RECEIPTS: Final = LabelSelector.parse(f"{MESSAGE_TYPE} = stream_sum.Receipt")


@dataclass(frozen=True, slots=True)
class StreamSumFlags:
    database: str = setting("", "database of shards with the label store=sql, as a SQLAlchemy URL")


class Summer(Application[StreamState]):
    message_type = Chunk
    config_groups: ClassVar[collections.abc.Mapping[str, type]] = {"streamsum": StreamSumFlags}

    def __init__(self) -> None:
        self.database = ""

    async def initialize(self, service: ConsumerService) -> None:
        self.database = service.config(StreamSumFlags).database
        sums, receipts = service.partitions(SUMS), service.partitions(RECEIPTS)
        # Before there are shards: a transaction must not find that there is nowhere to publish to.
        await sums.ready()
        await receipts.ready()
        self.publish_to(sums, receipts)
        service.add_route("/shards/{shard:path}/totals", TotalsApi(service).totals)

    def publish_to(self, sums: PartitionsFunc, receipts: PartitionsFunc) -> None:
        self.sum_mapping: Mapping[Sum] = modulo_mapping(sums, lambda one: one.key)
        self.receipt_mapping: Mapping[Receipt] = modulo_mapping(receipts, lambda one: one.shard)

    def new_store(self, shard: Shard, recorder: Any) -> StreamState:
        kind = shard.spec.labels.value_of(STORE_LABEL) or "sqlite"
        return new_state(kind, shard, recorder, self.database)

    def consume_message(
        self, shard: Shard, store: StreamState, envelope: Envelope[Chunk], publisher: Publisher
    ) -> None:
        chunk = envelope.message
        last = store.open(chunk.key)
        if chunk.seq_no != last.seq_no + 1:
            raise Corrupt(
                f"chunk {chunk.seq_no} of stream {chunk.key.hex()} follows chunk {last.seq_no}",
                hint="A message was lost or came twice, or the store is older than its checkpoint.",
                journal=envelope.journal,
                offset=envelope.begin,
            )
        partial = Partial(chunk.seq_no, crc64(chunk.data or b"", last.value))
        store.gathered[chunk.key] = partial if chunk.data else None
        if not chunk.data:
            store.ended.append(Sum(id=chunk.id, seq_no=partial.seq_no, value=partial.value))

    def finalize_transaction(self, shard: Shard, store: StreamState, publisher: Publisher) -> None:
        ended, store.ended = store.ended, []
        transaction = store.flush(len(ended))
        if not ended:
            return
        journals: Counter[str] = Counter()
        digest = 0
        for one in ended:
            one.shard, one.transaction = shard.id, transaction
            digest ^= one.value
            journals[self.sum_mapping(one).journal] += 1
            publisher.publish_uncommitted(self.sum_mapping, one)
        receipt = Receipt(
            shard=shard.id, transaction=transaction, sums=dict(journals), digest=digest
        )
        publisher.publish_uncommitted(self.receipt_mapping, receipt)


class TotalsApi:
    """``GET /shards/SHARD/totals``: what a shard's state says, by any member."""

    def __init__(self, service: ConsumerService) -> None:
        self.service = service

    @shard_route()
    def totals(self, store: StreamState, request: ShardRequest) -> Totals:
        return store.totals()
