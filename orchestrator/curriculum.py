"""Decides which row a training group gets where a task has a sampler or a difficulty window.

Both look at reward counters per row (`orchestrator.rows`). What groups have come to is held back
and enters the counters when a version is committed, or when `HELD_BATCHES` batches of it wait:
until then neither a weight nor a window changes. So a choice is a function of the state alone.

A user's function of weights is asked by the planner only. The fold takes the rows of the log as
they are: a function that was mended, or is not there, changes nothing of what has happened.
`role started` says which source chose from then on, so that an audit knows whether its own is that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Final

from dora_pipe.config.model import Config, Task
from dora_pipe.core.errors import ConfigError, reason
from dora_pipe.core.own_code import importable, load_function, source_sha256
from dora_pipe.orchestrator.rows import UNSEEN, Curriculum, PendingOutcome, RowStats, Weights
from dora_pipe.orchestrator.state import Group, State
from dora_pipe.schemas.identity import derive_seed, prompt_index, source_of

HELD_BATCHES: Final = 4
"""Outcomes of so many batches enter the counters without a commit: where all that is sampled is
filtered, there would be none, and rows that are solved would be drawn for ever."""

SKIPPED_MAX: Final = 1024
"""The window looks at so many rows for one that is not solved. If none is, the next row is taken as
if there were no window: neither a plan nor a decision is endless, and a run whose rows are all
solved goes on."""

SOLVED_GROUPS: Final = 4
"""Groups of a row that `task.drop_solved` looks at, the last ones."""

NAMED_MAX: Final = 8
"""So many skipped rows stand in a dispatch's reason; all of them are in its `skipped`."""

DRAW_BITS: Final = 53

Weigh = Callable[[Sequence[RowStats], int], Sequence[float]]
"""A user's sampler: one weight per row of the task's data, for the version that groups get."""

HINT: Final = (
    "mend it and go on with `run --resume`; docs/tasks.md says what a sampler is given and gives"
)


@dataclass(frozen=True, slots=True)
class NextRow:
    """Which row comes next."""

    data_epoch: int
    index: int
    skipped: tuple[int, ...] = ()
    """Rows in front of it that are solved."""
    solved: bool = False
    """It is solved, too, as all are that could be taken."""

    @property
    def why(self) -> str:
        """What a dispatch's reason says of it, if anything."""
        if self.skipped:
            return f"; rows solved and skipped: {shortened(self.skipped)}"
        return "; its row is solved, as all are" if self.solved else ""


