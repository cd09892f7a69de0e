"""``gazctl``: the operator's commands on journals and shards.

Exit codes:

0: done.
1: failed, or done in part; stderr says what.
2: the command line, the configuration or a specification is wrong.
128 plus the signal's number: interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from gazette.gazctl.commands import help_text
from gazette.gazctl.io.terminal import EXIT_OK, Terminal
from gazette.lazy import many_imports
from gazette.runtime.standard_streams import open_closed_streams, with_streams


def run(argv: Sequence[str], environ: Mapping[str, str], terminal: Terminal) -> int:
    """Run one command as in a process of its own. Return the exit code. Import modules stage by stage: a list
    of commands needs no settings, and ``--help`` no client."""
    if text := help_text(argv):
        terminal.write(text)
        return EXIT_OK
    with many_imports():
        from gazette.gazctl.settings import prepare
    prepared = prepare(argv, environ, terminal)
    if isinstance(prepared, int):
        return prepared
    command, loaded, in_use = prepared
    with many_imports():
        from gazette.gazctl.perform import perform
    return perform(command, loaded, environ, terminal, in_use)


def main() -> None:
    open_closed_streams()
    terminal = Terminal.system()

    def run_and_flush() -> int:
        code = run(sys.argv[1:], os.environ, terminal)
        terminal.stdout.flush()
        return code

    # Not `sys.exit`, which waits for every thread: a thread may wait for a pipe that no process uses.
    os._exit(with_streams(run_and_flush))


if __name__ == "__main__":
    main()
