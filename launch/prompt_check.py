"""Check the prompts of a run before it starts.

Skips environments and agents, whose prompts would start an episode.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse, islice
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.config.several import PoolSpec, pool_specs
from dora_pipe.core.errors import ConfigError, DoraError
from dora_pipe.producers.chat.chat import Chat, Conversation
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.calls import Forget, PromptCall, PromptReady, TaskEvent, TaskFailed
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.task import Split
from dora_pipe.producers.worker.chats import chats_of
from dora_pipe.producers.worker.ports import prompt_of
from dora_pipe.schemas.control import INFRASTRUCTURE

FIRST_ROWS: Final = 256
"""Checked prompts per source, spread evenly over its rows."""

FIRST_S: Final = 10.0

ASKED_MAX: Final = 64

ANSWERS_S: Final = 60.0

POLL_S: Final = 0.05


@dataclass(slots=True, kw_only=True)
class PromptsSeen:
    """Checked prompts of one source."""

    source: str
    rows: int
    lengths: array[int] = field(default_factory=partial(array, "i"))
    failed: list[tuple[int, str, str]] = field(default_factory=list)
    """(row, error, hint) of rows without a prompt."""
    spelled: list[tuple[int, str]] = field(default_factory=list)
    """(row, token) of rows that contain a control token as text."""
    outside: int = 0

    @property
    def looked_at(self) -> int:
        return len(self.lengths) + len(self.failed)

    def beyond(self, tokens: int) -> int:
        return sum(length > tokens for length in self.lengths)

    @property
    def hopeless(self) -> bool:
        """Return whether no row can make a prompt; False after a timeout."""
        enough = len(self.failed) >= min(self.rows, FIRST_ROWS)
        return enough and not self.lengths and not self.outside

    def notes(self) -> Iterator[str]:
        if self.failed:
            row, error, hint = min(self.failed)
            yield (
                f"{len(self.failed)} of {self.looked_at} checked rows have no valid prompt, so"
                f" their groups fail: row {row}: {error}" + (f" ({hint})" if hint else "")
            )
        if self.spelled:
            row, token = min(self.spelled)
            yield (
                f"{len(self.spelled)} of {self.looked_at} checked rows contain control tokens,"
                f" encoded as text: row {row}: {token} (task.special_tokens)"
            )


def spread(rows: int, count: int) -> list[int]:
    """Return all row numbers, or `count` of them, evenly spaced."""
    if rows <= count:
        return list(range(rows))
    return [number * (rows - 1) // (count - 1) for number in range(count)]


def ordered(rows: int) -> Iterator[int]:
    """Yield all row numbers: first `FIRST_ROWS` spread evenly, then the rest."""
    first = spread(rows, FIRST_ROWS)
    yield from first
    yield from filterfalse(set(first).__contains__, range(rows))


def seen_by_doctor(config: Config, model: Path) -> Iterator[PromptsSeen]:
    """Check the prompts of every source, for `ANSWERS_S` each.

    Raises ConfigError, PolicyError, TaskError.
    """
    for spec in pool_specs(config):
        with TaskPool(msgspec.structs.replace(spec.task, processes=1)) as pool:
            pool.wait()
            opened, stop = [(spec, pool)], lambda: False
            chats = chats_of(opened, time.time_ns(), model, Tokenizer(model), stop=stop)
            yield from look(spec, pool, model, chats, rows_max=None, seconds=ANSWERS_S)


def check_first(
    spec: PoolSpec, pool: TaskPool, model: Path, chats: Mapping[str, Chat] | None
) -> Iterator[str]:
    """Yield notes about prompts before a run starts; nothing if `chats` is None.

    Raises ConfigError for a source without prompts, PolicyError, TaskError.
    """
    if chats is None:
        return
    for prompts in look(spec, pool, model, chats, rows_max=FIRST_ROWS, seconds=FIRST_S):
        if prompts.hopeless:
            row, error, hint = min(prompts.failed)
            raise ConfigError(
                f"no row of {prompts.source} has a valid prompt: row {row}: {error}",
                hint=hint or "check every row: dora-pipe doctor --config FILE",
            )
        yield from (f"prompts, {prompts.source}: {note}" for note in prompts.notes())


def look(
    spec: PoolSpec,
    pool: TaskPool,
    model: Path,
    chats: Mapping[str, Chat],
    *,
    rows_max: int | None,
    seconds: float,
) -> Iterator[PromptsSeen]:
    """Check all prompts of an open task, or `rows_max` per source, for at most `seconds`.

    Raises PolicyError, TaskError.
    """
    facts, task = pool.facts, spec.task
    if facts is None or task.has_agent:
        return
    if not facts.single_turn and (task.kind != "dataset" or task.mcp):
        return  # A prompt starts an episode.
    tokenizer = Tokenizer(model).reading(spec.task.special_tokens)
    for source in spec.sources:
        rows = facts.data(source).rows
        if not rows:
            continue
        prompts = PromptsSeen(source=source, rows=rows)
        order = islice(ordered(rows), rows_max)
        until_s = time.monotonic() + seconds
        for row, event in answers(pool, source, order, until_s):
            read(prompts, row, event, tokenizer, chats.get(source))
        yield prompts


def answers(
    pool: TaskPool, source: str, rows: Iterable[int], until_s: float
) -> Iterator[tuple[int, TaskEvent]]:
    split: Split = "train" if source.startswith("train") else "eval"
    remaining, asked = iter(rows), dict[str, int]()
    while True:
        while len(asked) < ASKED_MAX and (row := next(remaining, None)) is not None:
            request = f"{source} {row}"
            pool.start(PromptCall(request=request, split=split, index=row, source=source))
            asked[request] = row
        if not asked or time.monotonic() > until_s:
            break
        for event in pool.poll(POLL_S):
            if event.request in asked:
                yield asked.pop(event.request), event
                pool.start(Forget(request=event.request, source=source))
    for request in asked:
        pool.start(Forget(request=request, source=source))


def read(
    prompts: PromptsSeen, row: int, event: TaskEvent, tokenizer: Tokenizer, chat: Chat | None
) -> None:
    if not isinstance(event, PromptReady):
        named = f"{event.error}: " if isinstance(event, TaskFailed) else ""
        prompts.outside += not isinstance(event, TaskFailed) or event.error in INFRASTRUCTURE
        prompts.failed.append((row, f"{named}{getattr(event, 'message', '')}", ""))
        return
    texts = [message["content"] for message in event.messages] or [event.text]
    try:
        prompt = prompt_of(event, tokenizer, chat)
    except DoraError as error:
        prompts.failed.append((row, f"{type(error).__name__}: {error.message}", error.hint or ""))
        return
    ids = prompt.prompt_ids if isinstance(prompt, Conversation) else prompt
    if not ids:
        prompts.failed.append((row, "PromptUnfit: the prompt has no tokens", ""))
        return
    prompts.lengths.append(len(ids))
    token = next(filter(None, map(tokenizer.spelled, texts)), "")
    if token:
        prompts.spelled.append((row, token))
