"""Check the remaining prompts of a run in a thread; only files, which need no user code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Self

import msgspec

from dora_pipe.config.model import Config, Task
from dora_pipe.config.several import PoolSpec, pool_specs
from dora_pipe.core.errors import DoraError
from dora_pipe.launch.prompt_check import FIRST_ROWS, PromptsSeen, answers, ordered, read
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.worker.chats import chats_of
from dora_pipe.schemas.control import RunStarted

CHUNK_ROWS: Final = 64
"""Rows between pauses; a pause lasts as long as its rows, to use half a core."""

CLOSE_S: Final = 5.0


class PromptWatch:
    """Example: ``with PromptWatch(config, first, lambda: assets) as prompts: prompts.lines()``."""

    def __init__(self, config: Config, first: RunStarted, model: Callable[[], Path]) -> None:
        """`model` returns the tokenizer's directory; it is called in the thread."""
        self._specs = [spec for spec in pool_specs(config) if _has_more_rows(spec, first)]
        self._model = model
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="prompts", daemon=True)

    def __enter__(self) -> Self:
        if self._specs:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._specs:
            self._thread.join(CLOSE_S)

    def lines(self) -> list[str]:
        return [self._lines.get() for _ in range(self._lines.qsize())]

    def _look(self) -> None:
        try:
            for spec in self._specs:
                self._look_at(spec)
        except DoraError as error:
            self._lines.put(f"prompts: row checks stopped: {error.message}")

    def _look_at(self, spec: PoolSpec) -> None:
        task = msgspec.structs.replace(spec.task, processes=1, reward="none")
        model = self._model()
        tokenizer = Tokenizer(model).reading(task.special_tokens)
        with TaskPool(task) as pool:
            facts, opened = pool.wait(), [(spec, pool)]
            stop = self._ended.is_set
            chats = chats_of(opened, time.time_ns(), model, tokenizer, stop=stop)
            for source in spec.sources:
                rows = facts.data(source).rows
                prompts, threshold = PromptsSeen(source=source, rows=rows), 1
                remaining, begun = islice(ordered(rows), FIRST_ROWS, None), time.monotonic()
                for count, (row, event) in enumerate(answers(pool, source, remaining, stop), 1):
                    read(prompts, row, event, tokenizer, chats.get(source))
                    if len(prompts.failed) + len(prompts.spelled) >= threshold:
                        threshold = 2 * (len(prompts.failed) + len(prompts.spelled))
                        self._say(prompts)
                    if count % CHUNK_ROWS == 0:
                        self._ended.wait(time.monotonic() - begun)
                        begun = time.monotonic()
                if stop():
                    return
                if threshold > 2:
                    self._say(prompts)

    def _say(self, prompts: PromptsSeen) -> None:
        for note in prompts.notes():
            self._lines.put(f"prompts, {prompts.source}: {note}")


def _has_more_rows(spec: PoolSpec, first: RunStarted) -> bool:
    task: Task = spec.task
    of_files = task.kind == "dataset" and not (task.mcp or task.url or task.has_agent)
    sizes = [data.rows for data in map(first.data, spec.sources) if data is not None]
    return of_files and max(sizes, default=0) > FIRST_ROWS
