"""Built-in task `calculator`: sums of several numbers modulo 100, over several turns.

    user         n3 7 n2 5 n1 4
    assistant    n2 call calculator 7 5           tool   12
    assistant    n1 call calculator 12 4          tool   16
    assistant    answer 16

`options.tools` makes the calculator a Python function. Otherwise it is a text environment:

    prompt       n3 7 n2 5 n1 4 |
    model        n2 call 7 + 5            environment   result 12
    model        n1 call 12 + 4           environment   result 16
    model        answer 16                done

The word before a call names the added number and is not checked. Only the answer is rewarded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.tasks.arithmetic import EVAL_SEED
from dora_pipe.producers.tasks.messages import tool_schema
from dora_pipe.producers.tasks.task import (
    Environment,
    Observation,
    Prompt,
    Row,
    Split,
    Task,
    Tool,
    ToolCall,
    Turn,
)
from dora_pipe.schemas.identity import derive_seed

MODULUS = 100
NUMBERS_MAX = 9

TOOL = "calculator"
SPARE_TURNS = 2

WORDS: tuple[str, ...] = (
    "|",
    "+",
    "call",
    "result",
    "answer",
    "error",
    *(f"n{number}" for number in range(1, NUMBERS_MAX + 1)),
    *(str(number) for number in range(MODULUS)),
    TOOL,
)
"""Vocabulary for `write_word_tokenizer`."""

ROLES: tuple[str, ...] = ("<|tools|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

CHAT_TEMPLATE = """\
{%- if tools %}<|tools|>{% for one in tools %} {{ one.function.name }}{% endfor %}<eos>{% endif -%}
{%- for message in messages -%}
<|{{ message.role }}|> {{ message.content }}
{%- for call in message.tool_calls or [] %} call {{ call.function.name }}
{%- for value in call.function.arguments.values() %} {{ value }}{% endfor %}{% endfor %}<eos>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""

_CALL = re.compile(r"(?:^|\s)call (\d{1,2}) \+ (\d{1,2})$")
_WRITTEN_CALL = re.compile(r"(?:^|\s)call(?=\s|$)")
_ANSWER = re.compile(r"(?:^|\s)answer (\d{1,2})$")


def calculator(a: int, b: int) -> int:
    """Add two numbers, modulo 100.

    Args:
        a: One.
        b: The other.
    """
    return (a + b) % MODULUS


def read_turn(text: str) -> Turn:
    """Parse a turn (`task.tool_parser`)."""
    text_before, *calls = _WRITTEN_CALL.split(text)
    return Turn(text=text_before.strip(), tool_calls=tuple(map(_read_call, calls)))


def _read_call(written: str) -> ToolCall:
    name, *values = written.split() or [""]
    if len(values) == 2 and all(value.isdecimal() for value in values):
        a, b = map(int, values)
        return ToolCall(name=name, arguments={"a": a, "b": b})
    return ToolCall(name=name, error="a call has a name and two numbers", raw=f"call{written}")


class Calculator(Environment):
    """Text environment that adds numbers until there is an answer."""

    def reset(self, row: Row) -> str:
        numbers = row["numbers"]
        self._left = len(numbers) + SPARE_TURNS
        named = (f"n{len(numbers) - index} {number}" for index, number in enumerate(numbers))
        return f"{' '.join(named)} |"

    def step(self, text: str) -> Observation:
        self._left -= 1
        if _ANSWER.search(text.strip()):
            return Observation(text="", done=True)
        call = _CALL.search(text.strip())
        if call is None:
            return Observation(text="error", done=self._left <= 0, ok=False)
        total = (int(call[1]) + int(call[2])) % MODULUS
        return Observation(text=f"result {total}", done=self._left <= 0, tool=TOOL)


