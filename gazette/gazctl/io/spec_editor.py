"""Specifications as text, read from files and edited by users."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from gazette.errors import GazetteError, Invalid
from gazette.gazctl.context import Context

_TIP: Final = "#⚙ "
_PROBLEM: Final = "#⚠ "
_HEADER: Final = (
    f"{_TIP}Make your changes, save, and leave the editor. Without changes nothing is applied.\n"
)
_EDITOR_DEFAULT: Final = "vi"
_ESCAPED: Final = "surrogateescape"
_ATTEMPTS_MAX: Final = 5
"""Greatest number of times to open an editor again without a terminal: a program may repeat its mistake."""


class _EditorFailure(GazetteError):
    """An editor that failed. ``saved`` is the text that the editor left."""

    def __init__(self, message: str, saved: str) -> None:
        super().__init__(message)
        self.saved = saved


def read_specs(path: str, context: Context) -> str:
    """Return the text of a file, or of stdin for ``-``. Raise ``Invalid`` if it cannot be read."""
    try:
        data = context.terminal.stdin.read() if path == "-" else Path(path).read_bytes()
        return data.decode()
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}", path="--specs") from error
    except UnicodeDecodeError as error:
        raise Invalid(f"{path} is not UTF-8 text", path="--specs") from error


async def edit_specs(text: str, apply: Callable[[str], Awaitable[None]], context: Context) -> bool:
    """Have the user edit specifications, and apply them. Return True if the text was changed.

    If ``apply`` finds the text ``Invalid``, open the text again, with the error above, until the text is
    valid. Give up with ``Invalid`` if the user leaves an invalid text unchanged. Without a terminal, give up
    after `_ATTEMPTS_MAX` attempts. Keep a changed text in a file if it is not applied, for whatever reason,
    and name that file.
    """
    shown, problem, attempts = _HEADER + text, "", 0
    while True:
        try:
            edited, attempts = await _run_editor(shown, context), attempts + 1
        except _EditorFailure as failure:
            if _content(failure.saved) != text:
                failure.hint = _keep(failure.saved)
            raise
        unchanged = _content(edited) == _content(shown)
        if unchanged and not problem:
            return False
        if unchanged or (attempts > _ATTEMPTS_MAX and not context.terminal.stdin.isatty()):
            raise Invalid(f"gave up: {problem}", hint=_keep(edited))
        try:
            await apply(_content(edited))
        except Invalid as error:
            problem = str(error)
            lines = "".join(f"{_PROBLEM}{line}\n" for line in problem.splitlines())
            shown = _HEADER + lines + _content(edited)
        except GazetteError as error:
            advice = [] if error.hint == type(error).default_hint else [error.hint]
            error.hint = "\n".join([*advice, _keep(edited)])
            raise
        except asyncio.CancelledError:  # The user interrupts an apply that takes long.
            context.terminal.note(_keep(edited))
            raise
        else:
            return True


def _content(text: str) -> str:
    """Return the text without the lines that this command has added."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith((_TIP.strip(), _PROBLEM.strip())))


def _keep(text: str) -> str:
    """Keep the user's text in a file. Return a sentence with the name of the file."""
    with tempfile.NamedTemporaryFile(prefix="gazctl-edit-", suffix=".yaml", delete=False) as file:
        file.write(_content(text).encode(errors=_ESCAPED))
    return f"Your text is kept in {file.name}."


async def _run_editor(text: str, context: Context) -> str:
    """Return the text after the user has edited it.

    Raise ``Invalid`` if the editor cannot be run, and `_EditorFailure` if it fails or saves no text.
    """
    command = context.environ.get("GAZ_EDITOR") or context.environ.get("EDITOR") or _EDITOR_DEFAULT
    with tempfile.TemporaryDirectory(prefix="gazctl-") as directory:
        path = Path(directory, "specs.yaml")
        _write(path, text)
        # Ctrl-C belongs to the editor while it runs.
        former_handler, context.on_signal = context.on_signal, lambda: True
        try:
            words = shlex.split(command)
            process = await asyncio.create_subprocess_exec(*words, str(path))
            code = await process.wait()
        except (OSError, ValueError) as error:
            raise Invalid(
                f"cannot run the editor {command!r}: {error}",
                path="EDITOR",
                hint="Set GAZ_EDITOR or EDITOR to a command that takes a file.",
            ) from error
        finally:
            context.on_signal = former_handler
        saved, problem = _read(path)
        if code != 0:
            problem = f"the editor {command!r} ended with exit code {code}"
        if problem:
            raise _EditorFailure(problem, saved or text)
        return saved


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _read(path: Path) -> tuple[str, str]:
    """Return the saved text, with bytes that are no UTF-8 escaped, and why it cannot be used; empty for a
    usable text."""
    try:
        saved = path.read_text(encoding="utf-8", errors=_ESCAPED)
        saved.encode()
    except OSError as error:
        return "", f"cannot read what the editor saved: {error}"
    except UnicodeEncodeError:
        return saved, "what the editor saved is no UTF-8 text"
    return saved, ""
