"""What `sft` trains on, as token ids: demonstrations of a task, or rows of a file.

It decides which forms a row may have; `consumers.learners.sft` trains on what comes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dora_pipe.config.model import Config, Task
from dora_pipe.core.console import say
from dora_pipe.core.errors import PolicyError, TaskError
from dora_pipe.core.own_code import importable
from dora_pipe.producers.tasks.registry import open_task
from dora_pipe.schemas.identity import next_task, whole_shares
from dora_pipe.store.model_dir import read_config

if TYPE_CHECKING:
    from dora_pipe.consumers.learners.sft import Example, SftOptions
    from dora_pipe.producers.chat.tokenizer import Tokenizer

TALK_EVERY: Final = 40
"""Steps between two lines of talk."""

ROWS_BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
"""A larger JSONL file is refused: its rows are held in memory."""


class Row(msgspec.Struct, frozen=True):
    """A prompt, and what the model shall say to it."""

    prompt: str
    answer: str


_ROW: Final = msgspec.json.Decoder(Row)


def sft_options(config: Config, **given: Any) -> SftOptions:
    """`SftOptions` of these keys, with the configuration's adapter and what decays in it."""
    from dora_pipe.consumers.learners.registry import adapter_options
    from dora_pipe.consumers.learners.sft import SftOptions

    return SftOptions(
        lora=adapter_options(config.lora),
        weight_decay_exclude=config.trainer.weight_decay_exclude,
        **given,
    )


def warm_up(config: Config, rows: Sequence[Row], out: Path, options: SftOptions) -> None:
    """Train the model of a configuration and say how it goes.

    Raises PolicyError, TaskError for rows that cannot be used, NonFinite.
    """
    from dora_pipe.consumers.learners.sft import train_sft
    from dora_pipe.producers.chat.tokenizer import Tokenizer

    def progress(step: int, loss: float) -> None:
        if step % TALK_EVERY == 0 or step == options.steps:
            say(f"sft step {step:>4} of {options.steps}  loss {loss:.3f}")

    model = Path(config.model.path)
    tokenizer = Tokenizer(model, special_tokens=config.task.special_tokens)
    encode = RowEncoder(model, tokenizer)
    done = train_sft(model, rows, out, encode=encode, options=options, progress=progress)
    if done.left_out:
        say(
            f"{done.left_out} draws left out: longer than {options.context_tokens} tokens"
            " (--context)"
        )


class RowEncoder:
    """Rows as the rollout workers of a run would have them in tokens.

    Example: ``RowEncoder(model, Tokenizer(model))(Row("1+1=", "2"))``.
    """

    def __init__(self, model: Path, tokenizer: Tokenizer) -> None:
        """Raises PolicyError for a tokenizer that has nothing to end a turn with."""
        self._tokenizer = tokenizer
        self._end = _end_id(model, tokenizer.stop_ids)

    def __call__(self, row: Row) -> Example:
        """Only the answer counts, and the end of the turn that is put behind it."""
        from dora_pipe.consumers.learners.sft import Example

        before = self._tokenizer.prompt_ids(row.prompt)
        if not before:
            raise TaskError(f"prompt {row.prompt[:60]!r} has no tokens")
        after = [*self._tokenizer.ids(row.answer), self._end]
        return Example(token_ids=[*before, *after], mask=[0] * len(before) + [1] * len(after))


def _end_id(model: Path, stop_ids: Sequence[int]) -> int:
    """The token that ends an answer: the config's own if it is one that ends a turn."""
    if not stop_ids:
        raise PolicyError(f"the tokenizer in {model} has no end-of-sequence token")
    configured = read_config(model).get("eos_token_id")
    if isinstance(configured, int) and configured in stop_ids:
        return configured
    return stop_ids[0]


def demonstrations(config: Config, *, seed: int, count: int) -> list[Row]:
    """Those that the configuration's tasks make, in their ratios. Raises TaskError if one makes
    none."""
    shares = whole_shares(tuple(one.ratio for one in config.tasks))
    order, wanted = [], [0] * len(shares)
    for _ in range(count):
        order.append(next_task(shares, wanted))
        wanted[order[-1]] += 1
    made = [
        iter(_demonstrations(task, seed, number))
        for task, number in zip(config.tasks, wanted, strict=True)
    ]
    rows = [next(made[place], None) for place in order]
    return [row for row in rows if row is not None]


def _demonstrations(task: Task, seed: int, count: int) -> list[Row]:
    try:
        with importable(task.directory):
            pairs = open_task(task).demonstrations(seed, count)
    except NotImplementedError:
        raise TaskError(
            f"task {task.kind} makes no demonstrations", hint="give them with --data"
        ) from None
    if any(isinstance(one, Mapping) for one in pairs):
        raise TaskError(f"demonstrations of {task.kind} are conversations, not pairs")
    return [Row(prompt, answer) for prompt, answer in pairs]


def read_rows(path: Path) -> list[Row]:
    """Every line of a JSONL file. Raises TaskError naming the line."""
    try:
        if path.stat().st_size > ROWS_BYTES_MAX:
            raise TaskError(f"{path} is larger than {ROWS_BYTES_MAX} bytes")
        with path.open("rb") as file:
            return [_row(path, number, line) for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from None


def _row(path: Path, number: int, line: bytes) -> Row:
    try:
        return _ROW.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TaskError(
            f"{path} line {number}: {error}", hint="every line needs the texts prompt and answer"
        ) from None
