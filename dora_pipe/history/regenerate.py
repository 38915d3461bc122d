"""Generates a trajectory again from seed, sampling settings and the weights that sampled it.

A trajectory is cut into *stays*: stretches of tokens that were sampled behind one prefill. The
recorded prefill points say where each began (a request that went on elsewhere, or whose
environment answered, or whose weights changed, was prefilled again), so each stay is generated
from the recorded tokens before it under the version that sampled it, and what an environment said
is fed back as it was recorded. Tokens and both log-probs of every stay must come out bit for bit.

What that promises depends on what the engine declares: equal bits need `counter_sampling`, and
`batch_invariant` where the trajectory was sampled beside others.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from dora_pipe.bus.claims import lost_claim
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.errors import InvariantBroken, ReplayDiverged, UsageError
from dora_pipe.history.ledger import Ledger
from dora_pipe.history.reading import record_at
from dora_pipe.policies.store import PolicyStore, as_store
from dora_pipe.producers.engines.port import (
    Engine,
    EngineRequest,
    RequestFinished,
    SamplingParams,
    TokensSampled,
)
from dora_pipe.schemas.identity import Purpose
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory

STEPS_MAX: Final = 10_000_000
"""Engine steps for all trajectories of one version; beyond that it does not end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Tokens [start, end) of a trajectory, sampled behind one prefill of the first `start`."""

    start: int
    end: int
    version: int
    """Which one sampled it; in an interruptible run not always the trajectory's own."""
    whole: bool
    """Whether the engine itself ended there; else the request was taken away from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regenerated:
    """A trajectory and what came out when it was generated again."""

    trajectory: str
    version: int
    stays: int
    tokens: int
    """Sampled ones, all compared."""
    difference: str
    """The first difference in words; empty when everything is bit-equal."""

    @property
    def equal(self) -> bool:
        """Whether every token and log-prob is bit-equal."""
        return not self.difference


@dataclass(slots=True)
class _Run:
    """A trajectory while it is generated again."""

    recorded: Trajectory
    params: SamplingParams
    left: deque[Stay]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampler: list[float] = field(default_factory=list)
    difference: str = ""
    stays: int = 0

    @property
    def over(self) -> bool:
        """Whether nothing more is generated of it."""
        return not self.left or bool(self.difference)


def stays_of(trajectory: Trajectory) -> list[Stay]:
    """The stays of a trajectory, in order. Raises InvariantBroken where none can be made of it.

    Example: prompt of 5, prefilled at 5 and (on another worker) at 12, 20 tokens: stays 5..12 and
    12..20.
    """
    size, mask = len(trajectory.token_ids), trajectory.loss_mask
    points = sorted(set(trajectory.meta.prefills))
    found: list[Stay] = []
    for place, start in enumerate(points):
        end = start
        limit = points[place + 1] if place + 1 < len(points) else size
        while end < limit and mask[end]:
            end += 1
        last = place + 1 == len(points)
        taken = trajectory.meta.finish == "error" if last else end == limit
        if end > start:
            version = _version_of(trajectory, start, end)
            found.append(Stay(start=start, end=end, version=version, whole=not taken))
    covered = sum(stay.end - stay.start for stay in found)
    if covered != trajectory.sampled:
        raise InvariantBroken(
            f"{trajectory.trajectory}: its prefill points {points} do not lead to "
            f"{trajectory.sampled} sampled tokens"
        )
    return found


def _version_of(trajectory: Trajectory, start: int, end: int) -> int:
    """The version that sampled a stay."""
    found = {
        one.version
        for one in trajectory.segments
        if one.kind == "model" and one.start < end and one.end > start
    }
    if len(found) != 1:
        who = f"{trajectory.trajectory}: tokens {start} to {end}, behind one prefill,"
        raise InvariantBroken(f"{who} were sampled by versions {sorted(found)}")
    return found.pop()


def pick(ledger: Ledger, count: int, seed: int) -> list[str]:
    """So many random trajectories that count, by a seed; sorted. Evaluation groups are among them.

    Raises UsageError when there are none.
    """
    names = sorted(
        one.fact.trajectory
        for one in ledger.accounts.logged.values()
        if one.standing == "bound" and one.fact.finish != "error"
    )
    if not names:
        raise UsageError("no trajectory was logged yet")
    return sorted(random.Random(seed).sample(names, min(count, len(names))))


def engines_of(
    bus: Bus, topics: Topics, ledger: Ledger, wanted: Sequence[str]
) -> dict[str, list[str]]:
    """Trajectories by the name of the engine that sampled them.

    Raises UsageError for an id without a record, and for one that several engines sampled: their
    random streams differ, so that none of them can generate it again.
    """
    found: dict[str, list[str]] = {}
    workers = ledger.accounts.workers
    for name in sorted(wanted):
        segments = _read(bus, topics, ledger, name).segments
        epochs = {one.epoch for one in segments if one.kind == "model"}
        engines = sorted({workers[epoch].joined.engine for epoch in epochs})
        if len(engines) > 1:
            raise UsageError(f"{name} was sampled by several engines: {', '.join(engines)}")
        found.setdefault(engines[0] if engines else "", []).append(name)
    return found


def regenerate(
    bus: Bus,
    topics: Topics,
    store: PolicyStore | Path,
    ledger: Ledger,
    engine: Engine,
    wanted: Sequence[str],
    params: Mapping[Purpose, SamplingParams],
    *,
    weights_of: Callable[[int], Path] | None = None,
) -> Iterator[Regenerated]:
    """Generate trajectories again, version by version; in order of their last version, then id.

    `weights_of` gives the file of a version; without it, it must lie in the store.

    Raises UsageError for an id without a record, PolicyError when weights are gone.
    """
    store = as_store(store)
    if ledger.config is not None and ledger.config.lora.rank:  # The others stand on version 0.
        first = ledger.versions[0].digest
        engine.load(store.weights(first), version=0, digest=first)
        engine.drop(0)
    recorded = [_read(bus, topics, ledger, name) for name in sorted(wanted)]
    open_ = [
        _Run(recorded=one, params=params[one.meta.purpose], left=deque(stays_of(one)))
        for one in recorded
    ]
    for version in sorted({stay.version for run in open_ for stay in run.left}):
        runs = [run for run in open_ if run.left and run.left[0].version == version]
        if runs:
            digest = _digest_of(runs[0].recorded, version)
            path = store.weights(digest) if weights_of is None else weights_of(version)
            engine.load(path, version=version, digest=digest)
            _generate(engine, runs, version)
            engine.drop(version)
        yield from (_result(run) for run in open_ if run.over)
        open_ = [run for run in open_ if not run.over]
    yield from (_result(run) for run in open_)  # nothing was sampled of these


def raise_if_different(found: Regenerated) -> None:
    """Raise ReplayDiverged unless everything was bit-equal."""
    if not found.equal:
        raise ReplayDiverged(f"{found.trajectory}: {found.difference}")


def _read(bus: Bus, topics: Topics, ledger: Ledger, name: str) -> Trajectory:
    entry = ledger.accounts.request(name)
    if entry is None or entry.bound is None:
        raise UsageError(f"{name} has no record that counts", hint="`dora-pipe show` says why")
    fact = entry.bound.fact
    record = record_at(bus, TopicPartition(topics.trajectories, fact.partition), fact.offset)
    if record is None:
        raise InvariantBroken(f"the record of {name} is gone from the log")
    if lost := lost_claim(record):
        raise InvariantBroken(f"the record of {name} cannot be read: {lost}")
    return decode_trajectory(record.value)


def _digest_of(trajectory: Trajectory, version: int) -> str:
    others = {one.version: one.digest for one in trajectory.meta.weights}
    digest = others.get(version, trajectory.digest if version == trajectory.version else "")
    if not digest:
        raise InvariantBroken(f"{trajectory.trajectory} names no weights for version {version}")
    return digest


def _generate(engine: Engine, runs: Sequence[_Run], version: int) -> None:
    """Drive the engine until every stay of this version was generated, all slots in use."""
    waiting = deque(runs)
    active: dict[str, _Run] = {}
    for _ in range(STEPS_MAX):
        while waiting and engine.active < engine.slots:
            run = waiting.popleft()
            engine.add(_request(run))
            active[run.recorded.trajectory] = run
        if not active:
            return
        for event in engine.step():
            if isinstance(event, TokensSampled):
                _take(active[event.request], event)
            elif isinstance(event, RequestFinished):
                run = active.pop(event.request)
                if _ended(run, event) and run.left[0].version == version:
                    waiting.append(run)
        for name, run in list(active.items()):
            if run.left[0].end - run.left[0].start <= len(run.ids) and not run.left[0].whole:
                engine.cancel(name)
                del active[name]
                if _ended(run, None) and run.left[0].version == version:
                    waiting.append(run)
    raise InvariantBroken(f"the engine does not end after {STEPS_MAX} steps")


def _request(run: _Run) -> EngineRequest:
    """The request that the worker made for this stay.

    Every turn of an episode is a request of its own, with what is left of `max_tokens`; a turn that
    goes on behind another prefill counts what was sampled of it before.
    """
    stay, recorded = run.left[0], run.recorded
    run.ids, run.logprobs, run.sampler = [], [], []
    turn = _turn_start(recorded, stay)
    before = sum(recorded.loss_mask[:turn])
    sampled, params = (
        stay.start - turn,
        replace(run.params, max_tokens=run.params.max_tokens - before),
    )
    return EngineRequest(
        request=recorded.trajectory,
        token_ids=list(recorded.token_ids[: stay.start]),
        sampled=sampled,
        seed=recorded.meta.seed,
        params=params,
        emit_every=0 if stay.whole else 1,
    )


def _turn_start(trajectory: Trajectory, stay: Stay) -> int:
    """Where the turn begins that a stay belongs to."""
    model = [one for one in trajectory.segments if one.kind == "model"]
    turn = next(one.turn for one in model if one.start <= stay.start < one.end)
    return min(one.start for one in model if one.turn == turn)


def _take(run: _Run, event: TokensSampled) -> None:
    run.ids.extend(event.token_ids)
    run.logprobs.extend(event.logprobs)
    run.sampler.extend(event.sampler_logprobs)


def _ended(run: _Run, event: RequestFinished | None) -> bool:
    """Compare the stay that is over; whether the run has another one to generate."""
    stay = run.left.popleft()
    run.stays += 1
    run.difference = _compare(run, stay)
    last = not run.left
    finish = run.recorded.meta.finish
    if not run.difference and event is not None:
        if not stay.whole:
            run.difference = f"it ends at token {stay.start + len(run.ids)} ({event.reason})"
        elif last and finish in ("stop", "length") and event.reason != finish:
            run.difference = f"it ends with {event.reason!r}, recorded is {finish!r}"
    return bool(run.left) and not run.difference


def _compare(run: _Run, stay: Stay) -> str:
    """The first difference of a stay; log-probs are compared as the float32 that are recorded."""
    size, recorded = stay.end - stay.start, run.recorded
    ids = list(recorded.token_ids[stay.start : stay.end])
    made = run.ids if stay.whole else run.ids[:size]
    for place, (found, expected) in enumerate(zip(made, ids, strict=False)):
        if found != expected:
            return f"token {stay.start + place} is {found}, recorded is {expected}"
    if len(made) != size:
        return f"{len(made)} tokens behind the prefill at {stay.start}, recorded are {size}"
    pairs = (("logprobs", run.logprobs), ("sampler_logprobs", run.sampler))
    for name, values in pairs:
        expected_bits = _bits(getattr(recorded, name)[stay.start : stay.end])
        found_bits = _bits(values[:size])
        differing = np.nonzero(found_bits != expected_bits)[0]
        if len(differing):
            place = int(differing[0])
            was, now = getattr(recorded, name)[stay.start + place], values[place]
            return f"{name}[{stay.start + place}] is {now!r}, recorded is {was!r}"
    return ""


def _bits(values: Sequence[float | None]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.asarray(values, np.float32).view(np.uint32)


def _result(run: _Run) -> Regenerated:
    recorded = run.recorded
    return Regenerated(
        trajectory=recorded.trajectory,
        version=recorded.version,
        stays=run.stays,
        tokens=recorded.sampled,
        difference=run.difference,
    )
