"""Decisions in words, those of one kind in a round taken together; it decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from dora_pipe.schemas.rounds import (
    NO_VERSION,
    AnyDecision,
    Assign,
    Cancel,
    Dispatch,
    Drain,
    End,
    EndSiblings,
    Fence,
    Move,
    Place,
    Round,
    ScoreGroup,
    TakeBatch,
    TakePart,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSummary:
    """What a round decided. Example: ``dispatch 3 groups at version 5``, because ``a slot is
    free``."""

    at_ns: int
    words: str
    reason: str


def summaries_of(round_: Round) -> Iterator[DecisionSummary]:
    """The decisions of a round, in order."""
    found: Counter[tuple[str, str]] = Counter()
    reasons: dict[tuple[str, str], str] = {}
    for decision in round_.decisions:
        verb, what, count = _words_of(decision)
        found[verb, what] += count
        reasons[verb, what] = decision.reason  # Those of one kind differ in numbers alone.
    for (verb, what), count in found.items():
        words = f"{verb} {count} {what}" if count else f"{verb} {what}".rstrip()
        words = words.replace(" 1 groups", " 1 group").replace(" 1 siblings", " 1 sibling")
        yield DecisionSummary(at_ns=round_.now_ns, words=words, reason=reasons[verb, what])


def _words_of(decision: AnyDecision) -> tuple[str, str, int]:
    """Verb, object, and how many of them; 0 where there is one that has a name."""
    match decision:
        case Dispatch(spec=spec):
            kind = "evaluation groups" if spec.purpose == "eval" else "groups"
            return "dispatch", f"{kind} at version {spec.version}", 1
        case Place(worker=worker, spec=spec):
            return "place", f"of version {spec.version} on {worker}", len(decision.siblings)
        case Move():
            to = f"to {decision.to}" if decision.to else "to whoever is free"
            return "move", f"{decision.trajectory} from {decision.worker} {to}", 0
        case Cancel():
            return "cancel", f"on {decision.worker}", 1
        case Assign(version=version) if version == NO_VERSION:
            return "send", f"{decision.worker} to sleep", 0
        case Assign():
            return "assign", f"version {decision.version} to {decision.worker}", 0
        case Drain() | Fence():
            return type(decision).__name__.lower(), decision.worker, 0
        case ScoreGroup():
            return "score", f"groups on {decision.worker}", 1
        case TakePart():
            return "take", f"part {decision.part} of step {decision.step}", 0
        case TakeBatch():
            again = f", attempt {decision.attempt}" if decision.attempt > 1 else ""
            return "take", f"batch of step {decision.step}{again}", 0
        case End():
            return "end", f"groups as {decision.fate}", 1
        case EndSiblings():
            return "end", f"siblings as {decision.fate}", len(decision.siblings)
        case _:
            return "stop the run", "", 0
