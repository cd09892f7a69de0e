"""Frames of the user's own code, among those of the package, of Python and of libraries."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import pytest

import gazette.errors
from gazette.consumer.transaction.dispatch import deliver_in_halves
from gazette.errors import Invalid
from gazette.message.envelope import Envelope
from gazette.run.target import RunTarget
from gazette.runtime.user_code import (
    is_user_file,
    place_in,
    place_of_error,
    place_of_thread,
    shown_path,
    without_callers,
)

OURS = gazette.errors.__file__
PYTHONS = os.__file__
INSTALLED = pytest.__file__


def frame(filename: str, line: int) -> FrameSummary:
    return FrameSummary(filename, line, f"f{line}")


def test_files_of_the_user_are_neither_ours_nor_installed() -> None:
    assert is_user_file(__file__)
    for other in (OURS, PYTHONS, INSTALLED, "<string>", "<frozen importlib._bootstrap>"):
        assert not is_user_file(other), other


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ((OURS, "/a/app.py", "/a/parse.py", PYTHONS), "/a/parse.py:2 in f2"),
        ((OURS, "/a/app.py", INSTALLED, OURS), "/a/app.py:1 in f1"),
        # An application that is installed: where it was called, and not the library that it calls.
        ((PYTHONS, OURS, INSTALLED, "/x/site-packages/b.py"), f"{shown_path(INSTALLED)}:2 in f2"),
        ((OURS, PYTHONS, "<string>"), ""),
        ((), ""),
    ],
)
def test_a_place_is_the_innermost_frame_of_the_user(files: tuple[str, ...], place: str) -> None:
    assert place_in([frame(name, line) for line, name in enumerate(files)]) == place


def test_a_path_below_the_working_directory_is_shown_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(str(tmp_path / "a" / "app.py")) == "a/app.py"
    assert shown_path("/somewhere/app.py") == "/somewhere/app.py"


def test_a_traceback_begins_with_the_first_call_into_other_code() -> None:
    def fail(batch: Sequence[Envelope[Any]]) -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        deliver_in_halves([], fail)
    ours = caught.tb.tb_next
    assert ours is not None
    assert ours.tb_frame.f_code.co_name == "deliver_in_halves"
    shown = without_callers(ours)
    assert shown is not None
    assert shown.tb_frame.f_code.co_name == "fail"
    assert place_of_error(caught.value).endswith(" in fail")
    assert without_callers(None) is None


def test_a_traceback_of_ours_alone_stays_whole() -> None:
    with pytest.raises(Invalid) as caught:
        RunTarget.parse("no_such_file.py")
    ours = caught.tb.tb_next
    assert ours is not None
    assert without_callers(ours) is ours


def test_a_thread_is_found_where_it_is() -> None:
    entered, end = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert entered.wait(60)
        assert place_of_thread(thread.ident or 0).endswith(" in wait")
    finally:
        end.set()
        thread.join()
    assert place_of_thread(0) == ""
