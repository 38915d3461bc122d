"""Training data of `sft` as token ids."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from dora_pipe.config.model import Config, Task
from dora_pipe.core.errors import PolicyError, TaskError
from dora_pipe.core.system.console import say
from dora_pipe.core.system.own_code import importable
from dora_pipe.launch.model_checks import templated
from dora_pipe.producers.data.conversations import TOOLS, prompt_of, unshown_columns
from dora_pipe.producers.data.prepare import open_rows, reporting
from dora_pipe.producers.data.spec import DataSpec
from dora_pipe.producers.tasks.messages import NoAnswer, normal, tool_schemas
from dora_pipe.producers.tasks.registry import open_task
from dora_pipe.schemas.identity import next_task, whole_shares
from dora_pipe.store.model_dir import read_config

if TYPE_CHECKING:
    from dora_pipe.consumers.learners.sft import Example, SftOptions
    from dora_pipe.producers.chat.chat import Chat

NOTED_ROWS: Final = 256

TALK_EVERY: Final = 40

DAY_NS: Final = 24 * 60 * 60 * 1_000_000_000

FORMS: Final = (
    "a row has `messages` (and `tools`), or `prompt` and `answer`; a prompt is text or messages"
)

Row = Mapping[str, Any]


def sft_options(config: Config, *, packing: bool = False, **given: Any) -> SftOptions:
    """Return `SftOptions` from the configuration.

    Raises ConfigError if the optimizer's library is missing.
    """
    from dora_pipe.consumers.learners.registry import adapter_options, need_optimizer
    from dora_pipe.consumers.learners.sft import SftOptions
    from dora_pipe.consumers.learners.torch.memory import memory_options

    need_optimizer(config.trainer.optimizer)
    return SftOptions(
        optimizer=config.trainer.optimizer,
        lora=adapter_options(config.lora),
        memory=dataclasses.replace(memory_options(config.trainer), packing=packing),
        **given,
    )


def warm_up(config: Config, rows: Sequence[Row], out: Path, options: SftOptions) -> None:
    """Train the model of a configuration and report progress. Raises PolicyError, TaskError,
    NonFinite."""
    from dora_pipe.consumers.learners.sft import train_sft

    def progress(step: int, loss: float) -> None:
        if step % TALK_EVERY == 0 or step == options.steps:
            say(f"sft step {step:>4} of {options.steps}  loss {loss:.3f}")

    with templated(config, Path(config.model.path)) as model:
        config = replace(config, model=replace(config.model, path=str(model)))
        encode = RowEncoder(config)
        for note in encode.notes(rows[:NOTED_ROWS]):
            say(f"note: {note}")
        done = train_sft(model, rows, out, encode=encode, options=options, progress=progress)
    if done.left_out:
        say(
            f"{done.left_out} draws skipped: longer than {options.context_tokens} tokens"
            " (--context)"
        )


class RowEncoder:
    """Encode rows as rollout workers tokenize them."""

    def __init__(self, config: Config) -> None:
        """Raises PolicyError for a tokenizer without an end-of-turn token."""
        from dora_pipe.producers.chat.tokenizer import Tokenizer

        model = Path(config.model.path)
        self._config = config
        self._tokenizer = Tokenizer(model, special_tokens=config.task.special_tokens)
        self._end = _end_id(model, self._tokenizer.stop_ids)
        self._chat: Chat | None = None

    def __call__(self, row: Row) -> Example:
        """Encode a row; the loss covers assistant turns with their end tokens. Raises TaskError."""
        from dora_pipe.consumers.learners.sft import Example

        messages = self._messages(row)
        if messages is not None:
            ids, mask = self._conversation_ids(messages, row.get(TOOLS))
            return Example(token_ids=ids, mask=mask)
        prompt, answer = row.get(_column(row)), row.get("answer")
        if not isinstance(prompt, str) or not isinstance(answer, str):
            odd = "answer" if isinstance(prompt, str) else "prompt"
            raise TaskError(f"no text in `{odd}`", hint=FORMS)
        before = self._tokenizer.prompt_ids(prompt)
        if not before:
            raise TaskError(f"prompt {prompt[:60]!r} has no tokens")
        after = [*self._tokenizer.ids(answer), self._end]
        return Example(token_ids=[*before, *after], mask=[0] * len(before) + [1] * len(after))

    def notes(self, rows: Sequence[Row]) -> Iterator[str]:
        """Yield notes about data that the model does not see. Raises TaskError."""
        chat = bool(rows) and self._messages(rows[0]) is not None
        yield from unshown_columns(rows, (), tools=chat)
        for number, row in enumerate(rows):
            texts = [message.get("content") for message in self._messages(row) or ()]
            for text in texts or [row.get(_column(row)), row.get("answer")]:
                if isinstance(text, str) and (token := self._tokenizer.spelled(text)):
                    spelled = f"row {number} contains control token {token}"
                    yield f"{spelled} as text (task.special_tokens)"
                    return

    def _messages(self, row: Row) -> list[dict[str, Any]] | None:
        task, column = self._config.task, _column(row)
        if not isinstance(row.get(column), str | list):
            return None
        chat = column == "messages" or bool(task.chat or task.system_prompt)
        asked, reply = prompt_of(row[column], chat=chat, system=task.system_prompt)
        if isinstance(asked, str):
            return None
        if reply is None and isinstance(answer := row.get("answer"), str):
            reply = {"role": "assistant", "content": answer}
        if reply is None and column != "messages":
            raise TaskError("no text in `answer`", hint=FORMS)
        return asked if reply is None else [*asked, reply]

    def _conversation_ids(
        self, messages: list[dict[str, Any]], tools: Any
    ) -> tuple[list[int], list[int]]:
        from dora_pipe.producers.chat.chat import Chat
        from dora_pipe.producers.worker.chats import chat_options

        if self._chat is None:
            model = Path(self._config.model.path)
            # Midnight in UTC: all trainings of one day have the same tokens.
            options = chat_options(self._config.task, started_ns=time.time_ns() // DAY_NS * DAY_NS)
            self._chat = Chat.open(model, self._tokenizer, options)
            _say_day(model, options.now_ns)
        try:
            normalized = normal(messages)
            for message in normalized:
                self._tokenizer.check_unrendered(message["content"])
            return self._chat.training_ids(normalized, tool_schemas(tools))
        except NoAnswer as error:
            raise TaskError(str(error)) from None


def _column(row: Row) -> str:
    return "messages" if row.get("messages") is not None else "prompt"


def _say_day(model: Path, now_ns: int) -> None:
    """Report the day if the chat template contains it, because it is trained on."""
    from dora_pipe.producers.chat.template import find_templates

    if any("strftime_now" in text for text in find_templates(model).values()):
        day = datetime.fromtimestamp(now_ns // 1_000_000_000, UTC).date()
        say(f"today is {day} for the chat template")


def _end_id(model: Path, stop_ids: Sequence[int]) -> int:
    """Prefer the config's own token if it ends a turn."""
    if not stop_ids:
        raise PolicyError(f"the tokenizer in {model} has no end-of-sequence token")
    configured = read_config(model).get("eos_token_id")
    if isinstance(configured, int) and configured in stop_ids:
        return configured
    return stop_ids[0]


