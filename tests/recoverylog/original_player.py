"""The original's rules for playing a log back, as facts 4.2, 4.3 and 4.5 of the reference have them.

Written apart from `gazette.recoverylog`, with plain files, and for logs that are read from their first byte:
an operation counts if its number and the checksum of all payloads before it are those expected.
"""

from __future__ import annotations

import struct
from pathlib import Path

import google_crc32c

from gazette.protocol.pb import recoverylog_pb2 as pb

_FRAME = struct.Struct("<4sI")


def play(log: bytes, directory: Path) -> None:
    """Write the files that live at the end of ``log`` below ``directory``."""
    expected, checksum, at = 1, 0, 0
    content: dict[int, bytearray] = {}
    links: dict[str, int] = {}
    properties: dict[str, str] = {}
    while at < len(log):
        magic, length = _FRAME.unpack_from(log, at)
        assert magic == b"\x66\x33\x93\x36"
        payload = log[at + _FRAME.size : at + _FRAME.size + length]
        at += _FRAME.size + length
        op = pb.RecordedOp.FromString(payload)
        data = b""
        if op.HasField("write"):
            data = log[at : at + op.write.length]
            at += op.write.length
        if (op.seq_no, op.checksum) != (expected, checksum):
            continue
        if op.HasField("create"):
            assert op.create.path not in links
            content[op.seq_no], links[op.create.path] = bytearray(), op.seq_no
        elif op.HasField("link"):
            assert op.link.path not in links
            links[op.link.path] = op.link.fnode
        elif op.HasField("unlink"):
            assert links.pop(op.unlink.path) == op.unlink.fnode
            if op.unlink.fnode not in links.values():
                del content[op.unlink.fnode]
        elif op.HasField("write"):
            file, offset = content[op.write.fnode], op.write.offset
            # Seek and copy: what is between the end and the offset is zeros.
            file.extend(bytes(max(0, offset - len(file))))
            file[offset : offset + len(data)] = data
        elif op.HasField("property"):
            properties[op.property.path] = op.property.content
        expected += 1
        checksum = google_crc32c.extend(checksum, payload)
    directory.mkdir(parents=True)
    for path, fnode in links.items():
        (directory / path.lstrip("/")).write_bytes(content[fnode])
    for path, text in properties.items():
        (directory / path.lstrip("/")).write_text(text)
