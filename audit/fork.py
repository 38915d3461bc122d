"""Where a trajectory is cut, what stands before each cut, and what continuations say it is worth
there; decides nothing about how they are sampled (`fork_log`).

The *value* of a place is the mean reward of continuations from the recorded tokens before it, under
one version. Of a trajectory of several turns the places are the beginnings of its turns: what was
answered to a turn belongs to what it led to. The last turn leads to the recorded reward itself.

A `Fork` is what is known of one trajectory under one version, as `runs/RUN/forks/ID.json` has it,
where ID is ``g0000000042-003-v7``::

    {"run": "demo", "trajectory": "g0000000042-003", "version": 7, "digest": "ab12...",
     "sampled_by": 5, "reward": 1.0, "length": 61,
     "turns": [{"token": 12, "turn": 0, "samples": 16, "invalid": 0, "mean": 0.31, "low": 0.14,
                "high": 0.56, "sampled": 388, "rewards": [1.0, 0.0, ...]}, ...],
     "decided": {"turn": 4, "token": 40, "end": 52, "before": 0.94, "after": 0.12}}

`token` is the length of the sequence before the cut, prompt included; `samples` are continuations
that were sampled, `invalid` those of them without a valid reward, which no mean counts; `sampled`
are the tokens that they cost. `decided` is null where no place stands out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import msgspec

from dora_pipe.catalogue.evaluations import interval_of
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.trajectory import EpisodeProgress, Progress, Segment, Trajectory, turn_places

FOLDER: Final = "forks"
"""In a run's directory: a folder for the log of every trajectory and version, and a file with what
is known of it."""

CONFIDENT: Final = 1.96
"""Standard errors of a normal distribution that 95 % lie within."""

BINARY: Final = frozenset({0.0, 1.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place to continue from. Example: ``Cut(token=40, turn=4)``."""

    token: int
    """Tokens before it, the prompt included."""
    turn: int
    """The turn of the model that begins, or goes on, there."""


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A mean with an interval of 95 %."""

    mean: float
    low: float
    high: float


class ForkedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What continuations from one cut came to; see the module."""

    token: int
    turn: int
    samples: int
    invalid: int
    mean: float | None
    low: float | None
    high: float | None
    sampled: int
    rewards: tuple[float | None, ...]
    """Sample by sample."""


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """The stretch of tokens [token, end) that changed the value most."""

    turn: int
    token: int
    end: int
    before: float
    after: float


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a trajectory's places under one version; see the module."""

    run: str
    trajectory: str
    version: int
    digest: str
    sampled_by: int
    """The version that the trajectory is of."""
    reward: float | None
    """The recorded one."""
    length: int
    turns: tuple[ForkedTurn, ...]
    decided: Decided | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """What counts of one continuation."""

    reward: float | None
    sampled: int
    """Tokens behind the cut that were sampled."""
    token_ids: Sequence[int] = ()
    """All behind the cut."""


def turn_starts(trajectory: Trajectory) -> dict[int, int]:
    """Where each turn of the model begins, in order."""
    return turn_places(trajectory.segments)


def check_forkable(trajectory: Trajectory, scored_together: Sequence[str] = ()) -> None:
    """Raise UsageError for a trajectory that nothing can be continued from; `scored_together` are
    the sources whose siblings are (`RunStarted`)."""
    name = trajectory.trajectory
    if trajectory.meta.source in scored_together:
        raise UsageError(
            f"the siblings of {name} are scored together: a continuation alone has no such reward"
        )
    if trajectory.meta.calls or trajectory.meta.contexts:
        raise UsageError(
            f"{name} is of an agent, whose own process cannot be brought to a turn again",
            hint="an environment can, where it is told the same turns: docs/environments.md",
        )
    if not trajectory.sampled:
        raise UsageError(f"nothing was sampled of {name}, so there is nothing to cut")


