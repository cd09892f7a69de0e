"""The image of deploy/Dockerfile, layer by layer, in directories: each COPY and RUN, then a broker in it.

No container engine is needed. The Python is that of the image, if this machine has it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gazette.run.dev.processes import ChildProcess, await_ready
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.testing.etcd import EtcdServer
from tests.deployment import IMAGE, ROOT

CLOCK = SystemClock()
INSTALLED = """if True:
    import importlib.util
    for name in ("pyspark_gazette", "pyspark_gazette_state"):
        print(importlib.util.find_spec(name).name)
"""


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, without comments."""
    plain = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(r"^([A-Z]+) (.*)$", plain, re.MULTILINE)


def stages(text: str) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for instruction, words in instructions(text):
        if instruction == "FROM":
            found.append([])
        found[-1].append((instruction, words))
    return found


def python_of_image() -> str:
    """Return a Python of the version that the image has, or else this one."""
    (version,) = set(re.findall(r"FROM python:([\d.]+)-slim", IMAGE))
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}"))
    return shutil.which(f"python{version}") or (str(pyenv[-1]) if pyenv else sys.executable)


def build(root: Path) -> dict[str, str]:
    """Run the first stage below ``root``. Return the environment of its commands."""
    bin_ = root / "bin"
    bin_.mkdir(parents=True)
    (bin_ / "python").symlink_to(python_of_image())
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env = {**inherited, "PATH": f"{bin_}:{os.environ['PATH']}"}
    ignored = (ROOT / ".dockerignore").read_text().split()
    context = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    directory = root
    for instruction, words in stages(IMAGE)[0]:
        if instruction == "WORKDIR":
            directory = root / words.lstrip("/")
            directory.mkdir(parents=True)
        elif instruction == "ENV":
            name, _, value = words.partition("=")
            env[name] = value.replace("/opt", f"{root}/opt").replace("$PATH", env["PATH"])
        elif instruction == "COPY":
            *sources, target = words.split()
            for source in sources:
                assert source in context, f"{source} is not in the context"
                copy(ROOT / source, directory / target)
        elif instruction == "RUN":
            command = words.replace("/opt", f"{root}/opt")
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                cwd=directory,
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        else:
            assert instruction == "FROM", instruction
    return env


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, target / source.name if target.is_dir() else target)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_layers_make_an_image_that_serves(tmp_path: Path, etcd_server: EtcdServer) -> None:
    root = tmp_path / "root"
    env = build(root)
    # The sources are gone, as they are from the second stage.
    shutil.rmtree(root / "src")
    last = dict(stages(IMAGE)[1])
    own = dict(word.partition("=")[::2] for word in shlex.split(last["ENV"]) if "PATH" not in word)
    grpc, http = free_port(), free_port()
    for name in ("BROKER_SPOOL_DIR", "CONSUMER_SCRATCH_DIR"):
        own[name] = str(root / own[name].lstrip("/"))
        Path(own[name]).mkdir()
    own |= {"BROKER_PORT": str(grpc), "BROKER_HTTP_PORT": str(http), "BROKER_HOST": "127.0.0.1"}
    env |= own | {"ETCD_ADDRESS": etcd_server.endpoint, "ETCD_PREFIX": "/gazette/image"}
    command = [*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])]
    programs = root / "opt" / "gazette" / "bin"
    broker = ChildProcess(
        "broker", [programs / command[0], *command[1:]], tmp_path / "broker.log", env, CLOCK
    )
    (check,) = re.findall(r"^HEALTHCHECK.*\n +CMD (.*)$", IMAGE, re.MULTILINE)
    python, *arguments = json.loads(check.replace("8081", str(http)))

    def health() -> int:
        return subprocess.run(
            [programs / python, *arguments], env=env, capture_output=True, check=False
        ).returncode

    assert health() != 0
    await broker.start()
    try:
        await await_ready(broker, http, CLOCK, 60.0)
        assert health() == 0
    finally:
        assert await broker.stop(60.0), broker.log_tail()
    assert broker.exit_code == 0, broker.log_tail()
    for program, argument in (("gazctl", "--help"), ("gazette", "--help"), ("python", "-V")):
        subprocess.run([programs / program, argument], env=env, capture_output=True, check=True)
    installed = subprocess.run(
        [programs / "python", "-c", INSTALLED],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        check=True,
    )
    assert installed.stdout.split() == [b"pyspark_gazette", b"pyspark_gazette_state"]
