"""The process that runs users' code: opens a task and answers calls.

Functions that give their results at once are called in the main thread, one after the other, in
order. Calls that await something, or that wait to be tried again, go on beside them, all at the
same time (`background`).

It decides what counts as an answer: a reward is a number within `REWARD_MAX`, a prompt and an
observation are text or messages. Whatever the user's code raises is an answer too. It never imports
torch by itself, speaks over private copies of its standard streams (what users print goes to
stderr), and dies with the process that started it.

    python -m dora_pipe.producers.tasks.server      started by `pool.TaskPool`, of no use by hand
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import io
import itertools
import math
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TextIO

import msgspec

from dora_pipe.config import model
from dora_pipe.core.console import name_process, say
from dora_pipe.core.errors import (
    MESSAGE_CHARACTERS_MAX,
    ConfigError,
    DoraError,
    TaskError,
    printable,
)
from dora_pipe.core.errors import one_line as cut
from dora_pipe.producers.data.prepare import reporting
from dora_pipe.producers.tasks.background import (
    HUNG_MAX,
    Background,
    ContinueInLoop,
    begin,
    call_user_code,
    in_loop,
)
from dora_pipe.producers.tasks.calls import (
    DOWN,
    Abandon,
    Answered,
    Call,
    CallAnswer,
    Deferred,
    Down,
    EndEpisode,
    EnvObserved,
    EnvStep,
    Exhausted,
    GroupCall,
    GroupRewarded,
    Hello,
    PromptCall,
    PromptReady,
    Refused,
    RewardCall,
    Rewarded,
    Said,
    Setup,
    StillOpening,
    TaskFacts,
    TaskFailed,
    one_line,
    pack,
    unpack,
)
from dora_pipe.producers.tasks.messages import NoAnswer, normal, tool_schema
from dora_pipe.producers.tasks.port import (
    ANSWER_CHARACTERS_MAX,
    Completion,
    Environment,
    Observation,
    Retry,
    Reward,
    Row,
    Split,
    Task,
    Tool,
)
from dora_pipe.producers.tasks.registry import open_task, reward_digest, rows_digest
from dora_pipe.producers.tasks.tools import TOOL_LIMIT_S, ToolEnvironment
from dora_pipe.schemas.identity import derive_seed
from dora_pipe.schemas.wire import REWARD_MAX, sha256_hex

READ_BYTES = 1 << 18
TRACEBACKS_MAX = 20
"""So many tracebacks of users' code are shown per process; errors after them only travel."""
TRACEBACK_LINES_MAX = 60

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
"""Before the second, third, ... try at a call that raised `Retry`: twice as long each time, less up
to a half of it by chance."""

CLOSE_S = 1.0
"""For environments whose `close` awaits something, when the process ends."""
_PR_SET_PDEATHSIG = 1


