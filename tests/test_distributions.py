"""Two distributions, of whole rooms each: no file is of both, and each order of installing them works."""

from __future__ import annotations

import asyncio
import configparser
import importlib.metadata
import json
import subprocess
import sysconfig
import zipfile
from pathlib import Path

import pytest

from gazette.client.read.reader import ReadParams
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.wheel import ROOT, build_wheels, closure, installation, packages_of, pip, project_of

WHOLE, CLIENT = "pygazette", "pygazette-client"
WHEEL = ("tool", "hatch", "build", "targets", "wheel")
EVERYTHING = """if True:
    import gazette.main, gazette.gazctl.main, gazette.stores.sqlite
    from gazette import Application, ClientPublisher, runconsumer
    from gazette.client import Client
"""
THE_CLIENT = """if True:
    import importlib, pkgutil, gazette
    for module in pkgutil.walk_packages(gazette.__path__, "gazette."):
        importlib.import_module(module.name)
    from gazette.client import AppendService, Client, Reader, RetryReader
"""
WITHOUT_MESSAGES = THE_CLIENT.replace(
    "importlib.import_module", "module.name == 'gazette.message' or importlib.import_module"
)
PUBLISH = """if True:
    from gazette import Message, open_publisher
    class Order(Message):
        item: str
        pieces: int
    with open_publisher(sys.argv[1]) as publisher:
        publisher.publish("orders", Order(item="nail", pieces=7))
"""
MESSAGES = f"{CLIENT}[messages]"


def wheel_settings(distribution: str) -> dict[str, object]:
    found = project_of(distribution)
    for key in WHEEL:
        found = found[key]
    return found


def rooms_of_client() -> set[str]:
    """Return the files and directories directly below ``gazette/`` that the client's distribution has."""
    sources = wheel_settings(CLIENT)["force-include"]
    assert isinstance(sources, dict)
    paths = [Path(one) for one in sources.values()]
    assert {(path.parts[0], len(path.parts)) for path in paths} == {("gazette", 2)}
    assert {f"../../{path}" for path in paths} - {*sources} == {"../../gazette/LICENSE"}
    return {path.name for path in paths} - {"LICENSE"}


def test_each_room_is_of_one_distribution() -> None:
    excluded = wheel_settings(WHOLE)["exclude"]
    assert isinstance(excluded, list)
    assert {one.removeprefix("/gazette/") for one in excluded} == rooms_of_client()
    assert all((ROOT / "gazette" / room).exists() for room in rooms_of_client())


def test_the_client_is_the_lowest_layers_and_messages() -> None:
    """So `lint-imports` holds that the client imports nothing of what it does not have.

    Rooms beside `message` in its layer cannot be imported from it.
    """
    config = configparser.ConfigParser()
    config.read(ROOT / ".importlinter")
    layers = config["importlinter:contract:layers"]["layers"].split()
    rooms = [one for one in layers if one != "|"]
    below = rooms[rooms.index("client") :]
    assert {*below, "message", "__init__", "py.typed"} == {
        one.removesuffix(".py") for one in rooms_of_client()
    }


