"""Moves the bounds of runs to bounds of messages: `whole_runs`. Pure.

A run ends where a fragment ends, and nearly always a message ends there too. But a publisher may append a
message in parts. Then the run in which the message begins also reads the next fragments. The next run begins
where the message ends. Only a summary shows this offset, and only if its run begins with a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gazette.history.snapshot import Piece, Run, cover
from gazette.history.summary import Summary
from gazette.message.framing.frames import FRAME_BYTES_MAX, MalformedMessage
from gazette.protocol.ids import JournalName, Offset

Summarise = Callable[[Sequence[Run]], Sequence[Summary]]
"""Function that returns the summaries of runs, in their order."""


@dataclass(slots=True)
class _Link:
    """A run of a journal, and its summary. ``summary`` None: the run must be summarised."""

    run: Run
    summary: Summary | None = None


def whole_runs(runs: Sequence[Run], summarise: Summarise) -> tuple[tuple[Run, ...], list[Summary]]:
    """Change the runs, so that each message is in one run. Return the runs, and their summaries.

    Raise the errors of ``summarise``. Raise `MalformedMessage` for a message whose end is missing.
    """
    chains: dict[JournalName, list[_Link]] = {}
    for run in runs:
        chains.setdefault(run.journal, []).append(_Link(run))
    while unknown := [link for chain in chains.values() for link in chain if link.summary is None]:
        summaries = summarise([link.run for link in unknown])
        for link, summary in zip(unknown, summaries, strict=True):
            link.summary = summary
        for chain in chains.values():
            _mend(chain)
    links = [link for chain in chains.values() for link in chain]
    return tuple(link.run for link in links), [link.summary for link in links if link.summary]


def _mend(chain: list[_Link]) -> None:
    """Change runs that do not begin and end where messages do, up to the first run without a summary.

    Drop the summary of a run whose messages change. Raise `MalformedMessage` for a message that is cut off.
    """
    for position, link in enumerate(chain):
        run, summary = link.run, link.summary
        if summary is None:
            return  # The begin of this run was moved. Its new summary must come first.
        if summary.torn:
            # The run before ends with a message, so this run is malformed: the next summary raises the error.
            chain[position] = _Link(replace(run, sure=True))
            return
        if position == len(chain) - 1 or summary.reached == run.end:
            continue
        next_begin = chain[position + 1].run.pieces[0].begin
        if summary.reached > run.end:
            _begin_at(chain, position + 1, summary.reached)
        elif next_begin > run.end:
            # Lost bytes follow: the last message of the run has no end.
            _cut_off(run, summary, next_begin)
            chain[position] = _Link(replace(run, last=True), summary)
        elif not run.beyond:
            chain[position] = _Link(replace(run, beyond=_beyond(chain[position + 1 :], run.end)))
            return
        else:
            # The message ends neither in the snapshot nor before lost bytes.
            _begin_at(chain, position + 1, run.beyond[-1].end)
            if position < len(chain) - 1:
                _cut_off(run, summary, chain[position + 1].run.pieces[0].begin)
            chain[position] = _Link(replace(run, last=True, beyond=()), summary)


def _begin_at(chain: list[_Link], at: int, begin: Offset) -> None:
    """Cut the runs from position ``at`` on, so that they begin at the offset ``begin``. Drop empty runs."""
    while at < len(chain) and chain[at].run.end <= begin:
        del chain[at]
    if at < len(chain) and chain[at].run.pieces[0].begin < begin:
        run = chain[at].run
        chain[at] = _Link(replace(run, pieces=cover(run.pieces, begin, run.end), sure=True))


def _beyond(links: Sequence[_Link], begin: Offset) -> tuple[Piece, ...]:
    """Return the consecutive pieces from offset ``begin`` on, up to the greatest length of a message."""
    pieces: list[Piece] = []
    for link in links:
        for piece in link.run.pieces:
            if piece.begin != begin or (pieces and begin - pieces[0].begin > FRAME_BYTES_MAX):
                return tuple(pieces)
            pieces.append(piece)
            begin = piece.end
    return tuple(pieces)


def _cut_off(run: Run, summary: Summary, offset: Offset) -> None:
    """Raise `MalformedMessage` for the run's last message, which lost bytes before ``offset`` cut off. Do
    nothing if the format does not let such messages fail."""
    if run.shape.malformed == "fail":
        raise MalformedMessage(
            f"a message is cut off: the journal continues at offset {offset}",
            begin=summary.reached,
            end=run.end,
            raw=b"",
            journal=run.journal,
        )
