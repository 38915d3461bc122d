"""Recorded answers of environments and tools: by what a call is known, and which answer it gets.

A call is known by the row of its episode, by what the episode was asked and answered before it
(`History`), and by itself; nothing of the run, its seeds or its weights is part of that. Pure:
`cassette_file` reads and writes, `taped` asks.

A tool that answers by chance has several answers to one call. They are kept, each with the
trajectory that got it, and given again so that nothing depends on who asks first:

1. To the same trajectory its own, the last one where it asked several times.
2. Else those of the recording that is newest, ordered by trajectory: the sibling's number says
   which, counted around.

What a run records itself is given to the trajectory that it was recorded for, and to no other: a
run that records samples as one that does not.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from dora_pipe.core.errors import one_line
from dora_pipe.producers.tasks.port import Row, Turn
from dora_pipe.schemas.wire import canonical

DIGITS: Final = 32
"""Of digests of rows and histories: hex, half of a sha256."""

KEY_BYTES: Final = 16

NEAR_MAX: Final = 2000
"""Calls of a row among which the nearest is looked for."""

RECORDS: Final = 'task.cassette_mode = "record" records it'

CALL_CHARACTERS: Final = 60
"""Of a call, as a message names it."""

RESET: Final = "reset"
STEP: Final = "step"
TOOL: Final = "tool"
REWARD: Final = "reward"
LOGGED_REWARD: Final = "logged-reward"
"""Of a run's log: whose it is, the environment's or the task's, is not known there."""
OUTSIDE: Final = "outside"
"""Asked for no episode: which tools a server has."""

_SIBLING: Final = re.compile(r"-(\d+)$")

Call = Mapping[str, Any]
Answer = Mapping[str, Any]


class CassetteMiss(Exception):
    """A call that is not on the cassette, where nothing else may answer."""


class CassetteRefused(Exception):
    """An agent has asked in a way that no cassette is asked."""


class CassetteDiffers(Exception):
    """The real environment does not answer as the cassette has before it; nobody can go on."""


OF_A_CASSETTE: Final = frozenset(
    one.__name__ for one in (CassetteMiss, CassetteRefused, CassetteDiffers)
)
"""Names of errors that are held against a trajectory whatever else it was."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a cassette: a call and its answer.

    Example: ``{"cassette":1,"row":"9f...","history":"9f...","call":{"kind":"tool","name":"search",
    "arguments":{"query":"x"}},"answer":{"text":"nothing","ok":true},"run":"demo@17","by":
    "g0000000042-003","at_ns":17,"seconds":0.2}``
    """

    cassette: Literal[1]
    """The form of the line."""
    row: str
    """`row_digest`; empty: of no row."""
    history: str
    """What stood before the call (`History`)."""
    call: dict[str, Any]
    """`kind`, and what was asked."""
    nth: int = 0
    """Of equal calls that were made at the same time."""
    answer: dict[str, Any]
    """What came of it; `error` and `message` of what was raised."""
    run: str = ""
    """Which run recorded it; empty: none."""
    by: str = ""
    """The trajectory that asked."""
    at_ns: int
    """When it was answered: wall clock, ns since 1970."""
    seconds: float = 0.0
    """How long the answer took."""

    @property
    def key(self) -> bytes:
        return key_of(self.row, self.history, self.call, self.nth)


def key_of(row: str, history: str, call: Call, nth: int) -> bytes:
    """By what an answer is found: `KEY_BYTES` bytes."""
    said = canonical([row, history, nth, call])
    return hashlib.sha256(said).digest()[:KEY_BYTES]


def row_digest(row: Row) -> str:
    """Of a row's content, wherever it stands in its data."""
    return hashlib.sha256(canonical(row)).hexdigest()[:DIGITS]


class History:
    """What an episode was asked and answered so far, as a digest that grows.

    Example: ``History(row).add(step_of(turn), {"text": "go on", "done": False})``
    """

    def __init__(self, row: str) -> None:
        """`row`: its digest."""
        self.digest = row

    def add(self, call: Call, answer: Answer | None = None) -> None:
        """One more; None: the answer is not part of it."""
        said = canonical([self.digest, call, answer])
        self.digest = hashlib.sha256(said).hexdigest()[:DIGITS]


