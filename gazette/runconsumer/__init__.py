"""Entry point of applications: ``runconsumer.main(MyApplication())`` runs a consumer process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from gazette.consumer.application import Application


def main(application: Application[Any], *, bind_host: str = "") -> NoReturn:
    """Run an application until it is asked to stop, and leave the process.

    Without ``--consumer.bind-host``, listen on the address ``bind_host``; if it is empty, on all addresses.

    See `gazette.runconsumer.process` for the command line and the exit codes.
    """
    from gazette.runconsumer import process

    process.main(application, bind_host=bind_host)
