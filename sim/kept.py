"""A server of tasks that keeps episodes, in virtual time; decides what its environments say, and
asks whether a step of theirs is lost or made twice.

What was told, and who has an episode, is production's (`producers.tasks.told`). An environment
answers by chance and counts its steps, so another one cannot be told what it was told. A step is
made when its turn arrives, whatever becomes of who has told it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

import msgspec

from dora_pipe.core.clock import Clock
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    EpisodeLost,
    Forget,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    TaskCall,
    TaskEvent,
)
from dora_pipe.producers.tasks.claims import keyed
from dora_pipe.producers.tasks.told import EpisodeTaken, ToldEpisode, ToldEpisodes
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.sim.agents import Agents
from dora_pipe.sim.parts import CONTEXT_TOKENS, MS, SimTasks, observed_of

TURNS_MEAN: Final = 4
"""An environment says after so many turns, on average, that its episode is over."""

TAKEN: Final = "a later attempt has it"

MET: Final = ("episode found", "episode taken", "episode run out", "step known", "step unheard")
"""What can become of an episode: it is found again; from who still has it; nobody has come in time;
a step is answered from memory; the one that nobody had heard of."""

Wrong = Callable[[str, str], None]
After = Callable[[int, Callable[[], None]], None]


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept(ToldEpisode):
    """An episode with its environment."""

    chance: Random
    steps: int = 0
    heard: int = 0
    """Answers that have arrived somewhere."""

    def step(self, call: EnvStep, ready_ns: int) -> None:
        """The environment's: it says how many it has made, and something by chance."""
        said = [3 + self.steps, *(self.chance.randrange(3, 96) for _ in range(2))]
        done = self.chance.randrange(TURNS_MEAN) == 0
        self.steps += 1
        seen = observed_of(call, done=done, text=" ".join(map(str, said)))
        self.told.append((call.turn, (seen, ready_ns)))

    @property
    def answers(self) -> list[list[int]]:
        """Token ids of all that it has answered."""
        return [[int(word) for word in seen.text.split()] for _, (seen, _) in self.told]

    def answer(self, at: int) -> tuple[EnvObserved, int]:
        """To a turn that it was told, and when it is there (ns)."""
        found: tuple[EnvObserved, int] = self.told[at][1]
        return found


@dataclass(slots=True, eq=False)
class _Telling:
    """An episode as one request has it."""

    episode: _Kept
    at: int = 0
    answer: EnvObserved | EpisodeLost | None = None
    """To the turn that is told now."""

    @property
    def has_it(self) -> bool:
        return self.episode.holder is self


class Server:
    """Keeps the episodes of all workers; `wrong` is called with a check and what is amiss."""

    def __init__(self, seed: int, keep_ns: int, wrong: Wrong, after: After) -> None:
        """`after`: lets something happen so many ns later."""
        self.counted: Counter[str] = Counter()
        self._seed, self._keep_ns = seed, keep_ns
        self._wrong, self._after = wrong, after
        self._episodes = ToldEpisodes[_Kept]()
        self._begun: Counter[str] = Counter()
        self._closed: dict[str, int] = {}
        """Keys of episodes with steps that an attempt has ended, with the attempt."""
        self._tellings: dict[tuple[int, str], _Telling] = {}

    def begin(self, call: PromptCall) -> tuple[_Telling, bool]:
        """The episode of a prompt, and whether it was kept."""
        kept = self._episodes.take(call.key, call.attempt) if call.again else None
        found = kept is not None
        if kept is None:
            self._not_found(call)
            self._begun[call.key] += 1
            chance = Random(f"kept {self._seed} {call.key} {self._begun[call.key]}")
            kept = _Kept(key=call.key, attempt=call.attempt, chance=chance)
            self._episodes.add(kept)
        else:
            self.counted["episode taken" if kept.holder is not None else "episode found"] += 1
        telling = _Telling(kept)
        kept.hold(telling)
        return telling, found

    def _not_found(self, call: PromptCall) -> None:
        """Nobody who might have gone on with it has ended it."""
        attempt = self._closed.get(call.key, call.attempt)
        if call.again and attempt < call.attempt:
            what = f"{call.key} was ended by attempt {attempt}, attempt {call.attempt} asks for it"
            self._wrong("episode", what)

    def tell(self, telling: _Telling, call: EnvStep, now_ns: int, delay_ns: int) -> int:
        """A turn arrives; how long it takes until its answer does."""
        kept = telling.episode
        telling.answer = EpisodeLost(request=call.request, message=TAKEN)
        if not telling.has_it:
            return delay_ns
        try:
            known = kept.is_known(telling.at, call.turn)
        except EpisodeTaken as error:
            self._wrong("episode", f"{kept.key}: {error}")
            return delay_ns
        if known:
            self.counted["step unheard" if telling.at >= kept.heard else "step known"] += 1
        else:
            kept.step(call, now_ns + delay_ns)
        seen, ready_ns = kept.answer(telling.at)
        telling.answer = msgspec.structs.replace(seen, request=call.request)
        telling.at += 1
        return max(ready_ns - now_ns, MS)

    def leave(self, telling: _Telling) -> None:
        """Who has it is gone: it is kept for a while."""
        kept = telling.episode
        if kept.leave(telling):
            generation = kept.generation
            self._after(self._keep_ns, lambda: self._expire(kept, generation))

    def _expire(self, kept: _Kept, generation: int) -> None:
        if kept.is_over(generation):
            self.counted["episode run out"] += 1
            self._episodes.end(kept)

    def end(self, telling: _Telling, *, asked: bool) -> None:
        """Close it, if nobody else has it; `asked`: by its request, which has not lost it."""
        if telling.has_it:
            if asked and telling.episode.steps:
                self._closed[telling.episode.key] = telling.episode.attempt
            self._episodes.end(telling.episode)

    def die(self) -> bool:
        """All that it keeps is gone; whether there was anything."""
        lost = self._episodes.all()
        for kept in lost:
            self._episodes.end(kept)
        return bool(lost)

    # What the record says

    def note(self, incarnation: int, request: str, telling: _Telling) -> None:
        """An incarnation's request has an episode now."""
        self._tellings[incarnation, request] = telling

    def logged(self, one: Trajectory, incarnation: int) -> None:
        """A trajectory is in the log: it has every answer of its environment, each once."""
        telling = self._tellings.get((incarnation, f"{one.trajectory}/{one.meta.attempt}"))
        if telling is None or one.meta.finish == "error":
            return
        found = [
            list(map(int, one.token_ids[segment.start : segment.end]))
            for segment in one.segments
            if segment.kind == "tool"
        ]
        made = telling.episode.answers
        no_room = bool(made) and one.length + len(made[-1]) > CONTEXT_TOKENS
        if found != made and not (no_room and found == made[:-1]):  # What has none is left out.
            what = f"its environment has made {len(made)} steps, its record has {len(found)} of"
            self._wrong("episode", f"{one.trajectory}: {what} {made}: {found}")


