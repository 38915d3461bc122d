"""How long a run's prompts are, before it starts; decides how many of them are looked at.

They are asked of the task's own process and become tokens as in a worker, by the model's tokenizer
or chat template. Prompts of an environment or an agent are not asked for: that would begin its
episodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.config.several import pool_specs
from dora_pipe.core.errors import TaskError
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.calls import Forget, PromptCall, TaskFailed
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.port import Split
from dora_pipe.producers.worker.chats import chats_of
from dora_pipe.producers.worker.effects import PromptReady
from dora_pipe.producers.worker.ports import TaskPorts
from dora_pipe.producers.worker.role import task_ports

LOOKED_AT: Final = 4096
"""Prompts of each source, spread evenly over its rows."""

ANSWERS_S: Final = 60.0
"""For all prompts of a source."""

POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """Of a source (`GroupSpec.source`)."""

    source: str
    rows: int
    """That it has."""
    tokens: tuple[int, ...]
    """Of the prompts that were looked at."""

    def beyond(self, tokens: int) -> int:
        """How many of them are longer than this."""
        return sum(one > tokens for one in self.tokens)


def prompt_lengths(config: Config, model_dir: Path) -> Iterator[PromptLengths]:
    """Of every source whose prompts stand in rows. Raises ConfigError, PolicyError, TaskError."""
    tokenizer = Tokenizer(model_dir)
    for spec in pool_specs(config):
        if spec.task.has_agent:
            continue
        with TaskPool(msgspec.structs.replace(spec.task, processes=1)) as pool:
            facts = pool.wait()
            if not facts.single_turn:
                continue
            opened = [(spec, pool)]
            chats = chats_of(opened, time.time_ns(), model_dir, tokenizer, stop=lambda: False)
            ports = task_ports(opened, tokenizer, chats)
            for source in spec.sources:
                rows = facts.data(source).rows
                if not rows:
                    continue
                split: Split = "train" if source.startswith("train") else "eval"
                asked = [
                    PromptCall(request=f"{source} {row}", split=split, index=row, source=source)
                    for row in spread(rows)
                ]
                found = tuple(_answers(ports, asked))
                yield PromptLengths(source=source, rows=rows, tokens=found)


def spread(rows: int) -> list[int]:
    """Which rows are looked at: all, or LOOKED_AT of them from the first to the last."""
    if rows <= LOOKED_AT:
        return list(range(rows))
    return [number * (rows - 1) // (LOOKED_AT - 1) for number in range(LOOKED_AT)]


def _answers(ports: TaskPorts, asked: Sequence[PromptCall]) -> Iterator[int]:
    """Tokens of each prompt. A row that the task fails on fails in the run, too, by a name of its
    own; it is left out. Raises TaskError where answers do not come."""
    until, left = time.monotonic() + ANSWERS_S, {one.request for one in asked}
    for one in asked:
        ports.start(one)
    while left:
        for event in ports.poll():
            if isinstance(event, PromptReady):
                yield len(event.token_ids)
            if isinstance(event, PromptReady | TaskFailed):
                left.discard(event.request)
                ports.start(Forget(request=event.request, source=asked[0].source))
        if left and time.monotonic() > until:
            raise TaskError(f"{len(left)} prompts have not come within {ANSWERS_S:g} s")
        time.sleep(0 if ports.busy else POLL_S)
