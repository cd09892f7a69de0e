"""The context by which `gazctl` finds a run, and the printed line about that context."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from gazette.errors import Invalid
from gazette.gazctl.contexts import Contexts
from gazette.gazctl.run_contexts import RunContext, published, run_contexts


@contextmanager
def announced(
    environ: Mapping[str, str],
    target: str,
    brokers: str,
    consumers: str,
    say: Callable[[str], object],
) -> Iterator[None]:
    """Let `gazctl` find a run by a context, during the block. Say the context's name, or that it has none."""
    with ExitStack() as stack:
        run = RunContext(brokers, consumers, target, os.getcwd())
        try:
            name = stack.enter_context(published(environ, run))
            say(_text(environ, name))
        except Invalid as error:
            say(f"gazctl needs --broker.address={brokers}: {error}")
        yield


def _text(environ: Mapping[str, str], name: str) -> str:
    """Return how `gazctl` finds a run: without flags unless the user or another run has a context."""
    if current := Contexts.load(environ).current:
        return f"gazctl finds it by --context={name} (the context in use is {current})"
    if others := len(run_contexts(environ)) - 1:
        runs = "another run is" if others == 1 else f"{others} other runs are"
        return f"gazctl finds it by --context={name} ({runs} there)"
    return f"gazctl finds it without flags, in any directory (context {name})"
