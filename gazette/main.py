"""``gazette``: run an application, a broker, or a whole small cluster on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from gazette.lazy import import_function
from gazette.runtime.near_names import near_name
from gazette.runtime.process_exit import end_process
from gazette.runtime.standard_streams import with_streams
from gazette.version import __version__

USAGE: Final = f"""gazette {__version__}

usage: gazette COMMAND [FLAGS]

  new            write a project to begin from
  run            run an application, with all that it needs on this machine
  test           simulate an application with kills, zombies and other faults
  serve          run a broker
  dev            run etcd and brokers on this machine, for development
  demo           count words exactly once while processes are killed
  ui             serve the console: pages that show a cluster
  print-config   print the effective configuration of `serve`

in a checkout only:

  bench          measure this machine
  soak           sum streams exactly once under faults, and verify the sums
  chaos          break a cluster under load, and verify the outcome

`gazette COMMAND --help` lists the flags of a command.
"""

_COMMANDS: Final = {
    "new": "gazette.run.new_project:run",
    "run": "gazette.run.command:run",
    "test": "gazette.run.fixed_hashes:run",
    "serve": "gazette.broker.main:serve",
    "print-config": "gazette.broker.main:print_config",
    "dev": "gazette.run.dev.dev:run",
    "demo": "gazette.run.dev.demo:run",
    "ui": "gazette.run.console.command:run",
    "soak": "tools.soak.run:run",
    "bench": "tools.bench.main:run",
    "chaos": "tools.chaos.run:run",
}
_WITH_ENVIRONMENT: Final = frozenset({"serve", "print-config"})


def run(argv: Sequence[str]) -> int:
    """Run one command, and return its exit code: 1 without a command, 2 for an unknown command."""
    if not argv:
        print(USAGE, file=sys.stderr)
        return 1
    command, arguments = argv[0], argv[1:]
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command in ("-V", "--version", "version"):
        print(__version__)
        return 0
    if command not in _COMMANDS:
        near = near_name(command, _COMMANDS)
        guess = f" (did you mean {near}?)" if near else ""
        print(f"gazette: unknown command {command}{guess}\n\n{USAGE}", file=sys.stderr)
        return 2
    # Import on demand: a broker does not need the modules of other commands.
    try:
        function: Callable[..., int] = import_function(_COMMANDS[command])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "tools":
            raise
        print(
            f"gazette: `{command}` is part of the source tree and not of the installed package: "
            "clone the repository and run it there",
            file=sys.stderr,
        )
        return 2
    return function(arguments, os.environ) if command in _WITH_ENVIRONMENT else function(arguments)


def main() -> None:
    end_process(with_streams(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
