"""The text that the demonstration counts: any directory of text, by default Python's own library."""

from __future__ import annotations

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gazette.errors import Invalid

WORD: Final = re.compile(r"[a-z]+")
_SKIPPED: Final = frozenset(
    {"test", "tests", "site-packages", "__pycache__", "idle_test", "lib2to3"}
)
_SUFFIXES: Final = frozenset({".py", ".txt", ".md", ".rst", ".html", ".csv", ".log", ""})


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def corpus_files(path: Path | None) -> list[Path]:
    """Return the text files of a corpus, in order. Raise ``Invalid`` for a corpus without text.

    Without a path: the modules of the standard library, without their tests.
    """
    root = standard_library() if path is None else path
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise Invalid(f"{root} is neither a file nor a directory", path="--corpus")
    suffixes = frozenset({".py"}) if path is None else _SUFFIXES
    skipped = _SKIPPED if path is None else frozenset({"__pycache__", ".git"})
    files: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        # Do not walk through skipped directories: packages beside the library are many times its size.
        subdirectories[:] = [name for name in subdirectories if name not in skipped]
        for name in names:
            file = Path(directory, name)
            if file.suffix in suffixes and name not in skipped and file.is_file():
                files.append(file)
    if not files:
        raise Invalid(f"{root} holds no text", path="--corpus")
    return sorted(files)


def texts(files: list[Path], chunk_bytes: int) -> Iterator[str]:
    """Yield the text of files in pieces of about ``chunk_bytes`` bytes, cut between lines only."""
    lines: list[str] = []
    size = 0
    for path in files:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            for line in file:
                lines.append(line)
                size += len(line)
                if size >= chunk_bytes:
                    yield "".join(lines)
                    lines, size = [], 0
    if lines:
        yield "".join(lines)


def count_independently(files: list[Path]) -> Counter[str]:
    """Return the count of each word, computed with the standard library alone."""
    counts: Counter[str] = Counter()
    for path in files:
        counts.update(WORD.findall(path.read_text("utf-8", errors="replace").lower()))
    return counts
