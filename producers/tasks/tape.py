"""The tape of an episode: what it asks of the cassette of its process, and what is recorded of it.

Everything that a cassette may answer goes through `EpisodeTape`: the beginning, every step and the
reward of an environment (`taped_environment`), every call of a tool, whatever is behind it
(`tools.call_tools`), the calls of functions that an agent's author has marked (`taped`), those of
an agent's own processes (`tape_door`), and the questions of the reward `judge`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard

import msgspec

from dora_pipe.config import model
from dora_pipe.core.clock import Clock, SystemClock
from dora_pipe.core.errors import ResourceError, TaskError
from dora_pipe.producers.tasks.calls import one_line
from dora_pipe.producers.tasks.cassette import (
    OUTSIDE,
    Answer,
    Call,
    CassetteMiss,
    CassetteRefused,
    History,
    Recorded,
    chosen,
    key_of,
    missed,
    row_digest,
    tool_call,
)
from dora_pipe.producers.tasks.cassette_file import CassetteFile
from dora_pipe.producers.tasks.kept import RaisedThere
from dora_pipe.producers.tasks.port import Retry, Row, Split, ToolCall
from dora_pipe.schemas.control import CassetteUse
from dora_pipe.schemas.wire import canonical

Mode = Literal["record", "strict", "refresh"]
"""What is done with a call that is not on the cassette: asked and recorded; refused; and
`refresh`: all are asked and recorded."""

NOTHING: Final[Answer] = {"none": True}
"""Of a row without an environment, of an environment without a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cassette:
    """The cassette of a task process.

    Example: ``Cassette(file=CassetteFile(path), mode="record", run="demo@17")``
    """

    file: CassetteFile
    mode: Mode
    run: str = ""
    """Which run records; no other is called so."""
    clock: Clock = field(default_factory=SystemClock)

    def first_rows(self, splits: Mapping[Split, Sequence[Row]]) -> dict[str, int]:
        """Of each split the first row that is on the cassette, where no other may be asked."""
        if self.mode != "strict":
            return {}
        there = {one.row for one in self.file.all()}
        found: dict[str, int] = {}
        for split, rows in splits.items():
            first = (at for at, row in enumerate(rows) if row_digest(row) in there)
            found[split] = next(first, 0)
        return found

    def find(self, asked: AskedCall) -> Recorded | None:
        """The answer, or None where the real one is to be asked. Raises CassetteMiss."""
        found = self.look(asked)
        if found is None and self.mode == "strict":
            there = self.file.of_row(asked.row)
            raise missed(asked.where, asked.call, asked.history, there, self.file.path.name)
        return found

    def look(self, asked: AskedCall) -> Recorded | None:
        """The answer, if there is one. What another process of this run has just recorded is seen:
        an episode that begins again there is answered as before."""
        key, again = key_of(asked.row, asked.history, asked.call, asked.nth), self.mode == "refresh"
        found = chosen(self.file.found(key), run=self.run, by=asked.by, again=again)
        if found is None and self.mode != "strict":
            self.file.refresh()
            found = chosen(self.file.found(key), run=self.run, by=asked.by, again=again)
        return found

    def record(self, asked: AskedCall, answer: Answer, seconds: float) -> None:
        """What the real one has answered. Raises Retry where it cannot be written now."""
        line = Recorded(
            cassette=1,
            row=asked.row,
            history=asked.history,
            call=dict(asked.call),
            nth=asked.nth,
            answer=dict(answer),
            run=self.run,
            by=asked.by,
            at_ns=self.clock.wall_ns(),
            seconds=round(seconds, 6),
        )
        try:
            self.file.append(line)
        except ResourceError as error:
            raise Retry(error.message) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCall:
    """A call at its place."""

    row: str
    history: str
    call: Call
    nth: int
    by: str
    where: str
    """The row, in words."""


def nobody_is_asked() -> bool:
    """Whether the cassette of this process must have every answer: no key is needed then."""
    cassette = CASSETTE.get()
    return cassette is not None and cassette.mode == "strict"


def open_cassette(task: model.Task, run: str) -> Cassette | None:
    """That of a task, if it has one. Raises ConfigError, ResourceError."""
    if not task.cassette:
        return None
    file = CassetteFile(Path(task.cassette), writes=task.cassette_mode != "strict")
    return Cassette(file=file, mode=task.cassette_mode, run=run)


