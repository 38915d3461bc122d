"""Answers the calls of an open task, in the event loop.

Exceptions of users' code are answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import MESSAGE_CHARACTERS_MAX, DoraError, TaskError, one_line, printable
from dora_pipe.core.system.own_code import traceback_of, with_place
from dora_pipe.producers.tasks.agents import open_agent
from dora_pipe.producers.tasks.calls import (
    Abandon,
    AgentCall,
    AgentEnded,
    Answered,
    Call,
    CallAnswer,
    CallState,
    Down,
    EndEpisode,
    EnvObserved,
    EnvStep,
    EpisodeLost,
    Exhausted,
    GroupCall,
    GroupRewarded,
    Progress,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    Setup,
    TaskFacts,
    TaskFailed,
    message_line,
    pack,
)
from dora_pipe.producers.tasks.execution import (
    CONTEXT,
    THREADS_ELSEWHERE,
    CallContext,
    Threads,
    call_user_code,
)
from dora_pipe.producers.tasks.messages import NoAnswer, finite, in_order, normal, tool_schemas
from dora_pipe.producers.tasks.registry import reward_digest, rows_digest
from dora_pipe.producers.tasks.task import (
    ANSWER_CHARACTERS_MAX,
    RETRIES_MAX,
    Completion,
    Environment,
    Message,
    Observation,
    Retry,
    Reward,
    Row,
    Split,
    Task,
    Tool,
)
from dora_pipe.producers.tasks.tools import ToolEnvironment
from dora_pipe.schemas.control import fault_of
from dora_pipe.schemas.identity import derive_seed
from dora_pipe.schemas.wire import REWARD_MAX, sha256_hex

ERRORS_MAX: Final = 20

RETRY_FIRST_S: Final = 0.5
RETRY_MAX_S: Final = 30.0
"""Pause before each further try: doubles, less up to half at random."""

CLOSE_S: Final = 1.0

HUNG_MAX: Final = 8
"""Hung threads above which the process asks for a replacement."""

AGENT_THREADS_MAX: Final = 1024
"""Most concurrent agents that are functions."""


class TaskServer:
    """Open task with its rows and episodes."""

    def __init__(self, task: Task, setup: Setup, write: Callable[[bytes], None]) -> None:
        """`write` is called from several threads."""
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
        self._threads = Threads(config.threads if config.threads > 1 else THREADS_ELSEWHERE)
        self._agent_threads = Threads(AGENT_THREADS_MAX)
        self._episodic = not task.single_turn()
        self._replayable = task.replayable or config.replayable
        self._running: dict[int, tuple[Call, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._exhausted = False
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

    def take(self, frame: Down) -> None:
        match frame:
            case Call():
                self._running[frame.number] = frame, asyncio.create_task(self._answer(frame))
            case EndEpisode(episode=episode):
                self.end(episode)
            case Abandon(number=number) if number in self._running:
                self._running[number][1].cancel()

    def end(self, episode: int) -> None:
        world = self._episodes.pop(episode, None)
        if world is None:
            return
        calls = [task for call, task in self._running.values() if call.episode == episode]
        closing = asyncio.create_task(self._close(world, calls))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for _, task in self._running.values():
            task.cancel()
        for episode in list(self._episodes):
            self.end(episode)
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_S)

    async def _answer(self, call: Call) -> None:
        context = self._context_of(call)
        CONTEXT.set(context)
        try:
            answer = pack(CallAnswer(call.number, await self._tried(call, context)))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if not isinstance(error, asyncio.CancelledError):
                self._show(error)
            name = "Retry" if isinstance(error, Retry) else type(error).__name__
            message = message_line(with_place(error) if fault_of(name) == "code" else str(error))
            answer = pack(CallAnswer(call.number, self._failure(call, name, message)))
        del self._running[call.number]
        if isinstance(call.call, RewardCall) and call.episode is not None:
            self.end(call.episode)
        self._write(answer)
        await asyncio.sleep(0)  # so that threads it has just left count as hung
        hung = self._threads.hung + self._agent_threads.hung
        if hung > HUNG_MAX and not self._exhausted:
            self._exhausted = True
            self._write(pack(Exhausted(f"more than {HUNG_MAX} of its threads hang")))

    def _failure(self, call: Call, error: str, message: str) -> TaskFailed | EpisodeLost:
        """An external failure restarts the episode elsewhere."""
        request = call.call.request
        if error == "Retry" and (
            isinstance(call.call, EnvStep | AgentCall)
            or (isinstance(call.call, PromptCall) and self._episodic)
        ):
            return EpisodeLost(request=request, message=message_line(f"Retry: {message}"))
        return TaskFailed(request=request, error=error, message=message)

    def _context_of(self, call: Call) -> CallContext:
        """Functions of episodes run concurrently, others serially."""
        match call.call:
            case PromptCall():
                threaded = self._episodic and self._config.threads > 1
            case EnvStep():
                threaded = self._config.threads > 1 and not _awaits(self._world(call.episode))
            case _:
                threaded = isinstance(call.call, AgentCall)
        threads = self._agent_threads if isinstance(call.call, AgentCall) else self._threads
        return CallContext(
            threads=threads, threaded=threaded, tell=partial(self._tell, call.number)
        )

    def _tell(self, number: int, state: CallState) -> None:
        self._write(pack(Progress(number, state)))

    def _world(self, episode: int | None) -> Environment:
        assert episode is not None
        return self._episodes[episode]

    async def _tried(self, call: Call, context: CallContext) -> Answered:
        for tries in itertools.count():
            try:
                return await self._event(call)
            except Retry as error:
                if tries >= RETRIES_MAX or isinstance(call.call, AgentCall):
                    raise
                message = one_line(str(error), MESSAGE_CHARACTERS_MAX)
                sys.stderr.write(f"task: tried again: {message}\n")
            seed = derive_seed("retry", call.call.request, call.number, tries)
            share = random.Random(seed).uniform(0.5, 1.0)
            context.report("waiting")
            await asyncio.sleep(min(RETRY_MAX_S, RETRY_FIRST_S * 2.0**tries) * share)
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
        reward: Any = None
        completion = call.completion
        if episode is not None:
            world = self._world(episode)
            reward = await call_user_code(world.reward, completion.text, completion.turns)
        if reward is None:
            row = self._row(call.split, call.index)
            reward = await call_user_code(self._task.score, row, completion)
        return scored(call.request, reward)

    async def _score_group(self, call: GroupCall) -> GroupRewarded:
        row = self._row(call.split, call.index)
        completions = [await self._prompted(row, completion) for completion in call.completions]
        rewards = await call_user_code(self._task.score_group, row, completions)
        return scored_together(call.request, rewards, len(completions))

    async def _run_agent(self, call: AgentCall) -> AgentEnded:
        if self._agent is None:
            raise NoAnswer("the task has no agent")
        row = self._row(call.split, call.index)
        CONTEXT.get().report("running")  # commands run outside of `call_user_code`
        result = await self._agent.run(call.base_url, call.api_key, row)
        return agent_ended(call.request, result)

    async def _prompted(self, row: Row, completion: Completion) -> Completion:
        """Put the prompt before the message of a single turn."""
        messages: tuple[Message, ...] = ()
        if completion.messages and len(completion.turns) <= 1:
            prompt = await call_user_code(self._task.prompt, row)
            if not isinstance(prompt, str):
                messages = (*normal(prompt, "prompt"), *completion.messages)
        return dataclasses.replace(completion, messages=messages)

    async def _close(self, world: Environment, calls: Sequence[asyncio.Task[None]]) -> None:
        CONTEXT.set(CallContext(threads=self._threads, threaded=self._config.threads > 1))
        try:
            if calls:
                await asyncio.wait(calls)
            async with asyncio.timeout(self._config.environment_timeout_s):
                await call_user_code(world.close)
        except (Exception, SystemExit) as error:
            self._show(error)  # no answer is expected

    def _show(self, error: BaseException) -> None:
        self._shown += 1
        if self._shown > ERRORS_MAX:
            return
        if isinstance(error, DoraError):
            sys.stderr.write(f"task: {one_line(str(error), MESSAGE_CHARACTERS_MAX)}\n")
        else:
            sys.stderr.write(traceback_of(error))
        if self._shown == ERRORS_MAX:
            sys.stderr.write("task: further errors of this process are not shown\n")


@contextlib.contextmanager
def _naming_row(call: RewardCall | GroupCall) -> Iterator[None]:
    try:
        yield
    except TaskError as error:
        raise TaskError(f"row {call.index} of {call.split}: {error.message}") from None


def _awaits(world: Environment) -> bool:
    if isinstance(world, ToolEnvironment):
        return True
    plain = type(world).respond is Environment.respond
    return plain and inspect.iscoroutinefunction(world.step)


AGENT_ANSWER_MAX: Final = 1 << 20
"""Most characters of an agent's answer."""


