"""``gazctl print-config``."""

from __future__ import annotations

from gazette.gazctl.commands import Command
from gazette.gazctl.context import Context


def run(context: Context, command: Command) -> int:
    context.terminal.write(command.schema().render_ini(context.loaded))
    return 0
