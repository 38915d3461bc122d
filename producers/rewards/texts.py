"""Rewards of the last turn's text: `math`, `exact`, `regex`, `json-schema`; each is 1 or 0.

`bounded` evaluates untrusted input; a timeout scores 0 with part `stopped`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, DecimalException
from typing import Any, Literal

import msgspec

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.rewards.arguments import Function, Options, RewardContext
from dora_pipe.producers.rewards.bounded import HELPER, WrongQuestion
from dora_pipe.producers.tasks.task import Completion, Reward, Row
from dora_pipe.producers.tasks.values import plain

Gold = str | Decimal


def right_answers(answer: Any, field: str = "") -> list[Gold]:
    """Return at least one correct answer, as text or number.

    `field` selects a field of an object; dots select nested fields. Raises TaskError.
    """
    value = plain(answer)
    items = value if isinstance(value, list) else [value]
    golds = [gold for item in items for gold in _golds(item, field)]
    if not golds:
        raise TaskError("the row's answer is an empty list")
    return golds


def _golds(value: Any, field: str) -> list[Gold]:
    match value:
        case dict() if field:
            inner = _inner(value, field)
            return right_answers(inner) if isinstance(inner, list) else _golds(inner, "")
        case dict():
            raise TaskError(
                f"the row's answer is an object with {', '.join(map(repr, value)) or 'nothing'}:"
                " set the reward's option `field`"
            )
        case str():
            return [value]
        case bool():
            return [str(value).lower(), str(value)]
        case int() | float() | Decimal():
            return [Decimal(str(value))]
        case None:
            raise TaskError("the row's answer is null; drop such rows with task.filter")
    raise TaskError(f"the row's answer has a {type(value).__name__} in a list")


def _inner(value: Mapping[str, Any], field: str) -> Any:
    inner: Any = value
    for name in field.split("."):
        if not isinstance(inner, Mapping) or name not in inner:
            raise TaskError(f"the row's answer has no `{field}`")
        inner = inner[name]
    return inner


def is_right(text: str, gold: Gold) -> bool:
    """Compare a text with a correct answer: numbers by value, others character by character."""
    if isinstance(gold, str):
        return text == gold
    try:
        return Decimal(text) == gold
    except DecimalException:
        return False


_STOPPED = Reward(value=0.0, parts={"stopped": 1.0})


def last_block(text: str) -> str:
    """Return the content of the last closed fenced block, or the entire text."""
    block: str | None = None
    inside: list[str] | None = None
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("```"):
            if inside is None:
                inside = []
            else:
                block, inside = "".join(inside), None
        elif inside is not None:
            inside.append(line)
    return text if block is None else block


class Compared(Options, frozen=True, kw_only=True):
    """Options of a reward that compares with the row's answer."""

    field: str = ""
    """Field of an answer that is an object; dots select nested fields."""
    of: Literal["auto", "text", "reasoning", "written"] = "auto"
    """Compared text: the last turn's text, its thoughts, or the turn as written, including
    thoughts; `auto` is `text`."""

    def part(self, completion: Completion) -> str:
        return str(getattr(completion, "text" if self.of == "auto" else self.of))

    def check_answer(self, answer: Any) -> None:
        right_answers(answer, self.field)


class Math(Compared, frozen=True, kw_only=True):
    """Equality of the text's last expression and the row's answer (math-verify).

    Supports numbers, fractions, LaTeX, sets, intervals and equations. Unreadable or slow
    expressions score 0. Part `parsed`: whether there was an expression.
    """

    boxed: bool = False
    """Compare only the text's last ``\\boxed{}``."""

    def open(self, where: str, context: RewardContext) -> Function:
        """Return the function; see Options. Loads the library before the first text."""
        HELPER.ask("equal", gold="1", answer="1")
        return self.score

    def score(self, completion: Completion, answer: Any) -> Reward:
        """Return 1 or 0. Raises TaskError if no answer of the row is an expression."""
        answer_text = self.part(completion)
        if self.boxed:
            inner = last_boxed(answer_text)
            answer_text = "" if inner is None else f"\\boxed{{{inner}}}"
        judgements, why = [], ""
        for gold in right_answers(answer, self.field):
            try:
                judgements.append(HELPER.ask("equal", gold=str(gold), answer=answer_text))
            except WrongQuestion as error:
                why = why or str(error)
        if not judgements:
            raise TaskError(why)
        judged = [judgement for judgement in judgements if judgement is not None]
        if not any(equal for _, equal, _ in judged) and len(judged) < len(judgements):
            return _STOPPED
        parsed, equal, read = max(judged, key=lambda judgement: judgement[1])
        return Reward(value=float(equal), parts={"parsed": float(parsed)}, answer=read)


