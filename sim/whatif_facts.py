"""Decides what a finished run's log says of its hardware: lengths, speeds, delays; nothing else.

Everything is as the run measured it, on a machine that may have had other things to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.logged import Damage
from dora_pipe.bus.port import Bus
from dora_pipe.catalogue.database import Catalogue
from dora_pipe.catalogue.logged import COUNTS, logged_records
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.core.errors import SchemaError, UsageError
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.sim.whatif_speed import SlotTime, Speed, busy_workers, speed_of

SECOND_NS = 1_000_000_000
STEPS_MIN = 4
"""A shorter run says too little."""

STEPS: Final = """
    select step, (taken_ns - started_ns) / 1e9 as taken_s,
           (committed_ns - started_ns) / 1e9 as committed_s, tokens, staleness_mean as staleness
    from steps, runs order by step"""

WORKERS: Final = """
    select worker, arg_max(slots, incarnation), arg_max(prefetch, incarnation), min(joined_ns)
    from workers group by worker order by worker"""

SIBLINGS: Final = """
    select ordinal, sibling, trajectories.tokens, trajectories.reward
    from trajectories join groups using (group_id)
    where logged_ns is not null and purpose = ? order by all"""

DELAYS: Final = """
    with reports as (select distinct control_offset, logged_ns from records),
         folds as (select control_next, min(at_ns) as at_ns from rounds group by control_next)
    select (select median(at_ns - logged_ns) / 1e9
            from reports asof join folds on control_offset < control_next),
           (select median(ready_ns - assigned_ns) / 1e9 from hostings),
           (select count(*) from events where kind = 'command'),
           (select count(*) - count(distinct worker) from workers)"""

Key = tuple[int, int]
"""Ordinal (or evaluation row) and sibling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A committed step."""

    step: int
    taken_s: float
    committed_s: float
    tokens: int
    """Sampled, of its batch."""
    staleness: float
    """Mean over its groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything that `whatif` takes from a log."""

    config: Config
    workers: Sequence[tuple[str, int, int]]
    """Name, slots, prefetch of every worker that joined, once per name."""
    began_s: float
    """When the last of the first workers had joined; seconds since the run started."""
    lengths: dict[Key, int]
    eval_lengths: dict[Key, int]
    """By ordinal of the evaluation group."""
    rewards: dict[Key, float | None]
    steps: Sequence[Trained]
    speed: Speed
    reports_s: Sequence[float]
    """From the last token of a response to the record that says so, sorted."""
    react_s: float
    """From a report of trajectories to the round that folds it, on the median."""
    place_s: float
    """From a decision that places a request to its slot, where one was free."""
    load_s: float
    """From a decision that assigns a version to the worker's report that it has it."""
    busy_training: float
    """Workers with a request, on the mean while a step was trained."""
    train_fixed_s: float
    train_token_s: float
    first_step_s: float
    commands: int
    """What users asked during the run; the model knows nothing of it."""
    rejoined: int
    """Workers that came back; the model has none."""
    damage: Damage
    """Trajectories whose records are not what was logged: their times are left out."""

    @property
    def wall_s(self) -> float:
        """From `began_s` to the last commit."""
        return self.steps[-1].committed_s - self.began_s


