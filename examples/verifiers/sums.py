"""A taskset of verifiers with one turn: the sum of a few numbers, modulo 100."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class Numbers(vf.TaskData):
    numbers: list[int]


class SumsConfig(vf.TasksetConfig):
    """`options.env.taskset` of the configuration."""

    count: int = 1024
    seed: int = 1
    most: int = 3


def rows(config: SumsConfig) -> Iterator[Numbers]:
    """Rows whose prompt is ``n3 7 n2 5 n1 4``: the numbers, each with how many are left."""
    chance = random.Random(config.seed)
    for _ in range(config.count):
        numbers = [chance.randint(0, 24) for _ in range(chance.randint(2, config.most))]
        named = (f"n{len(numbers) - index} {number}" for index, number in enumerate(numbers))
        yield Numbers(prompt=" ".join(named), numbers=numbers)


def answered(trace: vf.Trace, total: int) -> float:
    """1 where the model said the total last."""
    match = re.search(r"answer (\d+)$", (trace.last_reply or "").strip())
    return float(match is not None and int(match[1]) == total % 100)


class Sum(vf.Task[Numbers]):
    """Score of a row."""

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return answered(trace, sum(self.data.numbers))


class Sums(vf.Taskset[Sum, SumsConfig]):
    """Sums of up to `most` numbers."""

    def load(self) -> Iterator[Sum]:
        """The tasks, which follow from the seed."""
        for row in rows(self.config):
            yield Sum(row, self.config.task)
