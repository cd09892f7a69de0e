"""What a command line names: the application in it, and each way in which it has no application."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gazette.consumer.application_name import name_of
from gazette.errors import Invalid
from gazette.run.target import RunTarget, user_files

APPLICATION = """
from gazette import Application

class Words(Application):
    def new_store(self, shard, recorder): ...
    def consume_message(self, shard, store, envelope, publisher): ...
"""


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in an empty directory, and forget what was imported there."""
    monkeypatch.chdir(tmp_path)
    path, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write(name: str, text: str = APPLICATION) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("my_app.py", "my_app.Words"),
        ("./my_app.py", "my_app.Words"),
        ("my_app.py:Words", "my_app.Words"),
        ("my_app", "my_app.Words"),
        ("my_app:Words", "my_app.Words"),
        ("package.inner:Words", "package.inner.Words"),
        ("package/inner.py", "inner.Words"),
        ("my-app.py", "my-app.Words"),
    ],
)
def test_an_application_is_found(text: str, name: str) -> None:
    """Its name is the one that `python my_app.py` or `python -m package.inner` gives it."""
    for file in ("my_app.py", "my-app.py", "package/inner.py"):
        write(file)
    write("package/__init__.py", "")
    application = RunTarget.parse(text).load()
    assert name_of(application) == name
    assert type(application).__name__ == "Words"


def test_files_of_the_user_are_known() -> None:
    write("my_helper.py", "x = 1\n")
    write("my_app.py", f"import my_helper\n{APPLICATION}")
    RunTarget.parse("my_app.py").load()
    found = [Path(one).name for one in user_files()]
    assert {"my_app.py", "my_helper.py"} <= set(found)
    assert not any("site-packages" in one or "/gazette/" in one for one in user_files())


def test_an_object_may_be_named() -> None:
    made = "class Made(Words):\n    def __init__(self, size): self.size = size\n"
    write("my_app.py", f"{APPLICATION}\n{made}\nsmall = Made(3)\n")
    application = RunTarget.parse("my_app.py:small").load()
    assert application.size == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("my_ap.py", "my_ap.py does not exist (did you mean my_app.py?)", "as in app.py"),
        ("nowhere/app.py", "nowhere/app.py does not exist", "as in app.py"),
        (".", ". is a directory", "as in app.py"),
        ("folder", "folder is a directory", "as in app.py"),
        ("./notes.txt", "notes.txt is no Python file", "as in app.py"),
        ("my app", '"my app" is neither a file nor the name of a module', "as in app.py"),
        ("nowhere.at_all", "there is no module nowhere", "in the directory of the module"),
        ("json.py", "hides the module json", "Rename the file"),
        ("my_app.py:Wrods", "there is no Wrods in it (did you mean Words?)", "Words"),
        ("my_app.py:number", "number is no application", "gazette.Application"),
    ],
)
def test_what_is_not_there_is_named(text: str, says: str, hint: str) -> None:
    write("my_app.py", f"{APPLICATION}\nnumber = 3\n")
    for file in ("notes.txt", "json.py", "folder/x.py"):
        write(file, "")
    with pytest.raises(Invalid) as caught:
        RunTarget.parse(text).load()
    assert says in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("source", "says", "hint"),
    [
        ("x = 1\n", "has no application", "Derive a class"),
        (
            "from gazette import Application\nclass A(Application): ...\n",
            "has no application",
            "Implement consume_message, new_store in A.",
        ),
        (
            f"{APPLICATION}\nclass Other(Words): ...\nclass Third(Words): ...\n",
            "several applications: Other and Third",
            "my_app.py:Other",
        ),
        (
            f"{APPLICATION}\nclass Big(Words):\n    def __init__(self, size): ...\n",
            "Big needs arguments (size)",
            "defaults",
        ),
        (
            f"{APPLICATION}\nclass Bad(Words):\n    def __init__(self): raise OSError('no disk')\n",
            "Bad() fails\n  my_app.py, line 9, in __init__\n",
            "Correct the file.",
        ),
        (
            "x = (\n",
            "my_app.py, line 1\n    x = (\nSyntaxError: '(' was never closed",
            "Correct the file.",
        ),
        ("import sys\nsys.exit(3)\n", "my_app.py, line 2, in <module>", "if __name__ =="),
        ("from . import other\n", "relative import", "package.module:Class"),
        (
            'from gazette import Message, Source\nwords = Source("a b", Message)\n',
            "Source('a b').name: not a valid token",
            "Write 'a-b'.",
        ),
        ("import not_there\n", "No module named 'not_there'", "Correct the file."),
    ],
)
def test_what_is_wrong_in_it_is_named(source: str, says: str, hint: str) -> None:
    write("my_app.py", source)
    with pytest.raises(Invalid) as caught:
        RunTarget.parse("my_app.py").load()
    assert says in str(caught.value)
    assert hint in caught.value.hint


def test_the_users_innermost_frame_comes_first() -> None:
    write("my_helper.py", "import msgspec\ndef parse():\n    return msgspec.json.decode(b'{')\n")
    write("my_app.py", "import my_helper\nvalue = my_helper.parse()\n")
    with pytest.raises(Invalid) as caught:
        RunTarget.parse("my_app.py").load()
    assert str(caught.value).splitlines() == [
        "my_app.py cannot be imported",
        "  my_helper.py, line 3, in parse",
        "    return msgspec.json.decode(b'{')",
        "  my_app.py, line 2, in <module>",
        "    value = my_helper.parse()",
        "msgspec.DecodeError: Input data was truncated",
    ]


def test_a_module_that_imports_a_missing_one_is_not_called_missing() -> None:
    write("my_app.py", "import not_there\n")
    with pytest.raises(Invalid, match=r"my_app\.py, line 1"):
        RunTarget.parse("my_app").load()
