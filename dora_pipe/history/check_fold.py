"""Folds the rounds with the orchestrator's own code and compares the states it recorded.

The chain is checked where rounds are walked (`walk`), link by link; here it is taken as it stands,
so that a log whose chain was mended is still held against its states.
"""

from __future__ import annotations

from dora_pipe.errors import InvariantBroken
from dora_pipe.history.findings import Findings
from dora_pipe.history.walk import Turn
from dora_pipe.orchestrator.fold import fold_decisions, fold_inputs
from dora_pipe.orchestrator.state import State


class FoldCheck:
    """Follows the rounds for as long as they can be folded; the first that cannot ends it."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.state: State | None = State()
        """After the last round; None once a round could not be folded."""
        self.digests = 0
        """States that were compared."""

    def take(self, turn: Turn) -> None:
        """Fold one round."""
        round_ = turn.round
        if self.state is None or round_ is None:
            return
        self._findings.looked["rounds"] += 1
        try:
            control = [(fact.offset, fact.value) for fact in turn.facts]
            fold_inputs(self.state, round_, control)
            fold_decisions(self.state, round_)
        except InvariantBroken as error:
            who = f"round {round_.ordinal}"
            why = error.message.removeprefix(f"{who}: ")
            self._findings.add("rounds", who, f"cannot be folded: {why}")
            self.state = None
            return
        self.digests += round_.state_digest is not None
        self.state.chain = round_.chain
