"""Calls of Kafka that `compare.py` needs, in an environment that has confluent-kafka.

::

    python kafka_client.py fill ADDRESS FILE…          put lines of JSON into a topic named after each file
    python kafka_client.py wait ADDRESS GROUP TOPIC    return when the group has committed all of a topic
    python kafka_client.py counts ADDRESS TOPIC        print what a restart restores from a changelog
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

PARTITIONS = 4
POLL_S = 0.2
TIMEOUT_S = 60.0
STARTING = (
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)


def fill(address: str, *sources: str) -> None:
    for source in sources:
        fill_topic(address, Path(source))


def fill_topic(address: str, source: Path) -> None:
    topic = source.stem
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    admin.list_topics(timeout=TIMEOUT_S)  # It waits for the broker.
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(TIMEOUT_S)
    producer = Producer({"bootstrap.servers": address, "linger.ms": 20, "log_level": 0})
    for line in source.read_bytes().splitlines():
        key = json.loads(line)["word"]
        while True:
            try:
                producer.produce(topic, line, key)
                break
            except BufferError:
                producer.poll(0.05)
    if producer.flush(TIMEOUT_S):
        raise TimeoutError("Kafka did not take all messages")


def ends(consumer: Consumer, topic: str) -> list[TopicPartition]:
    """Return the end of each partition."""
    partitions = consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions
    return [
        TopicPartition(
            topic,
            partition,
            consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=TIMEOUT_S)[1],
        )
        for partition in partitions
    ]


def wait(address: str, group: str, topic: str) -> None:
    consumer = Consumer({"bootstrap.servers": address, "group.id": group})
    goal = {end.partition: end.offset for end in ends(consumer, topic)}
    partitions = [TopicPartition(topic, partition) for partition in goal]
    while True:
        try:
            committed = consumer.committed(partitions, timeout=TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() not in STARTING:
                raise
        else:
            if all(at.offset >= goal[at.partition] for at in committed):
                return
        time.sleep(POLL_S)  # noqa: TID251 - another process commits.


def counts(address: str, topic: str) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "counts",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    partitions = ends(consumer, topic)
    consumer.assign([TopicPartition(topic, at.partition, 0) for at in partitions])
    latest: dict[str, int] = {}
    left = len(partitions)
    while left:
        message = consumer.poll(TIMEOUT_S)
        if message is None:
            raise TimeoutError(f"{topic} has uncommitted messages")
        if message.error():
            # The end of a partition.
            left -= 1
        elif (value := message.value()) is not None:
            latest[word_of(message.key())] = number_of(value)
    print(json.dumps(latest))


def word_of(key: bytes) -> str:
    """Return the word of a key: quixstreams puts a name behind it, and Faust quotes it."""
    return key.partition(b"|")[0].decode().strip('"')


def number_of(value: bytes) -> int:
    """Return a count: Kafka Streams writes eight bytes, the others write JSON."""
    return int.from_bytes(value) if len(value) == 8 and value[0] == 0 else int(json.loads(value))


if __name__ == "__main__":
    {"fill": fill, "wait": wait, "counts": counts}[sys.argv[1]](*sys.argv[2:])