class TaskServer:
    """An open task with its rows and running episodes.

    Frames are taken in the main thread, and so are calls whose functions give their results at
    once. The others go on in `Background` (see there), and are answered from its thread.
    """

    def __init__(self, task: Task, config: model.Task, write: Callable[[bytes], None]) -> None:
        """`write`: puts packed frames into the pipe, from either thread."""
        self._task, self._config, self._write = task, config, write
        self._rows: dict[Split, Sequence[Row]] = {
            "train": task.rows("train"),
            "eval": task.rows("eval"),
        }
        if not len(self._rows["train"]):
            raise TaskError("the training data has no rows", hint="see task.data and task.filter")
        self._episodes: dict[int, Environment] = {}
        self._background = Background()
        self._running: dict[int, _Running] = {}
        self._closing: set[Future[None]] = set()
        self._exhausted = False
        self._shown = 0

    def facts(self) -> TaskFacts:
        """Digests of data and reward; imports the reward's module. Raises as `Task.check` does."""
        self._task.check()
        train, train_rows = rows_digest(self._rows["train"], "train")
        evaluation, eval_rows = rows_digest(self._rows["eval"], "eval")
        return TaskFacts(
            train_digest=train,
            train_rows=train_rows,
            eval_digest=evaluation,
            eval_rows=eval_rows,
            reward_digest=reward_digest(self._task),
            single_turn=self._task.single_turn(),
            scores_groups=self._task.scores_groups(),
            packages=dict(self._task.packages()),
        )

    def take(self, frame: Call | EndEpisode | Abandon) -> None:
        """Do what a frame says; whatever goes wrong in a call is an answer."""
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
        """Close an episode, if there is one, when its call has ended."""
        world = self._episodes.pop(episode, None)
        if world is None:
            return
        under_way = [one.ended for one in self._running.values() if one.episode == episode]
        closing = self._close(world, under_way)
        if in_loop() or begin(closing) is not None:
            work = self._background.run(closing)
            self._closing.add(work)
            work.add_done_callback(self._closing.discard)

    def close(self) -> None:
        """Close every episode; what takes longer than `CLOSE_S` is left."""
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
            self._running[call.number] = running  # its answer takes it out, maybe at once
            running.work = self._background.run(work)

    async def _answer(self, call: Call) -> None:
        """Answer a call, in the thread in which it ends."""
        try:
            answer = pack(CallAnswer(call.number, await self._tried(call)))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            self._show(error)
            name = "Retry" if isinstance(error, Retry) else type(error).__name__
            message = one_line(str(error))
            failed = TaskFailed(request=call.call.request, error=name, message=message)
            answer = pack(CallAnswer(call.number, failed))
        running = self._running.pop(call.number, None)
        if running is not None:
            running.ended.set_result(None)
        if isinstance(call.call, RewardCall) and call.episode is not None:
            self.end(call.episode)
        self._write(answer)
        if in_loop():
            await asyncio.sleep(0)  # threads that it has just left are counted as hung
        if not self._exhausted and self._background.hung > HUNG_MAX:
            self._exhausted = True
            self._write(pack(Exhausted(f"more than {HUNG_MAX} of its threads hang")))

    async def _tried(self, call: Call) -> Answered:
        """The event of a call, made again as often as it raises `Retry`, if not for ever."""
        for tries in itertools.count():
            try:
                return await self._event(call)
            except Retry as error:
                if tries >= self._config.retries_max:
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
                assert call.episode is not None
                world = self._episodes[call.episode]
                return observed(request, await call_user_code(world.respond, turn))
            case RewardCall() as asked:
                return await self._score(call.episode, asked)
            case GroupCall() as asked:
                return await self._score_group(asked)

    def _row(self, split: Split, index: int) -> Row:
        rows = self._rows[split]
        if not 0 <= index < len(rows):
            raise NoAnswer(f"row {index} of {len(rows)} in `{split}`")
        return dict(rows[index])  # a copy: what users change in it does not stay

    async def _prompt(self, number: int, call: PromptCall) -> PromptReady:
        row = self._row(call.split, call.index)
        tools = tuple(await call_user_code(self._task.tools, row))
        world = await call_user_code(self._task.environment, row)
        if world is None and tools:
            world = ToolEnvironment(self._task, tools)
        asked = self._task.prompt if world is None else world.reset
        ready = prompted(call.request, await call_user_code(asked, row), tools)
        if world is None:
            return ready
        self._episodes[number] = world
        return msgspec.structs.replace(ready, episode=True)

    async def _score(self, episode: int | None, call: RewardCall) -> Rewarded:
        found: Any = None
        if episode is not None:
            world = self._episodes[episode]
            found = await call_user_code(world.reward, call.text, call.turns)
        if found is None:
            row = self._row(call.split, call.index)
            said = Completion(text=call.text, turns=call.turns, messages=call.messages)
            found = await call_user_code(self._task.score, row, said)
        return scored(call.request, found)

    async def _score_group(self, call: GroupCall) -> GroupRewarded:
        row = self._row(call.split, call.index)
        said = [await self._completion(row, one) for one in call.completions]
        found = await call_user_code(self._task.score_group, row, said)
        return scored_together(call.request, found, len(said))

    async def _completion(self, row: Row, one: Said) -> Completion:
        """Of a single turn also the conversation, where the prompt is messages."""
        if one.turn is None or len(one.turns) > 1:
            return Completion(text=one.text, turns=one.turns)
        prompt = await call_user_code(self._task.prompt, row)
        messages = () if isinstance(prompt, str) else (*normal(prompt, "prompt"),)
        said = (*messages, one.turn.message()) if messages else ()
        return Completion(text=one.text, turns=one.turns, messages=said)

    async def _close(self, world: Environment, under_way: Sequence[Future[None]]) -> None:
        try:
            if under_way:
                if not in_loop():
                    await ContinueInLoop()
                await asyncio.gather(*map(asyncio.wrap_future, under_way))
            await call_user_code(world.close)
        except (Exception, SystemExit) as error:
            self._show(error)  # nobody waits for an answer

    def _show(self, error: BaseException) -> None:
        self._shown += 1
        if self._shown <= TRACEBACKS_MAX:
            sys.stderr.write(traceback_of(error))
        if self._shown == TRACEBACKS_MAX:
            sys.stderr.write("task: further tracebacks of this process are not shown\n")