CASSETTE: ContextVar[Cassette | None] = ContextVar("cassette of this process", default=None)
TAPE: ContextVar[EpisodeTape | None] = ContextVar("tape of this episode", default=None)
"""Of the agent, or the reward, that runs in this context."""


@contextmanager
def taping(tape: EpisodeTape | None) -> Iterator[None]:
    """Functions that are marked (`taped`) ask it. What it has refused, or could not record, is
    raised, whatever an agent has made of that."""
    before = TAPE.set(tape)
    try:
        yield
    finally:
        with suppress(ValueError):  # it has gone on in the loop, which has a context of its own
            TAPE.reset(before)
        if tape is not None and tape.failed is not None:
            raise tape.failed


def _nobody_waits() -> None:
    pass


class EpisodeTape:
    """What an episode asks of a cassette, and how much of it was there.

    Example: ``EpisodeTape(cassette, row, by="g0000000042-003", where="row 17 of train")``
    """

    def __init__(self, cassette: Cassette, row: Row, *, by: str, where: str) -> None:
        self._cassette, self._by, self._where = cassette, by, where
        self._row = row_digest(row)
        self._history = History(self._row)
        self._answers = self._asked = 0
        self._oldest_ns = 0
        self._turns: list[int] = []
        self._turn = 0
        self.failed: CassetteMiss | CassetteRefused | Retry | None = None
        """What was refused first, or could not be recorded: an agent may have caught it."""
        self.when_failed: Callable[[], object] = _nobody_waits
        """Called once it has `failed`, in whichever thread asked."""

    @property
    def mode(self) -> Mode:
        """Of its cassette."""
        return self._cassette.mode

    @property
    def use(self) -> CassetteUse:
        """How much so far."""
        return CassetteUse(
            answers=self._answers,
            asked=self._asked,
            oldest_ns=self._oldest_ns,
            turns=tuple(self._turns),
        )

    def fail(self, error: CassetteMiss | CassetteRefused | Retry) -> None:
        """Hold it against the trajectory, whatever who has asked makes of it."""
        if self.failed is None:
            self.failed = error
            self.when_failed()

    def ask(self, call: Call, nth: int = 0) -> AskedCall:
        """A call behind all that was added."""
        return AskedCall(
            row=self._row,
            history=self._history.digest,
            call=call,
            nth=nth,
            by=self._by,
            where=self._where,
        )

    def find(self, asked: AskedCall) -> Answer | None:
        """What the cassette has. Raises CassetteMiss."""
        try:
            found = self._cassette.find(asked)
        except CassetteMiss as error:
            self.fail(error)
            raise
        if found is None:
            return None
        if asked.call["kind"] == OUTSIDE:
            return found.answer
        self._answers += 1
        self._oldest_ns = min(self._oldest_ns or found.at_ns, found.at_ns)
        return found.answer

    def has(self, call: Call) -> Answer | None:
        """What it has, if it has it: nobody else is to be asked."""
        found = self._cassette.look(self.ask(call))
        return None if found is None else found.answer

    def record(self, asked: AskedCall, answer: Answer, seconds: float) -> None:
        """What the real one has answered. Raises Retry where it cannot be written now."""
        self._asked += asked.call["kind"] != OUTSIDE
        try:
            self._cassette.record(asked, answer, seconds)
        except Retry as error:
            self.fail(error)
            raise

    def begin(self, call: Call, *, stateless: bool = False) -> Begun:
        """A call of an agent or a reward, behind all that it has begun before; `stateless`: no
        later call stands behind it. Raises CassetteMiss."""
        asked = self.ask(call)
        if not stateless:
            self.add(call)
        return Begun(self.find(asked), Asking(self, asked))

    def begin_outside(self, of: str, what: Mapping[str, Any]) -> Begun:
        """A question that is of no episode (`outside`), and counted in none. Raises
        CassetteMiss."""
        call = {"kind": OUTSIDE, "of": of, **what}
        asked = AskedCall(row="", history="", call=call, nth=0, by="", where=self._where)
        return Begun(self.find(asked), Asking(self, asked))

    def asking(self, asked: AskedCall) -> Asking:
        """Around what asks the real one."""
        return Asking(self, asked)

    def add(self, call: Call, answer: Answer | None = None) -> None:
        """What later calls stand behind."""
        self._history.add(call, answer)

    def end_turn(self, *, given: bool) -> None:
        """A turn of the model has its answer, which was `given` by the cassette alone."""
        if given:
            self._turns.append(self._turn)
        self._turn += 1


