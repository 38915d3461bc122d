"""Regenerate a trajectory from seed, sampling settings and weights, and compare bit for bit.

Each *prefill segment* (between moves, environment turns or weight updates) is generated from the
recorded tokens before it, under its version; environment tokens are not generated. Bit equality
needs the engine capability `counter_sampling`, and `batch_invariant` if batches differ.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from dora_pipe.audit.reading import record_at, records_at
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import logged_trajectory
from dora_pipe.config.logged import logged_config
from dora_pipe.core.errors import InvariantBroken, ReplayDiverged, UsageError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.ledger.database import Catalogue, LoggedRecord, counting_record
from dora_pipe.producers.engines.engine import (
    Engine,
    EngineRequest,
    RequestFinished,
    SamplingParams,
    TokensSampled,
)
from dora_pipe.schemas.context_tokens import choices_of, tokens_before
from dora_pipe.schemas.contexts import Call, bounds, context_at
from dora_pipe.schemas.control import FinishReason, WorkerJoined, decode_control
from dora_pipe.schemas.routes import GrowingRoutes
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.store.store import PolicyStore, as_store

STEPS_MAX: Final = 10_000_000
"""Engine steps per version before giving up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSegment:
    """Tokens [start, end) sampled after one prefill."""

    start: int
    end: int
    version: int
    whole: bool
    """Ended by the engine, not interrupted."""
    finish: FinishReason | None = None
    call: Call | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regenerated:
    trajectory: str
    version: int
    prefills: int
    tokens: int
    difference: str

    @property
    def equal(self) -> bool:
        return not self.difference


@dataclass(slots=True)
class _Run:
    recorded: Trajectory
    params: SamplingParams
    left: deque[PrefillSegment]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampler: list[float] = field(default_factory=list)
    routes: GrowingRoutes = field(default_factory=GrowingRoutes)
    difference: str = ""
    prefills: int = 0

    @property
    def over(self) -> bool:
        return not self.left or bool(self.difference)


def prefill_segments(trajectory: Trajectory) -> list[PrefillSegment]:
    """Return the segments in order. Raises InvariantBroken.

    Example: prompt of 5, prefilled at 5 and (on another worker) at 12, 20 tokens: 5..12 and 12..20.
    """
    size, mask, meta = trajectory.length, trajectory.loss_mask, trajectory.meta
    points = sorted({*meta.prefills, *(call.start for call in meta.calls if call.end > call.start)})
    edges = sorted(
        {*(context.start for context in meta.contexts), *(call.end for call in meta.calls), size}
    )
    segments: list[PrefillSegment] = []
    for index, start in enumerate(points):
        end = start
        following = points[index + 1] if index + 1 < len(points) else size
        limit = min(following, next((edge for edge in edges if edge > start), size))
        while end < limit and mask[end]:
            end += 1
        last = index + 1 == len(points)
        if end > start and meta.calls:
            segments.append(_of_call(trajectory, start, end))
        elif end > start:
            taken = meta.finish == "error" if last else end == following and end not in edges
            segments.append(
                PrefillSegment(
                    start=start,
                    end=end,
                    version=_version_of(trajectory, start, end),
                    whole=not taken,
                    finish=meta.finish if last and meta.finish in ("stop", "length") else None,
                )
            )
    covered = sum(segment.end - segment.start for segment in segments)
    if covered != trajectory.sampled:
        raise InvariantBroken(
            f"{trajectory.trajectory}: its prefill points {points} do not lead to "
            f"{trajectory.sampled} sampled tokens"
        )
    return segments


def _of_call(trajectory: Trajectory, start: int, end: int) -> PrefillSegment:
    calls = [call for call in trajectory.meta.calls if call.start <= start and end <= call.end]
    if len(calls) != 1:
        raise InvariantBroken(f"{trajectory.trajectory}: tokens {start} to {end} are of no call")
    (call,) = calls
    ended = end == call.end and call.finish in ("stop", "length")
    return PrefillSegment(
        start=start,
        end=end,
        version=_version_of(trajectory, start, end),
        whole=ended,
        finish=call.finish if ended else None,
        call=call,
    )


def _turn_start(trajectory: Trajectory, start: int) -> int:
    contexts = trajectory.meta.contexts
    first, end = bounds(contexts, trajectory.length)[context_at(contexts, start)]
    model = [
        segment
        for segment in trajectory.segments
        if segment.kind == "model" and first <= segment.start < end
    ]
    turn = next(segment.turn for segment in model if segment.start <= start < segment.end)
    return min(segment.start for segment in model if segment.turn == turn)


def _version_of(trajectory: Trajectory, start: int, end: int) -> int:
    versions = {
        segment.version
        for segment in trajectory.segments
        if segment.kind == "model" and segment.start < end and segment.end > start
    }
    if len(versions) != 1:
        who = f"{trajectory.trajectory}: tokens {start} to {end}, after one prefill,"
        raise InvariantBroken(f"{who} were sampled by versions {sorted(versions)}")
    return versions.pop()


