"""The process that runs users' code: opens a task and answers calls, one at a time, in order.

It decides what counts as an answer: a reward is a finite number, a prompt and an observation are
text. Whatever the user's code raises is an answer too. It never imports torch by itself, speaks
over private copies of its standard streams (what users print goes to stderr), and dies with the
process that started it.

    python -m dora_pipe.producers.tasks.server      started by `pool.TaskPool`, of no use by hand
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dora_pipe.errors import ConfigError, DoraError, TaskError
from dora_pipe.producers.tasks import wire
from dora_pipe.producers.tasks.calls import one_line
from dora_pipe.producers.tasks.port import Environment, Observation, Reward, Row, Split, Task
from dora_pipe.producers.tasks.registry import open_task, reward_digest, rows_digest

READ_BYTES = 1 << 18
TRACEBACKS_MAX = 20
"""So many tracebacks of users' code are shown per process; errors after them only travel."""
_PR_SET_PDEATHSIG = 1


class NoAnswer(Exception):
    """What the user's code gave is no answer to the call."""


class Server:
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

    def facts(self) -> wire.Facts:
        """Digests of data and reward; imports the reward's module."""
        train, train_rows = rows_digest(self._rows["train"], "train")
        evaluation, eval_rows = rows_digest(self._rows["eval"], "eval")
        return wire.Facts(
            train_digest=train,
            train_rows=train_rows,
            eval_digest=evaluation,
            eval_rows=eval_rows,
            reward_digest=reward_digest(self._task),
            single_turn=type(self._task).environment is Task.environment,
        )

    def answer(self, call: wire.Call) -> bytes:
        """The packed answer to a call; whatever goes wrong in it is an answer."""
        try:
            return wire.pack(self._answer(call))
        except (Exception, SystemExit) as error:
            self._show(error)
            failed = wire.Failed(call.number, type(error).__name__, one_line(str(error)))
            return wire.pack(failed)

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

    def _answer(self, call: wire.Call) -> wire.Answer:
        match call:
            case wire.Prompt():
                return self._prompt(call)
            case wire.Step():
                seen = self._episodes[call.episode].step(call.text)
                return observed(call.number, seen)
            case wire.Score():
                return self._score(call)

    def _row(self, split: Split, index: int) -> Row:
        rows = self._rows[split]
        if not 0 <= index < len(rows):
            raise NoAnswer(f"row {index} of {len(rows)} in `{split}`")
        return dict(rows[index])  # a copy: what users change in it does not stay

    def _prompt(self, call: wire.Prompt) -> wire.Prompted:
        row = self._row(call.split, call.index)
        world = self._task.environment(row)
        text = self._task.prompt(row) if world is None else world.reset(row)
        if not isinstance(text, str):
            raise NoAnswer(f"the prompt is {type(text).__name__}, not text")
        if world is not None:
            self._episodes[call.number] = world
        return wire.Prompted(call.number, text, world is not None)

    def _score(self, call: wire.Score) -> wire.Scored:
        found: Any = None
        if call.episode is not None:
            world = self._episodes[call.episode]
            try:
                found = world.reward(call.text, call.turns)
            finally:
                self.end(call.episode)
        if found is None:
            row = self._row(call.split, call.index)
            found = self._task.reward(row, call.text, call.turns)
        return scored(call.number, found)

    def _show(self, error: BaseException) -> None:
        self._shown += 1
        if self._shown <= TRACEBACKS_MAX:
            traceback.print_exception(error)
        if self._shown == TRACEBACKS_MAX:
            sys.stderr.write("task: further tracebacks of this process are not shown\n")


def observed(number: int, seen: Observation) -> wire.Observed:
    """An observation as an answer. Raises NoAnswer where it is none."""
    if not isinstance(seen, Observation):
        raise NoAnswer(f"the environment gave {type(seen).__name__}, not an Observation")
    if not isinstance(seen.text, str):
        raise NoAnswer(f"the observation's text is {type(seen.text).__name__}")
    return wire.Observed(number, seen.text, bool(seen.done), str(seen.tool), bool(seen.ok))


def scored(number: int, found: float | Reward) -> wire.Scored:
    """A reward as an answer. Raises NoAnswer unless all its numbers are finite numbers."""
    reward = found if isinstance(found, Reward) else Reward(value=found)
    parts = {str(name): finite(f"part `{name}`", part) for name, part in reward.parts.items()}
    raw = None if reward.raw is None else finite("the raw reward", reward.raw)
    return wire.Scored(number, finite("the reward", reward.value), raw, parts)


def finite(what: str, value: object) -> float:
    """`value` as a finite float; numbers of numpy and others will do. Raises NoAnswer."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise NoAnswer(f"{what} is {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise NoAnswer(f"{what} is {number}")
    return number


def main() -> None:
    """Serve until the pipe ends."""
    faulthandler.enable()
    inbox, outbox = _private_pipes()
    frames = _frames(inbox)
    setup = next(frames, None)
    if not isinstance(setup, wire.Setup):
        return
    _die_with(setup.parent_pid)
    if setup.task.directory:
        sys.path.insert(0, setup.task.directory)
    opened = _open(setup)
    if isinstance(opened, wire.Refused):
        _write(outbox, wire.pack(opened))
        return
    server, hello = opened
    _write(outbox, wire.pack(hello))
    for frame in frames:
        if isinstance(frame, wire.End):
            server.end(frame.episode)
        elif not isinstance(frame, wire.Setup):
            _write(outbox, server.answer(frame))
    server.close()


def _open(setup: wire.Setup) -> tuple[Server, wire.Hello] | wire.Refused:
    try:
        server = Server(open_task(setup.task))
        return server, wire.Hello(server.facts())
    except DoraError as error:
        return wire.Refused(error.message, error.hint, isinstance(error, ConfigError))
    except (Exception, SystemExit) as error:
        traceback.print_exception(error)
        message = one_line(f"the task cannot be opened: {type(error).__name__}: {error}")
        return wire.Refused(message, None, False)


def _private_pipes() -> tuple[int, int]:
    """Move the protocol off the standard streams, where users' code reads and prints."""
    inbox, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return inbox, outbox


def _die_with(parent_pid: int) -> None:
    """Be killed when the parent dies, also in the middle of users' code (Linux; else the pipe)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before we asked


def _frames(inbox: int) -> Iterator[wire.Down]:
    buffer = bytearray()
    while data := os.read(inbox, READ_BYTES):
        buffer += data
        for body in wire.unpack(buffer):
            yield wire.DOWN.decode(body)


def _write(outbox: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(outbox, view) :]


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, msgspec.DecodeError):
        sys.exit(1)  # the pool is gone, or is not one
