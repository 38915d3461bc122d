"""State of an agent's session: its calls, answers and contexts.

A call extends the context that its prompt starts with. Otherwise it opens a context that shares the
longest common prefix with an earlier one. Calls are added in log order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dora_pipe.producers.engines.prefixes import common_prefix
from dora_pipe.producers.worker.sequence import TokenSequence
from dora_pipe.schemas.contexts import Call, Context, prompt_digest
from dora_pipe.schemas.control import FinishReason
from dora_pipe.schemas.trajectory import TurnProgress
from dora_pipe.schemas.trajectory_codec import AnyProgress

Ids = np.ndarray[Any, np.dtype[np.int32]]


class CallPlace(NamedTuple):
    """Position of a call, as fields of `TurnProgress`."""

    context: int
    parent: int
    shared: int
    given_ids: list[int]


class Record(NamedTuple):
    """All contexts as stored in a trajectory record."""

    sequence: TokenSequence
    contexts: tuple[Context, ...]
    calls: tuple[Call, ...]
    """In the order of their answers."""


class ContextTree:
    """Answered calls of a session: ``add`` each `TurnProgress`, ``place`` the next call, finally
    ``record``."""

    def __init__(self) -> None:
        self.turns: list[TurnProgress] = []
        self._ids: list[Ids] = []  # per context, including the shared prefix

    def place(self, prompt: Sequence[int]) -> CallPlace:
        ids = np.asarray(prompt, np.int32)
        equal = [common_prefix(ids, known_ids) for known_ids in self._ids]
        extended = [
            number for number, known_ids in enumerate(self._ids) if equal[number] == len(known_ids)
        ]
        if extended:
            context = max(extended, key=equal.__getitem__)
            return CallPlace(context, -1, 0, ids[equal[context] :].tolist())
        shared = max(equal, default=0)
        parent = equal.index(shared) if shared else -1
        return CallPlace(len(self._ids), parent, shared, ids[shared:].tolist())

    def add(self, turn: TurnProgress) -> str:
        """Add an answered call; return why it cannot follow the earlier ones, or an empty
        string."""
        exists = turn.context < len(self._ids)
        before = self._ids[turn.context] if exists else self._begun(turn)
        if before is None or (exists and turn.shared):
            return f"call {turn.turn} is part of a context that is not there"
        given, sampled = (
            np.asarray(tokens, np.int32) for tokens in (turn.given_ids, turn.token_ids)
        )
        start = len(before) + len(given)
        if (turn.call.start, turn.call.end) != (start, start + len(sampled)):
            return f"call {turn.turn} is not where its context ends"
        self._ids[turn.context : turn.context + 1] = [np.concatenate((before, given, sampled))]
        self.turns.append(turn)
        return ""

    def prompt(self, index: int) -> list[int]:
        turn = self.turns[index]
        ids: list[int] = self._ids[turn.context][: turn.call.start].tolist()
        return ids

    def only(self, places: Collection[int]) -> ContextTree:
        tree = ContextTree()
        for index, turn in enumerate(self.turns):
            if index in places:
                position = tree.place(self.prompt(index))
                why = tree.add(placed(turn, position))
                assert not why, why
        return tree

    def record(self) -> Record:
        sequence = TokenSequence((), at_ns=0)
        contexts: list[Context] = []
        calls: dict[int, Call] = {}
        for number in range(len(self._ids)):
            mine = [index for index, turn in enumerate(self.turns) if turn.context == number]
            ended_ns = 0
            for index in mine:
                turn = self.turns[index]
                asked_ns = turn.call.asked_ns
                if index != mine[0]:
                    _observe(sequence, turn, ended_ns)
                elif number:
                    contexts.append(Context(len(sequence), turn.parent, turn.shared))
                    sequence.branch(turn.given_ids, at_ns=asked_ns)
                else:
                    sequence = TokenSequence(turn.given_ids, at_ns=asked_ns)
                calls[index] = _say(sequence, turn)
                ended_ns = turn.call.answered_ns
        in_order = tuple(calls[index] for index in sorted(calls))
        return Record(sequence, tuple(contexts), in_order)

    def _begun(self, turn: TurnProgress) -> Ids | None:
        """Return the shared prefix of a new context; None if its fields are invalid."""
        if turn.context != len(self._ids):
            return None
        if turn.parent < 0:
            return np.zeros(0, np.int32) if turn.shared == 0 else None
        parents = self._ids[turn.parent : turn.parent + 1]
        there = parents and 0 < turn.shared <= len(parents[0])
        return parents[0][: turn.shared] if there else None


def placed(turn: TurnProgress, position: CallPlace) -> TurnProgress:
    """Return the call with another position."""
    return replace(turn, **position._asdict())


def _observe(sequence: TokenSequence, turn: TurnProgress, ended_ns: int) -> None:
    asked_ns = turn.call.asked_ns
    sequence.observed(turn.given_ids, asked_ns=ended_ns, at_ns=asked_ns, tool="", ok=True)


def _say(sequence: TokenSequence, turn: TurnProgress) -> Call:
    start = len(sequence)
    sequence.start_stay(turn.started_ns, imported=not turn.prefills)
    sequence.sampled(turn.token_ids, turn.logprobs, turn.sampler_logprobs, turn.routed_experts)
    sequence.end_stay(
        turn.ended_ns, worker=turn.worker, incarnation=turn.incarnation, version=turn.version
    )
    return msgspec.structs.replace(turn.call, start=start, end=len(sequence))


class CallKey(NamedTuple):
    """Identity of a call, independent of worker and call order."""

    prompt: str
    occurrence: int


@dataclass(slots=True, kw_only=True)
class OpenCall:
    session: str
    name: CallKey
    number: int
    """Recipient of the answer."""
    first: bool
    asked_ns: int
    asked_max: int | None
    api: str
    caller: str
    asked: dict[str, Any]
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    finish: FinishReason = "stop"
    ended_ns: int = 0

    def not_before(self, wall_ns: int) -> int:
        """Return `wall_ns`, or the call's time if the clock jumped back."""
        return max(self.asked_ns, wall_ns)


