"""The process that runs users' code: opens a task and answers calls, one at a time, in order.

It decides what counts as an answer: a reward is a number within `REWARD_MAX`, a prompt and an
observation are text. Whatever the user's code raises is an answer too. It never imports torch by
itself, speaks over private copies of its standard streams (what users print goes to stderr), and
dies with the process that started it.

    python -m dora_pipe.producers.tasks.server      started by `pool.TaskPool`, of no use by hand
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import math
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import msgspec

from dora_pipe.core.console import name_process
from dora_pipe.core.errors import (
    MESSAGE_CHARACTERS_MAX,
    ConfigError,
    DoraError,
    TaskError,
    printable,
)
from dora_pipe.core.errors import one_line as cut
from dora_pipe.producers.tasks.calls import (
    DOWN,
    Answered,
    Call,
    CallAnswer,
    Down,
    EndEpisode,
    EnvObserved,
    EnvStep,
    Hello,
    PromptCall,
    PromptReady,
    Refused,
    RewardCall,
    Rewarded,
    Setup,
    TaskFacts,
    TaskFailed,
    one_line,
    pack,
    unpack,
)
from dora_pipe.producers.tasks.messages import NoAnswer
from dora_pipe.producers.tasks.port import Environment, Observation, Reward, Row, Split, Task
from dora_pipe.producers.tasks.registry import open_task, reward_digest, rows_digest
from dora_pipe.schemas.wire import REWARD_MAX

READ_BYTES = 1 << 18
TRACEBACKS_MAX = 20
"""So many tracebacks of users' code are shown per process; errors after them only travel."""
TRACEBACK_LINES_MAX = 60
_PR_SET_PDEATHSIG = 1


class TaskServer:
    """An open task with its rows and running episodes."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._rows: dict[Split, Sequence[Row]] = {
            "train": task.rows("train"),
            "eval": task.rows("eval"),
        }
        if not len(self._rows["train"]):
            raise TaskError("the training data has no rows")
        self._episodes: dict[int, Environment] = {}
        self._shown = 0

    def facts(self) -> TaskFacts:
        """Digests of data and reward; imports the reward's module."""
        train, train_rows = rows_digest(self._rows["train"], "train")
        evaluation, eval_rows = rows_digest(self._rows["eval"], "eval")
        return TaskFacts(
            train_digest=train,
            train_rows=train_rows,
            eval_digest=evaluation,
            eval_rows=eval_rows,
            reward_digest=reward_digest(self._task),
            single_turn=type(self._task).environment is Task.environment,
        )

    def answer(self, call: Call) -> bytes:
        """The packed answer to a call; whatever goes wrong in it is an answer."""
        try:
            return pack(CallAnswer(call.number, self._event(call)))
        except (Exception, SystemExit) as error:
            self._show(error)
            name, message = type(error).__name__, one_line(str(error))
            failed = TaskFailed(request=call.call.request, error=name, message=message)
            return pack(CallAnswer(call.number, failed))

    def end(self, episode: int) -> None:
        """Close an episode, if there is one."""
        world = self._episodes.pop(episode, None)
        try:
            if world is not None:
                world.close()
        except (Exception, SystemExit) as error:
            self._show(error)  # nobody waits for an answer

    def close(self) -> None:
        """Close every episode."""
        for episode in list(self._episodes):
            self.end(episode)

    def _event(self, call: Call) -> Answered:
        match call.call:
            case PromptCall() as asked:
                return self._prompt(call.number, asked)
            case EnvStep(request=request, turn=turn):
                assert call.episode is not None
                return observed(request, self._episodes[call.episode].respond(turn))
            case RewardCall() as asked:
                return self._score(call.episode, asked)

    def _row(self, split: Split, index: int) -> Row:
        rows = self._rows[split]
        if not 0 <= index < len(rows):
            raise NoAnswer(f"row {index} of {len(rows)} in `{split}`")
        return dict(rows[index])  # a copy: what users change in it does not stay

    def _prompt(self, number: int, call: PromptCall) -> PromptReady:
        row = self._row(call.split, call.index)
        world = self._task.environment(row)
        text = self._task.prompt(row) if world is None else world.reset(row)
        if not isinstance(text, str):
            raise NoAnswer(f"the prompt is {type(text).__name__}, not text")
        if world is not None:
            self._episodes[number] = world
        return PromptReady(request=call.request, text=text, episode=world is not None)

    def _score(self, episode: int | None, call: RewardCall) -> Rewarded:
        found: Any = None
        if episode is not None:
            world = self._episodes[episode]
            try:
                found = world.reward(call.text, call.turns)
            finally:
                self.end(episode)
        if found is None:
            row = self._row(call.split, call.index)
            found = self._task.reward(row, call.text, call.turns)
        return scored(call.request, found)

    def _show(self, error: BaseException) -> None:
        self._shown += 1
        if self._shown <= TRACEBACKS_MAX:
            sys.stderr.write(traceback_of(error))
        if self._shown == TRACEBACKS_MAX:
            sys.stderr.write("task: further tracebacks of this process are not shown\n")


def traceback_of(error: BaseException) -> str:
    """A traceback for a role's log. What users' code says there may be of any length: its lines are
    cut, and of many lines the first and the last are kept."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    if len(lines) > TRACEBACK_LINES_MAX:
        half = TRACEBACK_LINES_MAX // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    return "".join(f"{cut(line, MESSAGE_CHARACTERS_MAX)}\n" for line in lines)


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
    return Rewarded(request=request, reward=value, raw=raw, parts=parts)


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
    opened = _open(setup)
    if isinstance(opened, Refused):
        _write(outbox, pack(opened))
        return
    server, hello = opened
    _write(outbox, pack(hello))
    for frame in frames:
        if isinstance(frame, EndEpisode):
            server.end(frame.episode)
        elif isinstance(frame, Call):
            _write(outbox, server.answer(frame))
    server.close()


def _open(setup: Setup) -> tuple[TaskServer, Hello] | Refused:
    try:
        server = TaskServer(open_task(setup.task))
        return server, Hello(server.facts())
    except DoraError as error:
        return Refused(error.message, error.hint, isinstance(error, ConfigError))
    except (Exception, SystemExit) as error:
        sys.stderr.write(traceback_of(error))
        message = one_line(f"the task cannot be opened: {type(error).__name__}: {error}")
        return Refused(message, None, False)


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


def _write(outbox: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(outbox, view) :]


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, msgspec.DecodeError):
        sys.exit(1)  # the pool is gone, or is not one
