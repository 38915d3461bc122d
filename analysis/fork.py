"""Continue a recorded trajectory from its turns with new seeds and compare the rewards.

The *value* of a turn is the mean reward of continuations from the recorded tokens before it. A
continuation is a request that lost its worker there: a worker resumes from the prefix, and the
environment's answers must equal the recorded ones.

    turn that begins at token 40, sample 3 -> request g0000000040-003
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec

from dora_pipe.analysis.worker_log import SampleRequest, TemporaryWorker
from dora_pipe.core.errors import ReplayDiverged, UsageError
from dora_pipe.ledger.evaluations import interval_of
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.schemas.control import REPLAY_DIFFERS, RequestFailed
from dora_pipe.schemas.identity import SAMPLES_MAX, cut_seed, group_id
from dora_pipe.schemas.rounds import GroupSpec
from dora_pipe.schemas.trajectory import Progress, Segment, Trajectory

CONFIDENCE: Final = 1.96
"""Standard errors for 95 %."""

BINARY: Final = frozenset({0.0, 1.0})
REASON: Final = "a continuation of a recorded trajectory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Beginning of a turn."""

    token: int
    """Tokens before it, with the prompt."""
    turn: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    reward: float | None
    sampled: int
    token_ids: Sequence[int]


class ForkedTurn(msgspec.Struct, frozen=True, kw_only=True):
    token: int
    turn: int
    mean: float | None
    low: float | None
    """`low` and `high`: 95 % interval of the mean."""
    high: float | None
    samples: Sequence[Sample]


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    turn: int
    before: float
    after: float


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a trajectory's turns under one version."""

    run: str
    trajectory: str
    version: int
    digest: str
    sampled_by: int
    reward: float | None
    length: int
    turns: Sequence[ForkedTurn]
    decided: Decided | None


def turn_starts(trajectory: Trajectory) -> dict[int, int]:
    """Return the first token of each model turn."""
    starts: dict[int, int] = {}
    for segment in trajectory.segments:
        if segment.kind == "model" and segment.end > segment.start:
            starts.setdefault(segment.turn, segment.start)
    return starts


def check_forkable(trajectory: Trajectory, scored_together: Sequence[str] = ()) -> None:
    """Raise UsageError for a trajectory that cannot be continued.

    `scored_together`: sources with group scoring.
    """
    name = trajectory.trajectory
    if trajectory.meta.source in scored_together:
        raise UsageError(f"{name} has a group reward, which a single continuation cannot get")
    if trajectory.meta.calls or trajectory.meta.contexts:
        raise UsageError(
            f"{name} comes from an agent, which cannot return to an earlier turn",
            hint="environments support it: docs/environments.md",
        )
    if not trajectory.sampled:
        raise UsageError(f"{name} has no sampled tokens")


def cuts_of(trajectory: Trajectory, turn: int | None) -> list[Cut]:
    """Return the beginning of one or every turn. Raises UsageError."""
    starts = turn_starts(trajectory)
    if turn is None:
        return [Cut(token=token, turn=turn) for turn, token in starts.items()]
    if turn not in starts:
        many = f"turns {min(starts)} to {max(starts)}" if len(starts) > 1 else "turn 0 alone"
        raise UsageError(f"{trajectory.trajectory} has no turn {turn}, it has {many}")
    return [Cut(token=starts[turn], turn=turn)]


def continuations(
    recorded: Trajectory, cuts: Sequence[Cut], samples: int, worker: TemporaryWorker
) -> tuple[dict[Cut, list[Trajectory]], list[RequestFailed]]:
    """Return continuations from each cut and failed requests. Raises ReplayDiverged if an
    environment answers differently, and what the worker raises."""
    requests = {
        cut: [_wanted(recorded, cut, sample, worker) for sample in range(samples)] for cut in cuts
    }
    sampled = worker.sample([request for of_cut in requests.values() for request in of_cut])
    lost = [result for result in sampled.values() if isinstance(result, RequestFailed)]
    for failure in lost:
        if failure.error == REPLAY_DIFFERS:
            raise _diverged(recorded, failure.message)
    done: dict[Cut, list[Trajectory]] = {}
    for cut, of_cut in requests.items():
        results = (sampled[request.name] for request in of_cut)
        done[cut] = [result for result in results if isinstance(result, Trajectory)]
        for continued in done[cut]:
            if why := prefix_difference(recorded, continued, cut):
                raise _diverged(recorded, why)
    return done, lost


def check_replayable(recorded: Trajectory, facts: Mapping[str, TaskFacts]) -> None:
    """Raise UsageError for an environment that is not declared replayable."""
    here = facts[recorded.meta.source]
    if not (here.single_turn or here.replayable):
        raise UsageError(
            f"the environment of {recorded.trajectory} does not declare `replayable`",
            hint="docs/environments.md",
        )


def _diverged(recorded: Trajectory, why: str) -> ReplayDiverged:
    return ReplayDiverged(
        f"{recorded.trajectory} cannot return to its turns: {why}",
        hint="the task must be deterministic",
    )


def _wanted(recorded: Trajectory, cut: Cut, sample: int, worker: TemporaryWorker) -> SampleRequest:
    meta = recorded.meta
    spec = GroupSpec(
        group=group_id(meta.purpose, cut.token),
        ordinal=cut.token,
        purpose=meta.purpose,
        version=worker.version,
        digest=worker.digest,
        deadline=-1,
        partition=0,
        dataset_digest=meta.dataset_digest,
        index=meta.index,
        data_epoch=meta.data_epoch,
        seed=cut_seed(meta.seed, cut.token),
        size=SAMPLES_MAX,
        task=meta.task,
        evaluation=meta.evaluation,
    )
    request = SampleRequest(spec=spec, sample=sample)
    return SampleRequest(
        spec=spec, sample=sample, prefix=prefix_of(recorded, cut, request.name, worker)
    )


