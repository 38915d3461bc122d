"""Answers of a run's environments and tools as a cassette has them, made from its records alone.

A record has tokens, a cassette has what was said before the tokenizer and the chat template made
tokens of it. So texts are decoded, and messages are found between what the template writes around
them; what does not come out as the very tokens of the record is left out, with a reason. The rest
of a trajectory stands behind it and is left out too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.chat.chat import Chat, Conversation
from dora_pipe.producers.tasks.calls import RowDescribed
from dora_pipe.producers.tasks.cassette import (
    LOGGED_REWARD,
    RESET,
    Call,
    History,
    Recorded,
    step_of,
    tool_call,
)
from dora_pipe.producers.tasks.port import Turn
from dora_pipe.producers.tasks.tape import NOTHING
from dora_pipe.producers.tasks.taped_environment import reward_answer, step_answer
from dora_pipe.schemas.trajectory import Segment, Trajectory

MARK: Final = "qzx{}xzq"
"""Stands for a content, to see what a template writes around it."""

OF_AN_AGENT: Final = "what an agent's tools have answered is in no record"
NO_TEXT: Final = "its prompt cannot be read back from its tokens"
NO_ANSWER: Final = "an answer cannot be read back from its tokens"

_FAILED: Final = "error: "


class Words(Protocol):
    """A run's tokenizer, by the rule of its task."""

    def prompt_ids(self, text: str) -> list[int]: ...

    def ids(self, text: str) -> list[int]: ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Without special tokens."""
        ...

    def full_text(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A turn of the model and what it was answered."""

    said: list[int]
    answer: list[int]
    tool: str
    ok: bool
    done: bool
    asked_ns: int
    answered_ns: int


class NotReadable(Exception):
    """What stands in a record and cannot be read back."""


def exchanges_of(one: Trajectory) -> tuple[list[Exchange], list[int]]:
    """Every turn that was answered, and the last one where nobody has answered it."""
    found: list[Exchange] = []
    said: list[int] = []
    answers = [segment for segment in one.segments if segment.kind in ("tool", "environment")]
    for segment in one.segments[1:]:
        ids = list(one.token_ids[segment.start : segment.end])
        if segment.kind == "model":
            said += ids
            continue
        last = segment is answers[-1] and segment is one.segments[-1]
        found.append(_exchange(segment, said, ids, last and one.meta.finish == "environment"))
        said = []
    return found, said


def _exchange(segment: Segment, said: list[int], ids: list[int], done: bool) -> Exchange:
    return Exchange(
        said=said,
        answer=ids,
        tool=segment.tool,
        ok=segment.ok,
        done=done,
        asked_ns=segment.start_ns,
        answered_ns=segment.end_ns,
    )


def recorded_of(
    one: Trajectory, row: RowDescribed, words: Words, chat: Chat | None, run: str
) -> Iterator[Recorded]:
    """What a cassette has of a trajectory, in order. Raises NotReadable behind what can be read."""
    if one.meta.calls:
        raise NotReadable(OF_AN_AGENT)
    reader = _Reader(one, row, words, chat, run)
    if row.environment:
        yield from reader.of_environment()
    elif row.tools:
        yield from reader.of_tools()