@dataclass(slots=True, kw_only=True)
class Session:
    """Calls and answers of a session; changed only by `sessions.Sessions`."""

    tree: ContextTree = field(default_factory=ContextTree)
    """All durable answers, also of earlier attempts."""
    answers: dict[CallKey, int] = field(default_factory=dict)
    """Indices in `tree.turns`."""
    used: set[int] = field(default_factory=set)
    """Indices of answers given in this attempt."""
    open: dict[CallKey, str] = field(default_factory=dict)
    """Calls without a durable answer."""
    sampled: deque[CallKey] = field(default_factory=deque)
    logging: TurnProgress | None = None
    """Unacknowledged record."""
    calls: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    """Calls of this attempt, by prompt."""
    numbers: set[int] = field(default_factory=set)
    limited: bool = False
    contexts: tuple[Context, ...] = ()
    made: tuple[Call, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(self.tree.turns[index].token_ids) for index in self.used)

    @property
    def tokens_logged(self) -> int:
        return sum(len(turn.token_ids) for turn in self.tree.turns)


def session_of(
    chunks: Sequence[AnyProgress],
    *,
    trajectory: str,
    version: int,
    digest: str,
    tokens: int,
) -> Session | str:
    """Return the session of these calls, oldest first, or why they are not its first `tokens`
    tokens."""
    session = Session()
    if not chunks:
        return "no progress record found"
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, TurnProgress):
            return "the chain contains a record that is no agent call"
        if chunk.trajectory != trajectory:
            return f"a progress record of {chunk.trajectory} is in the chain of {trajectory}"
        if (chunk.version, chunk.digest) != (version, digest):
            return f"a progress record was made by version {chunk.version}, not {version}"
        if chunk.turn != index:
            return f"a progress record is of call {chunk.turn}, not {index}"
        why = session.tree.add(chunk)
        if why:
            return why
        name = CallKey(prompt_digest(session.tree.prompt(index)), chunk.call.occurrence)
        if name in session.answers:
            return f"call {index} was answered before"
        session.answers[name] = index
    if session.tokens_logged != tokens:
        return f"the progress records reach {session.tokens_logged} tokens, not {tokens}"
    return session
