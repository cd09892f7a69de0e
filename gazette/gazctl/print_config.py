"""``gazctl print-config``."""

from __future__ import annotations

from gazette.gazctl.command import Command
from gazette.gazctl.commands import FAMILIES
from gazette.gazctl.context import Context
from gazette.gazctl.settings import shared_schema


def run(context: Context, _command: Command) -> int:
    """Print the settings of each group of commands, as a file that the original also reads."""
    for family, groups in FAMILIES.items():
        schema = shared_schema(family)
        loaded = schema.load(context.loaded.argv, context.environ)
        context.terminal.write(schema.render_ini(loaded, ("", *groups)) + "\n")
    return 0