def demonstrations(config: Config, *, seed: int, count: int) -> list[Row]:
    """Return demonstrations of the tasks, in their ratios. Raises TaskError if one has none."""
    shares = whole_shares(tuple(task.ratio for task in config.tasks))
    order, counts = [], [0] * len(shares)
    for _ in range(count):
        order.append(next_task(shares, counts))
        counts[order[-1]] += 1
    sources = [
        iter(_demonstrations(task, seed, number))
        for task, number in zip(config.tasks, counts, strict=True)
    ]
    rows = [next(sources[index], None) for index in order]
    return [row for row in rows if row is not None]


def _demonstrations(task: Task, seed: int, count: int) -> list[Row]:
    try:
        with importable(task.directory), reporting(say):
            examples = open_task(task).demonstrations(seed, count)
    except NotImplementedError:
        raise TaskError(
            f"task {task.kind} has no demonstrations", hint="pass rows with --data"
        ) from None
    return [
        example if isinstance(example, Mapping) else {"prompt": example[0], "answer": example[1]}
        for example in examples
    ]


def data_rows(source: str) -> Sequence[Row]:
    """Return the rows of a file, a glob or `hf:NAME`, read lazily. Raises TaskError."""
    with reporting(say):
        return open_rows(DataSpec(sources=(source,)))