class Asking:
    """Asks the real one in its block, and records what that answers, or raises; what says that
    something outside has failed (`Retry`) is no answer."""

    def __init__(self, tape: EpisodeTape, asked: AskedCall) -> None:
        self._tape, self._asked = tape, asked
        self._started = time.monotonic()

    def __enter__(self) -> Asking:
        return self

    def answered(self, answer: Answer) -> None:
        self._tape.record(self._asked, answer, time.monotonic() - self._started)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if is_answer(error):
            self.answered(raised(error))


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that was begun: what the cassette has, or else whom to tell what the real one says."""

    found: Answer | None
    asking: Asking

    def answered(self, answer: Answer) -> None:
        """What the real one has answered. Raises Retry where it cannot be written now."""
        self.asking.answered(answer)


class TapedTurn:
    """The calls of tools of a turn, which are made at the same time: each stands behind the turns
    before."""

    def __init__(self, tape: EpisodeTape, calls: Sequence[ToolCall], there: Container[str]) -> None:
        """`there`: names of tools; what calls none of them is told so by nobody's answer."""
        self._tape = tape
        self._started = time.monotonic()
        self._asked: dict[int, AskedCall] = {}
        self._given = True
        seen: Counter[bytes] = Counter()
        for at, one in enumerate(calls):
            if not one.error and one.name in there:
                call = tool_call(one.name, one.arguments)
                same = canonical(call)
                self._asked[at] = tape.ask(call, seen[same])
                seen[same] += 1

    def find(self, known: Container[int]) -> dict[int, Answer]:
        """What the cassette has, by place in the turn, but for what is known. Raises
        CassetteMiss."""
        found: dict[int, Answer] = {}
        for at, asked in self._asked.items():
            if at not in known and (answer := self._tape.find(asked)) is not None:
                found[at] = answer
        return found

    def record(self, at: int, told: Answer) -> None:
        """What a tool has answered, if it was one."""
        if at in self._asked:
            self._given = False
            self._tape.record(self._asked[at], told, time.monotonic() - self._started)

    def end(self, told: Sequence[Answer]) -> None:
        """All are answered; later turns stand behind them."""
        for at, asked in self._asked.items():
            self._tape.add(asked.call, told[at])
        self._tape.end_turn(given=self._given and bool(self._asked))


def outside(of: str, what: Mapping[str, Any], ask: Callable[[], Any]) -> Any:
    """What somebody outside says that is asked for no episode, such as the tools of a server
    (`of`, which is named where it is otherwise); `what` says which question it is.

    Raises TaskError where the cassette does not have it and nobody may be asked.
    """
    cassette = CASSETTE.get()
    if cassette is None:
        return ask()
    call = {"kind": OUTSIDE, "of": of, **what}
    asked = AskedCall(row="", history="", call=call, nth=0, by="", where=of)
    try:
        found = cassette.find(asked)
    except CassetteMiss as error:
        raise TaskError(str(error)) from None
    if found is not None:
        return found.answer["value"]
    started = time.monotonic()
    value = msgspec.json.decode(msgspec.json.encode(ask()))
    cassette.record(asked, {"value": value}, time.monotonic() - started)
    return value


def is_answer(error: BaseException | None) -> TypeGuard[Exception | SystemExit]:
    """Whether what a call raises is what it answers: not where something outside has failed."""
    return isinstance(error, Exception | SystemExit) and not isinstance(error, Retry)


def raised(error: BaseException) -> Answer:
    """What was raised, as it is recorded."""
    name = error.error if isinstance(error, RaisedThere) else type(error).__name__
    return {"error": name, "message": one_line(str(error))}


def raise_recorded(answer: Answer) -> None:
    """Raise RaisedThere where the answer is what was raised."""
    if "error" in answer:
        raise RaisedThere(answer["error"], answer["message"])
