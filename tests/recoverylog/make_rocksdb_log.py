"""Makes ``testdata/rocksdb.log.gz``: a recovery log as the Go original records a RocksDB database.

::

    python tests/recoverylog/make_rocksdb_log.py        # needs strace and rocksdict

The original hooks RocksDB's file system: each file that is made is a CREATE, each append a WRITE, a rename
an UNLINK of the target, a LINK and an UNLINK, and ``/IDENTITY`` a PROPERTY. Here the same calls are taken
from a trace of the system calls of a RocksDB that opens, writes, flushes, compacts and opens again.
"""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from gazette.protocol.hints import FSMHints
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.log.recorder import Recorder
from gazette.testing.recovery import LOG, MemoryLog

TARGET = Path(__file__).parent / "testdata" / "rocksdb.log.gz"
WORK = """
import sys
from rocksdict import Options, Rdict

options = Options(raw_mode=True)
options.create_if_missing(True)
options.set_write_buffer_size(1 << 14)
options.set_target_file_size_base(1 << 13)
options.set_max_manifest_file_size(512)
options.set_max_background_jobs(1)
for generation in range(3):
    db = Rdict(sys.argv[1], options)
    for number in range(300):
        db.put(b"key %03d" % ((number * 7 + generation) % 200), b"%d %d " % (generation, number) + b"v" * 90)
    db.delete_range(b"key 100", b"key 110")
    db.flush()
    if generation == 1:
        db.compact_range(None, None)
    db.put(b"generation", b"%d" % generation)
    db.close()
"""
CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (-?\d+)")
SKIPPED = re.compile(r"LOG(\.old.*)?|LOCK|rocksdict-config\.json|.*\.dbtmp\.old")


def unescape(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory, trace = Path(scratch) / "db", Path(scratch) / "trace"
        directory.mkdir()
        calls = "openat,write,pwrite64,rename,link,unlink,close"
        command = ["strace", "-f", "-qq", "-xx", "-s", "1000000", "-e", f"trace={calls}"]
        command += ["-o", str(trace), sys.executable, "-c", WORK, str(directory)]
        subprocess.run(command, check=True)
        log = record(directory, trace)
    TARGET.parent.mkdir(exist_ok=True)
    with gzip.GzipFile(TARGET, "wb", mtime=0) as file:
        file.write(log.data)


def record(directory: Path, trace: Path) -> MemoryLog:
    log = MemoryLog()
    recorder = Recorder(RecoveryFSM(FSMHints(log=LOG)), 1234, directory, log, LOG, 0)
    files: dict[tuple[str, int], tuple[str, int]] = {}
    unfinished: dict[str, str] = {}
    for line in trace.read_text().splitlines():
        thread = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            unfinished[thread] = line.removesuffix(" <unfinished ...>")
            continue
        if " resumed>" in line:
            line = unfinished.pop(thread) + line.split(" resumed>", 1)[1]
        match = CALL.match(line)
        if match is None or int(match[3]) < 0:
            continue
        name, arguments, result = match[1], match[2], int(match[3])
        paths = [inside(directory, unescape(text)) for text in re.findall(r'"([^"]*)"', arguments)]
        descriptor = ("", int(arguments.split(",", 1)[0])) if arguments[0].isdigit() else ("", -1)
        if name == "openat" and paths[0] and "O_CREAT" in arguments:
            with recorder.group() as group:
                group.create(paths[0])
            files["", result] = paths[0], 0
        elif name == "close":
            files.pop(descriptor, None)
        elif name == "write" and descriptor in files:
            path, offset = files[descriptor]
            data = unescape(re.findall(r'"([^"]*)"', arguments)[0])[:result]
            with recorder.group() as group:
                fnode = group.fnode_of(path)
                assert fnode is not None
                group.write(fnode, offset, data)
            files[descriptor] = path, offset + len(data)
        elif name in ("rename", "link", "unlink") and paths[0]:
            with recorder.group() as group:
                if name == "unlink":
                    group.unlink(paths[0])
                elif name == "link":
                    group.link(paths[0], paths[1] or "")
                else:
                    group.rename(paths[0], paths[1] or "")
    return log


def inside(directory: Path, path: bytes) -> str | None:
    """Return a path of the database as the log names it; None for any other."""
    prefix = os.fsencode(directory) + b"/"
    if not path.startswith(prefix):
        return None
    name = path[len(prefix) :].decode()
    return None if SKIPPED.fullmatch(name) else "/" + name


if __name__ == "__main__":
    main()