def prompted(
    request: str, prompt: object, tools: Sequence[Tool], shown: Sequence[Mapping[str, Any]] = ()
) -> PromptReady:
    """Return a prompt of text or messages; `shown` replaces the schemas of `tools`. Raises
    NoAnswer."""
    if isinstance(prompt, str):
        if tools or shown:
            raise NoAnswer("the prompt of a row with tools is text, not messages")
        return PromptReady(request=request, text=prompt, episode=False)
    if not isinstance(prompt, Sequence):
        raise NoAnswer(f"the prompt is {type(prompt).__name__}, neither text nor messages")
    return PromptReady(
        request=request,
        text="",
        episode=False,
        messages=normal(prompt, "prompt"),
        tools=tool_schemas(shown or tools),
    )


def observed(request: str, observation: object) -> EnvObserved:
    """Return a validated observation. Raises NoAnswer."""
    if not isinstance(observation, Observation):
        raise NoAnswer(f"the environment gave {type(observation).__name__}, not an Observation")
    for name in ("text", "tool"):
        if not isinstance(getattr(observation, name), str):
            raise NoAnswer(
                f"the observation's {name} is {type(getattr(observation, name)).__name__}"
            )
    return EnvObserved(
        request=request,
        text=observation.text,
        done=_truth("done", observation.done),
        tool=observation.tool,
        ok=_truth("ok", observation.ok),
        error=str(observation.error),
        messages=normal(observation.messages, "messages") if observation.messages else (),
    )


