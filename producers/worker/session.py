"""The state of what a request has inside: an agent's session with its calls, or the continuations
that value its turns; decides nothing."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dora_pipe.producers.worker.context_tree import ContextTree
from dora_pipe.schemas.contexts import Call, Context
from dora_pipe.schemas.control import FinishReason
from dora_pipe.schemas.trajectory import TurnProgress


class CallKey(NamedTuple):
    """Which call of its agent this is, whoever runs the agent and in whatever order it calls."""

    prompt: str
    """Digest of its prompt's token ids."""
    occurrence: int
    """As `Call.occurrence`."""


@dataclass(slots=True, kw_only=True)
class OpenCall:
    """A call whose answer is not durable yet."""

    session: str
    """The key of its session."""
    name: CallKey
    number: int | None
    """What its answer is sent to; None: who asked it is gone, and may ask again."""
    first: bool
    """The session had no answer before."""
    asked_ns: int
    asked_max: int | None
    """The agent's own limit of tokens."""
    api: str
    caller: str
    asked: dict[str, Any]
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """Of its own."""
    finish: FinishReason = "stop"
    ended_ns: int = 0

    def not_before(self, wall_ns: int) -> int:
        """This time, or that of the question: a wall clock may jump back between them."""
        return max(self.asked_ns, wall_ns)


@dataclass(slots=True, kw_only=True)
class Session:
    """All that a session's agent has asked and heard. Changed by `sessions.Sessions` alone."""

    tree: ContextTree = field(default_factory=ContextTree)
    """Every answer that is durable, also of calls that an earlier start of the agent made."""
    answers: dict[CallKey, int] = field(default_factory=dict)
    """Places in `tree.turns`."""
    used: set[int] = field(default_factory=set)
    """Which of them this start of the agent was given."""
    open: dict[CallKey, str] = field(default_factory=dict)
    """Keys of the calls that have no durable answer."""
    sampled: deque[CallKey] = field(default_factory=deque)
    """Those whose tokens are all there, in the order in which they are logged."""
    logging: TurnProgress | None = None
    """The record of the first of these: encoded, or appended and not yet acknowledged."""
    calls: int = 0
    """Requests for the engine so far: the next one's number."""
    asked: Counter[str] = field(default_factory=Counter)
    """By prompt: calls of this start of the agent."""
    numbers: set[int] = field(default_factory=set)
    """Of the calls of this start, as the endpoint counts them."""
    starts: int = 0
    """How often its agent was started again here."""
    begun: int = -1
    """`RequestTable.turn` in which its agent was started, last."""
    limited: bool = False
    """It has come to a limit of the run."""
    contexts: tuple[Context, ...] = ()
    made: tuple[Call, ...] = ()
    """As the record has both; made when it ends."""

    @property
    def tokens(self) -> int:
        """Sampled tokens of the answers that this start of the agent was given."""
        return sum(len(self.tree.turns[at].token_ids) for at in self.used)

    @property
    def tokens_logged(self) -> int:
        """Sampled tokens of all durable answers."""
        return sum(len(turn.token_ids) for turn in self.tree.turns)

    def start_again(self) -> None:
        """Its agent begins anew, and has heard nothing."""
        self.starts += 1
        self.used.clear()
        self.asked.clear()
        self.numbers.clear()
        self.limited = False
