"""Simulated agents and their endpoint, without processes.

A program is a generator that yields concurrent calls and receives answers. It depends only on its
trajectory and the answers, so a restarted one repeats its calls; a wandering one deviates.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, Final

from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.tasks.calls import AgentCall, AgentEnded, EpisodeLost, Rewarded, TaskFailed
from dora_pipe.producers.worker.effects import (
    AnswerCall,
    CallAsked,
    CloseSession,
    OpenSession,
    RefuseCall,
    SessionEffect,
)
from dora_pipe.producers.worker.sessions import TOO_MANY_OPEN
from dora_pipe.schemas.contexts import prompt_digest
from dora_pipe.sim.role import NEVER_NS

ROUNDS_MAX: Final = 6
TRIES_MAX: Final = 8

LONG: Final = 160
"""Tokens at which a program compacts."""

SYSTEM: Final = (90, 91, 92, 93)
"""Common prompt prefix of all sub-agents of a run."""

AGENT_RAISES: Final = "agent-raises"
AGENT_LOST: Final = "agent-lost"
AGENT_WANDERS: Final = "agent-wanders"
AGENT_HANGS: Final = "environment-hangs"
"""Faults, as passed to `Agents.befalls`."""

LOST_MESSAGES: Final = ("its process ended", "Retry: its tools are away")


@dataclass(frozen=True, slots=True)
class Ask:
    """Call of a program."""

    prompt: list[int]
    max_tokens: int | None = None


Heard = AnswerCall | RefuseCall
Program = Generator[list[Ask], list[Heard], Rewarded | str | None]
"""Generator; returns a reward, an answer, or neither. Raises AgentError."""

Draws = Callable[[int], Random]


class AgentError(Exception):
    """Error of a program."""


class AgentObserver:
    """Observer of calls and answers; does nothing."""

    def began(self, incarnation: int, request: str) -> None:
        """A program starts or restarts."""

    def asked(self, incarnation: int, request: str, prompt: Sequence[int]) -> None:
        """A program makes a call."""

    def refused(self, incarnation: int, request: str, prompt: Sequence[int]) -> None:
        """A call is refused."""

    def answered(self, incarnation: int, prompt: Sequence[int], answer: AnswerCall) -> None:
        """A call is answered."""


# Programs


def program(call: AgentCall, draws: Draws) -> Program:
    """Continue, branch and compact contexts, and call sub-agents. Raises AgentError, after a
    refusal in half of the cases."""
    row, end = call.index, draws(-1)
    contexts = [[*SYSTEM[: row % 3], 3 + row % 89, 4 + row // 89 % 89, 5 + row % 7]]
    refused = False
    for number in range(end.randint(1, ROUNDS_MAX)):
        asks = _asks(draws(number), contexts)
        heard = yield asks
        for ask, answer in zip(asks, heard, strict=True):
            if isinstance(answer, AnswerCall):
                contexts.append([*ask.prompt, *answer.token_ids])
            else:
                refused = True
        if refused:
            break
    if refused and end.random() < 0.5:
        raise AgentError("a call was refused")
    kind, digest = end.choice(("reward", "text", "")), int(prompt_digest(contexts[-1])[:8], 16)
    if kind == "reward":
        value = float(digest % 2)
        return Rewarded(request=call.request, reward=value, raw=value, parts={"own": value})
    return str(digest) if kind else None


def _asks(chance: Random, contexts: Sequence[list[int]]) -> list[Ask]:
    kinds = ("extend", "extend", "extend", "branch", "compact", "parallel", "again")
    kind, newest = chance.choice(kinds), contexts[-1]
    if kind == "compact" or (len(newest) > LONG and chance.random() < 0.9):
        return [Ask([*contexts[0][: chance.randint(1, 6)], *_tokens(chance, 4)], _most(chance))]
    if kind == "branch":
        base = chance.choice(contexts)
        return [Ask([*base[: chance.randint(1, len(base))], *_tokens(chance, 2)], _most(chance))]
    if kind == "parallel":
        bases = [chance.choice((SYSTEM, *contexts[-3:])) for _ in range(chance.randint(2, 3))]
        return [Ask([*base, *_tokens(chance, 3)], _most(chance)) for base in bases]
    ask = Ask([*newest, *_tokens(chance, chance.choice((0, 1, 4)))], _most(chance))
    return [ask, ask] if kind == "again" else [ask]


def _tokens(chance: Random, most: int) -> list[int]:
    return [chance.randrange(3, 96) for _ in range(most)]


def _most(chance: Random) -> int | None:
    return chance.choice((None, 2, 6, 16))


@dataclass(slots=True, kw_only=True)
class _RunningProgram:
    call: AgentCall
    program: Program
    asks: dict[int, Ask] = field(default_factory=dict)
    heard: dict[int, Heard] = field(default_factory=dict)
    tries: int = 0
    waits: int = 0
    idle_ns: int = 0
    """Time at which `waits` became 0."""
    raises: bool = False
    """Whether it raises at its end."""


class Agents:
    """Port with the agents of a worker incarnation and its endpoint.

    `think_ns` is the delay before each action.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        seed: int,
        incarnation: int,
        chance: Random,
        think_ns: Callable[[], int],
        befalls: Callable[[str], bool] = lambda kind: False,
        hang_ns: Callable[[], int] = lambda: 0,
        observer: AgentObserver | None = None,
    ) -> None:
        self._clock = clock
        self._seed = seed
        self._incarnation = incarnation
        self._chance = chance
        self._think_ns = think_ns
        self._befalls = befalls
        self._hang_ns = hang_ns
        self._observer = observer or AgentObserver()
        self._open: set[str] = set()
        self._running: dict[str, _RunningProgram] = {}
        self._later: list[tuple[int, int, Any]] = []
        self._serial, self._numbers = count(), count()

    def start(self, effect: SessionEffect) -> None:
        match effect:
            case OpenSession():
                self._open.add(effect.request)
            case CloseSession():
                self._open.discard(effect.request)
                self._drop(effect.request, CallAsked)
            case AnswerCall() | RefuseCall():
                self._hear(effect)

    def poll(self) -> list[Any]:
        now_ns, events = self._clock.now_ns(), list[Any]()
        while self._later and self._later[0][0] <= now_ns:
            event = heapq.heappop(self._later)[2]
            events.append(event)
            running = self._running.get(event.request)
            if isinstance(event, AgentEnded | TaskFailed):
                self._running.pop(event.request, None)
            elif running and isinstance(event, CallAsked) and event.call in running.asks:
                self._observer.asked(self._incarnation, event.request, event.token_ids)
                running.waits += 1
        return events

    @property
    def busy(self) -> bool:
        """Report whether an event is due."""
        return self._clock.now_ns() >= self.due_ns()

    def due_ns(self) -> int:
        return self._later[0][0] if self._later else NEVER_NS

    def close(self) -> None:
        self._running.clear()
        self._later.clear()

    def begin(self, call: AgentCall) -> None:
        name = call.request
        assert name not in self._running, f"the agent of {name} runs"
        self._observer.began(self._incarnation, name)
        draws = self._draws(name.partition("/")[0])
        running = _RunningProgram(call=call, program=program(call, draws))
        running.raises = self._befalls(AGENT_RAISES)
        running.idle_ns = self._clock.now_ns()
        self._running[name] = running
        if self._befalls(AGENT_LOST):
            message = self._chance.choice(LOST_MESSAGES)
            self._say(EpisodeLost(request=name, message=message), 3 * self._think_ns())
        self._advance(running, None)

    def forget(self, request: str) -> None:
        """End a program silently."""
        self._running.pop(request, None)
        self._drop(request)

    def lose(self, message: str) -> None:
        """Simulate the death of the task process; recent calls may still arrive."""
        for name in list(self._running):
            asked = [event for _, _, event in self._later if event.request == name]
            self.forget(name)
            self._say(EpisodeLost(request=name, message=message), 0)
            for event in asked:
                if isinstance(event, CallAsked) and self._chance.random() < 0.5:
                    self._say(event, 0)

    def lose_endpoint(self, message: str) -> None:
        """Simulate the death of the endpoint and its sessions."""
        for name in sorted(self._open & self._running.keys()):
            ended = [
                event
                for _, _, event in self._later
                if event.request == name and isinstance(event, AgentEnded)
            ]
            self.forget(name)
            for event in ended:
                self._say(event, 0)
            self._say(EpisodeLost(request=name, message=message), 0)
        self._open.clear()

    @property
    def many(self) -> int:
        """Number of running programs."""
        return len(self._running)

    def idle(self) -> dict[str, int]:
        """Start times at which requests needed no slot."""
        programs = self._running.items()
        return {name: program.idle_ns for name, program in programs if not program.waits}

    def _draws(self, trajectory: str) -> Draws:
        """Return a program's random numbers; a wandering one changes them from some round on."""
        salt, after = "", 0
        if self._befalls(AGENT_WANDERS):
            salt, after = str(self._chance.random()), self._chance.randrange(3)
        seed = f"agent {self._seed} {trajectory}"
        return lambda number: Random(f"{seed} {number} {salt if number >= after else ''}")

    def _advance(self, running: _RunningProgram, heard: list[Heard] | None) -> None:
        name = running.call.request
        try:
            asks = running.program.send(heard) if heard is not None else next(running.program)
        except StopIteration as end:
            self._end(running, end.value)
            return
        except AgentError as error:
            self._fail(name, str(error))
            return
        numbers = [next(self._numbers) for _ in asks]
        running.asks, running.heard = dict(zip(numbers, asks, strict=True)), {}
        running.tries = 0
        hangs = self._hang_ns() if self._befalls(AGENT_HANGS) else 0
        for number in self._chance.sample(numbers, len(numbers)):
            self._ask(name, number, running.asks[number], hangs + self._think_ns())

    def _ask(self, name: str, number: int, ask: Ask, delay_ns: int) -> None:
        asked = CallAsked(
            request=name,
            call=number,
            token_ids=ask.prompt,
            max_tokens=ask.max_tokens,
            api="generate",
        )
        self._say(asked, delay_ns)

    def _hear(self, heard: Heard) -> None:
        running = self._running.get(heard.request)
        if running is None or heard.call not in running.asks:
            return  # Caller is gone.
        assert heard.call not in running.heard, f"call {heard.call} is answered twice"
        ask = running.asks[heard.call]
        running.waits -= 1
        running.idle_ns = self._clock.now_ns()
        if isinstance(heard, AnswerCall):
            self._observer.answered(self._incarnation, ask.prompt, heard)
        else:
            self._observer.refused(self._incarnation, heard.request, ask.prompt)
            if heard.code == TOO_MANY_OPEN and running.tries < TRIES_MAX:
                self._ask_again(running, heard.call)
                return
        running.heard[heard.call] = heard
        if len(running.heard) == len(running.asks):
            self._advance(running, [running.heard[number] for number in running.asks])

    def _ask_again(self, running: _RunningProgram, refused: int) -> None:
        running.tries += 1
        ask, number = running.asks[refused], next(self._numbers)
        running.asks = {number if old == refused else old: ask for old, ask in running.asks.items()}
        self._ask(running.call.request, number, ask, running.tries * (1 + self._think_ns()))

    def _end(self, running: _RunningProgram, value: Rewarded | str | None) -> None:
        name = running.call.request
        if running.raises:
            self._fail(name, "a bug of its own")
            return
        rewarded = value if isinstance(value, Rewarded) else None
        text = value if isinstance(value, str) else None
        self._last(AgentEnded(request=name, rewarded=rewarded, text=text))

    def _fail(self, name: str, message: str) -> None:
        self._last(TaskFailed(request=name, error="ValueError", message=message))

    def _last(self, event: AgentEnded | TaskFailed) -> None:
        self._drop(event.request)
        self._say(event, self._think_ns())

    def _say(self, event: Any, delay_ns: int) -> None:
        due_ns = self._clock.now_ns() + delay_ns
        heapq.heappush(self._later, (due_ns, next(self._serial), event))

    def _drop(self, request: str, kind: type = object) -> None:
        self._later = [
            entry
            for entry in self._later
            if entry[2].request != request or not isinstance(entry[2], kind)
        ]
        heapq.heapify(self._later)