class _Reader:
    """A trajectory on its way."""

    def __init__(
        self, one: Trajectory, row: RowDescribed, words: Words, chat: Chat | None, run: str
    ) -> None:
        self._one, self._row, self._words, self._chat, self._run = one, row, words, chat, run
        self._history = History(row.digest)
        self._prompt = list(one.token_ids[: one.meta.prompt_tokens])

    def of_environment(self) -> Iterator[Recorded]:
        """Its beginning, its answers, its reward."""
        exchanges, left = exchanges_of(self._one)
        if not exchanges and self._one.meta.finish != "length":
            return
        conversation, begun = self._begin()
        placed_ns = self._one.meta.times.placed
        yield self._line({"kind": RESET}, begun, placed_ns, placed_ns)
        self._history.add({"kind": RESET}, begun)
        text = ""
        for each in exchanges:
            turn = self._turn(conversation, each.said)
            said = self._environment_said(conversation, turn, each)
            answer = step_answer(*said, done=each.done, tool=each.tool, ok=each.ok)
            text = turn.text
            yield self._line(step_of(turn), answer, each.asked_ns, each.answered_ns)
            self._history.add(step_of(turn), answer)
        if left:
            text = self._turn(conversation, left).text
        yield from self._reward(text)

    def _reward(self, text: str) -> Iterator[Recorded]:
        """Of the whole episode; an answer that did not fit is in no record, nor what it ended."""
        one, meta = self._one, self._one.meta
        ended = one.segments[-1].kind != "model" or meta.finish != "environment"
        if one.reward is None or meta.rewarded_by != "task" or not ended:
            return
        answer = reward_answer(one.reward, meta.reward_raw, meta.reward_parts, meta.reward_answer)
        at_ns = meta.times.rewarded or meta.times.finished or meta.times.placed
        call = {"kind": LOGGED_REWARD, "text": text}
        yield self._line(call, answer, meta.times.finished or at_ns, at_ns)

    def _begin(self) -> tuple[Conversation | None, dict[str, Any]]:
        """Its prompt: a text, or messages of a user, behind one of the system."""
        if self._chat is None:
            text = self._words.text(self._prompt)
            for found in (text, self._words.full_text(self._prompt)):
                if self._words.prompt_ids(found) == self._prompt:
                    return None, {"text": found}
            raise NotReadable(NO_TEXT)
        for roles in (("user",), ("system", "user")):
            bare = [{"role": role, "content": ""} for role in roles]
            contents = self._contents(self._prompt_ids, bare, self._prompt)
            if contents is not None:
                messages = _with(bare, contents)
                return self._chat.start(messages, self._row.tools), {"messages": messages}
        raise NotReadable(NO_TEXT)

    def _prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        assert self._chat is not None
        return self._chat.start(messages, self._row.tools).prompt_ids

    def of_tools(self) -> Iterator[Recorded]:
        """Every call that a tool has answered."""
        assert self._chat is not None, "rows with tools have prompts of messages"
        names = {str(one["function"]["name"]) for one in self._row.tools}
        conversation = self._chat.start(self._row.messages, self._row.tools)
        if list(conversation.prompt_ids) != self._prompt:
            raise NotReadable("its prompt is another one now")
        if self._row.may_have:
            placed_ns = self._one.meta.times.placed
            yield self._line({"kind": RESET}, NOTHING, placed_ns, placed_ns)
        for each in exchanges_of(self._one)[0]:
            turn = conversation.say(each.said)
            if not turn.tool_calls:
                return
            contents = self._tools_said(conversation, turn, each)
            behind = list[tuple[dict[str, Any], dict[str, Any]]]()
            for at, (call, text) in enumerate(zip(turn.tool_calls, contents, strict=True)):
                if call.error or call.name not in names:
                    continue
                asked = tool_call(call.name, call.arguments)
                ok = each.ok or (_any_failed(contents) and not text.startswith(_FAILED))
                same = [one.arguments for one in turn.tool_calls[:at] if one.name == call.name]
                answer = {"text": text, "ok": ok}
                nth = same.count(call.arguments)
                yield self._line(asked, answer, each.asked_ns, each.answered_ns, nth)
                behind.append((asked, answer))
            for asked, answer in behind:
                self._history.add(asked, answer)

    def _turn(self, conversation: Conversation | None, ids: list[int]) -> Turn:
        return Turn(text=self._words.text(ids)) if conversation is None else conversation.say(ids)

    def _environment_said(
        self, conversation: Conversation | None, turn: Turn, each: Exchange
    ) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """Text, or messages of tools where there were calls."""
        if conversation is None:
            text = self._words.text(each.answer)
            if self._words.ids(text) != each.answer:
                raise NotReadable(NO_ANSWER)
            return text, ()
        if not each.answer:
            conversation.answered((), go_on=not each.done)
            return "", ()
        forms: list[list[dict[str, Any]]] = [[{"role": "user", "content": ""}]]
        if turn.tool_calls:
            forms.insert(0, _tool_messages(turn))
        for bare in forms:
            contents = self._answered(conversation, bare, each)
            if contents is not None:
                own = bare[0]["role"] == "user"
                return (contents[0], ()) if own else ("", _with(bare, contents))
        raise NotReadable(NO_ANSWER)

    def _tools_said(self, conversation: Conversation, turn: Turn, each: Exchange) -> list[str]:
        contents = self._answered(conversation, _tool_messages(turn), each)
        if contents is None:
            raise NotReadable(NO_ANSWER)
        return contents

    def _answered(
        self, conversation: Conversation, bare: list[dict[str, Any]], each: Exchange
    ) -> list[str] | None:
        """The contents of the messages that answer a turn; they stand in the conversation then."""
        bridge = partial(conversation.bridge, go_on=not each.done)
        contents = self._contents(bridge, bare, each.answer)
        if contents is not None:
            conversation.answered(_with(bare, contents), go_on=not each.done)
        return contents

    def _contents(
        self,
        render: Callable[[Sequence[Mapping[str, Any]]], Sequence[int]],
        bare: Sequence[Mapping[str, Any]],
        ids: list[int],
    ) -> list[str] | None:
        """Contents with which these messages are rendered as these very tokens; None: there are
        none."""
        text = self._words.full_text
        try:
            marks = self._marks(len(bare), text(render(bare)))
            contents = _between(text(render(_with(bare, marks))), marks, text(ids))
            found = contents is not None and list(render(_with(bare, contents))) == ids
        except TaskError:
            return None
        return contents if found else None

    def _marks(self, count: int, bare: str) -> list[str]:
        """Texts that stand nowhere else, to see what is written around them; of a vocabulary of
        words some of those of the record."""
        marks = [MARK.format(at) for at in range(count)]
        if all(self._words.text(self._words.ids(one)) == one for one in marks):
            return marks
        found: list[str] = []
        for token in self._one.token_ids:
            word = self._words.text([token]).strip()
            apart = not any(word in one or one in word for one in (bare, *found))
            if word and apart and self._words.text(self._words.ids(word)).strip() == word:
                found.append(word)
                if len(found) == count:
                    break
        return found

    def _line(
        self, call: Call, answer: Mapping[str, Any], asked_ns: int, at_ns: int, nth: int = 0
    ) -> Recorded:
        return Recorded(
            cassette=1,
            row=self._row.digest,
            history=self._history.digest,
            call=dict(call),
            nth=nth,
            answer=dict(answer),
            run=self._run,
            by=self._one.trajectory,
            at_ns=at_ns,
            seconds=max(0, at_ns - asked_ns) / 1e9,
        )


def _between(rendered: str, marks: Sequence[str], text: str) -> list[str] | None:
    """What stands in a text where marks stand in what was rendered; None: it is another one."""
    if not marks:
        return None
    first, *parts = re.split("|".join(map(re.escape, marks)), rendered)
    if len(parts) != len(marks) or not text.startswith(first):
        return None
    text, found = text[len(first) :], list[str]()
    for part in parts[:-1]:
        content, there, text = text.partition(part) if part else ("", "", text)
        if not there:  # Also where nothing stands between two contents.
            return None
        found.append(content)
    if not text.endswith(parts[-1]):
        return None
    return [*found, text[: len(text) - len(parts[-1])]]


def _tool_messages(turn: Turn) -> list[dict[str, Any]]:
    """As `tools.call_tools` answers it."""
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            **({"name": call.name} if call.name else {}),
            "content": "",
        }
        for call in turn.tool_calls
    ]


def _with(bare: Sequence[Mapping[str, Any]], contents: Sequence[str]) -> list[dict[str, Any]]:
    return [{**one, "content": content} for one, content in zip(bare, contents, strict=True)]


def _any_failed(contents: Sequence[str]) -> bool:
    return any(one.startswith(_FAILED) for one in contents)