def cuts_of_turns(trajectory: Trajectory) -> list[Cut]:
    """One at the beginning of every turn."""
    return [Cut(token=token, turn=turn) for turn, token in turn_starts(trajectory).items()]


def cut_of_turn(trajectory: Trajectory, turn: int) -> Cut:
    """At the beginning of one turn. Raises UsageError."""
    starts = turn_starts(trajectory)
    if turn not in starts:
        many = f"turns {min(starts)} to {max(starts)}" if len(starts) > 1 else "turn 0 alone"
        raise UsageError(
            f"{trajectory.trajectory} has no turn {turn}, it has {many}",
            hint="--at TOKEN or --pieces N cut within a turn",
        )
    return Cut(token=starts[turn], turn=turn)


def cut_at(trajectory: Trajectory, token: int) -> Cut:
    """Behind so many tokens; the next one was sampled. Raises UsageError."""
    for one in trajectory.segments:
        if one.kind == "model" and one.start <= token < one.end:
            return Cut(token=token, turn=one.turn)
    first, last = trajectory.meta.prompt_tokens, trajectory.length
    inside = next((one for one in trajectory.segments if one.start <= token < one.end), None)
    if inside is None:
        raise UsageError(
            f"{trajectory.trajectory} has {last} tokens, and cannot be cut behind {token}",
            hint=f"its prompt has {first}",
        )
    after = min((at for at in turn_starts(trajectory).values() if at > token), default=None)
    raise UsageError(
        f"token {token} of {trajectory.trajectory} was not sampled: it is of the {inside.kind}",
        hint=None if after is None else f"the next turn begins at token {after}",
    )