def prefix_of(
    recorded: Trajectory, cut: Cut, name: str, worker: TemporaryWorker
) -> Progress | None:
    """Return the tokens before a cut as a progress record; None at the prompt.

    It names the worker's version and ends with a model turn, so that the environment answers again.
    """
    models = [
        segment
        for segment in recorded.segments
        if segment.kind == "model" and segment.start < cut.token
    ]
    if not models:
        return None
    end = models[-1].end
    return Progress(
        trajectory=name,
        attempt=1,
        version=worker.version,
        digest=worker.digest,
        worker=models[-1].worker,
        incarnation=models[-1].incarnation,
        start=0,
        token_ids=recorded.token_ids[:end],
        logprobs=recorded.logprobs[:end],
        sampler_logprobs=recorded.sampler_logprobs[:end],
        loss_mask=recorded.loss_mask[:end],
        segments=list(_segments_before(recorded.segments, end, worker.version)),
        prefills=tuple(position for position in recorded.meta.prefills if position < end),
        previous=-1,
        started_ns=recorded.meta.times.first_token or recorded.meta.times.scheduled,
        finish="stop",
    )


def _segments_before(segments: Sequence[Segment], end: int, version: int) -> Iterator[Segment]:
    for segment in segments:
        if segment.start < end:
            by = version if segment.kind == "model" else segment.version
            yield msgspec.structs.replace(segment, end=min(segment.end, end), version=by)


def prefix_difference(recorded: Trajectory, continued: Trajectory, cut: Cut) -> str:
    """Return the first difference before a cut, or an empty string."""
    answers = _answers(continued)
    for number, before in enumerate(_answers(recorded)):
        if before.end > cut.token:
            break
        name = f"the answer to turn {before.turn}"
        if number >= len(answers):
            return f"{name} is missing"
        now = answers[number]
        if (now.tool, now.ok) != (before.tool, before.ok) or list(
            continued.token_ids[now.start : now.end]
        ) != list(recorded.token_ids[before.start : before.end]):
            return f"{name} differs"
    prompt = recorded.meta.prompt_tokens
    if list(continued.token_ids[:prompt]) != list(recorded.token_ids[:prompt]):
        return f"the prompt is not that of row {recorded.meta.index}"
    if list(continued.token_ids[: cut.token]) != list(recorded.token_ids[: cut.token]):
        return "the sampled tokens differ"
    if continued.length == cut.token:
        return f"the answer to turn {cut.turn - 1} ends the episode, which continued"
    return ""


def _answers(trajectory: Trajectory) -> list[Segment]:
    return [segment for segment in trajectory.segments if segment.kind in ("environment", "tool")]


def mean_of(rewards: Sequence[float]) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return mean and 95 % interval: Wilson's for rewards of 0 and 1, since it has a width even if
    all are equal; else a bootstrap interval."""
    if not rewards:
        return None, None, None
    if not BINARY.issuperset(rewards):
        interval = interval_of(rewards)
        return interval.value, interval.low, interval.high
    count, mean = len(rewards), math.fsum(rewards) / len(rewards)
    square = CONFIDENCE**2 / count
    center, scale = mean + square / 2, 1 + square
    half = CONFIDENCE * math.sqrt(mean * (1 - mean) / count)
    half = math.hypot(half, CONFIDENCE**2 / (2 * count))
    return mean, (center - half) / scale, (center + half) / scale


def fork_of(
    run: str,
    recorded: Trajectory,
    samples: Mapping[Cut, Sequence[Trajectory]],
    worker: TemporaryWorker,
) -> Fork:
    """Return the values of these cuts."""
    turns = tuple(_turn(cut, samples[cut]) for cut in sorted(samples, key=lambda cut: cut.token))
    return Fork(
        run=run,
        trajectory=recorded.trajectory,
        version=worker.version,
        digest=worker.digest,
        sampled_by=recorded.version,
        reward=recorded.reward,
        length=recorded.length,
        turns=turns,
        decided=decided_by(turns, recorded.reward),
    )


def _turn(cut: Cut, continued: Sequence[Trajectory]) -> ForkedTurn:
    mean, low, high = mean_of(
        [continuation.reward for continuation in continued if continuation.reward is not None]
    )
    samples = tuple(
        Sample(
            reward=continuation.reward,
            sampled=sum(continuation.loss_mask[cut.token :]),
            token_ids=tuple(continuation.token_ids[cut.token :]),
        )
        for continuation in continued
    )
    return ForkedTurn(
        token=cut.token, turn=cut.turn, mean=mean, low=low, high=high, samples=samples
    )


def decided_by(turns: Sequence[ForkedTurn], reward: float | None) -> Decided | None:
    """Return the first turn with the largest change of value, if any.

    The recorded reward follows the last turn. A turn counts if its interval does not overlap the
    next one's.
    """
    values = [
        (turn.turn, turn.mean, turn.low, turn.high)
        for turn in turns
        if turn.mean is not None and turn.low is not None and turn.high is not None
    ]
    values += [] if reward is None else [(-1, reward, reward, reward)]
    changes = [
        Decided(turn=turn, before=before, after=after)
        for (turn, before, low, high), (_, after, low_now, high_now) in pairwise(values)
        if low > high_now or low_now > high
    ]
    most = max(changes, key=lambda change: abs(change.after - change.before), default=None)
    return most if len(turns) > 1 else None
