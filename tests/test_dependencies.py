"""Dependencies of an installation: each process loads few packages, and errors name a missing extra."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

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
    "h11",
    "hpack",
    "idna",
    "msgspec",
    "pyyaml",
    "starlette",
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
        (
            "from gazette.client.oidc.key_set import require_cryptography; require_cryptography()",
            "oidc",
        ),
        ("from gazette import read_table; read_table('a/journal')", "tables"),
    ],
)
def test_an_extra_that_is_missing_is_named(plain: Path, statement: str, extra: str) -> None:
    done = run(plain, "-c", statement)
    assert done.returncode == 1
    assert f"pip install 'pygazette[{extra}]'" in done.stderr, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the pages, built with the extra ``docs`` alone."""
    try:
        distributions = closure(EXTRAS["docs"])
    except importlib.metadata.PackageNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed: run `make docs`")
    directory = tmp_path_factory.mktemp("docs")
    python = installation(directory / "docs", distributions)
    command = ["-m", "mkdocs", "build", "--quiet", "--config-file", str(ROOT / "mkdocs.yml")]
    done = run(python, *command, "--site-dir", str(directory / "site"))
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "site"


@pytest.mark.long
def test_the_pages_are_built_with_the_extra_docs_alone(site: Path) -> None:
    """Neither Spark nor a database: not even this package."""
    reference = (site / "api" / "application" / "index.html").read_text()
    assert 'id="gazette.Application.consume_message"' in reference


class LoadedByPage(HTMLParser):
    """The addresses that a browser loads with a page: scripts, styles, fonts and pictures. Links are not."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = re.findall(IN_STYLES, page)
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        followed = tag == "a" or attributes.get("rel") == "canonical"
        for name in ("src", "srcset", "data", "poster", *(() if followed else ("href",))):
            if address := attributes.get(name):
                self.addresses.append(address)


IN_STYLES = r"""(?:@import\s+(?:url\()?|url\()\s*["']?([^"')\s]+)"""


def from_elsewhere(site: Path) -> Iterator[str]:
    """Yield what pages and styles of a site load from another host."""
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        text = path.read_text()
        page = path.suffix == ".html"
        addresses = LoadedByPage(text).addresses if page else re.findall(IN_STYLES, text)
        yield from (
            f"{path.relative_to(site)}: {address}"
            for address in addresses
            if urlsplit(address).netloc
        )


@pytest.mark.long
@pytest.mark.long
def test_the_pages_load_nothing_from_elsewhere(site: Path) -> None:
    assert [*from_elsewhere(site)] == []
    assert (site / "pictures" / "cluster.svg").exists()


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ('<script src="https://cdn.example/a.js"></script>', ["https://cdn.example/a.js"]),
        ('<link rel="stylesheet" href="//cdn.example/a.css">', ["//cdn.example/a.css"]),
        ('<p><img alt="" src="http://cdn.example/a.png"></p>', ["http://cdn.example/a.png"]),
        ("<style>@import url('https://cdn.example/f.css')</style>", ["https://cdn.example/f.css"]),
        ('<a href="https://elsewhere.example/">a link to follow</a>', []),
        ('<link rel="canonical" href="https://elsewhere.example/">', []),
        ('<img alt="" src="../pictures/cluster.svg">', []),
    ],
)
def test_a_planted_address_is_found(tmp_path: Path, planted: str, said: list[str]) -> None:
    (tmp_path / "page.html").write_text(planted)
    assert [*from_elsewhere(tmp_path)] == [f"page.html: {address}" for address in said]


def test_the_client_depends_on_a_part_of_what_the_project_does() -> None:
    everything = [
        *CLIENT_PROJECT["dependencies"],
        *CLIENT_PROJECT["optional-dependencies"]["messages"],
    ]
    assert set(everything) < set(PROJECT["dependencies"])


@pytest.mark.parametrize("extra", ["tables", "spark", "dev"])
def test_no_extra_accepts_the_pyarrow_that_crashes(extra: str) -> None:
    """Until a thread imports pyarrow 25.0.0 and ends, all is well. Then each other thread crashes."""
    (pyarrow,) = (one for one in map(Requirement, EXTRAS[extra]) if one.name == "pyarrow")
    assert not pyarrow.specifier.contains("25.0.0")
    assert pyarrow.specifier.contains("25.0.1")


def test_the_page_on_installation_names_each_extra_and_package() -> None:
    page = (ROOT / "docs" / "installation.md").read_text()
    extras = re.findall(r"^\| `([a-z0-9]+)` \|", page, re.MULTILINE)
    assert sorted(extras) == sorted(EXTRAS)
    packages = dict(re.findall(r"^\| ([a-z0-9-]+) \| (yes|`messages`)? ?\|", page, re.MULTILINE))
    assert [*packages] == [Requirement(one).name for one in PROJECT["dependencies"]]
    of_extras = CLIENT_PROJECT["optional-dependencies"]
    for mark, requirements in (
        ("yes", CLIENT_PROJECT["dependencies"]),
        ("`messages`", of_extras["messages"]),
    ):
        marked = {name for name in packages if packages[name] == mark}
        assert marked == {Requirement(one).name for one in requirements}
