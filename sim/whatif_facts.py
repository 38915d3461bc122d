"""Decides what a finished run's log says of its hardware: lengths, speeds, delays; nothing else.

The speed of its engines is a regression over all requests: the time from entering a slot to the
last token, against its tokens, its tokens times the requests that were active beside it, and the
share of that time in which a step was being trained:

    seconds = tokens * (t0 + t1 * active) * (1 + slower * training share)

Everything is as the run measured it, on a machine that may have had other things to do.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.logged import Damage
from dora_pipe.bus.port import Bus
from dora_pipe.catalogue.database import COUNTS, Catalogue, logged_records
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.core.errors import SchemaError, UsageError
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Segment, Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory

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
           (select median(ready_ns - assigned_ns) / 1e9 from hostings where version >= 0),
           (select count(*) from events where kind = 'command'),
           (select count(*) - count(distinct worker) from workers)"""

VALUES: Final = """
    select sum(cast(figures->>'turn_value_tokens' as double)), sum(tokens)
    from steps where figures->>'turn_value_tokens' is not null"""

SLOWER_TRIED = tuple(one / 50 for one in range(151))
"""Slow-downs while a step trains that the regression looks at: 0 .. 3."""

Key = tuple[int, int]
"""Ordinal (or evaluation row) and sibling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTime:
    """A request in a slot. Times are seconds since the run started."""

    trajectory: str
    worker: str
    placed_s: float
    """When it was decided; of a later turn, when its environment had answered."""
    start_s: float
    end_s: float
    tokens: int
    after_s: float | None
    """From its end, or that of its last turn, until control has the whole of it, with all that its
    environment took; None of a turn with others behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What the regression found."""

    t0_s: float
    t1_s: float
    slower: float
    r2: float
    """Share of the variance of the requests' times that it explains."""


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
class TurnValues:
    """What values of turns cost (`groups.turn_values_share`), of the trained trajectories."""

    tokens: int
    """Of continuations; the model does not sample them."""
    trained: int
    """Sampled tokens of the same steps' batches."""
    share: float
    samples: int
    """As configured: the cost grows with both alike."""


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
    turn_values: TurnValues | None
    """None: no turn was valued."""
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
    logged = logged_config(json.loads(config))
    return Measured(
        config=logged,
        workers=[(name, slots, prefetch) for name, slots, prefetch, _ in workers],
        began_s=(max(joined_ns for *_, joined_ns in workers) - zero_ns) / SECOND_NS,
        lengths=_keyed(trained, 2),
        eval_lengths=_keyed(evaluated, 2),
        rewards=_keyed(trained, 3),
        steps=steps,
        speed=speed_of(found, training),
        reports_s=sorted(max(0.0, one.after_s) for one in found if one.after_s is not None),
        react_s=max(0.0, react_s or 0.0),
        place_s=_place_s(found),
        load_s=max(0.0, load_s or 0.0),
        busy_training=busy_workers(found, training),
        train_fixed_s=fixed_s,
        train_token_s=token_s,
        first_step_s=first_s,
        turn_values=turn_values_of(catalogue, logged),
        commands=commands,
        rejoined=rejoined,
        damage=damage,
    )


def turn_values_of(catalogue: Catalogue, config: Config) -> TurnValues | None:
    """What values of turns have cost, of the steps that say so."""
    ((tokens, trained),) = catalogue.query(VALUES)
    if not tokens:
        return None
    share, samples = config.groups.turn_values_share, config.groups.turn_values_samples
    return TurnValues(tokens=int(tokens), trained=int(trained), share=share, samples=samples)


def _keyed(siblings: Sequence[tuple[Any, ...]], column: int) -> dict[Key, Any]:
    return {(one[0], one[1]): one[column] for one in siblings}


