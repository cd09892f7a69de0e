"""The same sessions joined with a table, on bytewax and on quixstreams, killed by SIGKILL in the middle.

::

    python benchmarks/frameworks/visits.py --python ENVIRONMENT/bin/python

The environment has bytewax and quixstreams, and nothing of ours. Each program is killed once it has written
100 sessions, started again, and what it wrote is compared with the sessions of the input. A program that does
not end in time is reported, and the next one runs. Ours is killed by ``pytest tests/run/test_visits.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

HERE: Final = Path(__file__).parent
GAP_S: Final = 1800
BEGIN_S: Final = 1_700_000_000
KILL_AT: Final = 100
"""Number of sessions that a program has written when it is killed."""
POLL_S: Final = 1.0
END_S: Final = 150.0

MOCK: Final = """
import json, sys, time
from confluent_kafka import Producer
cluster = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
brokers = cluster.list_topics(timeout=30).brokers.values()
address = ",".join(f"{one.host}:{one.port}" for one in brokers)
producer = Producer({"bootstrap.servers": address})
for name in ("clicks", "plans", "visits"):
    producer.list_topics(name, timeout=30)
for line in open(sys.argv[1]):
    message = json.loads(line)
    name = "plans" if "plan" in message else "clicks"
    producer.produce(name, line.strip(), message["user"], timestamp=message["at"] * 1000)
    producer.poll(0)
producer.flush(60)
print(address, flush=True)
sys.stdin.read()
"""
ON_MOCK: Final = """
import runpy, sys
from confluent_kafka import Producer
from quixstreams.models.topics import TopicAdmin, TopicConfig

# The mock broker has no admin API: it makes topics as they are asked for, all alike.
settings = {"retention.ms": "604800000", "retention.bytes": "-1", "cleanup.policy": "delete"}
producer = Producer({"bootstrap.servers": sys.argv[2]})

def inspect(admin, names, *_, **__):
    for name in names:
        producer.list_topics(name, timeout=30)
    return dict.fromkeys(names, TopicConfig(4, 1, settings))

TopicAdmin.inspect_topics = inspect
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
DRAIN: Final = """
import json, sys
from confluent_kafka import Consumer, TopicPartition
settings = {"bootstrap.servers": sys.argv[1], "group.id": "drain", "auto.offset.reset": "earliest",
            "enable.partition.eof": True, "isolation.level": "read_committed"}
consumer = Consumer(settings)
partitions = consumer.list_topics("visits", timeout=30).topics["visits"].partitions
consumer.assign([TopicPartition("visits", one, 0) for one in partitions])
ended = set()
while len(ended) < len(partitions):
    message = consumer.poll(10)
    if message is None:
        break
    if message.error():
        ended.add(message.partition())
        continue
    value = json.loads(message.value())
    print(json.dumps({"user": message.key().decode(), **value, "begin": value["begin"] // 1000}))
"""


def history(rng: random.Random) -> tuple[list[dict[str, Any]], Counter[tuple[str, int, int]]]:
    """Return messages in the order of their times, and the sessions that later messages close."""
    messages: list[dict[str, Any]] = []
    clicks: dict[str, list[int]] = defaultdict(list)
    at = BEGIN_S
    for number in range(4000):
        at += rng.randrange(1, 90)
        user = f"user-{rng.randrange(20)}"
        if rng.random() < 0.1:
            messages.append({"user": user, "at": at, "plan": f"plan-{number}"})
        else:
            clicks[user].append(at)
            messages.append({"user": user, "at": at})
    for user in sorted(clicks):  # Another click of each user, much later.
        messages.append({"user": user, "at": at + 10 * GAP_S})
    sessions: Counter[tuple[str, int, int]] = Counter()
    for user, times in clicks.items():
        first = 0
        for index, time_s in enumerate(times):
            if index + 1 == len(times) or times[index + 1] >= time_s + GAP_S:
                sessions[user, times[first], index + 1 - first] += 1
                first = index + 1
    return messages, sessions


