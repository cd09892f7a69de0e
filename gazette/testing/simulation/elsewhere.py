"""Folds in another process, in which sets of texts have another order: results must not depend on it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from gazette.errors import Broken
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.shard import ShardSpec
from gazette.runtime.decoders import json_decoder
from gazette.testing.simulation.fold import Fold, FoldResult, Input
from gazette.testing.simulation.setup import Setup
from gazette.testing.simulation.shard_history import Consumed
from gazette.testing.simulation.user_code import UserSurroundings

HASH_SEED: Final = "4711"
"""The hash seed of the other process; the simulation's is 0."""

_OF: Final = 3
"""One in so many seeds is folded in the other process, too."""


def is_elsewhere(seed: int) -> bool:
    """Return True if the other process folds a seed, too."""
    return seed % _OF == 2


class _Request(msgspec.Struct):
    shard: bytes
    content: dict[str, bytes]
    transactions: list[list[Consumed]]
    recorded: bool
    ignore: list[str]
    seed: int
    is_first: bool
    """True for the first shard of a fold: the database has no rows yet."""


class _Answer(msgspec.Struct):
    error: str = ""
    state: dict[str, dict[str, str]] | None = None
    outputs: dict[str, dict[str, int]] = {}


class Elsewhere:
    """The other process. It starts with the first fold, and ends with ``close``."""

    def __init__(self, command: Sequence[str]) -> None:
        """Remember the command of the process, which calls `serve` with its standard streams."""
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it runs. Call this before processes that use it are forked."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONHASHSEED": HASH_SEED},
                start_new_session=True,  # Ctrl-C is for the parent, which ends this process.
            )

    def fold(
        self, folded: Input, setup: Setup, seed: int, *, is_first: bool = True
    ) -> FoldResult | str:
        """Fold in the other process. Return the text of the error if the application raises one.

        ``is_first`` begins a fold of several shards. In a database, the result has the rows of all of them.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        request = _Request(
            folded.shard.to_pb().SerializeToString(),
            {source.journal: folded.content[source.journal] for source in folded.shard.sources},
            [list(steps) for steps in folded.transactions],
            setup.recorded,
            list(setup.ignore),
            seed,
            is_first,
        )
        process.stdin.write(msgspec.json.encode(request) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise Broken(
                f"the other process that folds {folded.shard.id} has died",
                hint="Its standard error says why.",
            )
        answer = json_decoder(_Answer).decode(line)
        if answer.error:
            return answer.error
        outputs = {name: Counter(counts) for name, counts in answer.outputs.items()}
        return FoldResult(answer.state, outputs)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None


def serve(setup: Setup, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until their end."""
    logging.disable(logging.CRITICAL)
    database: Any = None
    with (
        tempfile.TemporaryDirectory(prefix="gazette-folds-") as name,
        contextlib.ExitStack() as databases,
    ):
        for number, line in enumerate(requests):
            request = json_decoder(_Request).decode(line)
            if request.is_first and setup.database is not None:
                databases.close()
                database = databases.enter_context(setup.database.fresh())
            answer = _answer(setup, request, Path(name) / str(number), database)
            answers.write(msgspec.json.encode(answer) + b"\n")
            answers.flush()


def _answer(setup: Setup, request: _Request, directory: Path, database: Any) -> _Answer:
    shard = ShardSpec.from_pb(consumer_pb2.ShardSpec.FromString(request.shard))
    folded = Input(shard, setup.journals, request.content, request.transactions, setup.source_names)
    fold = Fold(
        setup.new_application(), folded, directory, recorded=request.recorded, seed=request.seed
    )
    user = UserSurroundings(request.seed)
    user.bind(fold.now, lambda seconds: None, lambda what, place, hint: None)
    user.is_folding, user.database = True, database
    try:
        with user.attached():
            result = fold.run(request.ignore)
        if result.state is None and database is not None:
            result = replace(result, state=database.rows(request.ignore))
    except Exception as error:  # noqa: BLE001 - of the application
        return _Answer(f"{type(error).__name__}: {error}")
    outputs = {name: dict(counts) for name, counts in result.outputs.items()}
    return _Answer("", result.state, outputs)