def pick(catalogue: Catalogue, count: int, seed: int) -> list[str]:
    """Return random trajectories that count, evaluations included. Raises UsageError if there are
    none."""
    rows = catalogue.query(
        "select trajectory_id from trajectories where finish <> 'error' order by 1"
    )
    if not rows:
        raise UsageError("no trajectory was logged yet")
    names = [name for (name,) in rows]
    return sorted(random.Random(seed).sample(names, min(count, len(names))))


def engines_of(
    bus: Bus, topics: Topics, catalogue: Catalogue, trajectories: Sequence[str]
) -> dict[str, list[str]]:
    """Return trajectories by engine. Raises UsageError for an id without a record or with several
    engines, whose random streams differ."""
    by_engine: dict[str, list[str]] = {}
    engine_of = dict(catalogue.query("select incarnation, engine from workers"))
    for name in sorted(trajectories):
        segments = recorded_trajectory(bus, topics, catalogue, name).segments
        incarnations = {segment.incarnation for segment in segments if segment.kind == "model"}
        engines = sorted({engine_of[incarnation] for incarnation in incarnations})
        if len(engines) > 1:
            raise UsageError(f"{name} was sampled by several engines: {', '.join(engines)}")
        by_engine.setdefault(engines[0] if engines else "", []).append(name)
    return by_engine


def joins_of(bus: Bus, topics: Topics, catalogue: Catalogue) -> Iterator[WorkerJoined]:
    offsets = [
        incarnation
        for (incarnation,) in catalogue.query("select incarnation from workers order by 1")
    ]
    for record in records_at(bus, TopicPartition(topics.control, 0), offsets):
        if isinstance(fact := decode_control(record.value), WorkerJoined):
            yield fact


def regenerate(
    bus: Bus,
    topics: Topics,
    store: PolicyStore | Path,
    catalogue: Catalogue,
    engine: Engine,
    trajectories: Sequence[str],
    params: Mapping[str, SamplingParams],
    *,
    weights_of: Callable[[int], Path] | None = None,
) -> Iterator[Regenerated]:
    """Regenerate by version; yield in order of last version, then id.

    By default the store provides weights. Raises UsageError for an id without a record, PolicyError
    for missing weights.
    """
    store = as_store(store)
    run = "select config, digest from runs, versions where version = 0"
    for config, first in catalogue.query(run):
        if logged_config(json.loads(config)).lora.rank:  # base of the adapters
            engine.load(store.weights(first), version=0, digest=first)
            engine.drop(0)
    recorded = [recorded_trajectory(bus, topics, catalogue, name) for name in sorted(trajectories)]

    def weights(version: int, digest: str) -> Path:
        return store.weights(digest) if weights_of is None else weights_of(version)

    yield from generate_again(engine, recorded, params, weights)


def generate_again(
    engine: Engine,
    recorded: Sequence[Trajectory],
    params: Mapping[str, SamplingParams],
    weights: Callable[[int, str], Path],
) -> Iterator[Regenerated]:
    """Regenerate given trajectories; `weights` maps version and digest to a file. Raises
    PolicyError."""
    open_ = [
        _Run(
            recorded=trajectory,
            params=params[trajectory.meta.source],
            left=deque(prefill_segments(trajectory)),
        )
        for trajectory in recorded
    ]
    for version in sorted({segment.version for run in open_ for segment in run.left}):
        runs = [run for run in open_ if run.left and run.left[0].version == version]
        if runs:
            digest = _digest_of(runs[0].recorded, version)
            engine.load(weights(version, digest), version=version, digest=digest)
            _generate(engine, runs, version)
            engine.drop(version)
        yield from (_result(run) for run in open_ if run.over)
        open_ = [run for run in open_ if not run.over]
    yield from (_result(run) for run in open_)  # no sampled tokens


def raise_if_different(result: Regenerated) -> None:
    """Raise ReplayDiverged unless bit-equal."""
    if not result.equal:
        raise ReplayDiverged(f"{result.trajectory}: {result.difference}")


def counted_record(catalogue: Catalogue, name: str) -> LoggedRecord:
    """Return the record that counts. Raises UsageError without one."""
    record = counting_record(catalogue, name)
    if record is None:
        raise UsageError(f"{name} has no record that counts", hint="`dora-pipe show` says why")
    return record


def recorded_trajectory(bus: Bus, topics: Topics, catalogue: Catalogue, name: str) -> Trajectory:
    """Read and verify the record that counts. Raises UsageError, InvariantBroken."""
    named = counted_record(catalogue, name)
    record = record_at(bus, TopicPartition(topics.trajectories, named.partition), named.offset)
    return logged_trajectory(record, named)