def run_killed(command: list[str], log: Path, written: Callable[[], int], total: int) -> None:
    """Start a program, kill it when it has written `KILL_AT` sessions, and start it again.

    Return when it has ended, or has written all. Print it if neither is so within `END_S`.
    """
    with log.open("wb") as output:
        first = subprocess.Popen(command, stdout=output, stderr=output)
        _wait(first, lambda: written() >= KILL_AT)
        if first.poll() is not None:
            raise SystemExit(f"{command} ended before it was killed:\n{log.read_text()[-2000:]}")
        first.kill()
        first.wait()
        print(f"killed after {written()} sessions", flush=True)
        second = subprocess.Popen(command, stdout=output, stderr=output)
        began = perf_counter()
        done = _wait(second, lambda: written() >= total)
        seconds = perf_counter() - began
        print(f"{'done' if done else 'not done'} {seconds:.0f} s after the restart", flush=True)
        if second.poll() is None:
            second.terminate()
        try:
            second.wait(30)
        except subprocess.TimeoutExpired:
            second.kill()
            second.wait()


def _wait(process: subprocess.Popen[bytes], enough: Callable[[], bool]) -> bool:
    """Return True once the process has ended or ``enough`` returns True, and False after `END_S`."""
    until = perf_counter() + END_S
    while perf_counter() < until:
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if enough():
                return True
        else:
            return True
    return False


def compare(
    name: str, visits: list[dict[str, Any]], expected: Counter[tuple[str, int, int]]
) -> None:
    last = BEGIN_S + 10 * GAP_S + max(begin for _, begin, _ in expected) - BEGIN_S
    found = Counter((one["user"], one["begin"], one["clicks"]) for one in visits)
    found = Counter({key: n for key, n in found.items() if key[1] < last - GAP_S})
    twice = sum(n - 1 for n in found.values() if n > 1)
    print(
        f"{name}: {sum(expected.values())} sessions; {len(found & expected)} right,"
        f" {len(expected - found)} missing, {len(found.keys() - expected.keys())} wrong,"
        f" {twice} published twice",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True)
    python = parser.parse_args().python
    messages, expected = history(random.Random(7))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source, target, state = root / "input.jsonl", root / "output.jsonl", root / "bytewax"
        source.write_text("".join(json.dumps(one) + "\n" for one in messages))
        state.mkdir()
        total = sum(expected.values())
        command = [python, str(HERE / "visits_bytewax.py"), str(source), str(target), str(state)]

        def in_file() -> int:
            return target.read_bytes().count(b"\n") if target.exists() else 0

        # It ends with its input. Its last sessions are those that no message closes.
        run_killed(command, root / "log", in_file, len(messages))
        visits = [json.loads(line) for line in target.read_text().splitlines()]
        compare("bytewax, to a file", visits, expected)
        for guarantee in ("at-least-once", "exactly-once"):
            run_quix(python, root, guarantee, source, expected, total)


def run_quix(
    python: str,
    root: Path,
    guarantee: str,
    source: Path,
    expected: Counter[tuple[str, int, int]],
    total: int,
) -> None:
    kafka = subprocess.Popen(
        [python, "-c", MOCK, str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert kafka.stdout is not None
    address = kafka.stdout.readline().strip()

    def drained() -> list[str]:
        done = subprocess.run(
            [python, "-c", DRAIN, address], check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.splitlines()

    log = root / "log"
    script = str(HERE / "visits_quix.py")
    command = [python, "-c", ON_MOCK, script, address, str(root / guarantee), guarantee]
    try:
        run_killed(command, log, lambda: len(drained()), total)
        compare(f"quixstreams, {guarantee}", [*map(json.loads, drained())], expected)
    except BaseException:
        print(log.read_text()[-3000:])
        raise
    finally:
        kafka.communicate("")


if __name__ == "__main__":
    main()
