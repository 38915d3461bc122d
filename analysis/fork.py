"""Continue a recorded trajectory from its turns with new seeds and compare the rewards.

The *value* of a place in a trajectory is the mean reward of continuations from the recorded tokens
before that place, under one policy version. The places are the beginnings of the model's turns.

`fork` writes one file, ``runs/RUN/forks/g0000000042-003-v7.json``::

    {"run": "demo", "trajectory": "g0000000042-003", "version": 7, "digest": "ab12...",
     "sampled_by": 5, "reward": 1.0, "length": 61,
     "places": [{"token": 12, "turn": 0, "mean": 0.31, "low": 0.14, "high": 0.56,
                 "samples": [{"reward": 1.0, "sampled": 9, "token_ids": [7, 2, ...]}, ...]}, ...],
     "decided": {"turn": 4, "token": 40, "end": 52, "before": 0.94, "after": 0.12}}

`token` is the number of tokens before the place, prompt included; `low` and `high` bound the mean
with 95 % confidence; samples without a valid reward count in no mean. `decided` is null where no
place stands out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import UsageError
from dora_pipe.ledger.evaluations import interval_of
from dora_pipe.schemas.trajectory import EpisodeProgress, Progress, Segment, Trajectory

FOLDER: Final = "forks"
"""Folder in a run's directory with one file per trajectory and version."""

CONFIDENCE: Final = 1.96
"""Standard errors of a normal distribution that 95 % lie within."""

