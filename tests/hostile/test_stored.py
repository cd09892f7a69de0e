"""Stored fragments that lie or explode, URLs of stores that lead elsewhere, and links out of stores."""

from __future__ import annotations

import hashlib
import io
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from gazette.blobs.blob_store import BlobStore
from gazette.blobs.extras import kind_of
from gazette.blobs.file import FileStore
from gazette.blobs.registry import BlobSettings, default_constructors
from gazette.errors import Corrupt, GazetteError
from gazette.protocol.codecs.codec import new_compressor
from gazette.protocol.codecs.decoder import DecodedFile, FragmentDecoder
from gazette.protocol.fragment import Codec, Fragment, FragmentStoreUrl
from tests.hostile.conftest import Matrix, mutated

CODECS: Final = [one for one in Codec if one is not Codec.INVALID]
CONTENT: Final = b"".join(b"line %d of some text\n" % n for n in range(500))
BOMB_BYTES: Final = 64 << 20
MEMORY_MAX: Final = 16 << 20


def encoded(codec: Codec, content: bytes) -> bytes:
    compressor = new_compressor(codec)
    return compressor.compress(content) + compressor.end_batch() + compressor.finish()


def named(codec: Codec, content: bytes) -> Fragment:
    return Fragment("a/journal", 0, len(content), hashlib.sha1(content).digest(), codec)


def read(fragment: Fragment, data: bytes) -> bytes:
    with DecodedFile(io.BytesIO(data), FragmentDecoder(fragment)) as file:
        return b"".join(iter(lambda: file.read(1 << 16), b""))


@pytest.mark.parametrize("codec", CODECS)
def test_fragments_that_lie(
    codec: Codec, dice: random.Random, scale: int, matrix: Callable[[str], Matrix]
) -> None:
    """What is read is what the name says, or an error: never other bytes."""
    results = matrix(f"fragments that lie x {codec.name}")
    data, honest = encoded(codec, CONTENT), named(codec, CONTENT)
    assert read(honest, data) == CONTENT
    lies = [
        replace(honest, sum=bytes(20)),
        replace(honest, end=honest.end - 1),
        replace(honest, end=honest.end + 1),
        replace(honest, end=honest.end + (1 << 62)),
        *(replace(honest, codec=other) for other in CODECS if other is not codec),
    ]
    files = [(lie, data) for lie in lies]
    files += [(honest, data[:length]) for length in range(0, len(data), len(data) // 20 or 1)]
    files += [(honest, data + data), (honest, data + b"!"), (honest, b"")]
    files += [(honest, mutated(dice, data)) for _ in range(100 * scale)]
    for fragment, file in files:
        try:
            content = read(fragment, file)
        except Corrupt:
            results.count("refused")
        else:
            # A byte of a header that nothing depends on may differ.
            assert content == CONTENT, (fragment, file[:50])
            results.count("read as it was")
    assert results.outcomes["refused"] >= len(lies)


@pytest.mark.parametrize("codec", [one for one in CODECS if one is not Codec.NONE])
def test_bombs(codec: Codec, matrix: Callable[[str], Matrix]) -> None:
    """A file of kilobytes that unpacks to many megabytes is left at the length of its name."""
    results = matrix(f"bombs x {codec.name}")
    bomb = encoded(codec, bytes(BOMB_BYTES))
    small = named(codec, b"small")
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            read(small, bomb)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX
    finally:
        tracemalloc.stop()
    results.count("refused")


URLS: Final = (
    "",
    "/",
    "file://",
    "file:///..",
    "file:///../",
    "file:///a/../../",
    "file:///a/./../../outside/",
    "file:////etc/",
    "file:///%2e%2e/outside/",
    "file://outside/etc/",
    "file:///a/?find=a&replace=../../outside/",
    "file:///a/?find=x&replace=/etc/",
    "file:///a/?unknown=1",
    "file:///a\x00/",
    "file:///\u202e/",
    "fsspec+file:///etc/",
    "fsspec+local:///etc/",
    "fsspec+http://127.0.0.1/",
    "fsspec+simplecache::file:///etc/",
    "fsspec+filecache::http://127.0.0.1/",
    "fsspec+zip://a.zip::file:///etc/",
    "fsspec+reference:///etc/",
    "fsspec+dir:///etc/",
    "fsspec+memory://a/",
    "fsspec+://a/",
    "http://127.0.0.1/",
    "ftp://127.0.0.1/",
    "javascript:alert(1)",
    "unix:///run/docker.sock/",
    "FILE:///etc/",
    "x" * 10_000 + "://a/",
    "file:///" + "a/" * 5_000,
)
PATHS: Final = (
    "",
    "/",
    "..",
    "../outside/file",
    "a/../../outside/file",
    "a/./../../outside",
    "/etc/passwd",
    "a//b",
    "a/",
    "./a",
    "a\x00b",
    "away/file",
    "away/deep/file",
    "secret",
    "loop/file",
    "chain/file",
    "a" * 5_000,
    "a/" * 2_000,
)


def assert_untouched(outside: Path) -> None:
    assert sorted(one.name for one in outside.iterdir()) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_urls_of_stores(tmp_path: Path, matrix: Callable[[str], Matrix]) -> None:
    """A store is below the root, or is refused: nothing is written elsewhere."""
    results = matrix("URLs of stores")
    root, outside = tmp_path / "root", tmp_path / "outside"
    for directory in (root / "a", outside):
        directory.mkdir(parents=True)
    (outside / "secret").write_bytes(b"secret")
    constructors = default_constructors(BlobSettings(root, False, frozenset()))
    for text in URLS:
        try:
            url = FragmentStoreUrl.parse(text)
            store: BlobStore = constructors[kind_of(url.scheme)](url)
            store.put("journal/fragment", io.BytesIO(b"content"))
        except (GazetteError, KeyError):
            results.count("refused")
        else:
            results.count("below the root")
    assert_untouched(outside)
    assert {one.name for one in tmp_path.iterdir()} == {"root", "outside"}
    assert results.outcomes["refused"] > 20


def test_links_out_of_stores(tmp_path: Path, matrix: Callable[[str], Matrix]) -> None:
    results = matrix("paths and links out of file stores")
    root, outside = tmp_path / "root", tmp_path / "outside"
    for directory in (root, outside):
        directory.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "away").symlink_to(outside)
    (root / "secret").symlink_to(outside / "secret")
    (root / "loop").symlink_to(root / "loop")
    (root / "hop").symlink_to(outside)
    (root / "chain").symlink_to(root / "hop")
    store = FileStore(root, FragmentStoreUrl.parse("file:///"))
    for path in PATHS:
        acts: tuple[Callable[[str], Any], ...] = (
            lambda path: store.put(path, io.BytesIO(b"overwritten")),
            lambda path: store.open(path).close(),
            store.remove,
            store.exists,
            lambda path: list(store.list(path)),
        )
        for act in acts:
            try:
                found = act(path)
            except GazetteError:
                results.count("refused")
            else:
                assert not found or all(one.path != "away/secret" for one in found), path
                results.count("nothing there")
    assert_untouched(outside)
    assert results.outcomes["refused"] > 3 * 10