def cuts_of_pieces(trajectory: Trajectory, pieces: int) -> list[Cut]:
    """At the beginnings of so many pieces with about as many sampled tokens each. Raises
    UsageError."""
    places = [at for at, sampled in enumerate(trajectory.loss_mask) if sampled]
    if not 1 <= pieces <= len(places):
        raise UsageError(
            f"{trajectory.trajectory} has {len(places)} sampled tokens, not {pieces} pieces"
        )
    return [cut_at(trajectory, places[one * len(places) // pieces]) for one in range(pieces)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What a prefix is handed over as: the request's, by this version."""

    trajectory: str
    version: int
    digest: str


def prefix_of(
    recorded: Trajectory, cut: Cut, owner: Owner, *, episode: bool
) -> Progress | EpisodeProgress | None:
    """What was sampled before a cut, as the progress record that a worker goes on from; None where
    the cut is at the prompt.

    Its tokens and log-probs are the recorded ones; it says that `owner.version` has sampled them,
    which is whom the worker asks to go on. With `episode` it ends with the last turn of the model
    before the cut: what was answered to that turn, its environment is asked again.
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
        segments=list(_cut_segments(recorded.segments, end, owner.version)),
        finish="" if models[-1].turn == cut.turn else "stop",
    )


def _cut_segments(segments: Sequence[Segment], end: int, version: int) -> Iterator[Segment]:
    for one in segments:
        if one.start < end:
            model = one.kind == "model"
            yield msgspec.structs.replace(
                one, end=min(one.end, end), version=version if model else one.version
            )


def prefix_difference(recorded: Trajectory, continued: Trajectory, cut: Cut) -> str:
    """What stands otherwise before a cut than was recorded, in words; empty where all is as it was.

    A worker compares what it tells an environment again, but for what was answered last.
    """
    before, found = (list(one.token_ids[: cut.token]) for one in (recorded, continued))
    answers = _answers(continued)
    for place, one in enumerate(_answers(recorded)):
        if one.end > cut.token:
            break
        now = answers[place] if place < len(answers) else None
        said = f"the answer to turn {one.turn}"
        if now is None:
            return f"{said} did not come"
        if list(continued.token_ids[now.start : now.end]) != before[one.start : one.end]:
            return f"{said} is another one now"
        if (now.tool, now.ok) != (one.tool, one.ok):
            return f"{said} is of {now.tool!r}, ok {now.ok}, and was of {one.tool!r}, ok {one.ok}"
    prompt = recorded.meta.prompt_tokens
    if found[:prompt] != before[:prompt]:
        return f"the prompt is not that of row {recorded.meta.index}"
    if found != before:
        return "what was sampled before could not be given again"
    if continued.length == cut.token:
        return f"the answer to turn {cut.turn - 1} ends the episode, which went on"
    return ""


def _answers(trajectory: Trajectory) -> list[Segment]:
    return [one for one in trajectory.segments if one.kind in ("environment", "tool")]


def continued_of(continued: Trajectory, cut: Cut) -> Continued:
    """What counts of a continuation from a cut."""
    return Continued(
        reward=continued.reward,
        sampled=sum(continued.loss_mask[cut.token :]),
        token_ids=continued.token_ids[cut.token :],
    )


def value_of(rewards: Sequence[float]) -> Value | None:
    """The mean of these rewards and its interval of 95 %; None of none.

    Of rewards that are 0 or 1 it is Wilson's, which has a width also where all are equal; of others
    that of the means of resampled ones, which has none there.
    """
    if not rewards:
        return None
    if not BINARY.issuperset(rewards):
        found = interval_of(rewards)
        return Value(mean=found.value, low=found.low, high=found.high)
    count, mean = len(rewards), math.fsum(rewards) / len(rewards)
    square = CONFIDENT**2 / count
    middle, half = mean + square / 2, CONFIDENT * math.sqrt(mean * (1 - mean) / count)
    half = math.hypot(half, CONFIDENT**2 / (2 * count))
    return Value(mean=mean, low=(middle - half) / (1 + square), high=(middle + half) / (1 + square))


def fork_of(
    run: str,
    recorded: Trajectory,
    samples: Mapping[Cut, Sequence[Continued]],
    owner: Owner,
) -> Fork:
    """What these continuations say; cuts in the order of their tokens."""
    turns = tuple(
        _forked_turn(cut, samples[cut]) for cut in sorted(samples, key=lambda one: one.token)
    )
    return Fork(
        run=run,
        trajectory=recorded.trajectory,
        version=owner.version,
        digest=owner.digest,
        sampled_by=recorded.version,
        reward=recorded.reward,
        length=recorded.length,
        turns=turns,
        decided=decided_of(turns, recorded.reward, recorded.length),
    )


def _forked_turn(cut: Cut, samples: Sequence[Continued]) -> ForkedTurn:
    rewards = tuple(one.reward for one in samples)
    valid = [one for one in rewards if one is not None]
    value = value_of(valid)
    return ForkedTurn(
        token=cut.token,
        turn=cut.turn,
        samples=len(samples),
        invalid=len(samples) - len(valid),
        mean=None if value is None else value.mean,
        low=None if value is None else value.low,
        high=None if value is None else value.high,
        sampled=sum(one.sampled for one in samples),
        rewards=rewards,
    )


def decided_of(turns: Sequence[ForkedTurn], reward: float | None, length: int) -> Decided | None:
    """The stretch between two places that changed the value most, of those whose intervals have
    nothing in common; the first of equals. None where there is none, and of a single place, behind
    which everything lies."""
    places = [
        (one.turn, one.token, one.mean, one.low, one.high)
        for one in turns
        if one.mean is not None and one.low is not None and one.high is not None
    ]
    if reward is not None:
        places.append((-1, length, reward, reward, reward))
    best: Decided | None = None
    for (turn, token, before, low, high), (_, end, after, low_now, high_now) in pairwise(places):
        change = abs(after - before)
        if low <= high_now and low_now <= high:
            continue
        if best is None or change > abs(best.after - best.before):
            best = Decided(turn=turn, token=token, end=end, before=before, after=after)
    return best if len(turns) > 1 else None
