"""Folds the rounds with the orchestrator's own code: the states it recorded, the plans it made.

The chain is checked where rounds are walked (`walk`), link by link; here it is taken as it stands,
so that a log whose chain was mended is still held against its states and its plans.

Plans are made again on a state of their own, that is folded beside the first: a plan changes the
state it is made on, and after one that differs the recorded decisions hold, not the ones that would
have been right. Then the state is taken from the first, and every later plan is still compared.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Final

import msgspec

from dora_pipe.errors import InvariantBroken
from dora_pipe.history.findings import Findings
from dora_pipe.history.walk import Turn
from dora_pipe.orchestrator.fold import close_round, fold_decisions, fold_inputs
from dora_pipe.orchestrator.planner import PLANNER, decide
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.rounds import AnyDecision, Round

REMADE_WRONG_MAX: Final = 100
"""After so many plans that differ no more are made: each costs a copy of the state."""

NOTHING: Final = "nothing"


class FoldCheck:
    """Follows the rounds for as long as they can be folded; the first that cannot ends it."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.state: State | None = State()
        """After the last round; None once a round could not be folded."""
        self.digests = 0
        """States that were compared."""
        self.plans = 0
        """Plans that were made again, and were the same."""
        self.planner = ""
        """Who made them, as `run started` says."""
        self._planning: State | None = State()
        self._wrong = 0

    def take(self, turn: Turn) -> None:
        """Fold one round."""
        round_ = turn.round
        if self.state is None or round_ is None:
            return
        self._findings.looked["rounds"] += 1
        for fact in turn.facts:
            if isinstance(fact.record, RunStarted) and not self.planner:
                self._started(fact.record.planner)
        control = [(fact.offset, fact.value) for fact in turn.facts]
        try:
            fold_inputs(self.state, round_, control)
            same = self._plan_again(round_, control)
            fold_decisions(self.state, round_)
        except InvariantBroken as error:
            who = f"round {round_.ordinal}"
            why = error.message.removeprefix(f"{who}: ")
            self._findings.add("rounds", who, f"cannot be folded: {why}")
            self.state = None
            return
        self.digests += round_.state_digest is not None
        self.state.chain = round_.chain
        if not same:
            self._planning = copy.deepcopy(self.state) if self._planning is not None else None

    def _started(self, planner: str) -> None:
        self.planner = planner
        if planner != PLANNER:
            self._planning = None
            note = f"plans were made by {planner or 'a planner without a name'}; this is {PLANNER}"
            self._findings.notes.append(f"{note}: they were not made again")

    def _plan_again(self, round_: Round, control: Sequence[tuple[int, bytes]]) -> bool:
        """Whether the plan of a round is what its planner decides on the state of the log."""
        state = self._planning
        if state is None:
            return True
        fold_inputs(state, round_, control)
        again = decide(state) if round_.planned else []
        if tuple(again) == round_.decisions:
            self.plans += round_.planned
            self._findings.looked["decisions"] += 1
            close_round(state, round_)
            state.chain = round_.chain
            return True
        expected, found = _first_difference(again, round_.decisions)
        message = "its plan is not what its planner decides on what stood in the log"
        self._findings.add(
            "decisions", f"round {round_.ordinal}", message, expected=expected, found=found
        )
        self._wrong += 1
        if self._wrong >= REMADE_WRONG_MAX:
            self._planning = None
            self._findings.notes.append("after so many plans that differ no more were made again")
        return False


def _first_difference(
    expected: Sequence[AnyDecision], found: Sequence[AnyDecision]
) -> tuple[str, str]:
    """The first decision in which two plans differ, each told by what it has of its own."""
    for one, other in zip(expected, found, strict=False):
        if one != other:
            return _differing(one, other)
    if len(expected) > len(found):
        return _words(expected[len(found)]), NOTHING
    return NOTHING, _words(found[len(expected)])


def _differing(one: AnyDecision, other: AnyDecision) -> tuple[str, str]:
    if type(one) is not type(other):
        return _words(one), _words(other)
    names = [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)]
    return _words(one, names), _words(other, names)


def _words(decision: AnyDecision, names: Sequence[str] = ()) -> str:
    """A decision as its kind and whom it concerns, or as the named fields.

    Example: ``move (trajectory g0000000042-002, worker w0, to w1)``.
    """
    kind = str(type(decision).__struct_config__.tag)
    plain = msgspec.to_builtins(decision)
    told = names or [one for one in ("trajectory", "group", "worker", "to", "step") if one in plain]
    whom = ", ".join(f"{name} {_short(plain[name])}" for name in told if name in plain)
    return f"{kind} ({whom})" if whom else kind


def _short(value: object, characters_max: int = 120) -> str:
    text = str(value)
    return text if len(text) <= characters_max else f"{text[:characters_max]}..."