class KeptTasks(SimTasks):
    """A pool whose episodes live at a server."""

    def __init__(
        self,
        clock: Clock,
        *,
        answer: Callable[[TaskCall], TaskEvent],
        delay_ns: Callable[[TaskCall], int],
        server: Server,
        world: Clock,
        run: str,
        incarnation: int,
        agents: Agents | None = None,
    ) -> None:
        super().__init__(clock, answer=self._answered, delay_ns=self._told_ns, agents=agents)
        self._plain, self._plain_ns = answer, delay_ns
        self._world = world
        self._server, self._run, self._incarnation = server, run, incarnation
        self._has: dict[str, _Telling] = {}

    def start(self, effect: TaskCall | Forget) -> None:
        """See `SimTasks`; what is forgotten is kept, if that is asked for."""
        if isinstance(effect, Forget):
            self._let_go(effect.request, keep=effect.keep)
        elif isinstance(effect, PromptCall):
            self._let_go(effect.request, keep=False)
            effect = keyed(effect, self._run)
        super().start(effect)

    def lose(self, message: str) -> bool:
        """The connections to the server end; it keeps what was told through them."""
        for name in list(self._has):
            self._let_go(name, keep=True)
        return super().lose(message)

    def close(self) -> None:
        """The connections end with their worker."""
        for name in list(self._has):
            self._let_go(name, keep=True)
        super().close()

    def _let_go(self, request: str, *, keep: bool) -> None:
        telling = self._has.pop(request, None)
        if telling is not None and keep:
            self._server.leave(telling)
        elif telling is not None:
            self._server.end(telling, asked=True)

    def _told_ns(self, call: TaskCall) -> int:
        """How long a call takes; a turn arrives at once."""
        delay_ns, telling = self._plain_ns(call), self._has.get(call.request)
        if isinstance(call, EnvStep) and telling is not None:
            return self._server.tell(telling, call, self._world.now_ns(), delay_ns)
        return delay_ns

    def _answered(self, call: TaskCall) -> TaskEvent:
        event, name = self._plain(call), call.request
        if isinstance(event, PromptReady) and event.episode:
            assert isinstance(call, PromptCall)
            self._has[name], found = self._server.begin(call)
            self._server.note(self._incarnation, name, self._has[name])
            return msgspec.structs.replace(event, kept=True, found=found)
        telling = self._has.get(name)
        if telling is None:
            return event
        if isinstance(event, EnvObserved):
            assert telling.answer is not None
            event = telling.answer
            telling.episode.heard = max(telling.episode.heard, telling.at)
        elif isinstance(call, RewardCall) and not telling.has_it:
            event = EpisodeLost(request=name, message=TAKEN)
        if not isinstance(event, EnvObserved | Rewarded):  # what is kept ends when it is forgotten
            del self._has[name]
            self._server.end(telling, asked=False)
        return event
