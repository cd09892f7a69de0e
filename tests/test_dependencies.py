"""Dependencies of an installation: each process loads few packages, and errors name a missing extra."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.wheel import ROOT, closure, installation, packages_of, project_of

PROJECT = project_of("pygazette")["project"]
EXTRAS = PROJECT["optional-dependencies"]
CLIENT_PROJECT = project_of("pygazette-client")["project"]

CLIENT = {
    "cramjam",
    "grpcio",
    "hpack",
    "opentelemetry-api",
    "prometheus-client",
    "protobuf",
    "pyjwt",
    "typing-extensions",
    "zstandard",
}
COMMANDS = CLIENT | {"pyyaml", "rich", "pygments", "markdown-it-py", "mdurl"}
SERVER = CLIENT | {
    "anyio",
    "click",
    "h11",
    "hpack",
    "idna",
    "msgspec",
    "pyyaml",
    "starlette",
    "uvicorn",
}
HEAVY = {
    "adlfs",
    "boto3",
    "fsspec",
    "gcsfs",
    "numba",
    "ortools",
    "pandas",
    "psycopg",
    "pyarrow",
    "pyspark",
    "rocksdict",
    "scipy",
    "sqlalchemy",
}
LOADED = """
import importlib, importlib.metadata, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
of = importlib.metadata.packages_distributions()
print(*sorted({name for module in sys.modules for name in of.get(module.partition(".")[0], ())}))
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an installation without extras, with this source."""
    directory = tmp_path_factory.mktemp("plain")
    python = installation(directory, closure(PROJECT["dependencies"]))
    (packages_of(python) / "source.pth").write_text(f"{ROOT}\n")
    return python


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-I", *arguments], capture_output=True, text=True, check=False
    )


def loaded(python: Path, *modules: str) -> set[str]:
    done = run(python, "-c", LOADED, *modules)
    assert done.returncode == 0, done.stderr
    return {canonicalize_name(name) for name in done.stdout.split()}


def test_a_plain_installation_is_small() -> None:
    distributions = closure(PROJECT["dependencies"])
    assert not distributions & HEAVY
    assert len(distributions) <= 25, sorted(distributions)
    sizes = {name: installed_bytes(name) for name in distributions}
    assert sum(sizes.values()) <= 190 << 20, sizes


def installed_bytes(distribution: str) -> int:
    """Return the bytes of what its wheel has, without what Python compiles of it."""
    files = importlib.metadata.files(distribution) or ()
    return sum(file.size or 0 for file in files if file.suffix != ".pyc")


@pytest.mark.parametrize(
    ("modules", "permitted"),
    [
        ("gazette", set()),
        ("gazette.main", set()),
        ("gazette.client.client gazette.client.append.service gazette.client.read.retry_reader", CLIENT),
        ("gazette.gazctl.main", COMMANDS),
        ("gazette.broker.main", SERVER - {"cramjam", "pyyaml"}),
        (
            "gazette.runconsumer.process gazette.stores.sqlite gazette.stores.json_file",
            SERVER | {"apsw", "google-crc32c", "numpy"},
        ),
    ],
    ids=["package", "gazette", "client", "gazctl", "broker", "member"],
)  # fmt: skip
def test_an_entry_point_loads_only(plain: Path, modules: str, permitted: set[str]) -> None:
    assert loaded(plain, *modules.split()) <= permitted


@pytest.mark.parametrize(
    ("statement", "extra"),
    [
        (
            "from gazette.recoverylog.rocksdb.native import load_rocksdict; load_rocksdict('it')",
            "rocksdb",
        ),
        ("from gazette.stores.sql import SQLStore", "postgres"),
        ("from gazette.stores.sql.store import SQLStore", "postgres"),
        ("from gazette.spark import session; session()", "spark"),
        ("from gazette.spark import GazetteDataSource", "spark"),
        ("from gazette.spark import Backfill", "spark"),
        ("from gazette.spark import read", "spark"),
        ("from gazette import read_table; read_table('a/journal')", "tables"),
    ],
)
def test_an_extra_that_is_missing_is_named(plain: Path, statement: str, extra: str) -> None:
    done = run(plain, "-c", statement)
    assert done.returncode == 1
    assert f"pip install 'pygazette[{extra}]'" in done.stderr, done.stderr


def test_the_pages_are_built_with_the_extra_docs_alone(tmp_path: Path) -> None:
    """Neither Spark nor a database: not even this package."""
    try:
        distributions = closure(EXTRAS["docs"])
    except importlib.metadata.PackageNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed: run `make docs`")
    python = installation(tmp_path / "docs", distributions)
    command = ["-m", "mkdocs", "build", "--quiet", "--config-file", str(ROOT / "mkdocs.yml")]
    done = run(python, *command, "--site-dir", str(tmp_path / "site"))
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "api" / "application" / "index.html").read_text()
    assert 'id="gazette.Application.consume_message"' in reference


def test_the_client_depends_on_a_part_of_what_the_project_does() -> None:
    assert set(CLIENT_PROJECT["dependencies"]) < set(PROJECT["dependencies"])


def test_the_page_on_installation_names_each_extra_and_package() -> None:
    page = (ROOT / "docs" / "installation.md").read_text()
    extras = re.findall(r"^\| `([a-z0-9]+)` \|", page, re.MULTILINE)
    assert sorted(extras) == sorted(EXTRAS)
    packages = dict(re.findall(r"^\| ([a-z0-9-]+) \| (yes)? ?\|", page, re.MULTILINE))
    assert [*packages] == [Requirement(one).name for one in PROJECT["dependencies"]]
    marked = {name for name, mark in packages.items() if mark}
    assert marked == {Requirement(one).name for one in CLIENT_PROJECT["dependencies"]}
