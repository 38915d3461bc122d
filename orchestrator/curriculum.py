"""Row selection for tasks with a sampler or a difficulty window, and groups of evaluations.

Outcomes enter the row counters at a commit, or when `HELD_BATCHES` batches wait, so a choice
depends on the state alone. Only the planner calls a user's sampler; the fold takes rows from the
log, so changing the function does not affect past rounds. Groups of evaluations are equal for every
version, including random streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Final

from dora_pipe.config.model import Config, Evaluation, Task
from dora_pipe.core.errors import ConfigError, reason
from dora_pipe.core.system.own_code import importable, load_function, source_sha256
from dora_pipe.orchestrator.entities import Group
from dora_pipe.orchestrator.rows import UNSEEN, Curriculum, PendingOutcome, RowStats, Weights
from dora_pipe.orchestrator.staleness import EVALUATION_DEADLINE
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.identity import (
    derive_seed,
    group_id,
    group_seed,
    partition_of,
    prompt_index,
    source_of,
)
from dora_pipe.schemas.rounds import GroupSpec

HELD_BATCHES: Final = 4
"""Outcome batches that count without a commit; otherwise a run of filtered groups would draw
solved rows indefinitely."""

SKIPPED_MAX: Final = 1024
"""Maximum solved rows to skip; then the next row is taken, so the run continues."""

SOLVED_GROUPS: Final = 4
"""Recent groups that `task.max_solve_rate` considers."""

NAMED_MAX: Final = 8
"""Skipped rows listed in a reason."""

DRAW_BITS: Final = 53

Weigh = Callable[[Sequence[RowStats], int], Sequence[float]]
"""User's sampler: row counters and version to one weight per row."""

HINT: Final = "fix it and continue with `run --resume`; docs/data.md describes samplers"


@dataclass(frozen=True, slots=True)
class NextRow:
    """Next row of a task."""

    data_epoch: int
    index: int
    skipped: tuple[int, ...] = ()
    solved: bool = False
    """Whether all candidates were solved."""

    @property
    def why(self) -> str:
        """Text for the dispatch's reason."""
        if self.skipped:
            return f"; rows solved and skipped: {shortened(self.skipped)}"
        return "; its row is solved, like all others" if self.solved else ""


def shortened(rows: Sequence[int]) -> str:
    """Return rows as text: ``shortened((17, 31)) == "17, 31"``."""
    more = f" and {len(rows) - NAMED_MAX} more" if len(rows) > NAMED_MAX else ""
    return ", ".join(map(str, rows[:NAMED_MAX])) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class Samplers:
    """Samplers of the planner."""

    functions: Mapping[str, Weigh] = field(default_factory=dict)
    """Functions by `task.sampler`."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """sha256 of their source files."""
    recorded: Mapping[int, int] | None = None
    """Logged rows by group ordinal, used instead."""

    @classmethod
    def load(cls, config: Config) -> Samplers:
        """Load the samplers. Raises ConfigError."""
        functions: dict[str, Weigh] = {}
        for task in config.tasks:
            if task.sampler:
                with importable(task.directory):
                    functions[task.sampler] = load_function("task.sampler", task.sampler)
        return cls(functions=functions, sources={name: source_sha256(name) for name in functions})


def has_curriculum(task: Task) -> bool:
    """Report whether rows are counted."""
    return bool(task.sampler) or task.max_solve_rate is not None


def note_ended(state: State, group: Group) -> None:
    """Record the outcome of an ended group."""
    assert state.config is not None
    spec = group.spec
    task = next((task for task in state.config.tasks if task.name == spec.task), None)
    if spec.purpose != "train" or task is None or not has_curriculum(task):
        return
    rewards = group.rewards
    held = state.curricula.setdefault(spec.source, Curriculum()).held
    held.append(PendingOutcome(spec.index, fsum(rewards) / len(rewards), spec.version))
    if len(held) >= HELD_BATCHES * state.config.rollout.prompts_per_step:
        count_pending(state, spec.source)


def new_version(state: State) -> None:
    """Count pending outcomes."""
    for source in state.curricula:
        count_pending(state, source)
    state.weights.clear()


def count_pending(state: State, source: str) -> None:
    """Count a source's pending outcomes."""
    held = state.curricula[source].held
    for outcome in held:
        key = row_key(source, outcome.index)
        stats = state.rows.get(key, UNSEEN)
        state.rows[key] = stats.and_group(outcome.reward, outcome.version)
        state.leaves.touch("row", key)
    held.clear()
    state.weights.pop(source, None)


