"""What two recordings say of the same calls: which tools answer otherwise. Pure.

A call is the same where its row is, and all that was asked and answered before it; so of an episode
in which an answer has changed the first such answer is named, and what came behind it is not
compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dora_pipe.producers.tasks.cassette import (
    LOGGED_REWARD,
    OUTSIDE,
    REWARD,
    Recorded,
    name_of,
    said,
)
from dora_pipe.producers.tasks.tape import NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedAnswer:
    """A call that is answered otherwise.

    Example: ``ChangedAnswer(trajectory="g0000000042-003", call='add({"a":1})', recorded="1",
    found="2")``
    """

    trajectory: str
    """Of the run."""
    call: str
    recorded: str
    """On the cassette; of several answers the last one."""
    found: str
    """In the run."""


@dataclass(slots=True, kw_only=True)
class ComparedTool:
    """A tool, or the environment, in both recordings."""

    name: str
    compared: int = 0
    """Calls of the run that are on the cassette."""
    unknown: int = 0
    """Calls of the run that are not."""
    changed: list[ChangedAnswer] = field(default_factory=list)


def compare(found: Iterable[Recorded], known: Mapping[bytes, Sequence[Any]]) -> list[ComparedTool]:
    """The answers of a run beside those of a cassette, by name. `known` has the answers of the
    cassette by key (`answers_by_key`); an answer by chance is the same as any of them."""
    tools: dict[str, ComparedTool] = {}
    for one in found:
        if one.call["kind"] in (REWARD, LOGGED_REWARD, OUTSIDE) or one.answer == NOTHING:
            continue
        name = name_of(one.call)
        tool = tools.setdefault(name, ComparedTool(name=name))
        answers = known.get(one.key)
        if answers is None:
            tool.unknown += 1
            continue
        tool.compared += 1
        if (answer := _essence(one.answer)) not in answers:
            changed = ChangedAnswer(
                trajectory=one.by,
                call=said(one.call),
                recorded=_words(answers[-1]),
                found=_words(answer),
            )
            tool.changed.append(changed)
    return [tools[name] for name in sorted(tools)]


def answers_by_key(recorded: Iterable[Recorded]) -> dict[bytes, list[Any]]:
    """All different answers of each call, in order."""
    found: dict[bytes, list[Any]] = {}
    for one in recorded:
        answers, answer = found.setdefault(one.key, []), _essence(one.answer)
        if answer in answers:
            answers.remove(answer)
        answers.append(answer)
    return found


def _essence(answer: Mapping[str, Any]) -> Any:
    """Whether one tool of several was well is not to be read in a log: its words are."""
    if answer.keys() == {"text", "ok"}:
        return answer["text"]
    return answer


def _words(answer: Any) -> str:
    if isinstance(answer, Mapping):
        for key in ("text", "value", "error"):
            if key in answer:
                return str(answer[key])
    return str(answer)
