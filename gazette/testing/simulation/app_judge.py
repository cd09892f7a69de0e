"""The judge of one seed: it compares the end of a run with a fold of its shards' input."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any, Final

from gazette.message.framing.frames import MalformedMessage
from gazette.protocol.journal import JournalSpec
from gazette.testing.simulation.app_run import AppRun, Ended, Finding
from gazette.testing.simulation.elsewhere import Elsewhere, is_elsewhere
from gazette.testing.simulation.fold import (
    Fold,
    FoldResult,
    Input,
    LostTimer,
    add_outputs,
    committed_spans,
    source_framing,
)
from gazette.testing.simulation.query_judge import QueryJudge
from gazette.testing.simulation.setup import Setup
from gazette.testing.simulation.shard_history import RecordedTransaction
from gazette.testing.simulation.states import Deviation, deviation_of
from gazette.testing.simulation.story import FaultForm
from gazette.testing.simulation.travel import TimeTraveller, travels
from gazette.testing.simulation.user_code import UserSurroundings

_SHIFT_S: Final = 86_461.5
"""Seconds by which clocks of a fold are ahead of the run. Results must not depend on the time of day."""

_FOLDS_MAX: Final = 64
"""Greatest number of folds that look for the transactions which shards have consumed."""


class Judge:
    """The judge of one run. ``elsewhere`` also folds in another process; None: only this process folds."""

    def __init__(
        self, run: AppRun, user: UserSurroundings, elsewhere: Elsewhere | None = None
    ) -> None:
        self._elsewhere = elsewhere
        self._run = run
        self._user = user
        self._setup: Setup = run.setup
        self._ended: Ended = run.ended
        self._specs: dict[str, JournalSpec] = {spec.name: spec for spec in self._setup.journals}
        self._inputs: dict[str, Input] = {}
        self._others: dict[str, list[Input]] = {}
        """By shard, the other inputs that it may have consumed."""
        self._folds = 0
        self._directory = Path(tempfile.mkdtemp(prefix="fold-", dir=run.cluster.scratch))

    def findings(self) -> list[Finding]:
        """Return the findings about the run; findings of the run itself come first."""
        ended = self._ended
        if ended.findings:
            return ended.findings
        if not ended.promotions:
            return [Finding("the run has ended before anything was compared")]
        findings = (
            self._consumed()
            or self._answered()
            or self._restarted()
            or self._folded()
            or self._travelled()
        )
        return ended.findings or findings

    def _consumed(self) -> list[Finding]:
        """Require that each committed message of each source was consumed once."""
        findings = []
        for spec in self._run.specs:
            promotion = self._ended.promotions[spec.id]
            chains = self._run.history.effective(promotion)
            if not chains:
                what = f"{spec.id} restored a checkpoint that no promotion had committed"
                findings.append(Finding(what))
                continue
            chain, *others = chains
            self._inputs[spec.id] = self._input(spec, chain)
            self._others[spec.id] = [self._input(spec, other) for other in others]
            consumed = Counter(
                (step.journal, span)
                for transaction in chain
                for step in transaction.steps
                for span in step.spans
            )
            for source in spec.sources:
                consumed.subtract(
                    (source.journal, span) for span in self._committed(source.journal)
                )
            wrong = {key: count for key, count in consumed.items() if count}
            if wrong and not self._setup.skips_poison:
                text = ", ".join(
                    f"{journal} {begin}–{end} {'too often' if count > 0 else 'never'}"
                    for (journal, (begin, end)), count in sorted(wrong.items())
                )
                findings.append(Finding(f"{spec.id} consumed messages wrongly: {text}"))
        return findings

    def _input(self, spec: Any, chain: list[RecordedTransaction]) -> Input:
        steps = [transaction.steps for transaction in chain]
        setup = self._setup
        return Input(spec, setup.journals, self._ended.content, steps, setup.source_names)

    def _answered(self) -> list[Finding]:
        """Require that each query got the state of a commit, and no state older than permitted."""
        judge = QueryJudge(
            self._run.history,
            self._run.specs,
            cache(self._committed),
            self._ended.states,
            counts_messages=not self._setup.skips_poison,
        )
        wrong = judge.wrong(self._ended.answers)
        if wrong is None:
            return []
        return [Finding(wrong.what, details=wrong.details, hint="query")]

    def _committed(self, journal: str, end: int | None = None) -> list[tuple[int, int]]:
        """Return the committed messages of a journal, or of the part before ``end``."""
        application, spec = self._setup.new_application(), self._specs[journal]
        framing = source_framing(application, spec)
        try:
            return list(committed_spans(journal, framing, self._ended.content[journal][:end]))
        except MalformedMessage:
            return []

    def _restarted(self) -> list[Finding]:
        """Require that a restart of all members has changed nothing."""
        for shard_id, before in self._ended.states_before.items():
            after = self._ended.states[shard_id]
            promotions = self._ended.promotions
            writers = promotions if self._setup.database is not None else (shard_id,)
            if any(promotions[writer].transactions for writer in writers):
                continue  # Timers have fired since.
            if before is not None and after is not None:
                deviation = deviation_of(after, before)
                if deviation is not None:
                    return [
                        Finding(
                            f"a restart changes {self._name_of(shard_id)}",
                            details=f"{deviation.place}\n  after   {deviation.actual or '(nothing)'}\n"
                            f"  before  {deviation.expected or '(nothing)'}",
                            hint="restart",
                        )
                    ]
        return []

    def _name_of(self, shard_id: str) -> str:
        """Return the name of a shard's state: a database has one state for all shards."""
        return "the database" if self._setup.database is not None else f"the state of {shard_id}"

    def _travelled(self) -> list[Finding]:
        """Require that the logs have the states of former commits."""
        story, history = self._run.story, self._run.history
        if not travels(seed := story.seed):
            return []
        traveller = TimeTraveller(
            self._ended.logs,
            self._directory,
            self._setup.ignore,
            seed,
            clocks_agree=FaultForm.CLOCK not in [fault.form for fault in story.faults_to_make()],
        )
        for spec in self._run.specs:
            promotion = self._ended.promotions[spec.id]
            chains = history.effective(promotion)
            wrong = traveller.wrong(spec, promotion, chains, history.since_rebuilt(spec.id))
            if wrong is not None:
                return [Finding(wrong.what, details=wrong.details, hint="travel")]
        return []

    # Folds.

    def _folded(self) -> list[Finding]:
        """Require the states and outputs of a fold without faults."""
        wrong = self._compare(recorded=self._setup.recorded, shift_s=_SHIFT_S)
        # Shards may have consumed less likely transactions. Try the combinations for all shards.
        usual = [self._inputs[shard_id] for shard_id in self._others]
        choices = [[own, *others] for own, others in zip(usual, self._others.values(), strict=True)]
        for inputs in islice(product(*choices), 1, _FOLDS_MAX):
            if wrong is None:
                break
            self._inputs.update(zip(self._others, inputs, strict=True))
            if self._compare(recorded=self._setup.recorded, shift_s=_SHIFT_S) is None:
                wrong = None
        if wrong is not None:
            self._inputs.update(zip(self._others, usual, strict=True))
            what, deviation = wrong
            details = "" if deviation is None else str(deviation)
            return [Finding(what, details=details, hint=self._cause(deviation))]
        return self._folded_elsewhere()

    def _folded_elsewhere(self) -> list[Finding]:
        """Require the same states and outputs of a fold in a process in which sets have another order."""
        seed = self._run.story.seed
        if self._elsewhere is None or not is_elsewhere(seed):
            return []
        results: dict[str, FoldResult] = {}
        for shard_id, folded in self._inputs.items():
            result = self._elsewhere.fold(folded, self._setup, seed, is_first=not results)
            if isinstance(result, str):
                return [Finding(f"in another process, {shard_id} fails: {result}", hint="set")]
            results[shard_id] = result
        if self._setup.database is not None:
            # Shards share their rows, and the last answer has the rows of all.
            last = [*results.values()][-1].state
            results = {shard_id: replace(each, state=last) for shard_id, each in results.items()}
        wrong = self._deviation(results)
        if wrong is None:
            return []
        what, deviation = wrong
        return [Finding(what, details=str(deviation), hint="set")]

    def _cause(self, deviation: Deviation | None) -> str:
        """Return the cause of a difference, by other folds of the same input."""
        again = [self._results(recorded=True, shift_s=0.0) for _ in range(2)]
        if again[0] != again[1]:
            return "varies"
        if isinstance(again[0], str):
            return ""
        if self._matches(again[0]):
            moved = self._compare(recorded=True, shift_s=_SHIFT_S)
            return "time" if moved is not None else "batches"
        extra = (
            deviation is not None
            and deviation.place.startswith("messages of")
            and not deviation.expected
        )
        return "extra output" if extra else "memory"

    def _results(self, *, recorded: bool, shift_s: float) -> dict[str, FoldResult] | str:
        """Fold each shard. Return the error of the application if it raises one."""
        server = self._setup.database
        if server is None:
            return self._fold_all(recorded=recorded, shift_s=shift_s)
        with server.fresh() as database:
            self._user.database = database
            results = self._fold_all(recorded=recorded, shift_s=shift_s)
            if isinstance(results, str):
                return results
            rows = database.rows(self._setup.ignore)
        return {
            shard_id: replace(each, state=rows) if each.state is None else each
            for shard_id, each in results.items()
        }

    def _fold_all(self, *, recorded: bool, shift_s: float) -> dict[str, FoldResult] | str:
        results: dict[str, FoldResult] = {}
        for shard_id, folded in self._inputs.items():
            self._folds += 1
            fold = Fold(
                self._setup.new_application(),
                folded,
                self._directory / str(self._folds),
                recorded=recorded,
                seed=self._run.story.seed,
            )
            user = self._user
            user.bind(fold.now, lambda seconds: None, self._note)
            user.shift_s, user.is_folding = shift_s, True
            try:
                with user.attached():
                    results[shard_id] = fold.run(self._setup.ignore)
            except LostTimer as error:
                return f"without any fault, {shard_id} has no {error}, which fired in this run"
            except Exception as error:  # noqa: BLE001 - of the application
                return f"without any fault, {shard_id} fails: {type(error).__name__}: {error}"
            finally:
                user.is_folding = False
        return results

    def _note(self, what: str, place: str, hint: str) -> None:
        self._ended.findings.append(Finding(what, place, hint=hint))

    def _compare(self, *, recorded: bool, shift_s: float) -> tuple[str, Deviation | None] | None:
        results = self._results(recorded=recorded, shift_s=shift_s)
        if isinstance(results, str):
            return results, None
        return self._deviation(results)

    def _matches(self, results: dict[str, FoldResult]) -> bool:
        return self._deviation(results) is None

    def _deviation(self, results: Mapping[str, FoldResult]) -> tuple[str, Deviation] | None:
        for shard_id, result in results.items():
            actual = self._ended.states[shard_id]
            if actual is not None and result.state is not None:
                deviation = deviation_of(actual, result.state)
                if deviation is not None:
                    what = f"{self._name_of(shard_id)} is not that of a run without faults"
                    return what, deviation
        expected: dict[str, Counter[str]] = {}
        for result in results.values():
            for name, counts in result.outputs.items():
                expected.setdefault(name, Counter()).update(counts)
        deviation = self._output_deviation(expected)
        return (
            None
            if deviation is None
            else ("outputs are not those of a run without faults", deviation)
        )

    def _output_deviation(self, expected: Mapping[str, Counter[str]]) -> Deviation | None:
        actual: dict[str, Counter[str]] = {}
        for journal, form in self._ended.forms.items():
            if journal in self._ended.content and journal not in self._setup.source_names:
                add_outputs(actual, journal, form, self._ended.content[journal])
        for name in sorted(actual.keys() | expected.keys()):
            ours, theirs = actual.get(name, Counter()), expected.get(name, Counter())
            for text in sorted(ours.keys() | theirs.keys()):
                if ours[text] != theirs[text]:
                    return Deviation(
                        f"messages of {name}", _times(text, ours[text]), _times(text, theirs[text])
                    )
        return None


def _times(text: str, count: int) -> str:
    if not count:
        return ""
    return text if count == 1 else f"{count} times {text}"
