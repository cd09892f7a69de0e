"""The application that a command line names: ``app.py``, ``app.py:Class``, ``module`` or ``module:Class``.

Loading runs the user's code. Only child processes of `gazette run` load an application.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gazette.consumer.application import Application
from gazette.errors import GazetteError, Invalid
from gazette.runtime.near_names import near_name
from gazette.runtime.user_code import is_user_file, shown_path, user_frames

_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class RunTarget:
    """The place of an application: a file or a module, and the name of its class, if one was given."""

    text: str
    """The text that the user gave."""
    path: Path | None
    module: str
    """Name under which the module is imported. For a file: its name without ``.py``."""
    name: str

    @classmethod
    def parse(cls, text: str) -> RunTarget:
        """Return the target that a text names. Raise ``Invalid`` if it names no file and no module."""
        place, _, name = text.partition(":")
        if not (place.endswith(".py") or "/" in place or os.sep in place):
            if Path(place).is_dir() and not (Path(place) / "__init__.py").exists():
                raise _no_file(f"{place} is a directory")
            if not all(part.isidentifier() for part in place.split(".")):
                raise _no_file(f'"{place}" is neither a file nor the name of a module')
            if Path(f"{place}.py").is_file():
                place = f"{place}.py"
            else:
                return cls(text, None, place, name)
        path = Path(place)
        if path.is_dir():
            raise _no_file(f"{place} is a directory")
        if not path.is_file():
            near = near_name(path.name, _python_files(path.parent))
            guess = f" (did you mean {path.parent / near}?)" if near else ""
            raise _no_file(f"{place} does not exist{guess}")
        if path.suffix != ".py":
            raise _no_file(f"{place} is no Python file")
        _check_stem(text, path.stem)
        return cls(text, path.resolve(), path.stem, name)

    @property
    def directory(self) -> str:
        """Directory from which the module is imported."""
        # Modules are found in the working directory, as with `python -m`.
        return os.getcwd() if self.path is None else str(self.path.parent)

    def load(self) -> Application[Any]:
        """Import the module, and return an object of its application.

        Raise ``Invalid`` if that fails, and for a module without an application, or with several applications
        if no name is given.
        """
        module = self._import()
        if self.name:
            return self._named(module)
        classes = list(_applications(module))
        if len(classes) == 1:
            return self._made(classes[0])
        if classes:
            names = " and ".join(cls.__name__ for cls in classes)
            first = f"{self.text}:{classes[0].__name__}"
            raise Invalid(
                f"{self.text} has several applications: {names}",
                hint=f"Say which one, as in {first}",
            )
        raise Invalid(
            f"{self.text} has no application: none of its classes is complete and derives from "
            "gazette.Application",
            hint=self._incomplete(module),
        )

    def _import(self) -> ModuleType:
        """Import the module. Raise ``Invalid`` if that fails in any way, even by `SystemExit`."""
        try:
            sys.path.insert(0, self.directory)
            if self.path is None:
                return importlib.import_module(self.module)
            spec = importlib.util.spec_from_file_location(self.module, self.path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[self.module] = module
            spec.loader.exec_module(module)
            return module
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if self.path is None and (f"{self.module}.").startswith(f"{missing}."):
                raise Invalid(
                    f"there is no module {missing} ({self.text})",
                    hint="Run the command in the directory of the module, or name its file.",
                ) from error
            raise self._failed(error) from error
        except (Exception, SystemExit) as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> Invalid:
        """Return an error that shows the user's own frames, and a hint that fits its cause."""
        hint = "Correct the file."
        if isinstance(error, GazetteError):
            hint = error.hint
        elif isinstance(error, SystemExit):
            hint = "Put what runs as a script below: if __name__ == '__main__':"
        elif isinstance(error, ImportError) and "relative import" in str(error):
            hint = "Name the file as a module of its package, as in package.module:Class."
        return Invalid(
            f"{self.text} cannot be imported\n{frames_text(error)}\n{_error_text(error)}", hint=hint
        )

    def _named(self, module: ModuleType) -> Application[Any]:
        """Return the named application: an object of the module, or a new object of a class."""
        attribute = getattr(module, self.name, None)
        if attribute is None:
            names = [cls.__name__ for cls in _applications(module)]
            near = near_name(self.name, names) or next(iter(names), None)
            guess = f" (did you mean {near}?)" if near else ""
            raise Invalid(
                f"{self.text}: there is no {self.name} in it{guess}",
                hint=f"Its applications: {', '.join(names) or 'none'}.",
            )
        if isinstance(attribute, Application):
            return attribute
        if not (isinstance(attribute, type) and issubclass(attribute, Application)):
            raise Invalid(
                f"{self.text}: {self.name} is no application",
                hint="Name a class that derives from gazette.Application.",
            )
        return self._made(attribute)

    def _made(self, kind: type[Application[Any]]) -> Application[Any]:
        """Return a new object of a class. Raise ``Invalid`` if the class is abstract, needs arguments, or
        fails."""
        if inspect.isabstract(kind):
            missing = ", ".join(sorted(kind.__abstractmethods__))
            raise Invalid(
                f"{self.text}: {kind.__name__} lacks {missing}",
                hint=f"Implement {missing} in it.",
            )
        required = [
            arg.name
            for arg in inspect.signature(kind).parameters.values()
            if arg.default is arg.empty and arg.kind not in (arg.VAR_POSITIONAL, arg.VAR_KEYWORD)
        ]
        if required:
            raise Invalid(
                f"{self.text}: {kind.__name__} needs arguments ({', '.join(required)}), and is "
                "created without any",
                hint="Give them defaults, or name an object of the class that the module makes.",
            )
        try:
            return kind()
        except Exception as error:
            raise Invalid(
                f"{self.text}: {kind.__name__}() fails\n{frames_text(error)}\n{_error_text(error)}",
                hint="Correct the file.",
            ) from error

    def _incomplete(self, module: ModuleType) -> str:
        """Return a hint for a module without an application: what its first abstract class lacks."""
        abstract = [
            value
            for value in vars(module).values()
            if _is_own(value, module) and inspect.isabstract(value)
        ]
        if not abstract:
            return "Derive a class from gazette.Application in it."
        cls = abstract[0]
        missing = ", ".join(sorted(cls.__abstractmethods__))
        return f"Implement {missing} in {cls.__name__}."


