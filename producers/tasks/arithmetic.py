"""Built-in task `arithmetic`: additions modulo 10 with a scratchpad.

The prompt ``3 7 c12 |`` asks for 3 + 12 * 7 modulo 10. The answer counts down with the running sum,
``c12 0 c11 7 ... c1 7 = 7``. Counts are log-normal. Only the final sum is rewarded. Some
demonstrated sums are wrong, so that training has something to learn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.tasks.task import Row, Split, Task
from dora_pipe.schemas.identity import derive_seed

MODULUS = 10
COUNT_MAX = 60

EVAL_SEED = 999
"""Seed of evaluation rows of generated tasks: fixed, so that evaluations are comparable."""

WORDS: tuple[str, ...] = (
    "|",
    "=",
    *(str(digit) for digit in range(MODULUS)),
    *(f"c{count}" for count in range(1, COUNT_MAX + 1)),
)
"""Vocabulary for `write_word_tokenizer`."""


class Arithmetic(Task):
    """Built-in task `arithmetic`."""

    def __init__(
        self,
        *,
        seed: int = 1,
        count: int = 4096,
        eval_count: int = 256,
        mu: float = 1.2,
        sigma: float = 1.3,
        n_max: int = COUNT_MAX,
        noise: float = 0.25,
    ) -> None:
        """`mu` and `sigma` describe the log of the count; `noise` is the share of wrong sums."""
        if not 1 <= n_max <= COUNT_MAX:
            raise ConfigError(f"task.options.n_max: {n_max} is not between 1 and {COUNT_MAX}")
        if not 0 <= noise <= 1:
            raise ConfigError(f"task.options.noise: {noise} is not between 0 and 1")
        self._seeds: dict[Split, int] = {"train": seed, "eval": EVAL_SEED}
        self._counts: dict[Split, int] = {"train": count, "eval": eval_count}
        self._mu, self._sigma, self._n_max = mu, sigma, n_max
        self._noise = noise

    def rows(self, split: Split) -> Sequence[Row]:
        chance = random.Random(derive_seed("arithmetic", split, self._seeds[split]))
        return [self._row(chance) for _ in range(self._counts[split])]

    def prompt(self, row: Row) -> str:
        return f"{row['start']} {row['step']} c{row['count']} |"

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> float:
        """Return 1 if the text ends with `=` and the correct sum, else 0."""
        total = (row["start"] + row["count"] * row["step"]) % MODULUS
        return float(text.split()[-2:] == ["=", str(total)])

    def demonstrations(self, seed: int, count: int) -> Sequence[tuple[str, str]]:
        chance = random.Random(derive_seed("arithmetic", "demonstrations", seed))
        rows = (self._row(chance) for _ in range(count))
        return [(self.prompt(row), self.answer(row, chance)) for row in rows]

    def answer(self, row: Row, chance: random.Random) -> str:
        """Return a demonstration; a share `noise` of its sums is wrong and carried on."""
        words, total = [], row["start"]
        for number in range(row["count"], 0, -1):
            total = (total + row["step"]) % MODULUS
            if chance.random() < self._noise:
                total = chance.randrange(MODULUS)
            words += [f"c{number}", str(total)]
        return " ".join([*words, "=", str(total)])

    def _row(self, chance: random.Random) -> Row:
        count = math.ceil(chance.lognormvariate(self._mu, self._sigma))
        return {
            "start": chance.randrange(MODULUS),
            "step": chance.randrange(MODULUS),
            "count": min(max(count, 1), self._n_max),
        }
