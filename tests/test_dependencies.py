"""Dependencies of an installation: each process loads few packages, and errors name a missing extra."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CLIENT_PROJECT = tomllib.loads((ROOT / "packages/client/pyproject.toml").read_text())["project"]

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


def closure(requirements: Iterable[str]) -> set[str]:
    """Return the names of the distributions that pip installs for the requirements and their extras."""
    found: set[str] = set()
    todo = [(Requirement(one), {""}) for one in requirements]
    while todo:
        one, extras = todo.pop()
        name = canonicalize_name(one.name)
        if one.marker is not None and not any(
            one.marker.evaluate({"extra": extra}) for extra in extras
        ):
            continue
        if name in found and not one.extras:
            continue
        found.add(name)
        required = map(Requirement, importlib.metadata.distribution(name).requires or [])
        todo += [(each, {"", *one.extras}) for each in required]
    return found


def installation(directory: Path, distributions: Iterable[str]) -> Path:
    """Make an environment in which only these distributions are installed, and return its Python."""
    venv.create(directory, with_pip=False, symlinks=True)
    packages = next(directory.glob("lib/python*/site-packages"))
    here = Path(sysconfig.get_path("purelib"))
    for name in distributions:
        for file in importlib.metadata.files(name) or ():
            source, link = here / file, packages / file
            if ".." in file.parts or file.suffix == ".pyc" or not source.exists():
                continue
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(source)
    return directory / "bin" / "python"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an installation without extras, with this source."""
    directory = tmp_path_factory.mktemp("plain")
    python = installation(directory, closure(PROJECT["dependencies"]))
    packages = next(directory.glob("lib/python*/site-packages"))
    (packages / "source.pth").write_text(f"{ROOT}\n")
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


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an installation of the client's wheel alone."""
    directory = tmp_path_factory.mktemp("client")
    python = installation(directory, closure(CLIENT_PROJECT["dependencies"]))
    build = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"]
    command = [
        *pip,
        "--no-deps",
        *build,
        "--wheel-dir",
        str(directory),
        str(ROOT / "packages/client"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = directory.glob("pygazette_client-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(next(directory.glob("lib/python*/site-packages")))
    return python


@pytest.mark.long
def test_the_client_installs_alone(client: Path) -> None:
    """All of its modules can be imported, with its own dependencies."""
    walk = """if True:
        import importlib, pkgutil, gazette
        for module in pkgutil.walk_packages(gazette.__path__, "gazette."):
            importlib.import_module(module.name)
        from gazette.client import AppendService, Client, Reader, RetryReader
    """
    done = run(client, "-c", walk)
    assert done.returncode == 0, done.stderr
    assert len(closure(CLIENT_PROJECT["dependencies"])) <= 10


@pytest.mark.long
def test_what_the_client_alone_lacks_is_named(client: Path) -> None:
    done = run(client, "-c", "from gazette import Application")
    assert "gazette.Application is part of pygazette" in done.stderr, done.stderr


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
