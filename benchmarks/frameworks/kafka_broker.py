"""A broker of Kafka, of one process: its jars, and its start."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

KAFKA: Final = "4.3.1"
TIMEOUT_S: Final = 600
CLUSTER_ID: Final = "MkU3OEVBNTcwNTJENDM2Qk"
HEAP: Final = (
    "-Xms1g",
    "-Xmx1g",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
)
"""The options of the start script of Kafka."""

POM: Final = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>gazette</groupId><artifactId>kafka-jars</artifactId><version>1</version>
  <dependencies>{}</dependencies>
</project>
"""
DEPENDENCY: Final = (
    "<dependency><groupId>org.apache.kafka</groupId><artifactId>{}</artifactId>"
    "<version>{}</version></dependency>"
)

SERVER: Final = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={directory}/data
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
group.initial.rebalance.delay.ms=0
# Messages have times of 2023.
log.retention.ms=-1
"""


def jars_in(directory: Path, version: str = KAFKA) -> Path:
    """Return a directory with the jars of a broker and of Kafka Streams. Without it, Maven gets them."""
    jars = directory / f"kafka-{version}"
    if not jars.exists():
        names = ("kafka_2.13", "kafka-streams")
        pom = directory / "pom.xml"
        pom.write_text(POM.format("".join(DEPENDENCY.format(name, version) for name in names)))
        goal = ("dependency:copy-dependencies", f"-DoutputDirectory={jars}.partial")
        command = ["mvn", "--quiet", "--batch-mode", f"--file={pom}", *goal]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
        Path(f"{jars}.partial").rename(jars)
    return jars


@contextmanager
def broker(
    jars: Path, directory: Path, java: str = "java", options: Sequence[str] = HEAP
) -> Iterator[str]:
    """Run one broker of Kafka, and yield its address. It answers a little later."""
    port, controller = free_port(), free_port()
    settings = directory / "server.properties"
    settings.write_text(SERVER.format(port=port, controller=controller, directory=directory))
    command = [java, *options, "-cp", f"{jars}/*"]
    with (directory / "kafka.log").open("wb") as output:
        subprocess.run(
            [*command, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(settings)],
            stdout=output,
            stderr=output,
            check=True,
        )
        process = subprocess.Popen(
            [*command, "kafka.Kafka", str(settings)],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
