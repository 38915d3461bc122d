"""Measures what large data cost a run: the first start on a machine, the next, and the memory of
the process that serves them. It decides nothing.

The rows are text of random words (fixed seed) in one Parquet file, as long as questions and
solutions of mathematics are, and as hard to compress as prose.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora_pipe.config import model
from dora_pipe.core.errors import ResourceError
from dora_pipe.producers.data.prepare import CACHE_VARIABLE, cache_folder
from dora_pipe.producers.tasks.calls import PromptCall
from dora_pipe.producers.tasks.pool import TaskPool

PROMPTS: Final = 2000
"""Rows asked for, from all over the data."""

GROUP_ROWS: Final = 20_000
WORDS: Final = 20_000
LIMIT_S: Final = 3600.0

REWARD: Final = "def score(row, text):\n    return float(text == row['answer'])\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFigure:
    """What one Parquet file costs. Memory is that of the process alone, without pages of files,
    which processes share and the kernel takes back.

    Example: ``DataFigure(parquet_mb=2058, rows=2_300_000, prepared_mb=2243, first_start_s=40.0,
    preparing_mb=81, next_start_s=0.37, task_mb=16, prompt_us=118.0)``
    """

    parquet_mb: int
    rows: int
    prepared_mb: int
    first_start_s: float
    preparing_mb: int
    next_start_s: float
    task_mb: int
    prompt_us: float


def bench_data(folder: Path, megabytes: int) -> DataFigure:
    """Figures of a file of so many MiB, made in `folder`. Raises ResourceError."""
    path = folder / "rows.parquet"
    rows = write_parquet(path, megabytes << 20)
    (folder / "bench_reward.py").write_text(REWARD)
    task = model.Task(
        kind="dataset", data=str(path), reward="bench_reward:score", directory=str(folder)
    )
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    try:
        first_s, preparing = _start(task)
        prepared = sum(one.stat().st_size for one in cache_folder().glob("*.rows"))
        next_s, task_bytes, prompt_s = _serve(task, rows)
    finally:
        if before is None:
            del os.environ[CACHE_VARIABLE]
        else:
            os.environ[CACHE_VARIABLE] = before
    return DataFigure(
        parquet_mb=path.stat().st_size >> 20,
        rows=rows,
        prepared_mb=prepared >> 20,
        first_start_s=round(first_s, 1),
        preparing_mb=preparing >> 20,
        next_start_s=round(next_s, 2),
        task_mb=task_bytes >> 20,
        prompt_us=round(prompt_s * 1e6, 1),
    )


def write_parquet(path: Path, bytes_min: int) -> int:
    """Rows of text until the file is so large; their number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chance = random.Random(17)
    letters = "etaoinshrdlucmf"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(WORDS)]
    schema = pa.schema([("prompt", pa.string()), ("answer", pa.string()), ("level", pa.int64())])
    rows = 0
    with pq.ParquetWriter(path, schema) as file:
        while not path.exists() or path.stat().st_size < bytes_min:
            texts = [" ".join(chance.choices(words, k=150)) for _ in range(GROUP_ROWS)]
            answers = [str(rows + place) for place in range(GROUP_ROWS)]
            levels = [place % 5 for place in range(GROUP_ROWS)]
            file.write_table(pa.table([texts, answers, levels], schema=schema))
            rows += GROUP_ROWS
    return rows


def _start(task: model.Task) -> tuple[float, int]:
    """Seconds until the task is open, and the most memory of a process below it."""
    start, peak, others = time.monotonic(), 0, set(_below(os.getpid()))
    with TaskPool(task) as pool:
        while pool.facts is None:
            pool.poll(wait_s=0.05)
            peak = max(peak, _most_bytes(others))
            if time.monotonic() - start > LIMIT_S:
                raise ResourceError(f"the data were not ready after {LIMIT_S:.0f} s")
        return time.monotonic() - start, peak


def _serve(task: model.Task, rows: int) -> tuple[float, int, float]:
    """Seconds of a start, memory after many prompts, and seconds per prompt."""
    start, others = time.monotonic(), set(_below(os.getpid()))
    with TaskPool(task) as pool:
        pool.wait()
        opened_s = time.monotonic() - start
        places = random.Random(3).sample(range(rows), PROMPTS)
        start = time.monotonic()
        for number, place in enumerate(places):
            pool.submit(PromptCall(request=f"g{number}", split="train", index=place))
        answered = 0
        while answered < PROMPTS:
            answered += len(pool.poll(wait_s=1.0))
        prompt_s = (time.monotonic() - start) / PROMPTS
        return opened_s, _most_bytes(others), prompt_s


def _most_bytes(others: Set[int]) -> int:
    """Memory of the largest process below this one but for `others`, which were there before."""
    return max((_own_bytes(pid) for pid in _below(os.getpid()) if pid not in others), default=0)


def _below(pid: int) -> Iterator[int]:
    """Processes that this one started, and those that they did."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = [int(one) for one in children.read_text().split()]
        except OSError:
            continue  # it has ended meanwhile
        for child in found:
            yield child
            yield from _below(child)


def _own_bytes(pid: int) -> int:
    """Memory of a process without pages of files; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    named = dict(line.split(":", 1) for line in lines if ":" in line)
    parts = (named.get(name, "0 kB") for name in ("RssAnon", "RssShmem"))
    return sum(int(part.split()[0]) for part in parts) * 1024
