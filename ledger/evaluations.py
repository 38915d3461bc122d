"""Evaluation metrics of a policy with bootstrap intervals.

A prompt has k trajectories, n of them with a valid reward. `mean@k` is the mean over prompts of the
mean reward of each. `pass@j` (j = 1, 2, 4, ... and k) is the mean over prompts with n >= j of

    1 - C(n - c, j) / C(n, j)

with c successes (reward >= 1): the unbiased probability that one of j succeeds (Chen et al., arXiv
2107.03374). `maj@k`, for k >= 3, is the mean of `majority`, if rewards name the answer they read.
`part/NAME` is the mean of a reward part. Intervals hold 95 % of `RESAMPLES` means over resampled
prompts (fixed seed).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from dora_pipe.schemas.control import RunStarted, TrajectoryLogged
from dora_pipe.schemas.rounds import GroupSpec
from dora_pipe.schemas.wire import ABSTAINED

if TYPE_CHECKING:
    from dora_pipe.ledger.database import Catalogue

RESAMPLES: Final = 1000
SEED: Final = 20_210_707
LOW, HIGH = 2.5, 97.5

DRAWN_MAX: Final = 1_000_000
SUCCESS: Final = 1.0
VOTES_MIN: Final = 3

QUERY: Final = """
    select g.version, g.evaluation, g.task, g.size, t.reward, t.reward_answer,
           t.reward_parts, g.group_id
    from groups g join trajectories t using (group_id)
    where g.outcome = 'evaluated'
    order by g.version, g.evaluation, g.ordinal, t.sample
"""


class Sample(NamedTuple):
    """A trajectory with a valid reward."""

    reward: float
    answer: str = ""
    parts: Mapping[str, float] = {}


def samples_of(results: Iterable[TrajectoryLogged]) -> list[Sample]:
    return [
        Sample(record.reward, record.answer, record.parts)
        for record in results
        if record.reward is not None
    ]


def part_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean of each reward part over samples with a value; missing parts count as 0."""
    names = dict.fromkeys(name for sample in samples for name in sample.parts)
    means = {}
    for name in names:
        abstained = f"{name.partition('.')[0]}.{ABSTAINED}"
        answered = [
            sample.parts for sample in samples if name == abstained or abstained not in sample.parts
        ]
        if answered:
            means[name] = math.fsum(parts.get(name, 0.0) for parts in answered) / len(answered)
    return means


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    version: int
    evaluation: str
    task: str
    prompts: int
    trajectories: int
    metrics: Mapping[str, Interval]
    """By name, such as `mean@4`, `pass@2`, `maj@4`, `part/math`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded:
    version: int
    evaluation: str
    ended_ns: int
    reward: float | None
    """Mean of its valid rewards; None if there are none."""
    metrics: Mapping[str, float]


OPEN_MAX: Final = 32
"""Unfinished evaluations that are kept."""


class Evaluating:
    def __init__(self) -> None:
        self._found: dict[tuple[int, str], list[tuple[int, list[Sample]]]] = {}

    def ended(
        self, run: RunStarted, spec: GroupSpec, samples: list[Sample], ended_ns: int
    ) -> EvaluationEnded | None:
        """Add a prompt's samples; return the evaluation once complete."""
        name, key = spec.evaluation, (spec.version, spec.evaluation)
        ended = self._found.setdefault(key, [])
        ended.append((spec.ordinal, samples))
        data = run.data(spec.source)
        prompts = section_of(run.config, name).get("prompts", 0)
        if len(ended) != min(prompts, 0 if data is None else data.rows):
            if len(self._found) > OPEN_MAX:
                del self._found[min(self._found)]
            return None
        del self._found[key]
        rewards = [sample.reward for _, own in ended for sample in own]
        return EvaluationEnded(
            version=spec.version,
            evaluation=name,
            ended_ns=ended_ns,
            reward=sum(rewards) / len(rewards) if rewards else None,
            metrics=metrics_of(
                [own for _, own in sorted(ended, key=lambda entry: entry[0])], samples=spec.size
            ),
        )


def pass_at(samples: int, successes: int, tries: int) -> float:
    """Return the probability that at least one try succeeds. ``pass_at(4, 1, 2) == 0.5``"""
    return 1.0 - math.comb(samples - successes, tries) / math.comb(samples, tries)


