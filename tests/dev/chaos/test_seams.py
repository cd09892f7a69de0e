"""The seams of chaos' brokers: stores that hang, wall clocks that jump; and what their logs tell."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from pathlib import Path

from tools.chaos.logs import defects, find_defects
from tools.chaos.seams import BROKER_ENV, CONTROL_ENV, Control


def test_files_move_the_seams(tmp_path: Path) -> None:
    control = Control(tmp_path)
    store, life = tmp_path / "fragments" / "store", tmp_path / "fragments" / "lives" / "a-1"
    control.hang("store")
    assert control.hangs(store)
    assert not control.hangs(life)
    control.hang("lives")
    assert control.hangs(life)
    control.release("store")
    control.release("store")
    assert not control.hangs(store)
    assert control.clock("broker-1") == 0.0
    control.set_clock("broker-1", -60.0)
    assert control.clock("broker-1") == -60.0
    assert control.clock("broker-2") == 0.0


PROGRAM = """
    import io, sys, threading, time
    from pathlib import Path
    from tools.chaos.seams import Control, install

    root = Path(sys.argv[1])
    control = Control(root / "control")
    control.set_clock("broker-1", 7200.0)
    install(control, "broker-1")

    from gazette.blobs.file import FileStore
    from gazette.runtime.clock import SystemClock
    from gazette.protocol.fragment import FragmentStoreUrl

    store = FileStore(root, FragmentStoreUrl.parse("file:///store/"))
    other = FileStore(root, FragmentStoreUrl.parse("file:///other/"))
    control.hang("store")
    ended = threading.Event()

    def put():
        store.put("a", io.BytesIO(b"content"))
        ended.set()

    threading.Thread(target=put, daemon=True).start()
    other.put("a", io.BytesIO(b"content"))
    print("hangs" if not ended.wait(0.5) else "went on", SystemClock().now() > time.time() + 7000)
    control.release("store")
    print(ended.wait(30), store.exists("a"), [one.path for one in other.list("")])
"""


def test_a_process_with_the_seams(tmp_path: Path) -> None:
    """In a process of its own, since the seams stay."""
    for name in ("control", "store", "other"):
        (tmp_path / name).mkdir()
    argv = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["hangs True", "True True ['a']"]


def test_a_broker_runs_with_the_seams(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tools.chaos.seams", "--help"]
    environ = {CONTROL_ENV: str(tmp_path), BROKER_ENV: "broker-1"}
    ran = subprocess.run(argv, capture_output=True, text=True, env=environ, check=True)
    assert "--broker.file-root" in ran.stdout


LOG = """\
2026-01-31T12:00:00.000Z warning gazette.broker: pulse of a/journal failed: gone
2026-01-31T12:00:00.001Z error gazette.broker: append 17 failed
Traceback (most recent call last):
  File "x.py", line 1, in f
gazette.errors.Bug: append FSM got an unexpected event (state=RESOLVE)
2026-01-31T12:00:01.000Z info gazette.broker: serving
2026-01-31T12:00:02.001Z error gazette.broker: append 18 failed
Traceback (most recent call last):
  File "x.py", line 1, in f
gazette.errors.Bug: append FSM got an unexpected event (state=RESOLVE)
2026-01-31T12:00:03.000Z fatal gazette serve: the lease was lost
"""


def test_defects_of_a_log(tmp_path: Path) -> None:
    found = find_defects("b1", io.StringIO(LOG))
    assert [(one.broker, one.count) for one in found] == [("b1", 2)]
    assert found[0].text.startswith("error gazette.broker: append 17 failed\nTraceback")
    assert "gazette.errors.Bug: append FSM" in found[0].text
    # Case: what a process says before it logs, and a broker that never ran.
    found = find_defects("b1", io.StringIO("Traceback (most recent call last):\nImportError: no\n"))
    assert [one.text for one in found] == ["Traceback (most recent call last):\nImportError: no"]
    assert find_defects("b1", io.StringIO(LOG.partition("\n")[0])) == []
    assert defects("b1", tmp_path / "b1.log") == []