BINARY: Final = frozenset({0.0, 1.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place to continue from. Example: ``Cut(token=40, turn=4)``."""

    token: int
    """Tokens before it, prompt included."""
    turn: int
    """The model's turn that begins or continues there."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation."""

    reward: float | None
    sampled: int
    """Tokens that the model sampled after the cut."""
    token_ids: Sequence[int]
    """All tokens after the cut."""


class ForkedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The continuations from one cut; see the module."""

    token: int
    turn: int
    mean: float | None
    low: float | None
    high: float | None
    samples: Sequence[Sample]


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens [token, end) that changed the value most."""

    turn: int
    token: int
    end: int
    before: float
    after: float


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a trajectory's places under one version; see the module."""

    run: str
    trajectory: str
    version: int
    digest: str
    sampled_by: int
    """Version of the trajectory."""
    reward: float | None
    """Recorded reward."""
    length: int
    places: Sequence[ForkedPlace]
    decided: Decided | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The request that continues a prefix, and the version that samples for it."""

    trajectory: str
    version: int
    digest: str


def turn_starts(trajectory: Trajectory) -> dict[int, int]:
    """Return the first token of each of the model's turns, in order."""
    found: dict[int, int] = {}
    for segment in trajectory.segments:
        if segment.kind == "model" and segment.end > segment.start:
            found.setdefault(segment.turn, segment.start)
    return found


def check_forkable(trajectory: Trajectory, scored_together: Sequence[str] = ()) -> None:
    """Raise UsageError for a trajectory that cannot be continued.

    `scored_together` are the sources whose trajectories are scored as a group (`RunStarted`).
    """
    name = trajectory.trajectory
    if trajectory.meta.source in scored_together:
        raise UsageError(f"{name} is scored with its group: a continuation alone has no reward")
    if trajectory.meta.calls or trajectory.meta.contexts:
        raise UsageError(
            f"{name} comes from an agent, whose process cannot return to an earlier turn",
            hint="an environment can: docs/environments.md",
        )
    if not trajectory.sampled:
        raise UsageError(f"{name} has no sampled tokens")


def cuts_of(trajectory: Trajectory, turn: int | None, tokens: Sequence[int]) -> list[Cut]:
    """Return the cuts at a turn, after so many tokens, or at every turn. Raises UsageError."""
    starts = turn_starts(trajectory)
    if turn is not None and tokens:
        raise UsageError("--turn and --at exclude each other")
    if tokens:
        return [_cut_at(trajectory, token) for token in sorted({*tokens})]
    if turn is None:
        return [Cut(token=token, turn=at) for at, token in starts.items()]
    if turn not in starts:
        many = f"turns {min(starts)} to {max(starts)}" if len(starts) > 1 else "turn 0 alone"
        raise UsageError(
            f"{trajectory.trajectory} has no turn {turn}, it has {many}",
            hint="--at TOKEN cuts within a turn",
        )
    return [Cut(token=starts[turn], turn=turn)]


def _cut_at(trajectory: Trajectory, token: int) -> Cut:
    """Return the cut after so many tokens; the next one was sampled. Raises UsageError."""
    inside = next((one for one in trajectory.segments if one.start <= token < one.end), None)
    if inside is None:
        raise UsageError(
            f"{trajectory.trajectory} has {trajectory.length} tokens: no cut after {token}",
            hint=f"its prompt has {trajectory.meta.prompt_tokens}",
        )
    if inside.kind != "model":
        later = min((at for at in turn_starts(trajectory).values() if at > token), default=None)
        raise UsageError(
            f"token {token} of {trajectory.trajectory} was not sampled: it is part of the"
            f" {inside.kind}",
            hint=None if later is None else f"the next turn begins at token {later}",
        )
    return Cut(token=token, turn=inside.turn)


def prefix_of(
    recorded: Trajectory, cut: Cut, owner: Owner, *, episode: bool
) -> Progress | EpisodeProgress | None:
    """Return the tokens before a cut as the progress record that a worker resumes from.

    None where the cut is at the prompt. The record names `owner.version` as the version of its
    tokens, so that this version continues. With `episode` it ends with the model's last turn
    before the cut: the worker asks the environment again for the answer to that turn.
    """
    models = [one for one in recorded.segments if one.kind == "model" and one.start < cut.token]
    if not models:
        return None
    end = min(models[-1].end, cut.token)
    start = 0 if episode else recorded.meta.prompt_tokens
    given: dict[str, Any] = {
        "trajectory": owner.trajectory,
        "attempt": 1,
        "version": owner.version,
        "digest": owner.digest,
        "worker": models[-1].worker,
        "epoch": models[-1].epoch,
        "start": 0,
        "token_ids": recorded.token_ids[start:end],
        "logprobs": recorded.logprobs[start:end],
        "sampler_logprobs": recorded.sampler_logprobs[start:end],
        "prefills": tuple(one for one in recorded.meta.prefills if one < end),
        "previous": -1,
        "started_ns": recorded.meta.times.first_token or recorded.meta.times.placed,
    }
    if not episode:
        return Progress(**given)
    return EpisodeProgress(
        **given,
        loss_mask=recorded.loss_mask[:end],
        segments=list(_segments_before(recorded.segments, end, owner.version)),
        finish="" if models[-1].turn == cut.turn else "stop",
    )


def _segments_before(segments: Sequence[Segment], end: int, version: int) -> Iterator[Segment]:
    for segment in segments:
        if segment.start < end:
            by = version if segment.kind == "model" else segment.version
            yield msgspec.structs.replace(segment, end=min(segment.end, end), version=by)


def prefix_difference(recorded: Trajectory, continued: Trajectory, cut: Cut) -> str:
    """Describe what differs before a cut from the recorded trajectory; empty where nothing does."""
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
    return [one for one in trajectory.segments if one.kind in ("environment", "tool")]


def mean_of(rewards: Sequence[float]) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return the mean of these rewards and its 95 % interval.

    Rewards of 0 and 1 get Wilson's interval, which has a width even where all are equal; others
    the interval of resampled means.
    """
    if not rewards:
        return None, None, None
    if not BINARY.issuperset(rewards):
        found = interval_of(rewards)
        return found.value, found.low, found.high
    count, mean = len(rewards), math.fsum(rewards) / len(rewards)
    square = CONFIDENCE**2 / count
    center, scale = mean + square / 2, 1 + square
    half = CONFIDENCE * math.sqrt(mean * (1 - mean) / count)
    half = math.hypot(half, CONFIDENCE**2 / (2 * count))
    return mean, (center - half) / scale, (center + half) / scale


def fork_of(
    run: str, recorded: Trajectory, samples: Mapping[Cut, Sequence[Trajectory]], owner: Owner
) -> Fork:
    """Return the values of these cuts by their continuations."""
    cuts = sorted(samples, key=lambda cut: cut.token)
    places = tuple(_place(cut, samples[cut]) for cut in cuts)
    return Fork(
        run=run,
        trajectory=recorded.trajectory,
        version=owner.version,
        digest=owner.digest,
        sampled_by=recorded.version,
        reward=recorded.reward,
        length=recorded.length,
        places=places,
        decided=decided_by(places, recorded.reward, recorded.length),
    )


def _place(cut: Cut, continued: Sequence[Trajectory]) -> ForkedPlace:
    mean, low, high = mean_of([one.reward for one in continued if one.reward is not None])
    samples = tuple(
        Sample(
            reward=one.reward,
            sampled=sum(one.loss_mask[cut.token :]),
            token_ids=tuple(one.token_ids[cut.token :]),
        )
        for one in continued
    )
    return ForkedPlace(
        token=cut.token, turn=cut.turn, mean=mean, low=low, high=high, samples=samples
    )


def decided_by(places: Sequence[ForkedPlace], reward: float | None, length: int) -> Decided | None:
    """Return the stretch between two places that changed the value most, the first of equals.

    Only stretches whose two intervals do not overlap count; None where there is none.
    """
    values = [
        (one.turn, one.token, one.mean, one.low, one.high)
        for one in places
        if one.mean is not None and one.low is not None and one.high is not None
    ]
    if reward is not None:
        values.append((-1, length, reward, reward, reward))
    best: Decided | None = None
    for (turn, token, before, low, high), (_, end, after, low_now, high_now) in pairwise(values):
        if low <= high_now and low_now <= high:
            continue
        if best is None or abs(after - before) > abs(best.after - best.before):
            best = Decided(turn=turn, token=token, end=end, before=before, after=after)
    return best if len(places) > 1 else None
