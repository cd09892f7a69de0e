"""Compares each commit in the steady state with the effects of the state machine of appends.

`gazette.broker.commit.steady.commit_now` is a shortcut around `AppendFSM`. When it accepts an append, the
machine must ask for exactly the effects of ``_PATH``, and begin the append at the same offset.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from gazette.auth import Capability, Claims
from gazette.broker.append import events as ev
from gazette.broker.append.fsm import AppendFSM
from gazette.broker.commit.driver import AppendCall, AppendDriver
from gazette.broker.pulse import NoContent

_PATH: Final = ("Resolve", "TakePipeline", "CheckReadiness", "ReadContent")


class SteadyCheck:
    """The check in this process. Call ``begin`` with the violations of each seed."""

    def __init__(self) -> None:
        self._violations: list[str] = []
        append_api: Any = import_module("gazette.broker.api.whole_append")
        self._commit_now = append_api.commit_now
        append_api.commit_now = self._checked

    def begin(self, violations: list[str]) -> None:
        self._violations = violations

    def _checked(self, context: Any, resolution: Any, pipeline: Any, line: Any, leader: Any) -> Any:
        found = None if pipeline is None else _machine(context, resolution, pipeline, leader)
        group = self._commit_now(context, resolution, pipeline, line, leader)
        if group is not None and found is not None:
            path, machine = found
            if path != _PATH or machine._begin != group._begin:
                self._violations.append(
                    f"an append to {resolution.journal} was committed at {group._begin} in the steady state. "
                    f"The machine comes to {machine._begin} by {' '.join(path)}"
                )
        return group


def _machine(
    context: Any, resolution: Any, pipeline: Any, leader: Any
) -> tuple[tuple[str, ...], AppendFSM] | None:
    """Step a machine until it would read content. Return the effects that it asked for, and the machine."""
    settings = context.settings
    machine = AppendFSM(
        leader.terms, rate_min=settings.min_append_rate, rate_max=settings.max_append_rate
    )
    claims = Claims.of_journal(Capability.APPEND, resolution.journal)
    call = AppendCall(leader.terms, claims, session=leader.session)
    driver = AppendDriver(context, call, NoContent(), leader.arrived)
    driver._resolution, driver._hold.replica = resolution, resolution.replica
    usable = pipeline.usable(context.clock.monotonic()) and not pipeline.reassigned.is_set
    route, view = (pipeline.route, pipeline.view()) if usable else (None, None)
    path: list[str] = []
    effects = machine.start()
    while len(effects) == 1 and len(path) < len(_PATH):
        path.append(type(effects[0]).__name__)
        match effects[0]:
            case ev.Resolve():
                effects = machine.step(resolution.as_event)
            case ev.TakePipeline():
                effects = machine.step(ev.PipelineTaken(route, view, resolution.replica.rate))
            case ev.CheckReadiness():
                effects = machine.step(driver._see_readiness())
            case _:
                break
    if leader.session is not None:
        resolution.replica.sessions.ended(leader.session, driver, None)
    return tuple(path), machine


CHECK: Final = SteadyCheck()
"""The check of this process."""
