"""The notebooks run from top to bottom with the installation that they name; what they assert is so."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.test_dependencies import EXTRAS, PROJECT
from tests.wheel import closure, installation

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("pyspark")

ROOT = Path(__file__).parents[2]


def named_installation(first_cell: str, directory: Path) -> Path:
    """Return the Python of an environment that has what a notebook says to install, and this source.

    Of Jupyter it has the kernel only: the test runs the notebook in Jupyter's place.
    """
    found = re.search(r"It needs `([^`]+)`", first_cell)
    assert found is not None, "it names no installation"
    requirements = []
    for one in shlex.split(found[1]):
        name, _, extra = one.rstrip("]").partition("[")
        if name == "pygazette":
            requirements += [*PROJECT["dependencies"], *(EXTRAS[extra] if extra else [])]
        else:
            requirements.append("ipykernel" if name == "notebook" else one)
    python = installation(directory, closure(requirements))
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "source.pth").write_text(f"{ROOT}\n")
    return python


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_backfill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "examples" / "notebooks" / "backfill.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    python = named_installation(notebook.cells[0].source, tmp_path / "environment")
    kernel = tmp_path / "jupyter" / "kernels" / "named" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": argv, "display_name": "named", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    # Whatever the kernel keeps is kept here.
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="named",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", ())]
    assert sum("image/png" in one.get("data", {}) for one in outputs) == 2
    texts = "".join(one.get("text", "") for one in outputs)
    assert "20,000 of them count" in texts
    assert "5 words more" in texts
