"""From an `Application` to a running process: ``runconsumer.main(MyApplication())``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from gazette.consumer.application import Application


def main(application: Application[Any]) -> NoReturn:
    """Run an application until it is told to stop, and leave the process.

    See `gazette.runconsumer.process` for the command line and the exit codes.
    """
    from gazette.runconsumer import process

    process.main(application)
