"""In-process agents: generators that call the model and receive its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from dora_pipe.producers.engines.engine import EngineEvent, EngineRequest, Exported, TokensSampled
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.tasks.calls import (
    AgentCall,
    AgentEnded,
    EpisodeLost,
    Rewarded,
)
from dora_pipe.producers.worker.effects import (
    AnswerCall,
    CallAsked,
    CloseSession,
    OpenSession,
    RefuseCall,
)
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.sim.agents import Ask, Heard, Program

if TYPE_CHECKING:
    from tests.support.worker import World

Agent = Program

Play = Callable[[AgentCall], Agent]


@dataclass
class _RunningAgent:
    agent: Agent
    first: int = 0
    """Number of the first awaited call."""
    waits: dict[int, Heard | None] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)


class AgentsPort:
    """Agents of a worker and their endpoint; `thinks` is the number of polls before each event."""

    def __init__(self, play: Play, *, thinks: Callable[[], int] = lambda: 0) -> None:
        self._play, self._thinks = play, thinks
        self._running: dict[str, _RunningAgent] = {}
        self._later: list[tuple[int, Any]] = []
        self._polls = 0
        self.opened: set[str] = set()
        self.started: list[str] = []
        self.closed: list[str] = []
        self.refused: list[RefuseCall] = []
        self.answered: dict[str, list[tuple[list[int], list[int]]]] = {}
        """Prompt and tokens of each answer of the current attempt, by request."""

    def start(self, effect: Any) -> None:
        match effect:
            case OpenSession():
                assert effect.request not in self.opened
                self.opened.add(effect.request)
            case AgentCall():
                assert effect.request in self.opened
                self._begin(effect)
            case CloseSession():
                self._close(effect.request)
            case AnswerCall() | RefuseCall():
                self._hear(effect)

    def poll(self) -> list[Any]:
        self._polls += 1
        due = [event for poll, event in self._later if poll <= self._polls]
        self._later = [(poll, event) for poll, event in self._later if poll > self._polls]
        return due

    @property
    def busy(self) -> bool:
        return bool(self._later)

    def close(self) -> None:
        self._running.clear()

    def lose(self, request: str) -> None:
        self._running.pop(request)
        self._say(EpisodeLost(request=request, message="its process ended: killed"))

    def _say(self, event: Any) -> None:
        self._later.append((self._polls + 1 + self._thinks(), event))

    def _begin(self, call: AgentCall) -> None:
        self.started.append(call.request)
        self.answered[call.request] = []
        running = self._running[call.request] = _RunningAgent(self._play(call))
        self._advance(call.request, running, None)

    def _advance(self, request: str, running: _RunningAgent, heard: list[Heard] | None) -> None:
        try:
            asks = running.agent.send(heard) if heard is not None else next(running.agent)
        except StopIteration as end:
            rewarded = end.value if isinstance(end.value, Rewarded) else None
            text = end.value if isinstance(end.value, str) else None
            self._say(AgentEnded(request=request, rewarded=rewarded, text=text))
            return
        numbers = range(running.first, running.first + len(asks))
        running.first += len(asks)
        running.waits = dict.fromkeys(numbers)
        poll = self._polls + 1 + self._thinks()
        for number, ask in zip(numbers, asks, strict=True):
            running.prompts[number] = ask.prompt
            asked = CallAsked(
                request=request,
                call=number,
                token_ids=ask.prompt,
                max_tokens=ask.max_tokens,
                api="generate",
            )
            self._later.append((poll, asked))

    def _hear(self, heard: Heard) -> None:
        assert heard.request in self.opened
        running = self._running.get(heard.request)
        if running is None:
            return
        assert running.waits[heard.call] is None, "answered once"
        running.waits[heard.call] = heard
        if isinstance(heard, AnswerCall):
            exchange = (running.prompts[heard.call], list(heard.token_ids))
            self.answered[heard.request].append(exchange)
        else:
            self.refused.append(heard)
        waits = [wait for wait in running.waits.values() if wait is not None]
        if len(waits) == len(running.waits):
            self._advance(heard.request, running, waits)

    def _close(self, request: str) -> None:
        self.opened.remove(request)
        self.closed.append(request)
        self._running.pop(request, None)
        self._later = [(poll, event) for poll, event in self._later if event.request != request]


class RecordingEngine(SimulatedEngine):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked: dict[str, EngineRequest] = {}
        self.sampled: dict[str, list[int]] = {}
        self.stays: list[tuple[list[int], list[int]]] = []
        """(initial tokens, tokens sampled after them) for each stay in a slot."""

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        self.asked[request.request] = request
        self.sampled[request.request] = []
        self.stays.append((list(request.token_ids), self.sampled[request.request]))

    def export(self, request: str) -> Exported | None:
        export = super().export(request)
        if export is not None and export.sampled is not None:
            self.sampled[request] += export.sampled.token_ids
        return export

    def step(self) -> list[EngineEvent]:
        events = super().step()
        for event in events:
            if isinstance(event, TokensSampled):
                self.sampled[event.request] += event.token_ids
        return events


def turns(prompt: Sequence[int], *answers: Sequence[int]) -> Play:
    def play(call: AgentCall) -> Agent:
        so_far = list(prompt)
        for answer in (*answers, None):
            (heard,) = yield [Ask(so_far)]
            if answer is None or isinstance(heard, RefuseCall):
                return None
            so_far = [*so_far, *heard.token_ids, *answer]
        return None

    return play


def wandering(random: Random, calls: int) -> Agent:
    """Random calls that continue, branch, cut or join earlier contexts."""
    texts: list[list[int]] = [[random.randrange(1, 50) for _ in range(random.randint(1, 6))]]
    calls_made = 0
    while calls_made < calls:
        asks: list[Ask] = []
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            base = random.choice(texts[-3:])
            cut = random.choice([0, 0, 0, random.randrange(len(base))])
            fresh = [
                random.randrange(1, 50) for _ in range(random.randint(0 if cut == 0 else 1, 4))
            ]
            prompt = [*base[: len(base) - cut], *fresh]
            asks += [Ask(prompt, random.choice([None, 3]))] * random.choice([1, 1, 2])
        calls_made += len(asks)
        heard = yield asks
        for ask, effect in zip(asks, heard, strict=True):
            if isinstance(effect, AnswerCall):
                texts.append([*ask.prompt, *effect.token_ids])
    return None


def recording_engine(world: World, setup: WorkerSetup) -> RecordingEngine:
    return RecordingEngine(
        slots=setup.slots,
        context_tokens=setup.context_tokens,
        lengths=world.lengths,
        clock=world.clock,
    )