@dataclass(slots=True, kw_only=True)
class _Running:
    """A deferred call: its episode, what says that it has ended, and what cancels it."""

    episode: int | None
    ended: Future[None] = field(default_factory=Future)
    work: Future[None] | None = None


def traceback_of(error: BaseException) -> str:
    """A traceback for a role's log. What users' code says there may be of any length: its lines are
    cut, and of many lines the first and the last are kept."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    if len(lines) > TRACEBACK_LINES_MAX:
        half = TRACEBACK_LINES_MAX // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    return "".join(f"{cut(line, MESSAGE_CHARACTERS_MAX)}\n" for line in lines)


def prompted(request: str, said: object, tools: Sequence[Tool]) -> PromptReady:
    """A prompt as an answer. Raises NoAnswer where it is neither text nor messages."""
    if isinstance(said, str):
        if tools:
            raise NoAnswer("the prompt of a row with tools is text, not messages")
        return PromptReady(request=request, text=said, episode=False)
    if not isinstance(said, Sequence):
        raise NoAnswer(f"the prompt is {type(said).__name__}, neither text nor messages")
    return PromptReady(
        request=request,
        text="",
        episode=False,
        messages=normal(said, "prompt"),
        tools=tuple(map(tool_schema, tools)),
    )


def observed(request: str, seen: object) -> EnvObserved:
    """An observation as an answer. Raises NoAnswer where it is none."""
    if not isinstance(seen, Observation):
        raise NoAnswer(f"the environment gave {type(seen).__name__}, not an Observation")
    if not isinstance(seen.text, str):
        raise NoAnswer(f"the observation's text is {type(seen.text).__name__}")
    return EnvObserved(
        request=request,
        text=seen.text,
        done=bool(seen.done),
        tool=str(seen.tool),
        ok=bool(seen.ok),
        messages=normal(seen.messages, "messages") if seen.messages else (),
    )


def scored(request: str, found: float | Reward) -> Rewarded:
    """A reward as an answer. Raises NoAnswer unless all its numbers are finite numbers.

    The reward itself is trained with, and may be `REWARD_MAX` at most, positive or negative.
    """
    reward = found if isinstance(found, Reward) else Reward(value=found)
    value = finite("the reward", reward.value)
    if abs(value) > REWARD_MAX:
        raise NoAnswer(f"the reward is {value:g}, beyond {REWARD_MAX:g}")
    parts = {str(name): finite(f"part `{name}`", part) for name, part in reward.parts.items()}
    raw = None if reward.raw is None else finite("the raw reward", reward.raw)
    answer = answer_text(reward.answer)
    return Rewarded(request=request, reward=value, raw=raw, parts=parts, answer=answer)


def answer_text(answer: str) -> str:
    """As it is logged. Raises NoAnswer where it is no text."""
    if not isinstance(answer, str):
        raise NoAnswer(f"the reward's answer is {type(answer).__name__}, not a text")
    line = printable(" ".join(answer.split()))
    if len(line) <= ANSWER_CHARACTERS_MAX:
        return line
    end = sha256_hex(line.encode())[:16]
    return f"{line[: ANSWER_CHARACTERS_MAX - len(end)]}{end}"


def scored_together(request: str, found: object, count: int) -> GroupRewarded:
    """A group's rewards as an answer. Raises NoAnswer unless there is a good one for each."""
    if isinstance(found, str | bytes) or not hasattr(found, "__iter__"):
        raise NoAnswer(f"score_group gave {type(found).__name__}, not a number per completion")
    rewards = [scored(request, one) for one in found]
    if len(rewards) != count:
        raise NoAnswer(f"score_group gave {len(rewards)} numbers for {count} completions")
    return GroupRewarded(
        request=request,
        rewards=tuple(one.reward for one in rewards),
        parts=tuple(one.parts for one in rewards),
    )