def majority(samples: Sequence[tuple[str, bool]]) -> float:
    """Return the success rate of the most frequent answer; the mean for ties, 0 without votes.

    ``majority([("42", True), ("42", True), ("7", False), ("", False)]) == 1.0``
    """
    votes: dict[str, list[bool]] = {}
    for answer, won in samples:
        if answer:
            votes.setdefault(answer, []).append(won)
    most = max(map(len, votes.values()), default=0)
    shares = [sum(own) / most for own in votes.values() if len(own) == most]
    return math.fsum(shares) / len(shares) if shares else 0.0


def tries_of(samples: int) -> list[int]:
    """Return powers of two, and all. ``tries_of(6) == [1, 2, 4, 6]``"""
    return sorted({1 << bit for bit in range(samples.bit_length())} | {samples})


def by_prompt(prompts: Sequence[Sequence[Sample]], *, samples: int) -> dict[str, list[float]]:
    """Return each prompt's values by metric."""
    scored = [own for own in prompts if own]
    by_metric = {
        f"mean@{samples}": [math.fsum(sample.reward for sample in own) / len(own) for own in scored]
    }
    votes = [[(sample.answer, sample.reward >= SUCCESS) for sample in own] for own in scored]
    answered = any(answer for own in votes for answer, _ in own)
    for tries in tries_of(samples):
        enough = [own for own in votes if len(own) >= tries]
        by_metric[f"pass@{tries}"] = [
            pass_at(len(own), sum(won for _, won in own), tries) for own in enough
        ]
        if answered and tries == samples >= VOTES_MIN:
            by_metric[f"maj@{tries}"] = [majority(own) for own in enough]
    parts = [part_means(own) for own in scored]
    for name in dict.fromkeys(name for own in parts for name in own):
        by_metric[f"part/{name}"] = [own.get(name, 0.0) for own in parts]
    return {name: values for name, values in by_metric.items() if values}


def metrics_of(prompts: Sequence[Sequence[Sample]], *, samples: int) -> dict[str, float]:
    by_metric = by_prompt(prompts, samples=samples)
    return {name: math.fsum(values) / len(values) for name, values in by_metric.items()}


def interval_of(values: Sequence[float]) -> Interval:
    import numpy as np

    own, drawn = np.asarray(values, dtype=np.float64), np.random.default_rng(SEED)
    each = max(1, DRAWN_MAX // len(own))
    means: list[float] = []
    while len(means) < RESAMPLES:
        count = min(each, RESAMPLES - len(means))
        means += own[drawn.integers(0, len(own), (count, len(own)))].mean(axis=1).tolist()
    low, high = np.percentile(means, (LOW, HIGH)).tolist()
    return Interval(value=math.fsum(values) / len(values), low=low, high=high)


def evaluations_of(tables: Catalogue, versions: Collection[int] | None = None) -> list[Evaluated]:
    """Return evaluations by version and name, unfinished ones included. Raises ResourceError."""
    return [
        Evaluated(
            version=version,
            evaluation=name,
            task=task,
            prompts=len(prompts),
            trajectories=sum(map(len, prompts)),
            metrics={
                metric: interval_of(values)
                for metric, values in by_prompt(prompts, samples=size).items()
            },
        )
        for (version, name, task, size), prompts in samples_by_prompt(tables).items()
        if versions is None or version in versions
    ]


def samples_by_prompt(tables: Catalogue) -> dict[tuple[int, str, str, int], list[list[Sample]]]:
    """Return samples per prompt, by version, evaluation, task and trajectory count."""
    samples_by_key: dict[tuple[int, str, str, int], dict[str, list[Sample]]] = {}
    for version, name, task, size, reward, answer, parts, group in tables.query(QUERY):
        own = samples_by_key.setdefault((version, name, task, size), {}).setdefault(group, [])
        if reward is not None:
            part_values = msgspec.json.decode(parts, type=dict[str, float]) if parts else {}
            own.append(Sample(reward, answer or "", part_values))
    return {key: list(groups.values()) for key, groups in samples_by_key.items()}


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    every = [config.get("evaluation", {}), *config.get("more_evaluations", ())]
    return next((section for section in every if section.get("name", "") == name), {})
