"""Decides what a finished run's log says of its hardware: lengths, speeds, delays; nothing else.

Everything is as the run measured it, on a machine that may have had other things to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import msgspec
import numpy as np

from dora_pipe.bus.port import Bus
from dora_pipe.config.model import Config
from dora_pipe.errors import ResourceError, SchemaError, UsageError
from dora_pipe.history.reading import ends_of, records_of
from dora_pipe.schemas.control import (
    Command,
    RunStarted,
    StepCommitted,
    TrajectoriesLogged,
    WorkerJoined,
    WorkerReady,
    decode_control,
)
from dora_pipe.schemas.identity import parse_trajectory_id
from dora_pipe.schemas.rounds import Assign, Place, TakeBatch, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import Unknown
from dora_pipe.sim.whatif_speed import Speed, Stay, busy_workers, speed_of

SECOND_NS = 1_000_000_000
STEPS_MIN = 4
"""A shorter run says too little."""

Value = TypeVar("Value")
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
    """From a fact to the round that reads it, on the median."""
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

    @property
    def wall_s(self) -> float:
        """From `began_s` to the last commit."""
        return self.steps[-1].committed_s - self.began_s


@dataclass(slots=True)
class _Facts:
    started: RunStarted | None = None
    joined: list[WorkerJoined] = field(default_factory=list)
    ready: list[WorkerReady] = field(default_factory=list)
    commits: list[StepCommitted] = field(default_factory=list)
    logged_ns: dict[str, int] = field(default_factory=dict)
    rewards: dict[str, float | None] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    at_ns: list[tuple[int, int]] = field(default_factory=list)
    """Offset and time of every fact that can be read, in order."""
    commands: int = 0


def measure(bus: Bus, topics: Topics) -> Measured:
    """Read a run's log. Raises UsageError when it is too short to say anything."""
    facts = _read_control(bus, topics)
    if facts.started is None or len(facts.commits) < STEPS_MIN:
        raise UsageError(f"the run has {len(facts.commits)} committed steps; {STEPS_MIN} are asked")
    zero_ns = facts.started.at_ns
    decided = _read_decisions(bus, topics)
    steps = [_trained(one, decided.taken_ns, facts, zero_ns) for one in facts.commits]
    training = [(one.taken_s, one.committed_s) for one in steps]
    # In an order of their own: how partitions come interleaved is up to the bus.
    stays = sorted(_stays(bus, topics, facts, zero_ns), key=lambda one: (one.end_s, one.trajectory))
    if not stays:
        raise UsageError("the log holds no trajectory with times")
    fixed_s, token_s, first_s = _train_times(steps)
    names = {one.worker: (one.worker, one.slots, one.prefetch) for one in facts.joined}
    began_ns = max(one.at_ns for one in _first_joins(facts.joined))
    return Measured(
        config=msgspec.convert(facts.started.config, Config),
        workers=[names[name] for name in sorted(names)],
        began_s=(began_ns - zero_ns) / SECOND_NS,
        lengths=_keyed(facts.tokens, "train"),
        eval_lengths=_keyed(facts.tokens, "eval"),
        rewards=_keyed(facts.rewards, "train"),
        steps=steps,
        speed=speed_of(stays, training),
        reports_s=sorted(max(0.0, one.reported_s - one.end_s) for one in stays),
        react_s=_react_s(facts.at_ns, decided),
        place_s=_place_s(stays, decided, zero_ns),
        load_s=_load_s(facts.ready, decided),
        busy_training=busy_workers(stays, training),
        train_fixed_s=fixed_s,
        train_token_s=token_s,
        first_step_s=first_s,
        commands=facts.commands,
        rejoined=len(facts.joined) - len(names),
    )


def _read_control(bus: Bus, topics: Topics) -> _Facts:
    facts = _Facts()
    for record in records_of(bus, ends_of(bus, topics.control)):
        try:
            found = decode_control(record.value)
        except SchemaError:
            continue
        if not isinstance(found, Unknown):
            facts.at_ns.append((record.offset, found.at_ns))
        match found:
            case RunStarted():
                facts.started = found
            case WorkerJoined():
                facts.joined.append(found)
            case WorkerReady():
                facts.ready.append(found)
            case StepCommitted():
                facts.commits.append(found)
            case Command():
                facts.commands += 1
            case TrajectoriesLogged():
                for entry in found.trajectories:
                    facts.logged_ns[entry.trajectory] = found.at_ns
                    facts.rewards[entry.trajectory] = entry.reward
                    facts.tokens[entry.trajectory] = entry.tokens
    return facts


