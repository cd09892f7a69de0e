"""Stored fragments, written without a broker, for tests of readers of blob stores."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from gazette.message.framing.framing import framing_of
from gazette.message.uuid import uuid_text
from gazette.protocol.codecs.codec import new_compressor
from gazette.protocol.fragment import Codec, Fragment, FragmentStoreUrl
from gazette.protocol.ids import JournalName, Offset


def write_fragment(
    root: Path,
    store: str,
    journal: JournalName,
    begin: Offset,
    content: bytes,
    codec: Codec = Codec.NONE,
    path_postfix: str = "",
) -> Fragment:
    """Write a fragment to a ``file://`` store below ``root``, under the name that a broker would choose."""
    digest = hashlib.sha1(content, usedforsecurity=False).digest()
    fragment = Fragment(
        journal, begin, begin + len(content), digest, codec, store, path_postfix=path_postfix
    )
    path = root / FragmentStoreUrl.parse(store).path.lstrip("/") / fragment.content_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    compressor = new_compressor(codec)
    path.write_bytes(compressor.compress(content) + compressor.end_batch() + compressor.finish())
    return fragment


def write_journal(
    root: Path,
    store: str,
    journal: JournalName,
    contents: Iterable[bytes],
    codec: Codec = Codec.NONE,
    begin: Offset = 0,
) -> list[Fragment]:
    """Write a journal with one fragment for each of ``contents``."""
    fragments: list[Fragment] = []
    for content in contents:
        fragments.append(write_fragment(root, store, journal, begin, content, codec))
        begin += len(content)
    return fragments


def json_line(message: dict[str, object], uuid: bytes = b"") -> bytes:
    """Return a line of a JSON journal. If a UUID is given, it comes first."""
    document = {"uuid": uuid_text(uuid), **message} if uuid else message
    return framing_of("application/x-ndjson", dict).encode(document)