def _digest_of(trajectory: Trajectory, version: int) -> str:
    digests = {sampler.version: sampler.digest for sampler in trajectory.meta.weights}
    digest = digests.get(version, trajectory.digest if version == trajectory.version else "")
    if not digest:
        raise InvariantBroken(f"{trajectory.trajectory} names no weights for version {version}")
    return digest


def _generate(engine: Engine, runs: Sequence[_Run], version: int) -> None:
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
    """Build the worker's request for a segment.

    Each turn and call has the remaining `max_tokens`, less the turn's earlier tokens.
    """
    segment, recorded = run.left[0], run.recorded
    run.ids, run.logprobs, run.sampler, run.routes = [], [], [], GrowingRoutes()
    call, params, most = segment.call, run.params, run.params.max_tokens
    if call is None:
        turn, seed = _turn_start(recorded, segment.start), recorded.meta.seed
        most -= sum(recorded.loss_mask[:turn])
    else:
        turn, seed = call.start, call.seed
        params = params.ended_by(call.stop, call.stop_ids)
        # The record lacks the agent's limit and other calls' usage.
        most = call.end - call.start if call.finish == "length" else most
    return EngineRequest(
        request=recorded.trajectory,
        token_ids=tokens_before(recorded, segment.start),
        sampled=segment.start - turn,
        seed=seed,
        params=replace(params, max_tokens=most),
        emit_every=0 if segment.whole else 1,
    )


def _take(run: _Run, event: TokensSampled) -> None:
    run.ids.extend(event.token_ids)
    run.logprobs.extend(event.logprobs)
    run.sampler.extend(event.sampler_logprobs)
    before = run.left[0].start - _context_start(run.recorded, run.left[0].start)
    run.routes.add(event.routes, before + len(run.ids))


def _ended(run: _Run, event: RequestFinished | None) -> bool:
    segment = run.left.popleft()
    run.prefills += 1
    run.difference = _compare(run, segment)
    last = not run.left
    finish = run.recorded.meta.finish
    if not run.difference and event is not None:
        if not segment.whole and not (last and finish == "error"):
            run.difference = f"it ends at token {segment.start + len(run.ids)} ({event.reason})"
        elif segment.finish is not None and event.reason != segment.finish:
            run.difference = f"it ends with {event.reason!r}, recorded is {segment.finish!r}"
    return bool(run.left) and not run.difference


def _compare(run: _Run, segment: PrefillSegment) -> str:
    size, recorded = segment.end - segment.start, run.recorded
    ids = list(recorded.token_ids[segment.start : segment.end])
    sampled = run.ids if segment.whole else run.ids[:size]
    for index, (actual, expected) in enumerate(zip(sampled, ids, strict=False)):
        if actual != expected:
            return f"token {segment.start + index} is {actual}, recorded is {expected}"
    if len(sampled) != size:
        return f"{len(sampled)} tokens after the prefill at {segment.start}, recorded are {size}"
    pairs = (("logprobs", run.logprobs), ("sampler_logprobs", run.sampler))
    for name, values in pairs:
        expected_bits = _bits(getattr(recorded, name)[segment.start : segment.end])
        found_bits = _bits(values[:size])
        differing = np.nonzero(found_bits != expected_bits)[0]
        if len(differing):
            index = int(differing[0])
            was, now = getattr(recorded, name)[segment.start + index], values[index]
            return f"{name}[{segment.start + index}] is {now!r}, recorded is {was!r}"
    return _compare_routes(run, segment)


def _context_start(recorded: Trajectory, position: int) -> int:
    """Return the context's first record offset, less its shared tokens."""
    number = context_at(recorded.meta.contexts, position)
    start, _ = bounds(recorded.meta.contexts, recorded.length)[number]
    return start - recorded.meta.contexts[number - 1].shared if number else start


def _compare_routes(run: _Run, segment: PrefillSegment) -> str:
    number = context_at(run.recorded.meta.contexts, segment.start)
    recorded = choices_of(run.recorded, number)
    if recorded is None:
        return ""
    start = _context_start(run.recorded, segment.start)
    end = segment.end - start
    routes = run.routes.between(0, end)
    if routes is None or routes.choices.shape[1:] != recorded.shape[1:]:
        return "the engine does not say through which experts, or has others"
    there = recorded[:end] != np.iinfo(recorded.dtype).max
    differing = ((routes.choices != recorded[:end]) & there).any((1, 2))
    if not differing.any():
        return ""
    return f"token {start + int(differing.argmax())} comes through other experts than recorded"


def _bits(values: Sequence[float | None]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.asarray(values, np.float32).view(np.uint32)


def _result(run: _Run) -> Regenerated:
    recorded = run.recorded
    return Regenerated(
        trajectory=recorded.trajectory,
        version=recorded.version,
        prefills=run.prefills,
        tokens=recorded.sampled,
        difference=run.difference,
    )
