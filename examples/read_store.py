"""Reads a journal straight from its blob store: names and codecs, and nothing of ours.

``python read_store.py DIRECTORY > bytes``: the directory of one journal below the root of its store,
say ``/mnt/store/fragments/examples/words``. Needs ``zstandard`` and ``cramjam`` for these codecs only.
"""

import gzip
import hashlib
import re
import sys
from pathlib import Path

NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{40})(\.\w+)")


def decode(stored: bytes, extension: str) -> bytes:
    if extension == ".gz":
        return gzip.decompress(stored)
    if extension == ".zst":
        import zstandard

        return zstandard.ZstdDecompressor().stream_reader(stored).read()
    if extension == ".sz":
        import cramjam

        return bytes(cramjam.snappy.decompress(stored))
    return stored


offset = 0
found = [(m, path) for path in Path(sys.argv[1]).rglob("*") if (m := NAME.fullmatch(path.name))]
for match, path in sorted(found, key=lambda one: (one[0][1], -int(one[0][2], 16))):
    begin, end = int(match[1], 16), int(match[2], 16)
    if end > offset:  # Others hold nothing new: two brokers may have stored the same bytes.
        content = decode(path.read_bytes(), match[4])
        sha1 = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        assert (sha1, len(content)) == (match[3], end - begin), f"{path} is not what its name says"
        assert begin <= offset, f"a hole before {path}"
        sys.stdout.buffer.write(content[offset - begin :])
        offset = end
