"""Asks the task again for the rewards of logged trajectories, from their texts as they lie there.

The task is asked through the worker's own port, so texts are what its workers handed it: the prompt
must come out token for token, the environment is told every recorded turn and must answer as it
did, and the reward, its raw value and its parts must be the recorded ones, exactly. That says
something of tasks that are deterministic; of others it says which trajectories differ.

An agent's trajectory is scored by the answer that it gave, or by what it was answered last. A
reward that the agent gave itself nobody can be asked for: it is counted and not compared.

What was lost to infrastructure (a time limit, a dead process, `Retry`), then or now, is counted and
not compared: how long a task takes is no property of the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import ReplayDiverged
from dora_pipe.producers.tasks.calls import (
    EpisodeLost,
    Forget,
    PromptCall,
    Rewarded,
    TaskFailed,
)
from dora_pipe.producers.worker.effects import (
    EnvObserved,
    EnvStep,
    GroupCall,
    PromptReady,
    RewardCall,
)
from dora_pipe.schemas.contexts import tokens_before
from dora_pipe.schemas.control import INFRASTRUCTURE, error_class
from dora_pipe.schemas.trajectory import SegmentKind, Trajectory, answer_of, turns_of

IN_FLIGHT_MAX: Final = 64
"""Trajectories that the task works on at a time."""

POLL_S: Final = 0.005
"""Between two looks for answers; each call has its own time limit in the pool."""


AGENTS_OWN: Final = "its agent gave the reward"
IN_ERROR: Final = "it ended in an error"


class Tasks(Protocol):
    """What asks the task: `producers.worker.ports.TaskPorts`."""

    def start(self, effect: PromptCall | EnvStep | RewardCall | GroupCall | Forget) -> None: ...

    def poll(self) -> list[Any]:
        """Answers since the last call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """A trajectory and what the task says of it now.

    Example: ``Rescored(trajectory="g0000000042-003", recorded=1.0, found=0.0,
    difference="its reward is 0.0, recorded is 1.0")``.
    """

    trajectory: str
    recorded: float | None
    found: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of now, by name."""
    error: str = ""
    """Why it has no reward now: a class of error and what it says, or in words."""
    difference: str = ""
    """In words; empty when everything is as recorded."""
    not_compared: str = ""
    """Why nothing can be said."""

    @property
    def equal(self) -> bool:
        """Whether prompt, observations and reward are the recorded ones."""
        return not self.difference and not self.not_compared

    @property
    def lost(self) -> bool:
        """Whether infrastructure lost what was asked now: another try may answer."""
        return self.found is None and bool(self.error) and bool(self.not_compared)


Turn = tuple[SegmentKind, list[int]]


@dataclass(slots=True)
class _Asked:
    """A trajectory that the task is working on."""

    recorded: Trajectory
    turns: list[Turn]
    left: deque[Turn] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.left = deque(self.turns)


def rescore(
    tasks: Tasks,
    trajectories: Iterable[Trajectory],
    *,
    clock: Clock,
    stopped: Callable[[Sequence[int]], bool],
    agents: bool = False,
) -> Iterator[Rescored]:
    """Ask for every trajectory, some at a time; in the order in which answers come.

    `stopped` says whether a turn of the model ended by itself, not by its length: then its
    environment was told of it. `agents`: the task is asked too where an agent gave the reward.
    Raises TaskError where the task cannot be run at all.
    """
    again = _Again(tasks, stopped, agents=agents)
    waiting = iter(trajectories)
    over = False
    while not over or again.asked:
        while not over and len(again.asked) < IN_FLIGHT_MAX:
            one = next(waiting, None)
            over = one is None
            if one is not None:
                again.begin(one)
        events = tasks.poll()
        for event in events:
            again.handle(event)
        yield from again.done
        again.done.clear()
        if not events and again.asked:
            clock.sleep(POLL_S)


def raise_if_different(found: Rescored) -> None:
    """Raise ReplayDiverged where the task says otherwise than the log."""
    if found.difference:
        raise ReplayDiverged(
            f"{found.trajectory}: {found.difference}",
            hint="a task that is not deterministic differs without anybody's doing",
        )


class _Again:
    def __init__(
        self, tasks: Tasks, stopped: Callable[[Sequence[int]], bool], *, agents: bool
    ) -> None:
        self._tasks, self._agents = tasks, agents
        self._stopped = stopped
        self.asked: dict[str, _Asked] = {}
        self.done: list[Rescored] = []

    def begin(self, one: Trajectory) -> None:
        """Ask for its prompt; what ended in an error was never scored."""
        name, meta = one.trajectory, one.meta
        if meta.finish == "error":
            wrong = "" if one.reward is None else "it ended in an error and has a reward"
            self.done.append(
                Rescored(
                    trajectory=name,
                    recorded=one.reward,
                    found=None,
                    error=IN_ERROR,
                    difference=wrong,
                )
            )
            return
        if meta.rewarded_by == "agent" and not self._agents:
            self.done.append(
                Rescored(
                    trajectory=name,
                    recorded=one.reward,
                    found=one.reward,
                    parts=dict(meta.reward_parts),
                    not_compared=AGENTS_OWN,
                )
            )
            return
        self.asked[name] = _Asked(recorded=one, turns=turns_of(one.segments, one.token_ids))
        if meta.calls:
            self._score(self.asked[name])
            return
        self._tasks.start(
            PromptCall(request=name, split=meta.purpose, index=meta.index, source=meta.source)
        )

    def handle(self, event: Any) -> None:
        """An answer of the task."""
        asked = self.asked.get(event.request)
        if asked is None:
            return
        match event:
            case PromptReady():
                self._prompted(asked, event)
            case EnvObserved():
                self._observed(asked, event)
            case Rewarded():
                self._rewarded(asked, event)
            case TaskFailed():
                self._failed(asked, event)
            case EpisodeLost():
                said = f"EpisodeLost: {event.message}"
                self._end(asked, error=said, not_compared=said)

    def _prompted(self, asked: _Asked, event: PromptReady) -> None:
        recorded = asked.recorded
        if list(event.token_ids) != list(recorded.token_ids[: recorded.meta.prompt_tokens]):
            self._differs(asked, f"its prompt is not that of row {recorded.meta.index}")
        elif event.episode:
            self._go_on(asked)
        else:
            self._score(asked)

    def _go_on(self, asked: _Asked) -> None:
        """Tell the environment the next turn of the model, if it was told."""
        recorded = asked.recorded
        if not asked.left:
            self._score(asked)
            return
        _, ids = asked.left.popleft()
        answered = asked.left or recorded.meta.finish == "environment" or self._stopped(ids)
        if answered:
            source = recorded.meta.source
            self._tasks.start(EnvStep(request=recorded.trajectory, token_ids=ids, source=source))
        else:
            self._score(asked)

    def _observed(self, asked: _Asked, event: EnvObserved) -> None:
        """The end of an observation that did not fit was not recorded."""
        if asked.left:
            _, ids = asked.left.popleft()
            if list(event.token_ids) != ids:
                self._differs(asked, "its environment answers otherwise")
                return
        self._go_on(asked)

    def _score(self, asked: _Asked) -> None:
        one, meta = asked.recorded, asked.recorded.meta
        self._tasks.start(
            RewardCall(
                request=one.trajectory,
                split=meta.purpose,
                index=meta.index,
                answer=answer_of(one),
                turns=[ids for _, ids in asked.turns],
                before=tokens_before(one, meta.calls[-1].start) if meta.calls else (),
                text=meta.agent_answer,
                source=meta.source,
            )
        )

    def _rewarded(self, asked: _Asked, event: Rewarded) -> None:
        one, meta = asked.recorded, asked.recorded.meta
        error = meta.reward_error or ""
        parts = dict(event.parts)
        if one.reward is None and error_class(error) in INFRASTRUCTURE:
            self._end(asked, found=event.reward, parts=parts, not_compared=error)
            return
        pairs = (
            ("reward", one.reward, event.reward),
            ("raw reward", meta.reward_raw, event.raw),
            ("reward's parts", dict(meta.reward_parts), parts),
            # Records from before rewards said it have none.
            ("answer", meta.reward_answer, event.answer if meta.reward_answer else ""),
        )
        said = (
            f"its {what} is {found!r}, recorded is {recorded!r}"
            for what, recorded, found in pairs
            if recorded != found
        )
        self._end(asked, found=event.reward, parts=parts, difference=next(said, ""))

    def _failed(self, asked: _Asked, event: TaskFailed) -> None:
        """No reward now: as recorded, if there was none then."""
        said = f"{event.error}: {event.message}"
        if event.error in INFRASTRUCTURE:
            self._end(asked, error=said, not_compared=said)
        elif asked.recorded.reward is None:
            self._end(asked, error=said)
        else:
            self._end(asked, error=said, difference=f"it has no reward ({said})")

    def _differs(self, asked: _Asked, difference: str) -> None:
        recorded = asked.recorded
        self._tasks.start(Forget(request=recorded.trajectory, source=recorded.meta.source))
        self._end(asked, error=difference, difference=difference)

    def _end(
        self,
        asked: _Asked,
        *,
        found: float | None = None,
        parts: Mapping[str, float] | None = None,
        error: str = "",
        difference: str = "",
        not_compared: str = "",
    ) -> None:
        name = asked.recorded.trajectory
        del self.asked[name]
        self.done.append(
            Rescored(
                trajectory=name,
                recorded=asked.recorded.reward,
                found=found,
                parts=parts or {},
                error=error,
                difference=difference,
                not_compared=not_compared,
            )
        )
