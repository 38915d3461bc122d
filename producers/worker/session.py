"""State of an agent's session and its calls."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dora_pipe.producers.worker.context_tree import ContextTree
from dora_pipe.schemas.contexts import Call, Context
from dora_pipe.schemas.control import FinishReason
from dora_pipe.schemas.trajectory import TurnProgress


class CallKey(NamedTuple):
    """Identity of a call, independent of worker and call order."""

    prompt: str
    occurrence: int


@dataclass(slots=True, kw_only=True)
class OpenCall:
    """Call without a durable answer."""

    session: str
    name: CallKey
    number: int | None
    """Recipient of the answer; None if the caller is gone and may call again."""
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
    """All durable answers, also of earlier starts."""
    answers: dict[CallKey, int] = field(default_factory=dict)
    """Indices in `tree.turns`."""
    used: set[int] = field(default_factory=set)
    """Indices of answers given to the current start."""
    open: dict[CallKey, str] = field(default_factory=dict)
    """Calls without a durable answer."""
    sampled: deque[CallKey] = field(default_factory=deque)
    logging: TurnProgress | None = None
    """Unacknowledged record."""
    calls: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    """Calls of the current start, by prompt."""
    numbers: set[int] = field(default_factory=set)
    starts: int = 0
    begun: int = -1
    """`RequestTable.turn` of the agent's last start."""
    limited: bool = False
    contexts: tuple[Context, ...] = ()
    made: tuple[Call, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(self.tree.turns[at].token_ids) for at in self.used)

    @property
    def tokens_logged(self) -> int:
        return sum(len(turn.token_ids) for turn in self.tree.turns)

    def start_again(self) -> None:
        self.starts += 1
        self.used.clear()
        self.asked.clear()
        self.numbers.clear()
        self.limited = False
