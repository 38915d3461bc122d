"""Answers the calls of an open task.

Functions run in the main thread; calls that await, retry or use threads run concurrently.
Exceptions of users' code are answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import MESSAGE_CHARACTERS_MAX, DoraError, TaskError
from dora_pipe.core.errors import one_line as cut
from dora_pipe.core.system.background import Background
from dora_pipe.core.system.own_code import traceback_of, with_place
from dora_pipe.producers.tasks.agents import AgentAsked, open_agent
from dora_pipe.producers.tasks.answers import (
    agent_ended,
    observed,
    prompted,
    scored,
    scored_together,
)
from dora_pipe.producers.tasks.background import (
    HUNG_MAX,
    HUNG_MOST,
    PLACE,
    THREADS_ELSEWHERE,
    ContinueInLoop,
    Place,
    Threads,
    begin,
    call_user_code,
    in_loop,
)
from dora_pipe.producers.tasks.calls import (
    Abandon,
    AgentCall,
    AgentEnded,
    Answered,
    Call,
    CallAnswer,
    Deferred,
    EndEpisode,
    EnvStep,
    EpisodeLost,
    Exhausted,
    GroupCall,
    GroupRewarded,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    Said,
    Setup,
    TaskFacts,
    TaskFailed,
    one_line,
    pack,
)
from dora_pipe.producers.tasks.main_thread import GivenUp
from dora_pipe.producers.tasks.messages import NoAnswer, normal
from dora_pipe.producers.tasks.registry import reward_digest, rows_digest
from dora_pipe.producers.tasks.task import (
    RETRIES_MAX,
    Completion,
    Environment,
    Retry,
    Row,
    Split,
    Task,
)
from dora_pipe.producers.tasks.tools import ToolEnvironment
from dora_pipe.schemas.control import fault_of
from dora_pipe.schemas.identity import derive_seed

ERRORS_MAX: Final = 20

RETRY_FIRST_S: Final = 0.5
RETRY_MAX_S: Final = 30.0
"""Pause before each further try: doubles, less up to half at random."""

CLOSE_S: Final = 1.0


AGENT_THREADS_MAX: Final = 1024
"""Most concurrent agents that are functions."""


class TaskServer:
    """Open task with its rows and episodes."""

    def __init__(self, task: Task, setup: Setup, write: Callable[[bytes], None]) -> None:
        """`write` is called from two threads."""
        config = setup.task
        self._task, self._config, self._write = task, config, write
        self._rows: dict[Split, Sequence[Row]] = {
            "train": task.rows("train"),
            "eval": task.rows("eval"),
        }
        if not len(self._rows["train"]):
            raise TaskError("the training data has no rows", hint="see task.data and task.filter")
        self._episodes: dict[int, Environment] = {}
        self._agent = open_agent(config, task)
        self._background = Background()
        self._threads = Threads(config.threads if config.threads > 1 else THREADS_ELSEWHERE)
        self._agent_threads = Threads(AGENT_THREADS_MAX)
        self._episodic = not task.single_turn()
        self._replayable = task.replayable or config.replayable
        self._running: dict[int, _Running] = {}
        self._closing: set[Future[None]] = set()
        self._exhausted = self._closed = False
        self._shown = 0

    def facts(self) -> TaskFacts:
        """Compute digests. Raises as `Task.check`."""
        self._task.check()
        train, train_rows = rows_digest(self._rows["train"], "train")
        evaluation, eval_rows = rows_digest(self._rows["eval"], "eval")
        agent = () if self._agent is None else (self._agent.source,)
        return TaskFacts(
            train_digest=train,
            train_rows=train_rows,
            eval_digest=evaluation,
            eval_rows=eval_rows,
            reward_digest=reward_digest(self._task, *agent),
            single_turn=self._agent is None and not self._episodic,
            replayable=self._replayable,
            scores_groups=self._task.scores_groups(),
            packages=dict(self._task.packages()),
            notes=tuple(self._task.notes()),
        )

    def take(self, frame: Call | EndEpisode | Abandon) -> None:
        match frame:
            case Call():
                self._begin(frame)
            case EndEpisode(episode=episode):
                self.end(episode)
            case Abandon(number=number):
                running = self._running.get(number)
                if running is not None and running.work is not None:
                    running.work.cancel()

    def end(self, episode: int) -> None:
        """Close an episode after its call."""
        world = self._episodes.pop(episode, None)
        if world is None:
            return
        under_way = [one.ended for one in list(self._running.values()) if one.episode == episode]
        closing = self._close(world, under_way)
        if in_loop() or begin(closing) is not None:
            work = self._background.run(closing)
            self._closing.add(work)
            work.add_done_callback(self._closing.discard)

    def close(self) -> None:
        self._closed = True
        for number in list(self._running):
            self.take(Abandon(number))
        for episode in list(self._episodes):
            self.end(episode)
        wait(list(self._closing), timeout=CLOSE_S)
        self._background.close()

    def _begin(self, call: Call) -> None:
        work = self._answer(call)
        switch = begin(work)
        if switch is not None:
            self._write(pack(Deferred(call.number, switch.pause_s)))
            running = _Running(episode=call.episode)
            self._running[call.number] = running  # its answer removes it
            running.work = self._background.run(work)

    def exhaust(self, why: str, *, at_once: bool = False, number: int = 0) -> None:
        self._exhausted = True
        self._write(pack(Exhausted(why, at_once, number)))

    def hangs(self, number: int) -> None:
        self.exhaust("its main thread is blocked", at_once=True, number=number)

    async def _answer(self, call: Call) -> None:
        PLACE.set(self._place(call))
        try:
            answer = pack(CallAnswer(call.number, await self._tried(call)))
        except GivenUp:
            late = TaskFailed(request=call.call.request, error="TimedOut", message="")
            answer = pack(CallAnswer(call.number, late, late=True))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if not self._closed:
                self._show(error)
            name = "Retry" if isinstance(error, Retry) else type(error).__name__
            message = one_line(with_place(error) if fault_of(name) == "code" else str(error))
            answer = pack(CallAnswer(call.number, self._failure(call, name, message)))
        running = self._running.pop(call.number, None)
        if running is not None:
            running.ended.set_result(None)
        if isinstance(call.call, RewardCall) and call.episode is not None:
            self.end(call.episode)
        self._write(answer)
        if in_loop():
            await asyncio.sleep(0)  # so that threads it has just left count as hung
        self._count_hung()

    def _failure(self, call: Call, error: str, message: str) -> TaskFailed | EpisodeLost:
        """An external failure restarts the episode elsewhere."""
        request = call.call.request
        if error == "Retry" and (
            isinstance(call.call, EnvStep | AgentCall)
            or (isinstance(call.call, PromptCall) and self._episodic)
        ):
            return EpisodeLost(request=request, message=one_line(f"Retry: {message}"))
        return TaskFailed(request=request, error=error, message=message)

    def _count_hung(self) -> None:
        hung = self._threads.hung + self._agent_threads.hung
        if hung > HUNG_MOST:
            self.exhaust(f"more than {HUNG_MOST} of its threads hang", at_once=True)
        elif hung > HUNG_MAX and not self._exhausted:
            self.exhaust(f"more than {HUNG_MAX} of its threads hang")

    def _place(self, call: Call) -> Place:
        """Functions of episodes run concurrently, others serially."""
        waits = partial(self._waits, call.number)
        match call.call:
            case PromptCall() if self._episodic:
                beside = self._config.threads > 1
            case EnvStep() if not _awaits(self._world(call.episode)):
                beside = self._config.threads > 1
            case AgentCall():
                return Place(threads=self._agent_threads, waits=waits)
            case _:
                beside = False
        limit_s = call.limit_s
        return Place(threads=self._threads, beside=beside, waits=waits, limit_s=limit_s)

    def _waits(self, number: int, waiting: bool) -> None:
        self._write(pack(Deferred(number, waiting=waiting)))

    def _world(self, episode: int | None) -> Environment:
        assert episode is not None
        return self._episodes[episode]

    async def _tried(self, call: Call) -> Answered:
        for tries in itertools.count():
            try:
                return await self._event(call)
            except Retry as error:
                if tries >= RETRIES_MAX or isinstance(call.call, AgentCall):
                    raise
                sys.stderr.write(f"task: tried again: {cut(str(error), MESSAGE_CHARACTERS_MAX)}\n")
            seed = derive_seed("retry", call.call.request, call.number, tries)
            share = random.Random(seed).uniform(0.5, 1.0)
            pause_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2.0**tries) * share
            if in_loop():
                self._write(pack(Deferred(call.number, pause_s)))
            else:
                await ContinueInLoop(pause_s)
            await asyncio.sleep(pause_s)
        raise AssertionError

    async def _event(self, call: Call) -> Answered:
        match call.call:
            case PromptCall() as asked:
                return await self._prompt(call.number, asked)
            case EnvStep(request=request, turn=turn):
                respond = self._world(call.episode).respond
                return observed(request, await call_user_code(respond, turn))
            case RewardCall() as asked:
                with _naming_row(asked):
                    return await self._score(call.episode, asked)
            case GroupCall() as asked:
                with _naming_row(asked):
                    return await self._score_group(asked)
            case AgentCall() as asked:
                return await self._run_agent(asked)

    def _row(self, split: Split, index: int) -> Row:
        rows = self._rows[split]
        if not 0 <= index < len(rows):
            raise NoAnswer(f"row {index} of {len(rows)} in `{split}`")
        return dict(rows[index])  # a copy, since users' code may change it

    async def _prompt(self, number: int, call: PromptCall) -> PromptReady:
        row = self._row(call.split, call.index)
        tools = tuple(await call_user_code(self._task.tools, row))
        world = await call_user_code(self._task.environment, row)
        if world is None and tools:
            world = ToolEnvironment(self._task, tools)
        asked = self._task.prompt if world is None else world.reset
        prompt = await call_user_code(asked, row)
        shown = await call_user_code(self._task.shown_tools, row)
        ready = prompted(call.request, prompt, tools, shown)
        if world is None:
            return ready
        self._episodes[number] = world
        return msgspec.structs.replace(ready, episode=True, replayable=self._replayable)

    async def _score(self, episode: int | None, call: RewardCall) -> Rewarded:
        found: Any = None
        if episode is not None:
            found = await call_user_code(self._world(episode).reward, call.text, call.turns)
        if found is not None:
            return scored(call.request, found)
        row = self._row(call.split, call.index)
        said = Completion(
            text=call.text, turns=call.turns, messages=call.messages, reasoning=call.reasoning
        )
        return scored(call.request, await call_user_code(self._task.score, row, said))

    async def _score_group(self, call: GroupCall) -> GroupRewarded:
        row = self._row(call.split, call.index)
        said = [await self._completion(row, one) for one in call.completions]
        found = await call_user_code(self._task.score_group, row, said)
        return scored_together(call.request, found, len(said))

    async def _run_agent(self, call: AgentCall) -> AgentEnded:
        if self._agent is None:
            raise NoAnswer("the task has no agent")
        if not in_loop():
            await ContinueInLoop()
        row = self._row(call.split, call.index)
        asked = AgentAsked(base_url=call.base_url, api_key=call.api_key, row=row)
        return agent_ended(call.request, await self._agent.run(asked))

    async def _completion(self, row: Row, one: Said) -> Completion:
        """Single turns include the conversation."""
        if one.turn is None or len(one.turns) > 1:
            thoughts = "" if one.turn is None else one.turn.reasoning
            return Completion(text=one.text, turns=one.turns, reasoning=thoughts)
        prompt = await call_user_code(self._task.prompt, row)
        messages = () if isinstance(prompt, str) else (*normal(prompt, "prompt"),)
        said = (*messages, one.turn.message()) if messages else ()
        thoughts = one.turn.reasoning
        return Completion(text=one.text, turns=one.turns, messages=said, reasoning=thoughts)

    async def _close(self, world: Environment, under_way: Sequence[Future[None]]) -> None:
        PLACE.set(Place(threads=self._threads, beside=self._config.threads > 1))
        try:
            if under_way:
                if not in_loop():
                    await ContinueInLoop()
                await asyncio.gather(*map(asyncio.wrap_future, under_way))
            await call_user_code(world.close)
        except (Exception, SystemExit) as error:
            self._show(error)  # no answer is expected

    def _show(self, error: BaseException) -> None:
        self._shown += 1
        if self._shown > ERRORS_MAX:
            return
        if isinstance(error, DoraError):
            sys.stderr.write(f"task: {cut(str(error), MESSAGE_CHARACTERS_MAX)}\n")
        else:
            sys.stderr.write(traceback_of(error))
        if self._shown == ERRORS_MAX:
            sys.stderr.write("task: further errors of this process are not shown\n")


@contextlib.contextmanager
def _naming_row(call: RewardCall | GroupCall) -> Iterator[None]:
    """Add the row to errors of its data."""
    try:
        yield
    except TaskError as error:
        raise TaskError(f"row {call.index} of {call.split}: {error.message}") from None


def _awaits(world: Environment) -> bool:
    if isinstance(world, ToolEnvironment):
        return True
    plain = type(world).respond is Environment.respond
    return plain and inspect.iscoroutinefunction(world.step)


@dataclass(slots=True, kw_only=True)
class _Running:
    episode: int | None
    ended: Future[None] = field(default_factory=Future)
    work: Future[None] | None = None