def row_key(source: str, index: int) -> str:
    """Return the key of a row: ``row_key("train/math", 17) == "train/math#17"``."""
    return f"{source}#{index}"


def next_row(
    state: State,
    task: Task,
    rows: int,
    *,
    samplers: Samplers | None = None,
    chosen: int | None = None,
) -> NextRow:
    """Return the row of a task's next group; `chosen` is the drawn row in the log.

    Raises ConfigError if a sampler fails.
    """
    assert state.started is not None
    source, seed = source_of("train", task.name), state.started.seed
    position = state.drawn.get(task.name, 0)
    if task.sampler:
        if chosen is None:
            chosen = _drawn(state, task, rows, samplers or Samplers(), position)
        return NextRow(position // rows, chosen, solved=is_solved(state, task, chosen))
    if task.max_solve_rate is None:
        return NextRow(*prompt_index(seed, position, rows))
    curriculum = state.curricula.get(source)
    position += curriculum.passed if curriculum is not None else 0
    first = prompt_index(seed, position, rows)
    skipped: list[int] = []
    index = first
    while is_solved(state, task, index[1]):
        skipped.append(index[1])
        if len(skipped) == min(rows, SKIPPED_MAX):
            return NextRow(*first, solved=True)
        index = prompt_index(seed, position + len(skipped), rows)
    return NextRow(*index, tuple(skipped))


def is_solved(state: State, task: Task, index: int) -> bool:
    """Report whether the window excludes a row."""
    row = state.rows.get(row_key(source_of("train", task.name), index))
    if row is None or task.max_solve_rate is None:
        return False
    return row.is_solved(task.max_solve_rate, SOLVED_GROUPS)


def _drawn(state: State, task: Task, rows: int, samplers: Samplers, position: int) -> int:
    assert state.started is not None
    if samplers.recorded is not None:
        return samplers.recorded.get(state.ordinal, 0)
    source = source_of("train", task.name)
    weights = state.weights.get(source)
    if weights is None:
        weights = state.weights[source] = _weights(state, task, rows, samplers)
    number = derive_seed("draw", state.started.seed, source, position)
    return weights.draw((number >> (63 - DRAW_BITS)) / (1 << DRAW_BITS))


_RAISED: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that a user's function may raise."""


def _weights(state: State, task: Task, rows: int, samplers: Samplers) -> Weights:
    """Return current weights; solved rows weigh 0 unless all are solved. Raises ConfigError."""
    who = f"task.sampler: `{task.sampler}`"
    weigh = samplers.functions.get(task.sampler)
    if weigh is None:
        raise ConfigError(f"{who} was not loaded")
    stats = stats_of(state, source_of("train", task.name), rows)
    try:
        weights = [float(weight) for weight in weigh(stats, state.version)]
        if len(weights) != rows:
            raise ValueError(f"{len(weights)} weights for {rows} rows")
        sums = Weights(weights)
        if task.max_solve_rate is None:
            return sums
        solved = [row.is_solved(task.max_solve_rate, SOLVED_GROUPS) for row in stats]
        unsolved = [0.0 if out else weight for weight, out in zip(weights, solved, strict=True)]
        return Weights(unsolved) if any(unsolved) else sums
    except _RAISED as error:
        message = f"{who} cannot be used at version {state.version}: {reason(error)}"
        raise ConfigError(message, hint=HINT) from error


def stats_of(state: State, source: str, rows: int) -> list[RowStats]:
    stats, prefix = [UNSEEN] * rows, f"{source}#"
    for key, row in state.rows.items():
        if key.startswith(prefix):
            stats[int(key[len(prefix) :])] = row
    return stats


def evaluation_rows(started: RunStarted, evaluation: Evaluation) -> int:
    data = started.datasets.get(source_of("eval", evaluation.name))
    return min(evaluation.prompts, data.rows if data else started.eval_rows)


def evaluation_group(
    started: RunStarted,
    config: Config,
    evaluation: Evaluation,
    row: int,
    *,
    ordinal: int,
    version: int,
    digest: str,
) -> GroupSpec:
    """Return one row's group for a version."""
    data = started.datasets.get(source_of("eval", evaluation.name))
    return GroupSpec(
        group=group_id("eval", ordinal),
        ordinal=ordinal,
        purpose="eval",
        version=version,
        digest=digest,
        deadline=EVALUATION_DEADLINE,
        partition=partition_of(ordinal, config.bus.partitions),
        dataset_digest=data.digest if data else started.eval_digest,
        index=row,
        data_epoch=0,
        seed=group_seed(started.seed, "eval", row),
        size=evaluation.group_size,
        task=config.task_of(evaluation).name,
        evaluation=evaluation.name,
    )
