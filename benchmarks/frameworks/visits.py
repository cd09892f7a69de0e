"""The same sessions joined with a table, on other frameworks, killed by SIGKILL in the middle.

::

    python benchmarks/frameworks/visits.py --python ENVIRONMENT/bin/python --kafka JARS

The environment has bytewax, quixstreams and faust-streaming, and nothing of ours. JARS is a directory with
the jars of ``org.apache.kafka:kafka_2.13`` and of all that it needs, for a broker of one process: as
``mvn dependency:copy-dependencies`` writes it. Each run has a broker of its own.

Each program is killed once it has written 100 sessions, and started again. What it wrote is compared with the
sessions of the input. A program that does not end in time is reported, and the next one runs. With
``--control`` none is killed: then each must be right. Ours is killed by ``pytest tests/run/test_visits.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from kafka_broker import broker

HERE: Final = Path(__file__).parent
GAP_S: Final = 1800
BEGIN_S: Final = 1_700_000_000
KILL_AT: Final = 100
"""Number of sessions that a program has written when it is killed."""
POLL_S: Final = 1.0
END_S: Final = 240.0
Perform = Callable[[list[str], Path, Callable[[], int], int], None]
"""Runs a command, which writes to a log. Takes the number of sessions written, and that of all."""

FILL: Final = """
import json, sys
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
address, source = sys.argv[1:]
admin = AdminClient({"bootstrap.servers": address, "log_level": 0})  # It waits for the broker.
admin.list_topics(timeout=60)
topics = [NewTopic(name, 4, 1) for name in ("clicks", "plans", "visits")]
for created in admin.create_topics(topics).values():
    created.result(60)
producer = Producer({"bootstrap.servers": address})
for line in open(source):
    message = json.loads(line)
    name = "plans" if "plan" in message else "clicks"
    producer.produce(name, line.strip(), message["user"], timestamp=message["at"] * 1000)
    producer.poll(0)
producer.flush(60)
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
    """Start a program, kill it when it has written `KILL_AT` sessions, and run it again to its end."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as first:
        try:
            _wait(first, lambda: written() >= KILL_AT)
            if first.poll() is not None:
                raise SystemExit(
                    f"{command} ended before it was killed:\n{log.read_text()[-2000:]}"
                )
        finally:
            first.kill()
    print(f"killed after {written()} sessions", flush=True)
    run_to_end(command, log, written, total)


def run_to_end(command: list[str], log: Path, written: Callable[[], int], total: int) -> None:
    """Return when a program has ended, or has written all. Print it if neither is so within `END_S`."""
    with (
        log.open("ab") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
    ):
        try:
            began = perf_counter()
            done = _wait(process, lambda: written() >= total)
            seconds = perf_counter() - began
            print(f"{'done' if done else 'not done'} {seconds:.0f} s after the start", flush=True)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
        finally:
            process.kill()


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
    parser.add_argument("--python", required=True, help="Python of the environment")
    parser.add_argument("--kafka", type=Path, help="directory of Kafka's jars")
    parser.add_argument("--only", default="bytewax,quix,faust")
    parser.add_argument("--control", action="store_true", help="run each program without a kill")
    arguments = parser.parse_args()
    python, only = arguments.python, arguments.only.split(",")
    perform = run_to_end if arguments.control else run_killed
    messages, expected = history(random.Random(7))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source = root / "input.jsonl"
        source.write_text("".join(json.dumps(one) + "\n" for one in messages))
        if "bytewax" in only:
            run_bytewax(python, root, source, expected, perform)
        for framework in sorted({"faust", "quix"} & set(only)):
            if arguments.kafka is None:
                parser.error(f"{framework} needs --kafka")
            for guarantee in ("at-least-once", "exactly-once"):
                directory = root / f"{framework}-{guarantee}"
                directory.mkdir()
                script = str(HERE / f"visits_{framework}.py")
                command = [python, script, "ADDRESS", str(directory), guarantee]
                with broker(arguments.kafka, directory) as address:
                    command[2] = address
                    run_on_kafka(python, command, address, source, expected, perform)


def run_bytewax(
    python: str,
    root: Path,
    source: Path,
    expected: Counter[tuple[str, int, int]],
    perform: Perform,
) -> None:
    target, state = root / "output.jsonl", root / "bytewax"
    state.mkdir()
    command = [python, str(HERE / "visits_bytewax.py"), str(source), str(target), str(state)]

    def in_file() -> int:
        return target.read_bytes().count(b"\n") if target.exists() else 0

    # It ends with its input. Its last sessions are those that no message closes.
    perform(command, root / "log", in_file, len(source.read_text().splitlines()))
    visits = [json.loads(line) for line in target.read_text().splitlines()]
    compare("bytewax, to a file", visits, expected)


def run_on_kafka(
    python: str,
    command: list[str],
    address: str,
    source: Path,
    expected: Counter[tuple[str, int, int]],
    perform: Perform,
) -> None:
    directory = Path(command[3])
    subprocess.run([python, "-c", FILL, address, str(source)], check=True, timeout=180)

    def drained() -> list[dict[str, Any]]:
        done = subprocess.run(
            [python, "-c", DRAIN, address], check=True, capture_output=True, text=True, timeout=60
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    def written() -> int:
        """Return the number of sessions in the output. One that is there twice counts once."""
        return len({(one["user"], one["begin"]) for one in drained()})

    log = directory / "log"
    try:
        perform(command, log, written, sum(expected.values()))
        compare(directory.name, drained(), expected)
    except BaseException:
        print(log.read_text()[-3000:])
        raise


if __name__ == "__main__":
    main()