def finite(what: str, value: object) -> float:
    """`value` as a finite float; numbers of numpy and others will do. Raises NoAnswer."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise NoAnswer(f"{what} is {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise NoAnswer(f"{what} is {number}")
    return number


class PlainLines(io.TextIOWrapper):
    """A stream for what users print: it may quote what a model sampled, and steers no terminal."""

    @classmethod
    def of(cls, stream: TextIO) -> PlainLines:
        """In place of a standard stream."""
        return cls(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=True,
        )

    def write(self, text: str) -> int:
        """Text, with every character that a terminal obeys as an escape."""
        super().write("\n".join(map(printable, text.split("\n"))))
        return len(text)


def main() -> None:
    """Serve until the pipe ends; the words behind it are what the process is called."""
    faulthandler.enable()
    name_process(*sys.argv[1:])
    inbox, outbox = _private_pipes()
    frames = _frames(inbox)
    setup = next(frames, None)
    if not isinstance(setup, Setup):
        return
    _die_with(setup.parent_pid)
    if setup.task.directory:
        sys.path.insert(0, setup.task.directory)
    TOOL_LIMIT_S.set(setup.task.tool_timeout_s or setup.task.environment_timeout_s)
    opened = _open(setup, _writer(outbox))
    if isinstance(opened, Refused):
        _write(outbox, pack(opened))
        return
    server, hello = opened
    _write(outbox, pack(hello))
    for frame in frames:
        if not isinstance(frame, Setup):
            server.take(frame)
    server.close()


def _open(setup: Setup, write: Callable[[bytes], None]) -> tuple[TaskServer, Hello] | Refused:
    try:
        with reporting(lambda text: _still_opening(text, write)):
            server = TaskServer(open_task(setup.task), setup.task, write)
        return server, Hello(server.facts())
    except DoraError as error:
        return Refused(error.message, error.hint, isinstance(error, ConfigError))
    except (Exception, SystemExit) as error:
        sys.stderr.write(traceback_of(error))
        message = one_line(f"the task cannot be opened: {type(error).__name__}: {error}")
        return Refused(message, None, False)


def _still_opening(text: str, write: Callable[[bytes], None]) -> None:
    say(text)
    write(pack(StillOpening()))


def _private_pipes() -> tuple[int, int]:
    """Move the protocol off the standard streams, where users' code reads and prints."""
    inbox, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout, sys.stderr = PlainLines.of(sys.stdout), PlainLines.of(sys.stderr)
    return inbox, outbox


def _die_with(parent_pid: int) -> None:
    """Be killed when the parent dies, also in the middle of users' code (Linux; else the pipe)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before we asked


def _frames(inbox: int) -> Iterator[Down]:
    buffer = bytearray()
    while data := os.read(inbox, READ_BYTES):
        buffer += data
        for body in unpack(buffer):
            yield DOWN.decode(body)


def _writer(outbox: int) -> Callable[[bytes], None]:
    """Writes whole frames, from whichever thread."""
    whole = threading.Lock()

    def write(data: bytes) -> None:
        with whole:
            _write(outbox, data)

    return write


def _write(outbox: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(outbox, view) :]


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, msgspec.DecodeError):
        sys.exit(1)  # the pool is gone, or is not one
