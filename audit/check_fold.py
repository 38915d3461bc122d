"""Fold the rounds with the orchestrator's code; compare states and plans.

`RoundReader` checks the chain. After a differing plan, the recorded decisions are folded from an
earlier copy of the state.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Final

import msgspec

from dora_pipe.audit.findings import Findings
from dora_pipe.audit.round_reader import FoldedRound
from dora_pipe.config.model import Config
from dora_pipe.core.errors import ConfigError, InvariantBroken, SchemaError
from dora_pipe.orchestrator.apply_control import read_control
from dora_pipe.orchestrator.curriculum import Samplers
from dora_pipe.orchestrator.fold import (
    check_digest,
    close_round,
    fold_decisions,
    fold_records,
)
from dora_pipe.orchestrator.planner import PLANNER, decide
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import AnyControl, RunStarted
from dora_pipe.schemas.rounds import AnyDecision, Dispatch, Round
from dora_pipe.schemas.wire import Unknown

REMADE_WRONG_MAX: Final = 100
"""Differing plans before plans are no longer remade; each costs a copy of the state."""

ANCHOR_BYTES: Final = 2 * 1024 * 1024
"""Bytes of rounds and events kept since the last copy."""

DECISION_BYTES: Final = 500

Records = Sequence[tuple[int, AnyControl | Unknown | SchemaError]]

NOTHING: Final = "nothing"


class FoldCheck:
    """Fold of the rounds, up to the first that cannot be folded."""

    def __init__(self, findings: Findings, *, plans: bool = True) -> None:
        self._findings = findings
        self.digests = 0
        self.plans = 0
        self.planner = ""
        self.makes_plans = plans
        self.wrong = 0
        self._samplers: Samplers | None = None
        if not plans:
            findings.notes.append("plans were not made again: --quick")
        self.go_on(State())

    def go_on(self, state: State) -> None:
        """Continue from a state and keep a copy of it."""
        self.state: State | None = state
        """None after a round that could not be folded."""
        self._anchor = _copied(state) if self.makes_plans else None
        self._since: list[tuple[Round, Records]] = []
        self._since_bytes = 0

    def fold(self, turn: FoldedRound) -> None:
        round_, state = turn.round, self.state
        if state is None or round_ is None:
            return
        self._findings.looked["rounds"] += 1
        for fact in turn.facts:
            if isinstance(fact.record, RunStarted) and not self.planner:
                self._started(fact.record.planner)
        records = [(fact.offset, fact.record or read_control(fact.value)) for fact in turn.facts]
        try:
            fold_records(state, round_, records)
            if self.makes_plans:
                self._since.append((round_, records))
                size_bytes = sum(len(fact.value) for fact in turn.facts)
                self._since_bytes += size_bytes + DECISION_BYTES * (1 + len(round_.decisions))
                self._plan_again(state, round_)
            else:
                fold_decisions(state, round_)
        except InvariantBroken as error:
            who = f"round {round_.ordinal}"
            why = error.message.removeprefix(f"{who}: ")
            self._findings.add("rounds", who, f"cannot be folded: {why}")
            self.state = self._anchor = None
            return
        self.digests += round_.state_digest is not None
        assert self.state is not None
        self.state.chain = round_.chain
        if self._since_bytes > ANCHOR_BYTES:
            self.go_on(self.state)

    def _started(self, planner: str) -> None:
        self.planner = planner
        if planner != PLANNER and self.makes_plans:
            self._stop_planning()
            note = f"plans were made by {planner or 'a planner without a name'}; this is {PLANNER}"
            self._findings.notes.append(f"{note}: they were not made again")

    def _stop_planning(self) -> None:
        self.makes_plans, self._anchor, self._since = False, None, []

    def _plan_again(self, state: State, round_: Round) -> None:
        samplers = self._draws(state, round_)
        again = decide(state, samplers=samplers) if round_.planned else []
        if tuple(again) == round_.decisions:
            self.plans += round_.planned
            self._findings.looked["decisions"] += 1
            close_round(state, round_)
            check_digest(state, round_)
            return
        expected, actual = _first_difference(again, round_.decisions)
        message = "its plan differs from the one recomputed from the log"
        self._findings.add(
            "decisions", f"round {round_.ordinal}", message, expected=expected, actual=actual
        )
        self._fold_again()
        self.wrong += 1
        if self.wrong >= REMADE_WRONG_MAX:
            self._stop_planning()
            self._findings.notes.append(
                f"plans are not recomputed after {REMADE_WRONG_MAX} that differ"
            )

    def _draws(self, state: State, round_: Round) -> Samplers | None:
        """Return the user's samplers if their code is unchanged; else note it and use recorded
        rows."""
        if state.config is None or not any(task.sampler for task in state.config.tasks):
            return None
        if self._samplers is None:
            self._samplers = _loaded(state.config)
        if self._samplers.sources == state.samplers:
            return self._samplers
        specs = [decision.spec for decision in round_.decisions if isinstance(decision, Dispatch)]
        rows = {spec.ordinal: spec.index for spec in specs if spec.purpose == "train"}
        if rows:
            self._note_sources(state, self._samplers)
        return Samplers(recorded=rows)

    def _note_sources(self, state: State, here: Samplers) -> None:
        for name, source in state.samplers.items():
            there = "is another one" if name in here.sources else "is not there"
            note = f"sampler {name} (sha256 {source[:12]}) {there} here: no rows were drawn again"
            if here.sources.get(name) != source and note not in self._findings.notes:
                self._findings.notes.append(note)

    def _fold_again(self) -> None:
        state = self._anchor
        assert state is not None
        for round_, records in self._since:
            fold_records(state, round_, records)
            fold_decisions(state, round_)
            state.chain = round_.chain
        self.go_on(state)


def _loaded(config: Config) -> Samplers:
    try:
        return Samplers.load(config)
    except ConfigError:
        return Samplers()


def _copied(state: State) -> State:
    groups = state.groups.values()
    results = (result for group in groups for result in group.results if result is not None)
    unchanging = [state.config, state.started, *(group.spec for group in groups), *results]
    return copy.deepcopy(state, {id(value): value for value in unchanging})


def _first_difference(
    expected: Sequence[AnyDecision], actual: Sequence[AnyDecision]
) -> tuple[str, str]:
    """Return the differing fields of the first decision in which two plans differ."""
    for decision, other in zip(expected, actual, strict=False):
        if decision != other:
            return _differing(decision, other)
    if len(expected) > len(actual):
        return _words(expected[len(actual)]), NOTHING
    return NOTHING, _words(actual[len(expected)])


def _differing(decision: AnyDecision, other: AnyDecision) -> tuple[str, str]:
    if type(decision) is not type(other):
        return _words(decision), _words(other)
    names = [
        name
        for name in decision.__struct_fields__
        if getattr(decision, name) != getattr(other, name)
    ]
    return _words(decision, names), _words(other, names)


def _words(decision: AnyDecision, names: Sequence[str] = ()) -> str:
    """Format a decision. Example: ``move (trajectory g0000000042-002, worker w0, to w1)``."""
    kind = str(type(decision).__struct_config__.tag)
    plain = msgspec.to_builtins(decision)
    shown = names or [
        name for name in ("trajectory", "group", "worker", "to", "step") if name in plain
    ]
    whom = ", ".join(f"{name} {_short(plain[name])}" for name in shown if name in plain)
    return f"{kind} ({whom})" if whom else kind


def _short(value: object, characters_max: int = 120) -> str:
    text = str(value)
    return text if len(text) <= characters_max else f"{text[:characters_max]}..."
