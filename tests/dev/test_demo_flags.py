"""What ``gazette demo`` refuses before it starts anything."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from gazette.dev import demo


def test_a_directory_that_holds_something_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    assert demo.run([f"--dir={tmp_path}"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_spark_without_a_backfill_is_refused(capsys: Any) -> None:
    assert demo.run(["--spark", "--backfill=false"]) == 2
    assert "no backfill that could run on Spark" in capsys.readouterr().err


def test_spark_that_is_not_installed_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    found = importlib.util.find_spec

    def find(name: str, *arguments: Any) -> Any:
        return None if name == "pyspark" else found(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert demo.run(["--spark"]) == 2
    assert "gazette[spark]" in capsys.readouterr().err


def test_a_java_that_is_not_there_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert demo.run(["--spark"]) == 1
    told = capsys.readouterr().err
    assert "has no bin/java" in told
    assert "unset JAVA_HOME" in told
