"""The changes that a console offers. Each is a command of `gazctl`, run with the console's settings."""

from __future__ import annotations

import io
import shlex
from typing import Any, Final

from gazette.config.schema import options_of
from gazette.gazctl.context import Context
from gazette.gazctl.io.terminal import Terminal
from gazette.gazctl.perform import run_in_loop
from gazette.gazctl.settings import GROUPS
from gazette.protocol.ids import validate_journal_name, validate_shard_id
from gazette.protocol.text.validation import within

COMMANDS: Final = {
    "suspend": ("journals", "suspend"),
    "reset-head": ("journals", "reset-head"),
    "unassign": ("shards", "unassign", "--failed"),
}
"""Commands by the names of their routes. Each takes one journal or shard, and ``--dry-run``."""
_TIMEOUT_S: Final = 20.0


async def perform_change(
    context: Context, change: str, name: str, *, dry_run: bool
) -> dict[str, Any]:
    """Run a command. Return its words, its exit code and its output."""
    words = COMMANDS[change]
    is_journal = words[0] == "journals"
    with within("name"):
        # A name that is valid has no character that a selector treats specially.
        (validate_journal_name if is_journal else validate_shard_id)(name)
    argv = [*words, "-l", f"{'name' if is_journal else 'id'}={name}"]
    argv += ["--dry-run"] if dry_run else []
    out, err = io.BytesIO(), io.StringIO()
    code = await run_in_loop(argv, _environ(context), Terminal(io.BytesIO(), out, err))
    return {
        "command": shlex.join(["gazctl", *argv]),
        "code": code,
        "output": out.getvalue().decode(errors="replace") + err.getvalue(),
    }


def _environ(context: Context) -> dict[str, str]:
    """Return the settings of the console as variables: the command reaches the same servers."""
    environ = {"GAZCTL_TIMEOUT": f"{min(context.timeout_s, _TIMEOUT_S):g}s"}
    for group, cls in GROUPS.items():
        flags: object = context.loaded.group(cls)
        for option in options_of(group, cls):
            if option.env and option.key in context.loaded.sources and context.is_given(option.key):
                environ[option.env] = option.render(getattr(flags, option.field))
    return environ