def step_of(turn: Turn) -> dict[str, Any]:
    """The call that a turn of the model is for its environment."""
    return {"kind": STEP, "turn": msgspec.to_builtins(turn)}


def tool_call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": TOOL, "name": name, "arguments": dict(arguments)}


def sibling_of(trajectory: str) -> int:
    """``sibling_of("g0000000042-003") == 3``; 0 of what is no trajectory's name."""
    found = _SIBLING.search(trajectory)
    return int(found[1]) if found else 0


def chosen(found: Sequence[Recorded], *, run: str, by: str, again: bool = False) -> Recorded | None:
    """The answer that a trajectory of this run gets, if there is one. `found` are all of one key,
    in the order in which they were recorded.

    `again`: only what it was answered in this run itself.
    """
    own = [one for one in found if run and one.run == run]
    mine = [one for one in own if one.by == by]
    if mine:
        return mine[-1]
    others = [] if again else [one for one in found if not run or one.run != run]
    if not others:
        return None
    newest = max(others, key=lambda one: one.at_ns).run
    latest = {one.by: one for one in others if one.run == newest}
    if by in latest:
        return latest[by]
    ordered = sorted(latest)
    return latest[ordered[sibling_of(by) % len(ordered)]]


def missed(
    where: str, call: Call, history: str, there: Iterable[Recorded], cassette: str
) -> CassetteMiss:
    """What is said of a call that is on no cassette; `there` are the recorded ones of its row."""
    near = _nearest(call, history, there)
    return CassetteMiss(f"{where}: {said(call)} is not on {cassette}; {near}; {RECORDS}")


def _nearest(call: Call, history: str, there: Iterable[Recorded]) -> str:
    first: dict[bytes, Recorded] = {}
    for one in there:
        if len(first) == NEAR_MAX:
            break
        first.setdefault(one.key, one)
    if not first:
        return "nothing of this row is"
    if any(one.call == call and one.history != history for one in first.values()):
        return "nearest: the same call, behind other calls or answers"
    here = {said(one.call, 400): one for one in first.values() if one.history == history}
    where = "at the same place" if here else "elsewhere in the row's episodes"
    texts = here or {said(one.call, 400): one for one in first.values()}
    near = difflib.get_close_matches(said(call, 400), texts, n=1, cutoff=0.0)
    return f"nearest: {one_line(near[0], CALL_CHARACTERS)}, {where}"


def said(call: Call, characters: int = CALL_CHARACTERS) -> str:
    """A call in words. ``said(tool_call("add", {"a": 1})) == 'add({"a":1})'``"""
    match call:
        case {"kind": "tool", "name": name, "arguments": arguments}:
            text = f"{name}({canonical(arguments).decode()})"
        case {"kind": "step", "turn": dict(turn)}:
            calls = [f"{one.get('name')}" for one in turn.get("tool_calls", ())]
            text = f"the turn {turn.get('text', '')!r}{' with ' * bool(calls)}{', '.join(calls)}"
        case {"kind": "outside", "of": of, "asked": what}:
            text = f"what {of} says of `{what}`"
        case {"kind": "reset"}:
            text = "the beginning of the episode"
        case {"kind": "reward" | "logged-reward", "text": ended}:
            text = f"the reward of the episode that ends with {ended!r}"
        case _:
            text = canonical(call).decode()
    return one_line(text, characters)


def name_of(call: Call) -> str:
    """Whose answer it is: a tool's name, or what of an environment. Example: ``name_of(step)`` is
    ``"the environment"``."""
    match call:
        case {"kind": "tool", "name": str(name)}:
            return name
        case {"kind": "outside", "of": str(name)}:
            return name
        case {"kind": "reward" | "logged-reward"}:
            return "the environment's reward"
        case _:
            return "the environment"
