"""Ways to run Spark elsewhere: a server of Spark Connect, and jobs submitted to a standalone cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyspark
import pytest
from word_count.ngram_pb2 import NGramCount

from gazette.errors import Broken, Conflict, Unavailable
from gazette.history.spark.backfill import SparkRunner
from gazette.history.spark.java import ensure_java
from gazette.history.spark.tasks import run_tasks
from gazette.labels import CONTENT_PROTO_FIXED
from gazette.message.framing.framing import framing_of
from gazette.message.uuid import OUTSIDE_TXN, build_uuid, clock_at
from gazette.runtime.ports import free_port
from gazette.spark import create_view, read, session, stream_lag
from gazette.testing.stored import json_line, write_journal
from tests.backfill.apps import WordsBackfill
from tests.facts import raises
from tests.faults.spark_cluster import CLOCK, POLL_S, ROOT, standalone, until
from tests.spark.backfills import FoldedBackfill, ListedBackfill, NoTable, build_stored

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]

STORE = "file:///fragments/"
SUBMIT = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
SMALL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
BEGAN = clock_at(1_700_000_000 * 10**9)


def uuid_of(number: int) -> bytes:
    return build_uuid(bytes([1, 0, 0, 0, 0, 1]), BEGAN + number, OUTSIDE_TXN)


@asynccontextmanager
async def connect_server(directory: Path) -> AsyncIterator[str]:
    """Start a server of Spark Connect, and yield its URL once it answers."""
    port = free_port()
    conf = {
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": f"{SMALL} -Dderby.system.home={directory}",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.memory": "1g",
    }
    settings = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    of = "org.apache.spark.sql.connect.service.SparkConnectServer"
    command = [SUBMIT, "--class", of, "--master", "local[1]", *settings, "spark-internal"]
    environ = {
        **os.environ,
        "JAVA_HOME": str(ensure_java(os.environ)),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        # Executors import the backfills of tests.
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            cwd=directory,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while "Spark Connect server started" not in log.read_text():
            assert process.poll() is None, log.read_text()[-3000:]
            await CLOCK.sleep(POLL_S)
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


async def test_tables_views_and_streams_by_spark_connect(tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="pyspark[connect] is not installed")
    lines = [json_line({"n": n, "word": f"w{n % 3}"}, uuid_of(n)) for n in range(100)]
    contents = [b"".join(lines[at : at + 10]) for at in range(0, 100, 10)]
    write_journal(tmp_path, STORE, "topic/one", contents)
    given = {"store": f"file://{tmp_path}/fragments", "journal": "topic/one"}
    async with connect_server(tmp_path) as url:
        spark = session(url)
        assert not hasattr(type(spark), "sparkContext") or "connect" in type(spark).__module__
        table = spark.read.format("gazette").options(**given).load()
        assert table.groupBy("word").count().orderBy("word").collect()[0]["count"] == 34
        first: Any = read(spark, maxPartitionBytes=500, **given)
        assert first.count() == 100
        create_view(spark, "words", **given)
        assert spark.sql("SELECT sum(n) FROM words").collect()[0][0] == 4950
        write_journal(
            tmp_path,
            STORE,
            "topic/one",
            [json_line({"n": 1}, uuid_of(200))],
            begin=sum(map(len, contents)),
        )
        assert spark.sql("SELECT sum(n) FROM words").collect()[0][0] == 4951
        stream = spark.readStream.format("gazette").options(**given).load().writeStream
        query = (
            stream.format("memory")
            .queryName("seen")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(300)
        assert spark.sql("SELECT count(*) FROM seen").collect()[0][0] == 101
        assert [lag.behind_bytes for lag in stream_lag(query.lastProgress)] == [0]
        counted: list[int] = []
        work = partial(map, len)
        given_items = [b"a", b"bb", b"ccc"]
        done = run_tasks(spark, given_items, work, 3, length=100, on_read=counted.append)
        assert done == [1, 2, 3]
        assert sum(counted) == 100
        write_journal(tmp_path, STORE, "topic/two", contents)
        write_journal(tmp_path, STORE, "topic/words", [json_line({"word": "alpha"}, uuid_of(0))])
        for backfill in (WordsBackfill(), FoldedBackfill(), ListedBackfill(tmp_path / "gate")):
            built = build_stored(
                tmp_path, ["topic/two", "topic/words"], backfill, SparkRunner(spark=spark)
            )
            messages = 100 if isinstance(backfill, WordsBackfill) else 3
            assert [one.built.messages for one in built] == [messages, 1]
        with raises(Broken, says="combine() must return a table"):
            build_stored(tmp_path, ["topic/words"], NoTable(), SparkRunner(spark=spark))
        with raises(Conflict, says="a session of Spark Connect still runs"):
            session("local[1]")
        spark.stop()
        # Its mode ends with it: other tests of this process need a session with a master.
        here = session("local[1]", conf={"spark.driver.memory": "1g"})
        assert here.range(3).count() == 3
        with raises(Conflict, says="a session with master local[1] exists already"):
            session(url)
        here.stop()


def test_a_server_that_is_not_there() -> None:
    with raises(Unavailable, says="cannot reach Spark at 127.0.0.1:1"):
        session("sc://127.0.0.1:1/;user_id=me")


async def test_a_job_with_its_own_modules_is_submitted_to_a_cluster(tmp_path: Path) -> None:
    """Modules of `--py-files` are found where rows are planned, and where they are made."""
    framing = framing_of(CONTENT_PROTO_FIXED, NGramCount)
    messages = [NGramCount(uuid=uuid_of(n), n_gram=f"gram {n}", count=n) for n in range(20)]
    content = b"".join(map(framing.encode, messages))
    write_journal(tmp_path, STORE, "topic/grams", [content])
    archive = tmp_path / "modules.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.write(ROOT / "examples" / "word_count" / "ngram_pb2.py", "ngram_pb2.py")
        files.writestr(
            "shouting.py", "import pyarrow.compute\nshouted = pyarrow.compute.utf8_upper\n"
        )
    with standalone(tmp_path) as cluster:
        await until(cluster.is_ready)
        conf = cluster.conf("submitted", tmp_path / "gates" / "none")
        job = str(ROOT / "tests" / "spark" / "deployed_job.py")
        store = f"file://{tmp_path}/fragments"
        command = [
            SUBMIT,
            "--master",
            cluster.url,
            "--py-files",
            str(archive),
            job,
            cluster.url,
            store,
        ]
        environ = {**cluster.environ, "SPARK_CONF_DIR": str(conf), "SPARK_LOCAL_IP": "127.0.0.1"}
        ended = subprocess.run(
            command,
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["rows"] == sorted([f"GRAM {n}", n] for n in range(20))
    assert found["ui"], "the UI is off"