def test_the_client_depends_on_a_part_of_what_the_project_does() -> None:
    client = project_of(CLIENT)["project"]["dependencies"]
    assert set(client) < set(project_of(WHOLE)["project"]["dependencies"])
    assert len(closure(client)) <= 10


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return the Python of an environment that has what both distributions depend on, and neither."""
    return installation(tmp_path / "env", closure(project_of(WHOLE)["project"]["dependencies"]))


def install(python: Path, *wheels: Path) -> None:
    """Install these wheels. A missing one that they depend on comes from the directory of the first."""
    found = ["--no-index", "--find-links", str(wheels[0].parent)]
    pip(python, "install", *found, *map(str, wheels))


def run(python: Path, code: str) -> str:
    """Run a program that must succeed, far from this tree."""
    done = start(python, code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(python: Path, code: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-I", "-c", code]
    return subprocess.run(command, cwd=python.parent, capture_output=True, text=True, check=False)


def files_of(python: Path) -> set[str]:
    """Return the files below ``gazette/`` in the environment, without those that Python makes of them."""
    packages = packages_of(python)
    return {
        str(path.relative_to(packages))
        for path in (packages / "gazette").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def files_in(*wheels: Path) -> set[str]:
    names = [name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()]
    return {name for name in names if name.startswith("gazette/")}


def distributions_in(python: Path) -> set[str]:
    path = [str(packages_of(python))]
    names = {one.name for one in importlib.metadata.distributions(path=path)}
    return names & {WHOLE, CLIENT}


@pytest.mark.long
def test_no_file_is_of_both(wheels: dict[str, Path]) -> None:
    whole, client = (set(zipfile.ZipFile(wheels[name]).namelist()) for name in (WHOLE, CLIENT))
    assert whole
    assert client
    assert not whole & client
    source = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "gazette").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert source <= whole | client


def requirements_of_client(*extras: str) -> set[str]:
    project = project_of(CLIENT)["project"]
    more = [one for extra in extras for one in project["optional-dependencies"][extra]]
    return closure([*project["dependencies"], *more])


@pytest.mark.long
def test_the_client_installs_alone(wheels: dict[str, Path], tmp_path: Path) -> None:
    """All of its modules but messages can be imported, with its own dependencies.

    Messages say what to install.
    """
    python = installation(tmp_path, requirements_of_client())
    install(python, wheels[CLIENT])
    run(python, WITHOUT_MESSAGES)
    for code in ("from gazette import open_publisher", "import gazette.message.mapping"):
        assert f"`pip install '{MESSAGES}'`" in start(python, code).stderr


@pytest.mark.long
async def test_the_client_publishes_with_its_extra(
    wheels: dict[str, Path], tmp_path: Path, gazette_broker: BrokerFixture
) -> None:
    python = installation(tmp_path / "env", requirements_of_client("messages"))
    install(python, wheels[CLIENT])
    run(python, THE_CLIENT)
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
    await gazette_broker.create(journal_spec("orders", labels=labels))
    await asyncio.to_thread(
        run, python, PUBLISH.replace("sys.argv[1]", repr(gazette_broker.endpoint))
    )
    async with gazette_broker.client.reader(ReadParams("orders")) as reader:
        content = await reader.read()
    (line,) = content.splitlines()
    assert {"item": "nail", "pieces": 7}.items() <= json.loads(line).items()


@pytest.mark.long
def test_the_large_one_brings_the_client_of_its_version(
    wheels: dict[str, Path], python: Path
) -> None:
    install(python, wheels[WHOLE])
    assert distributions_in(python) == {WHOLE, CLIENT}
    run(python, EVERYTHING)
    version = importlib.metadata.version(WHOLE)
    (metadata,) = packages_of(python).glob("pygazette-*.dist-info/METADATA")
    assert f"\nRequires-Dist: {CLIENT}=={version}\n" in metadata.read_text()


@pytest.mark.long
@pytest.mark.parametrize("first", [WHOLE, CLIENT])
def test_either_one_may_come_first(wheels: dict[str, Path], python: Path, first: str) -> None:
    (second,) = {WHOLE, CLIENT} - {first}
    pip(python, "install", "--no-deps", "--no-index", str(wheels[first]))
    install(python, wheels[second])
    assert files_of(python) == files_in(*wheels.values())
    run(python, EVERYTHING)


@pytest.mark.long
def test_both_at_once_and_one_of_them_uninstalled(wheels: dict[str, Path], python: Path) -> None:
    install(python, *wheels.values())
    pip(python, "uninstall", "--yes", WHOLE)
    assert files_of(python) == files_in(wheels[CLIENT])
    run(python, THE_CLIENT)
    install(python, wheels[WHOLE])
    pip(python, "uninstall", "--yes", CLIENT)
    assert files_of(python) == files_in(wheels[WHOLE])
    install(python, wheels[CLIENT])
    run(python, EVERYTHING)


@pytest.mark.long
def test_a_file_of_requirements_may_name_the_directory_of_the_wheels(
    wheels: dict[str, Path], python: Path, tmp_path: Path
) -> None:
    """As docs/installation.md says: a project without an index."""
    requirements = tmp_path / "requirements.txt"
    requirements.write_text(f"--find-links {wheels[WHOLE].parent}\n{WHOLE}\n")
    pip(python, "install", "--no-index", "--requirement", str(requirements))
    assert distributions_in(python) == {WHOLE, CLIENT}
    run(python, EVERYTHING)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Application", "read_table", "runconsumer"])
def test_what_the_client_alone_lacks_is_named(
    wheels: dict[str, Path], python: Path, name: str
) -> None:
    install(python, wheels[CLIENT])
    done = start(python, f"from gazette import {name}")
    assert f"ImportError: gazette.{name} is part of pygazette" in done.stderr
    assert "`pip install pygazette`" in done.stderr
    assert "cannot import" in start(python, "from gazette import Aplication").stderr


@pytest.mark.long
def test_a_client_that_hides_a_checkout_is_named(wheels: dict[str, Path], python: Path) -> None:
    """`import gazette` finds the client first, and the rest of it nowhere."""
    install(python, wheels[CLIENT])
    (packages_of(python) / "checkout.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    done = start(python, "from gazette import Application")
    assert str(packages_of(python)) in done.stderr
    assert "`pip uninstall pygazette-client`" in done.stderr