def last_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{...}`` with balanced braces, or None."""
    position = text.rfind("\\boxed{")
    if position < 0:
        return None
    depth, start = 1, position + len("\\boxed{")
    for index, char in enumerate(text[start:], start):
        depth += (char == "{") - (char == "}")
        if not depth:
            return text[start:index]
    return None


class NoReward(Options, frozen=True, kw_only=True):
    """Zero for every text, for training by a teacher."""

    def open(self, where: str, context: RewardContext) -> Function:
        return self.score

    def score(self, text: str) -> float:
        return 0.0


class Exact(Compared, frozen=True, kw_only=True):
    """Character equality with the row's answers; numbers compare by value."""

    strip: bool = True
    """Ignore surrounding white space."""
    case: bool = True
    """Distinguish upper and lower case."""

    def open(self, where: str, context: RewardContext) -> Function:
        return self.score

    def score(self, completion: Completion, answer: Any) -> Reward:
        golds = right_answers(answer, self.field)
        return _compared(self.part(completion), golds, self._normal)

    def _normal(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text if self.case else text.casefold()


def _compared(text: str, golds: Sequence[Gold], normal: Callable[[str], str]) -> Reward:
    text = normal(text)
    golds = [normal(gold) if isinstance(gold, str) else gold for gold in golds]
    right = any(is_right(text, gold) for gold in golds)
    return Reward(value=float(right), answer=str(golds[0]) if right else text)


class Regex(Compared, frozen=True, kw_only=True):
    """Match of a pattern; with a group, the last match must contain the answer."""

    pattern: str
    """Python pattern; flags are inline, as ``(?i)``."""
    group: str = ""
    """Name or number of the compared group."""

    def open(self, where: str, context: RewardContext) -> Function:
        try:
            groups = re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"{where}: pattern: {error}") from None
        known_groups = {*groups.groupindex, *map(str, range(groups.groups + 1))}
        if self.group and self.group not in known_groups:
            raise ConfigError(f"{where}: the pattern has no group `{self.group}`")
        return self.compared if self.group else self.found

    def part(self, completion: Completion) -> str:
        # `auto` is `written` for a pattern of thoughts.
        marked = any(mark in self.pattern for mark in ("<think>", "</think>"))
        return completion.written if self.of == "auto" and marked else super().part(completion)

    def found(self, completion: Completion) -> float | Reward:
        text = self.part(completion)
        held = HELPER.ask("search", pattern=self.pattern, group="", text=text)
        return _STOPPED if held is None else float(held)

    def compared(self, completion: Completion, answer: Any) -> Reward:
        """Return 1 if the last match's group is an answer, ignoring surrounding white space."""
        text = self.part(completion)
        golds = right_answers(answer, self.field)
        held = HELPER.ask("search", pattern=self.pattern, group=self.group, text=text)
        if held is None:
            return _STOPPED
        return _compared(held, golds, str.strip) if held else Reward(value=0.0)


class JsonSchema(Options, frozen=True, kw_only=True):
    """JSON that matches a schema: the text, or its last fenced block.

    References of a schema are not fetched. Part `json`: whether it was JSON.
    """

    schema: dict[str, Any] = msgspec.field(default_factory=dict)
    """Schema of all rows."""
    column: str = ""
    """Column with a row's schema: an object, or JSON text."""

    def open(self, where: str, context: RewardContext) -> Function:
        if bool(self.schema) == bool(self.column):
            raise ConfigError(f"{where}: needs one of the options `schema` and `column`")
        if self.schema:
            import jsonschema

            kind = jsonschema.validators.validator_for(
                self.schema, default=jsonschema.Draft202012Validator
            )
            try:
                kind.check_schema(self.schema)
            except jsonschema.SchemaError as error:
                raise ConfigError(f"{where}: schema: {error.message}") from None
        return self.score

    def score(self, row: Row, text: str) -> Reward:
        """Return 1 or 0. Raises ValueError for an invalid schema in the row."""
        schema: Any = self.schema or row[self.column]
        if isinstance(schema, str):
            schema = msgspec.json.decode(schema)
        if not isinstance(schema, Mapping):
            raise ValueError(f"the schema in `{self.column}` is {type(schema).__name__}")
        verdict = HELPER.ask("conforms", schema=dict(schema), text=last_block(text))
        if verdict is None:
            return _STOPPED
        is_json, conforms, read = verdict
        return Reward(value=float(conforms), parts={"json": float(is_json)}, answer=read)