def measure(bus: Bus, topics: Topics, catalogue: Catalogue) -> Measured:
    """Read a run's tables, and of its trajectories the times.

    Raises UsageError when it is too short to say anything.
    """
    steps = [Trained(**row) for row in catalogue.records(STEPS)]
    run = catalogue.one("select config, started_ns from runs")
    if run is None or len(steps) < STEPS_MIN:
        raise UsageError(f"the run has {len(steps)} committed steps; {STEPS_MIN} are asked")
    config, zero_ns = run
    training = [(one.taken_s, one.committed_s) for one in steps]
    damage = Damage()
    # In an order of their own: how partitions come interleaved is up to the bus.
    found = sorted(
        _slot_times(bus, topics, catalogue, zero_ns, damage),
        key=lambda one: (one.end_s, one.trajectory),
    )
    if not found:
        raise UsageError("the log holds no trajectory with times")
    fixed_s, token_s, first_s = _train_times(steps)
    workers = catalogue.query(WORKERS)
    ((react_s, load_s, commands, rejoined),) = catalogue.query(DELAYS)
    trained, evaluated = (catalogue.query(SIBLINGS, [one]) for one in ("train", "eval"))
    return Measured(
        config=logged_config(json.loads(config)),
        workers=[(name, slots, prefetch) for name, slots, prefetch, _ in workers],
        began_s=(max(joined_ns for *_, joined_ns in workers) - zero_ns) / SECOND_NS,
        lengths=_keyed(trained, 2),
        eval_lengths=_keyed(evaluated, 2),
        rewards=_keyed(trained, 3),
        steps=steps,
        speed=speed_of(found, training),
        reports_s=sorted(max(0.0, one.reported_s - one.end_s) for one in found),
        react_s=max(0.0, react_s or 0.0),
        place_s=_place_s(found),
        load_s=max(0.0, load_s or 0.0),
        busy_training=busy_workers(found, training),
        train_fixed_s=fixed_s,
        train_token_s=token_s,
        first_step_s=first_s,
        commands=commands,
        rejoined=rejoined,
        damage=damage,
    )


def _keyed(siblings: Sequence[tuple[Any, ...]], column: int) -> dict[Key, Any]:
    return {(one[0], one[1]): one[column] for one in siblings}


def _place_s(found: Sequence[SlotTime]) -> float:
    """The fastest tenth: the others waited for a slot."""
    waited = sorted(one.start_s - one.placed_s for one in found)
    return max(0.0, waited[len(waited) // 10])


def _slot_times(
    bus: Bus, topics: Topics, catalogue: Catalogue, zero_ns: int, damage: Damage
) -> Iterator[SlotTime]:
    """Every trajectory that counts, of one attempt and one turn, whose times are known."""
    left = logged_records(catalogue, COUNTS)
    placed_ns = dict(catalogue.query("select trajectory_id, placed_ns from trajectories"))
    for record in records_of(bus, ends_of(bus, topics.trajectories)):
        named = left.pop((record.partition, record.offset), None)
        if named is None or not damage.is_sound(record, named):
            continue
        with suppress(SchemaError):  # it is among the dead letters
            one = decode_trajectory(record.value)
            times, turns = one.meta.times, sum(part.kind == "model" for part in one.segments)
            if times.started is None or times.finished is None or named.attempt > 1 or turns != 1:
                continue
            yield SlotTime(
                trajectory=named.trajectory,
                worker=one.meta.worker,
                placed_s=(placed_ns[named.trajectory] - zero_ns) / SECOND_NS,
                start_s=(times.started - zero_ns) / SECOND_NS,
                end_s=(times.finished - zero_ns) / SECOND_NS,
                tokens=one.sampled,
                reported_s=(named.logged_ns - zero_ns) / SECOND_NS,
            )
    damage.look_for_the_rest(left)


def _train_times(steps: Sequence[Trained]) -> tuple[float, float, float]:
    """(fixed seconds, seconds per token, what the first step took beyond that)."""
    later = steps[1:]
    tokens = np.array([float(one.tokens) for one in later])
    seconds = np.array([one.committed_s - one.taken_s for one in later])
    table = np.stack([np.ones_like(tokens), tokens], axis=1)
    (fixed, token), *_ = np.linalg.lstsq(table, seconds, rcond=None)
    if token < 0 or fixed < 0:
        fixed, token = float(seconds.mean()), 0.0
    first = steps[0].committed_s - steps[0].taken_s
    beyond = max(0.0, first - float(fixed) - float(token) * steps[0].tokens)
    return float(fixed), float(token), beyond
