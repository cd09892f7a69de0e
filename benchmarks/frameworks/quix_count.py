"""The word count on quixstreams: ``python quix_count.py FILE DIRECTORY {at-least-once | exactly-once}``.

Run by `compare.py`, in an environment that has quixstreams and nothing of ours. Its Kafka is the mock
broker that librdkafka has inside: real protocol over loopback, all in memory, one process for all.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from quixstreams import Application, State
from quixstreams.models.topics import TopicAdmin, TopicConfig

TOPIC = "words"
PARTITIONS = 4
"""Of every topic of the mock broker."""
COMMIT_S = 1.0


def main() -> None:
    path, directory, guarantee = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    lines = path.read_bytes().splitlines()
    # The mock cluster lives as long as this client.
    cluster = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
    brokers = cluster.list_topics(timeout=30).brokers.values()
    address = ",".join(f"{one.host}:{one.port}" for one in brokers)
    producer = Producer({"bootstrap.servers": address, "linger.ms": 5})
    for line in lines:
        key = json.loads(line)["word"].encode()
        while True:
            try:
                producer.produce(TOPIC, line, key)
                break
            except BufferError:
                producer.poll(0.05)
    producer.flush(60)

    def inspect(_admin: TopicAdmin, names: list[str], *_: Any, **__: Any) -> dict[str, TopicConfig]:
        # The mock broker has no admin API: it makes topics as they are asked for, all alike.
        for name in names:
            producer.list_topics(name, timeout=30)
        settings = {
            "retention.ms": "604800000",
            "retention.bytes": "-1",
            "cleanup.policy": "delete",
        }
        return dict.fromkeys(names, TopicConfig(PARTITIONS, 1, settings))

    TopicAdmin.inspect_topics = inspect  # type: ignore[method-assign, assignment]
    application = Application(
        address,
        consumer_group="word-count",
        auto_offset_reset="earliest",
        commit_interval=COMMIT_S,
        state_dir=directory,
        processing_guarantee=guarantee,  # type: ignore[arg-type]
        auto_create_topics=False,
        loglevel="ERROR",
    )
    counts: dict[str, int] = {}
    times: list[float] = []

    def count(value: dict[str, Any], state: State) -> None:
        if not times:
            times.append(time.perf_counter())
        total = state.get("n", 0) + value["count"]
        state.set("n", total)
        counts[value["word"]] = total

    application.dataframe(application.topic(TOPIC, value_deserializer="json")).update(
        count, stateful=True
    )
    application.run(count=len(lines), timeout=120)
    seconds = time.perf_counter() - times[0]
    print(json.dumps({"messages": sum(counts.values()), "seconds": seconds, "counts": counts}))


if __name__ == "__main__":
    main()
