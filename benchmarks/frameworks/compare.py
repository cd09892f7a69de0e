"""The same word count on bytewax, on quixstreams and here: ``python benchmarks/frameworks/compare.py``.

Each of the others gets a virtual environment of its own, from the package index, and counts the same
messages that `gazette bench consume` does; what it counted is checked. Printed is what each run guarantees
beside how fast it was, since that is what makes them differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from tools.bench.app import message_of

HERE: Final = Path(__file__).parent
TIMEOUT_S: Final = 600


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    packages: tuple[str, ...]
    script: str
    mode: str
    guarantee: str


BYTEWAX: Final = ("bytewax==0.21.1", "msgspec")
QUIX: Final = ("quixstreams==3.28.1",)
PEERS: Final = (
    Peer(
        "bytewax, from a file, no recovery",
        BYTEWAX,
        "bytewax_count.py",
        "none",
        "none: a restart begins from the start",
    ),
    Peer(
        "bytewax, from a file, recovery in SQLite each second",
        BYTEWAX,
        "bytewax_count.py",
        "recovery",
        "state and offset from one snapshot; output since then again; the disk must survive",
    ),
    Peer(
        "quixstreams, mock Kafka, RocksDB and changelog",
        QUIX,
        "quix_count.py",
        "at-least-once",
        "state and output since the last commit (each second) may count twice",
    ),
    Peer(
        "quixstreams, mock Kafka, transactions",
        QUIX,
        "quix_count.py",
        "exactly-once",
        "exactly once, of a Kafka that is in memory here",
    ),
)
OURS: Final = {
    "consume JSON, word count folded": "gazette, folded in memory, SQLite and log",
    "the same, with consume_messages": "gazette, the same in batches",
    "consume JSON, an SQL upsert each": "gazette, an SQL upsert each",
}
OUR_GUARANTEE: Final = "exactly once, state in a log of brokers in another process (R=1)"


def main(argv: Sequence[str]) -> int:
    """Return 0 if all were compared; 1 if some could not be, which is printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--directory", type=Path, help="where environments are kept (temporary)")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="gazette-compare-") as temporary:
        root = flags.directory or Path(temporary)
        text = Path(temporary) / "words.jsonl"
        messages = [message_of(index) for index in range(flags.messages)]
        text.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in messages))
        expected: Counter[str] = Counter()
        for one in messages:
            expected[one.word] += one.count
        load = os.getloadavg()[0]
        print(f"{flags.messages:,} messages, {os.cpu_count()} cores, load {load:.1f} before")
        failed = 0
        for index, peer in enumerate(PEERS):
            state = Path(temporary) / f"state-{index}"
            state.mkdir()
            try:
                python = environment(root, peer.packages)
                seen = run(python, peer, text, state)
            except (subprocess.SubprocessError, OSError) as error:
                print(f"{peer.name}: not compared: {reason(error)}")
                failed += 1
                continue
            right = "right" if seen["counts"] == dict(expected) else "WRONG COUNTS"
            row(peer.name, seen["messages"] / seen["seconds"], right, peer.guarantee)
        for name, rate in ours(Path(temporary) / "ours.json").items():
            row(OURS[name], rate, "", OUR_GUARANTEE)
        print(f"load {os.getloadavg()[0]:.1f} after, {time.strftime('%Y-%m-%d %H:%M %Z')}")
    return 1 if failed else 0


def row(name: str, rate: float, counts: str, guarantee: str) -> None:
    print(f"{name:55} {rate:10,.0f} msg/s  {counts:6} {guarantee}", flush=True)


def environment(root: Path, packages: Sequence[str]) -> Path:
    """Return the interpreter of an environment that has these packages; make it if it is not there."""
    directory = root / packages[0].replace("=", "-")
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", *packages]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S, env=clean())
    return python


def run(python: Path, peer: Peer, text: Path, state: Path) -> dict[str, Any]:
    """Return what the peer's script prints last, which is JSON."""
    command = [str(python), str(HERE / peer.script), str(text), str(state), peer.mode]
    done = subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S, env=clean())
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def clean() -> dict[str, str]:
    """Return our environment, without what would lead others to our packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def ours(path: Path) -> dict[str, float]:
    """Return messages per second by `gazette bench consume`."""
    command = [sys.executable, "-m", "tools.bench.main", "consume", f"--json={path}"]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
    figures = json.loads(path.read_text())["figures"]
    return {one["name"]: one["value"] for one in figures if one["name"] in OURS}


def reason(error: Exception) -> str:
    """Return the last line of what went wrong."""
    said = getattr(error, "stderr", None) or b""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else repr(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