class CalculatorTask(Task):
    """Built-in task `calculator`."""

    replayable = True

    def __init__(
        self,
        *,
        seed: int = 1,
        count: int = 4096,
        eval_count: int = 256,
        min_numbers: int = 2,
        max_numbers: int = 5,
        largest: int = 9,
        noise: float = 0.25,
        end: str = "<eos>",
        tools: bool = False,
    ) -> None:
        """`noise` is the share of wrong numbers in demonstrated calls, `end` the end-of-sequence
        token between demonstrated turns."""
        if not 1 <= min_numbers <= max_numbers <= NUMBERS_MAX:
            raise ConfigError(
                f"task.options: min_numbers {min_numbers} and max_numbers {max_numbers} are not "
                f"a range within 1 and {NUMBERS_MAX}"
            )
        if not 0 <= largest < MODULUS:
            raise ConfigError(f"task.options.largest: {largest} is not below {MODULUS}")
        if not 0 <= noise <= 1:
            raise ConfigError(f"task.options.noise: {noise} is not between 0 and 1")
        self._seeds: dict[Split, int] = {"train": seed, "eval": EVAL_SEED}
        self._counts: dict[Split, int] = {"train": count, "eval": eval_count}
        self._numbers, self._largest = (min_numbers, max_numbers), largest
        self._noise = noise
        self._end = end
        self._tools = tools

    def rows(self, split: Split) -> Sequence[Row]:
        chance = random.Random(derive_seed("calculator", split, self._seeds[split]))
        return [self._row(chance) for _ in range(self._counts[split])]

    def prompt(self, row: Row) -> Prompt:
        text = Calculator().reset(row)
        if not self._tools:
            return text
        return [{"role": "user", "content": text.removesuffix(" |")}]

    def tools(self, row: Row) -> Sequence[Tool]:
        return [calculator] if self._tools else []

    def environment(self, row: Row) -> Environment | None:
        return None if self._tools else Calculator()

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> float:
        """Return 1 if the last turn answers with the sum of all numbers, else 0."""
        match = _ANSWER.search(text.strip())
        return float(match is not None and int(match[1]) == sum(row["numbers"]) % MODULUS)

    def demonstrations(self, seed: int, count: int) -> Sequence[tuple[str, str]] | Sequence[Row]:
        """Return pairs, one per turn, or conversations with tools."""
        chance = random.Random(derive_seed("calculator", "demonstrations", seed))
        if self._tools:
            return [self.conversation(self._row(chance), chance) for _ in range(count)]
        pairs: list[tuple[str, str]] = []
        while len(pairs) < count:
            pairs += self.episode(self._row(chance), chance)
        return pairs[:count]

    def conversation(self, row: Row, chance: random.Random) -> Row:
        """Return a demonstrated episode for `sft`."""
        total, *rest = row["numbers"]
        messages = [*self.prompt(row)]
        for index, number in enumerate(rest):
            if chance.random() < self._noise:
                number = chance.randint(0, self._largest)
            named = {"name": TOOL, "arguments": {"a": total, "b": number}}
            call = {"type": "function", "id": f"call{index:05}", "function": named}
            message = {
                "role": "assistant",
                "content": f"n{len(rest) - index}",
                "tool_calls": [call],
            }
            total = calculator(total, number)
            result = {"role": "tool", "name": TOOL, "tool_call_id": call["id"]}
            messages += [message, {**result, "content": str(total)}]
        messages.append({"role": "assistant", "content": f"answer {total}"})
        return {"messages": messages, "tools": [tool_schema(calculator)]}

    def episode(self, row: Row, chance: random.Random) -> list[tuple[str, str]]:
        """Return (everything before, turn) pairs of a demonstrated episode."""
        world = Calculator()
        context, pairs = world.reset(row), []
        total, *rest = row["numbers"]
        for index, number in enumerate(rest):
            if chance.random() < self._noise:
                number = chance.randint(0, self._largest)
            turn = f"n{len(rest) - index} call {total} + {number}"
            pairs.append((context, turn))
            answer = world.step(turn).text
            total = int(answer.split()[-1])
            context = f"{context} {turn} {self._end} {answer}"
        return [*pairs, (context, f"answer {total}")]

    def _row(self, chance: random.Random) -> Row:
        size = chance.randint(*self._numbers)
        return {"numbers": [chance.randint(0, self._largest) for _ in range(size)]}