def user_files() -> list[str]:
    """Return the files of imported modules that are the user's: not installed, and not of Python."""
    return sorted(
        {
            file
            for module in list(sys.modules.values())
            if isinstance(file := getattr(module, "__file__", None), str) and is_user_file(file)
        }
    )


def frames_text(error: BaseException) -> str:
    """Return where an error comes from: the user's innermost frame first, then its callers."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        line = (error.text or "").strip()
        return f"  {shown_path(error.filename)}, line {error.lineno}\n    {line}"
    frames = user_frames(traceback.extract_tb(error.__traceback__))
    texts = []
    for frame in reversed(frames[-_SHOWN_MAX:]):
        place = f"  {shown_path(frame.filename)}, line {frame.lineno}, in {frame.name}"
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        texts.append(f"{place}\n    {line}")
    return "\n".join(texts)


def _error_text(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)[-1:]).strip()


def _applications(module: ModuleType) -> Iterator[type[Application[Any]]]:
    """Yield the complete applications that a module defines, except bases of other such applications."""
    defined = (cls for cls in vars(module).values() if _is_own(cls, module))
    classes = [cls for cls in dict.fromkeys(defined) if not inspect.isabstract(cls)]
    for cls in classes:
        if not any(other is not cls and issubclass(other, cls) for other in classes):
            yield cls


def _is_own(kind: Any, module: ModuleType) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, Application)
        and kind.__module__ == module.__name__
    )


def _python_files(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("*.py")] if directory.is_dir() else []


def _no_file(problem: str) -> Invalid:
    return Invalid(
        problem, hint="Name a file or a module, as in app.py, app.py:Class or package.module:Class."
    )


def _check_stem(text: str, stem: str) -> None:
    """Raise ``Invalid`` for a file with the name of another module, which the file would hide."""
    if stem in sys.stdlib_module_names or stem in sys.modules:
        raise Invalid(
            f"{text}: a file of this name hides the module {stem}",
            hint="Rename the file, as to app.py.",
        )
