"""The wheel of this tree, installed by pip into a virtual environment of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]


def install_wheel(directory: Path) -> Path:
    """Build the wheel, and install it into ``directory``. Return the directory of its programs.

    What it depends on comes from this environment: nothing is downloaded.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    here = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    _run([*pip, "wheel", "--no-deps", *here, "--wheel-dir", str(directory), str(_ROOT)])
    (wheel,) = directory.glob("*.whl")
    venv.create(directory, with_pip=False)
    python = str(directory / "bin" / "python")
    _run([*pip, "--python", python, "install", "--no-deps", "--no-index", str(wheel)])
    (packages,) = directory.glob("lib/python*/site-packages")
    # After the wheel's own: this environment may have an editable installation of the source.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return directory / "bin"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
