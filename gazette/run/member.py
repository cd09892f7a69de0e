"""A child process of `gazette run`: loads the user's application, and describes or serves it.

    python -m gazette.run.member describe FILE TARGET
    python -m gazette.run.member FILE TARGET FLAGS…

The first command writes a `Description` to FILE, as JSON. The second command serves the application
with the flags of ``serve``. Once it serves, FILE has the application's HTTP routes as a JSON list.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from gazette.config.schema import exit_with
from gazette.consumer.contract.callbacks import require_callbacks
from gazette.consumer.declare.declaration import Declaration, declaration_of
from gazette.consumer.member import ConsumerMember
from gazette.errors import Invalid
from gazette.run.samples import MessageSample, samples_of
from gazette.run.target import RunTarget, user_files
from gazette.runconsumer import process
from gazette.runtime.private_paths import open_private
from gazette.runtime.process_exit import end_process
from gazette.runtime.supervisor import die_with_parent

DESCRIBE: Final = "describe"


class Description(msgspec.Struct, frozen=True):
    """Facts about an application, which `gazette run` gets from a child process that has imported it."""

    declaration: Declaration
    files: tuple[str, ...]
    """The user's own files of which the application consists."""
    samples: dict[str, MessageSample] = {}
    """A message of each source that takes JSON, by name."""


class NotingMember(ConsumerMember):
    """A member that writes the HTTP routes of its application to ``routes_file`` once it has started."""

    routes_file: Path | None = None

    async def start(self) -> None:
        await super().start()
        assert self.routes_file is not None
        paths = [route.path for route in self.service.routes if "GET" in (route.methods or ())]
        write_whole(self.routes_file, msgspec.json.encode(paths))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file. A reader sees the whole file, or the former one."""
    temporary = path.with_name(f"{path.name}.partial")
    with open(temporary, "wb", opener=open_private) as file:
        file.write(content)
    temporary.replace(path)


def run(argv: Sequence[str]) -> int:
    """Run the process, and return its exit code: 2 if the application cannot be used."""
    die_with_parent(os.environ)
    try:
        if argv[0] == DESCRIBE:
            file, text = argv[1:]
            target = RunTarget.parse(text)
            application = target.load()
            require_callbacks(application)
            description = Description(
                declaration_of(application),
                tuple(user_files()),
                {
                    source.name: sample
                    for source, sample in samples_of(application, target.directory)
                },
            )
            write_whole(Path(file), msgspec.json.encode(description))
            return 0
        file, text, *flags = argv
        application = RunTarget.parse(text).load()
    except Invalid as error:
        return exit_with(error, sys.stderr)
    # All processes stop together, so no process can take over. Hide the drain's warnings about this.
    logging.getLogger("gazette.cluster.allocator.drain").setLevel(logging.ERROR)
    NotingMember.routes_file = Path(file)
    return process.run(application, ["serve", *flags], os.environ, member=NotingMember)


if __name__ == "__main__":
    end_process(run(sys.argv[1:]))