@dataclass(slots=True)
class _Decided:
    """When decisions were made; ns."""

    rounds: list[tuple[int, int]] = field(default_factory=list)
    """Position in control and time of every round, in order."""
    taken_ns: dict[int, int] = field(default_factory=dict)
    placed_ns: dict[str, int] = field(default_factory=dict)
    assigned_ns: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """By worker, role epoch and version; the last one."""


def _read_decisions(bus: Bus, topics: Topics) -> _Decided:
    found = _Decided()
    for record in records_of(bus, ends_of(bus, topics.decisions)):
        round_ = decode_round(record.value)
        found.rounds.append((round_.control_next, round_.now_ns))
        for decision in round_.decisions:
            if isinstance(decision, TakeBatch):
                found.taken_ns[decision.step] = round_.now_ns
            elif isinstance(decision, Place):
                placed = {one.trajectory: round_.now_ns for one in decision.requests()}
                found.placed_ns.update(placed)
            elif isinstance(decision, Assign):
                key = decision.worker, decision.epoch, decision.version
                found.assigned_ns[key] = round_.now_ns
    return found


def _react_s(facts: Sequence[tuple[int, int]], decided: _Decided) -> float:
    found, place = [], 0
    for offset, at_ns in facts:
        while place < len(decided.rounds) and decided.rounds[place][0] <= offset:
            place += 1
        if place < len(decided.rounds):
            found.append((decided.rounds[place][1] - at_ns) / SECOND_NS)
    return max(0.0, median(found)) if found else 0.0


def _place_s(stays: Sequence[Stay], decided: _Decided, zero_ns: int) -> float:
    """The fastest tenth: the others waited for a slot."""
    found = sorted(
        one.start_s - (decided.placed_ns[one.trajectory] - zero_ns) / SECOND_NS
        for one in stays
        if one.trajectory in decided.placed_ns
    )
    return max(0.0, found[len(found) // 10]) if found else 0.0


def _load_s(ready: Sequence[WorkerReady], decided: _Decided) -> float:
    found = [
        (one.at_ns - decided.assigned_ns[key]) / SECOND_NS
        for one in ready
        if (key := (one.worker, one.epoch, one.version)) in decided.assigned_ns
    ]
    return max(0.0, median(found)) if found else 0.0


def _trained(
    commit: StepCommitted, taken_ns: dict[int, int], facts: _Facts, zero_ns: int
) -> Trained:
    if commit.step not in taken_ns:
        raise ResourceError(f"no decision took the batch of step {commit.step}")
    names = [one.trajectory for group in commit.groups for one in group.trajectories]
    stale = [commit.step - group.version for group in commit.groups]
    return Trained(
        step=commit.step,
        taken_s=(taken_ns[commit.step] - zero_ns) / SECOND_NS,
        committed_s=(commit.at_ns - zero_ns) / SECOND_NS,
        tokens=sum(facts.tokens.get(name, 0) for name in names),
        staleness=sum(stale) / len(stale),
    )


def _stays(bus: Bus, topics: Topics, facts: _Facts, zero_ns: int) -> Iterator[Stay]:
    """Every logged trajectory of one turn whose times are known."""
    for record in records_of(bus, ends_of(bus, topics.trajectories)):
        try:
            found = decode_trajectory(record.value)
        except SchemaError:
            continue
        times, logged_ns = found.meta.times, facts.logged_ns.get(found.trajectory)
        if times.started is None or times.finished is None or logged_ns is None:
            continue
        if found.meta.attempt > 1 or sum(one.kind == "model" for one in found.segments) != 1:
            continue
        yield Stay(
            trajectory=found.trajectory,
            worker=found.meta.worker,
            start_s=(times.started - zero_ns) / SECOND_NS,
            end_s=(times.finished - zero_ns) / SECOND_NS,
            tokens=found.sampled,
            reported_s=(logged_ns - zero_ns) / SECOND_NS,
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


def _first_joins(joined: Sequence[WorkerJoined]) -> list[WorkerJoined]:
    found: dict[str, WorkerJoined] = {}
    for one in joined:
        found.setdefault(one.worker, one)
    return list(found.values())


def _keyed(by_name: dict[str, Value], purpose: str) -> dict[Key, Value]:
    found: dict[Key, Value] = {}
    for name, value in by_name.items():
        what, ordinal, sibling = parse_trajectory_id(name)
        if what == purpose:
            found[ordinal, sibling] = value
    return found
