"""Which groups of a run have ended, when, and what of them counts: what its batches can be taken
again from. It decides which of them are left out.

The rounds are folded by the orchestrator's own code, so that a group ends where it ended for the
run. Left out are groups that ended for another reason than what their siblings were: cancelled, or
failed after they were whole, in a batch that the trainer refused or a user ended. So are those that
were open when the reading ended. Only groups are kept that one of the steps may take.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import takewhile

from dora_pipe.audit.taken_again import EndedGroup, EndedGroups, SourceStep
from dora_pipe.bus.port import Bus
from dora_pipe.core.errors import InvariantBroken, LogTruncated, SchemaError
from dora_pipe.orchestrator.fold import fold_decisions, fold_inputs, follow_chain
from dora_pipe.orchestrator.recovery import ReadRound, read_rounds
from dora_pipe.orchestrator.state import Group, State
from dora_pipe.schemas.rounds import AnyDecision, End, Fate, TakeBatch, TakePart
from dora_pipe.schemas.topics import Topics

WHOLE = ("finished", "taken")
"""Phases of a group that was complete."""


def ended_groups(
    bus: Bus, topics: Topics, *, first: int, last: int, rounds: int | None = None
) -> EndedGroups:
    """The groups that steps `first` to `last` may take, of the first so many rounds; None: of all.

    Raises InvariantBroken for a log that does not hold, BusError.
    """
    walk = _Walk(first, last)
    read = read_rounds(bus, topics)
    try:
        for at in takewhile(lambda one: rounds is None or one.round.ordinal < rounds, read):
            walk.round(at)
    except (InvariantBroken, LogTruncated, SchemaError) as error:
        raise InvariantBroken(
            f"the batches of {topics.run} cannot be taken again: {error.message}",
            hint=f"`dora-pipe audit {topics.run}` says what is wrong with its log",
        ) from error
    return walk.found()


@dataclass(slots=True)
class _Met:
    """A group that has come to something."""

    ended: EndedGroup
    whole: bool
    """It was complete then."""
    fate: Fate | None = None


@dataclass(slots=True)
class _Taking:
    """The newest decision that took a batch of a step, and the parts before it."""

    round: int
    parts: tuple[int, ...]
    groups: tuple[str, ...]


@dataclass(slots=True)
class _Walk:
    """The rounds up to here."""

    first: int
    last: int
    state: State = field(default_factory=State)
    seen: set[str] = field(default_factory=set)
    met: dict[str, _Met] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)
    """Rounds of the parts of the next batch."""
    takings: dict[int, _Taking] = field(default_factory=dict)

    def round(self, at: ReadRound) -> None:
        """One more round. Raises InvariantBroken."""
        state, control = self.state, at.folded()
        fold_inputs(state, at.round, control)
        self._look(at.round.ordinal)
        named = [state.groups[name] for name in _named(at.round.decisions) if name in state.groups]
        fold_decisions(state, at.round)
        follow_chain(state, at.round, control)
        # What came to its end by a decision may have ended, or been taken, by the next one.
        for group in named:
            self._meet(group, at.round.ordinal)
        self._look(at.round.ordinal)
        for decision in at.round.decisions:
            self._decided(decision, at.round.ordinal)

    def found(self) -> EndedGroups:
        """What can be taken again."""
        committed = self.state.version
        steps = {
            name: step
            for step, taking in self.takings.items()
            if step < committed
            for name in taking.groups
        }
        groups = [
            replace(one.ended, step=steps.get(name))
            for name, one in self.met.items()
            if name in steps or one.fate == "filtered" or (one.fate == "failed" and not one.whole)
        ]
        return EndedGroups(
            groups=sorted(groups, key=lambda one: (one.ended, one.ordinal)),
            steps=[
                SourceStep(step=step, round=taking.round, parts=taking.parts)
                for step, taking in sorted(self.takings.items())
                if self.first <= step <= self.last and step < committed
            ],
            rounds=self.state.rounds,
        )

    def _look(self, ordinal: int) -> None:
        """Groups that have come to something."""
        state = self.state
        for key in state.finished:
            if key.group not in self.seen:
                self._meet(state.groups[key.group], ordinal)
        for name in state.ending:
            if name not in self.seen:
                self._meet(state.groups[name], ordinal)

    def _meet(self, group: Group, ordinal: int) -> None:
        spec, phase = group.spec, group.phase
        if spec.group in self.seen or (phase not in WHOLE and phase != "ending"):
            return
        self.seen.add(spec.group)
        if spec.purpose != "train" or spec.deadline < self.first or spec.version > self.last:
            return
        counted = [one for one in group.results if one is not None and one.taken is not None]
        ended = EndedGroup(
            taken=group.taken(),
            ordinal=spec.ordinal,
            size=spec.size,
            rewards={one.taken.trajectory: one.reward for one in counted if one.taken is not None},
            ended=ordinal,
            newest=self.state.version if self.state.interruptible else spec.version,
            step=None,
        )
        self.met[spec.group] = _Met(ended=ended, whole=phase in WHOLE)

    def _decided(self, decision: AnyDecision, ordinal: int) -> None:
        if isinstance(decision, End) and (met := self.met.get(decision.group)):
            met.fate = decision.fate
        elif isinstance(decision, TakePart):
            del self.parts[decision.part :]
            self.parts.append(ordinal)
        elif isinstance(decision, TakeBatch):
            parts = tuple(self.parts[: len(decision.parts)])
            names = tuple(one.group for one in decision.groups)
            self.takings[decision.step] = _Taking(round=ordinal, parts=parts, groups=names)
            self.parts = []


def _named(decisions: tuple[AnyDecision, ...]) -> list[str]:
    """Groups that end, or are taken."""
    found: list[str] = []
    for one in decisions:
        if isinstance(one, End):
            found.append(one.group)
        elif isinstance(one, TakeBatch | TakePart):
            found += [taken.group for taken in one.groups]
    return found