def shortened(rows: Sequence[int]) -> str:
    """``shortened((17, 31)) == "17, 31"``; of many, the first `NAMED_MAX`."""
    more = f" and {len(rows) - NAMED_MAX} more" if len(rows) > NAMED_MAX else ""
    return ", ".join(map(str, rows[:NAMED_MAX])) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class Samplers:
    """What the planner draws rows with. Example: ``Samplers.load(config)``"""

    functions: Mapping[str, Weigh] = field(default_factory=dict)
    """By what `task.sampler` says."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """sha256 of the files they are in."""
    recorded: Mapping[int, int] | None = None
    """In place of them, the rows that the log has, by the ordinal of the group."""

    @classmethod
    def load(cls, config: Config) -> Samplers:
        """Those of a configuration. Raises ConfigError where one is not there."""
        functions: dict[str, Weigh] = {}
        for task in config.tasks:
            if task.sampler:
                with importable(task.directory):
                    functions[task.sampler] = load_function("task.sampler", task.sampler)
        return cls(functions=functions, sources={one: source_sha256(one) for one in functions})


def has_curriculum(task: Task) -> bool:
    """Whether rows are counted."""
    return bool(task.sampler) or task.drop_solved is not None


def note_ended(state: State, group: Group) -> None:
    """All siblings of a group have ended, enough with a reward: its outcome is certain."""
    assert state.config is not None
    spec = group.spec
    task = next((one for one in state.config.tasks if one.name == spec.task), None)
    if spec.purpose != "train" or task is None or not has_curriculum(task):
        return
    rewards = [one.reward for one in group.results if one is not None and one.reward is not None]
    held = state.curricula.setdefault(spec.source, Curriculum()).held
    held.append(PendingOutcome(spec.index, fsum(rewards) / len(rewards), spec.version))
    if len(held) >= HELD_BATCHES * state.config.groups.per_step:
        count_pending(state, spec.source)


def new_version(state: State) -> None:
    """A version was committed: what was held back counts from now on."""
    for source in state.curricula:
        count_pending(state, source)
    state.weights.clear()


def count_pending(state: State, source: str) -> None:
    """The outcomes of a source enter its counters."""
    held = state.curricula[source].held
    for one in held:
        key = row_key(source, one.index)
        known = state.rows.get(key, UNSEEN)
        state.rows[key] = known.and_group(one.reward, one.version)
        state.leaves.touch("row", key)
    held.clear()
    state.weights.pop(source, None)


def skip(state: State, source: str, skipped: Sequence[int]) -> None:
    """These rows are passed over in favour of the group that is dispatched."""
    if skipped:
        state.curricula.setdefault(source, Curriculum()).passed += len(skipped)


def row_key(source: str, index: int) -> str:
    """``row_key("train/math", 17) == "train/math#17"``."""
    return f"{source}#{index}"


def next_row(
    state: State,
    task: Task,
    rows: int,
    *,
    samplers: Samplers | None = None,
    chosen: int | None = None,
) -> NextRow:
    """The row of the next group of a task whose data has so many.

    Where it is drawn, `chosen` is the row that the log has; else `samplers` draw it, and may raise
    ConfigError.
    """
    assert state.facts is not None
    source, seed = source_of("train", task.name), state.facts.seed
    place = state.drawn.get(task.name, 0) if task.name else state.ordinal
    if task.sampler:
        if chosen is None:
            chosen = _drawn(state, task, rows, samplers or Samplers(), place)
        return NextRow(place // rows, chosen, solved=is_solved(state, task, chosen))
    if task.drop_solved is None:
        return NextRow(*prompt_index(seed, place, rows))
    known = state.curricula.get(source)
    place += known.passed if known is not None else 0
    first = prompt_index(seed, place, rows)
    skipped: list[int] = []
    found = first
    while is_solved(state, task, found[1]):
        skipped.append(found[1])
        if len(skipped) == min(rows, SKIPPED_MAX):
            return NextRow(*first, solved=True)
        found = prompt_index(seed, place + len(skipped), rows)
    return NextRow(*found, tuple(skipped))


def is_solved(state: State, task: Task, index: int) -> bool:
    """Whether the difficulty window leaves a row out."""
    row = state.rows.get(row_key(source_of("train", task.name), index))
    if row is None or task.drop_solved is None:
        return False
    return row.is_solved(task.drop_solved, SOLVED_GROUPS)


def _drawn(state: State, task: Task, rows: int, samplers: Samplers, place: int) -> int:
    """By a number that is a hash of the run's seed, the task and how many it has had."""
    assert state.facts is not None
    if samplers.recorded is not None:
        return samplers.recorded.get(state.ordinal, 0)
    source = source_of("train", task.name)
    weights = state.weights.get(source)
    if weights is None:
        weights = state.weights[source] = _weights(state, task, rows, samplers)
    number = derive_seed("draw", state.facts.seed, source, place)
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
"""What a user's function may raise, for all that one can say."""


def _weights(state: State, task: Task, rows: int, samplers: Samplers) -> Weights:
    """What the sampler gives for the counters and the version; solved rows weigh nothing, unless
    that leaves no row. Raises ConfigError."""
    who = f"task.sampler: `{task.sampler}`"
    weigh = samplers.functions.get(task.sampler)
    if weigh is None:
        raise ConfigError(f"{who} was not loaded")
    stats = stats_of(state, source_of("train", task.name), rows)
    try:
        weights = [float(one) for one in weigh(stats, state.version)]
        if len(weights) != rows:
            raise ValueError(f"{len(weights)} weights for {rows} rows")
        found = Weights(weights)
        if task.drop_solved is None:
            return found
        solved = [one.is_solved(task.drop_solved, SOLVED_GROUPS) for one in stats]
        left = [0.0 if out else one for one, out in zip(weights, solved, strict=True)]
        return Weights(left) if any(left) else found
    except _RAISED as error:
        said = f"{who} cannot be used at version {state.version}: {reason(error)}"
        raise ConfigError(said, hint=HINT) from error


def stats_of(state: State, source: str, rows: int) -> list[RowStats]:
    found, prefix = [UNSEEN] * rows, f"{source}#"
    for key, row in state.rows.items():
        if key.startswith(prefix):
            found[int(key[len(prefix) :])] = row
    return found