def _truth(name: str, value: object) -> bool:
    """Accepts numpy; text such as "false" is rejected."""
    if value is None or isinstance(value, str | bytes) or hasattr(value, "__len__"):
        raise NoAnswer(f"the observation's `{name}` is {type(value).__name__}, not true or false")
    return bool(value)


def scored(request: str, given: float | Reward | None) -> Rewarded:
    """Return a reward within `REWARD_MAX` whose numbers are all finite. Raises NoAnswer."""
    if given is None:
        raise NoAnswer("the only reward abstained (None)")
    reward = given if isinstance(given, Reward) else Reward(value=given)
    value = finite("the reward", reward.value)
    if abs(value) > REWARD_MAX:
        raise NoAnswer(f"the reward is {value:g}, beyond {REWARD_MAX:g}")
    parts = {str(name): finite(f"part `{name}`", part) for name, part in reward.parts.items()}
    raw = None if reward.raw is None else finite("the raw reward", reward.raw)
    answer = answer_text(reward.answer)
    return Rewarded(request=request, reward=value, raw=raw, parts=parts, answer=answer)


def agent_ended(request: str, result: object) -> AgentEnded:
    """Return the result of an agent. Raises NoAnswer."""
    if result is None or isinstance(result, str):
        if result and len(result) > AGENT_ANSWER_MAX:
            raise NoAnswer(f"the agent's answer has more than {AGENT_ANSWER_MAX} characters")
        return AgentEnded(request=request, text=result)
    return AgentEnded(request=request, rewarded=scored(request, result))  # type: ignore[arg-type]


def answer_text(answer: str) -> str:
    """Return an answer as logged. Raises NoAnswer."""
    if not isinstance(answer, str):
        raise NoAnswer(f"the reward's answer is {type(answer).__name__}, not a text")
    line = printable(" ".join(answer.split()))
    if len(line) <= ANSWER_CHARACTERS_MAX:
        return line
    end = sha256_hex(line.encode())[:16]
    return f"{line[: ANSWER_CHARACTERS_MAX - len(end)]}{end}"


def scored_together(request: str, given: object, count: int) -> GroupRewarded:
    """Return one reward per completion. Raises NoAnswer."""
    rewards = [scored(request, reward) for reward in in_order("score_group", given, count)]
    return GroupRewarded(
        request=request,
        rewards=tuple(reward.reward for reward in rewards),
        parts=tuple(reward.parts for reward in rewards),
    )