def _place_s(found: Sequence[SlotTime]) -> float:
    """The fastest tenth: the others waited for a slot."""
    waited = sorted(one.start_s - one.placed_s for one in found)
    return max(0.0, waited[len(waited) // 10])


def _slot_times(
    bus: Bus, topics: Topics, catalogue: Catalogue, zero_ns: int, damage: Damage
) -> Iterator[SlotTime]:
    """Every trajectory that counts, of one attempt that stayed where it was, whose times are known;
    of an episode every turn."""
    left = logged_records(catalogue, COUNTS)
    placed_ns = dict(catalogue.query("select trajectory_id, placed_ns from trajectories"))
    for record in records_of(bus, ends_of(bus, topics.trajectories)):
        named = left.pop((record.partition, record.offset), None)
        if named is None or not damage.is_sound(record, named):
            continue
        with suppress(SchemaError):  # it is among the dead letters
            one = decode_trajectory(record.value)
            turns = [part for part in one.segments if part.kind == "model"]
            if one.meta.times.finished is None or named.attempt > 1:
                continue
            if len({part.turn for part in turns}) == len(turns):
                at_ns = placed_ns[named.trajectory], named.logged_ns
                yield from _turns(one, turns, *at_ns, zero_ns)
    damage.look_for_the_rest(left)


def _turns(
    one: Trajectory, turns: Sequence[Segment], placed_ns: int, logged_ns: int, zero_ns: int
) -> Iterator[SlotTime]:
    """What a trajectory was in a slot: while its environment answers, others have that."""
    waits_ns = 0
    for part in one.segments:
        if part.kind == "prompt":
            continue
        if part.kind != "model":
            waits_ns += part.end_ns - part.start_ns
            placed_ns = max(placed_ns, part.end_ns)
            continue
        after_ns = logged_ns - part.end_ns + waits_ns if part is turns[-1] else None
        yield SlotTime(
            trajectory=one.trajectory,
            worker=part.worker,
            placed_s=(placed_ns - zero_ns) / SECOND_NS,
            start_s=(part.start_ns - zero_ns) / SECOND_NS,
            end_s=(part.end_ns - zero_ns) / SECOND_NS,
            tokens=part.end - part.start,
            after_s=None if after_ns is None else after_ns / SECOND_NS,
        )


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


def speed_of(requests: Sequence[SlotTime], training: Sequence[tuple[float, float]]) -> Speed:
    """The regression at the head of this file; `training` are the times of the steps."""
    rows = list(_regressors(requests, training))
    tokens = np.array([row[0] for row in rows])
    beside = np.array([row[0] * row[1] for row in rows])
    share = np.array([row[2] for row in rows])
    seconds = np.array([row[3] for row in rows])
    spread = float(((seconds - seconds.mean()) ** 2).sum()) or 1.0
    best: tuple[float, Speed] | None = None
    for slower in SLOWER_TRIED:
        factor = 1.0 + slower * share
        table = np.stack([tokens * factor, beside * factor], axis=1)
        (t0, t1), *_ = np.linalg.lstsq(table, seconds, rcond=None)
        t0, t1 = max(float(t0), 1e-6), max(float(t1), 0.0)
        wrong = float(((table @ np.array([t0, t1]) - seconds) ** 2).sum())
        if best is None or wrong < best[0]:
            best = wrong, Speed(t0_s=t0, t1_s=t1, slower=slower, r2=1.0 - wrong / spread)
    assert best is not None
    return best[1]


class Steps:
    """A function of time that is constant between given moments, and its integral."""

    def __init__(self, changes: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(changes)
        self._at = [moment for moment, _ in ordered]
        self._value = list(accumulate(by for _, by in ordered))
        spans = [
            (after - before) * value
            for before, after, value in zip(self._at, self._at[1:], self._value, strict=False)
        ]
        self._sum = [0.0, *accumulate(spans)]

    def integral(self, until: float) -> float:
        """From the beginning."""
        place = bisect_right(self._at, until) - 1
        if place < 0:
            return 0.0
        return self._sum[place] + (until - self._at[place]) * self._value[place]

    def mean(self, start: float, end: float) -> float:
        """Between two moments."""
        return (self.integral(end) - self.integral(start)) / (end - start)


def _regressors(
    requests: Sequence[SlotTime], training: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float, float, float]]:
    """Tokens, mean active requests, training share, seconds of every request."""
    trains = Steps([(a, 1.0) for a, _ in training] + [(b, -1.0) for _, b in training])
    by_worker: dict[str, list[SlotTime]] = {}
    for one in requests:
        by_worker.setdefault(one.worker, []).append(one)
    for found in by_worker.values():
        changes = [(one.start_s, 1.0) for one in found] + [(one.end_s, -1.0) for one in found]
        active = Steps(changes)
        for one in found:
            span = one.end_s - one.start_s
            if span > 0:
                beside = active.mean(one.start_s, one.end_s)
                yield one.tokens, beside, trains.mean(one.start_s, one.end_s), span


def busy_workers(requests: Sequence[SlotTime], training: Sequence[tuple[float, float]]) -> float:
    """Workers with a request, on the mean over these times."""
    by_worker: dict[str, list[tuple[float, float]]] = {}
    for one in requests:
        by_worker.setdefault(one.worker, []).append((one.start_s, one.end_s))
    total = sum(end - start for start, end in training)
    busy = 0.0
    for spans in by_worker.values():
        changes = [
            change for span in _joined(spans) for change in ((span[0], 1.0), (span[1], -1.0))
        ]
        at = Steps(changes)
        busy += sum(at.integral(end) - at.integral(start) for start, end in training)
    return busy / total if total else 0.0


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans, as spans that do not touch."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
