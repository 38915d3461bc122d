"""Split the ratios of a recorded batch by cause.

For a token that version w sampled and step s trains, the log of the ratio is a sum:

    log pi_s(o) - log q_w(o) =   log pi_s(o)  - log pi_w(o)      staleness: other weights
                               + log pi_w(o)  - log pi'_w(o)     numerics: same weights, other code
                               + log pi'_w(o) - log q_w(o)       sampling: top-k, top-p, min-p

The trainer computes pi. The engine recorded pi' (`logprobs`) and its sampling distribution q
(`sampler_logprobs`). pi and pi' include the temperature, except in runs with raw log-probs. The
objective's ratio is the first two terms. pi_s is before the first minibatch of the step.

With recorded routed experts, all pi above use them. The trainer's own routing is then a fourth
term, which is in no ratio of the step:

    log pi_w(o), experts by the trainer's own router  - log pi_w(o)     routing

Tokenization is measured apart, since a step trains the sampled ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from dora_pipe.consumers.learners.learner import TrainBatch
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.context_tokens import choices_of, counted_places, rows_of, tokens_before
from dora_pipe.schemas.contexts import bounds
from dora_pipe.schemas.routes import Choices
from dora_pipe.schemas.trajectory import Segment, Trajectory

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]
Row = tuple[Sequence[int], Sequence[int]]
"""Token ids, and a mask of requested log-probs."""

CAUSES: Final = ("staleness", "numerics", "sampling")
ROUTING: Final = "routing"


class Scorer(Protocol):
    """Source of the trainer's log-probs."""

    def load(self, weights: Path, *, digest: str, optimizer: Path | None) -> None:
        """Load weights. Raises PolicyError."""
        ...

    def score(self, rows: Sequence[Row]) -> list[list[float]]:
        """Return log-probs where the mask is 1, except at the first token."""
        ...

    def score_through(
        self, rows: Sequence[Row], choices: Sequence[Choices | None]
    ) -> tuple[list[list[float]], int, int]:
        """Return log-probs with these experts, and numbers of differing and of all choices. Raises
        PolicyError."""
        ...


class Encoder(Protocol):
    def again(self, token_ids: Sequence[int]) -> list[int]: ...


WeightsOf = Callable[[int], tuple[Path, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Log ratios of a trajectory by cause; arrays [n], nats."""

    trajectory: str
    stale: np.ndarray[tuple[int], np.dtype[np.int64]]
    staleness: Numbers
    numerics: Numbers
    sampling: Numbers
    routing: Numbers | None = None
    """None without recorded experts."""

    @property
    def total(self) -> Numbers:
        """log pi_s - log q_w, plus routing."""
        total = self.staleness + self.numerics + self.sampling
        return total if self.routing is None else total + self.routing

    @property
    def trained(self) -> Numbers:
        """log pi_s - log pi'_w: the ratio of the objective."""
        return self.staleness + self.numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioMetrics:
    """Log ratios of one cause or the sum, in nats."""

    cause: str
    tokens: int
    mean: float
    size: float
    """Mean absolute value."""
    p99: float
    """99th percentile of absolute values."""
    largest: float
    share: float | None
    """Mean product with the sum over the sum's mean square; all shares add up to 1. None if the sum
    is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retokenized:
    """Effects of encoding the sampled text again."""

    trajectories: int
    differing: int
    """Trajectories with other ids."""
    tokens: int
    tokens_after: int
    """Sampled tokens from each context's first difference on."""
    logprob_mean: float | None
    """Mean of log pi_w(text encoded again) - log pi_w(text as sampled) per differing trajectory,
    nats; None without scores."""
    logprob_largest: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerouted:
    """Choices of experts, one per token and layer."""

    choices: int
    differing: int
    """Differing from the trainer's own router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    step: int
    trajectories: int
    tokens: int
    metrics: tuple[RatioMetrics, ...]
    """Per cause, then "trained" (the objective's ratio) and "all"."""
    by_staleness: Mapping[int, RatioMetrics]
    tokenization: Retokenized | None
    rerouted: Rerouted | None = None

    def plain(self) -> dict[str, Any]:
        retokenized = self.tokenization
        return {
            "step": self.step,
            "trajectories": self.trajectories,
            "tokens": self.tokens,
            "causes": {ratios.cause: _plain(ratios) for ratios in self.metrics},
            "by_staleness": {str(key): _plain(ratios) for key, ratios in self.by_staleness.items()},
            "tokenization": None if retokenized is None else _plain(retokenized),
            **({} if self.rerouted is None else {"rerouted": _plain(self.rerouted)}),
        }


def measure(
    batch: TrainBatch, scorer: Scorer, weights_of: WeightsOf, texts: Encoder | None = None
) -> Mismatch:
    """Measure a batch; loads each version once, ascending. Raises PolicyError for unusable weights,
    and what `weights_of` raises."""
    trajectories = [
        trajectory
        for group in batch.groups
        for trajectory in group.trajectories
        if trajectory.sampled
    ]
    now = {batch.step: list(range(len(trajectories)))}
    sampled_by = {index: _versions(trajectory) for index, trajectory in enumerate(trajectories)}
    for index, versions in sampled_by.items():
        for version in set(versions.tolist()):
            now.setdefault(version, []).append(index)
    rows = [[(ids, mask) for ids, mask, _ in rows_of(trajectory)] for trajectory in trajectories]
    again = [
        None if texts is None else encoded_again(trajectory, texts) for trajectory in trajectories
    ]
    changed = {index: row for index, row in enumerate(again) if row is not None}
    then = [np.zeros(len(versions)) for versions in sampled_by.values()]
    routes = _Routes(scorer, trajectories, rows)
    trained: list[Numbers] = []
    gaps: dict[int, float] = {}
    for version in sorted(now):
        path, digest = weights_of(version)
        scorer.load(path, digest=digest, optimizer=None)
        places = sorted(set(now[version]))
        scored = routes.scored(places)
        if version == batch.step:
            trained = scored
        for index, values in zip(places, scored, strict=True):
            own = sampled_by[index] == version
            then[index][own] = values[own]
        routes.compare({index: sampled_by[index] == version for index in places}, then)
        mine = [
            index for index in places if index in changed and (sampled_by[index] == version).all()
        ]
        again_scored = _scored(scorer, [changed[index] for index in mine])
        for index, scores in zip(mine, again_scored, strict=True):
            gaps[index] = float(np.sum(scores) - np.sum(then[index]))
    splits = [
        split(
            trajectory,
            batch.step,
            trained=trained[index],
            then=then[index],
            routing=routes.gaps[index] if routes.there else None,
        )
        for index, trajectory in enumerate(trajectories)
    ]
    retokenized = None if texts is None else _retokenized(trajectories, changed, gaps)
    return report(batch.step, splits, retokenized, routes.rerouted)


class _Routes:
    def __init__(
        self, scorer: Scorer, trajectories: Sequence[Trajectory], rows: Sequence[Sequence[Row]]
    ) -> None:
        self._scorer, self._rows = scorer, rows
        self._choices = [
            [choices_of(trajectory, number) for number in range(len(of_one))]
            for trajectory, of_one in zip(trajectories, rows, strict=True)
        ]
        self.there = any(trajectory.routed_experts is not None for trajectory in trajectories)
        self.gaps = [np.zeros(len(counted_places(trajectory))) for trajectory in trajectories]
        self._seen = self._differing = 0

    @property
    def rerouted(self) -> Rerouted | None:
        return Rerouted(choices=self._seen, differing=self._differing) if self.there else None

    def scored(self, places: Sequence[int]) -> list[Numbers]:
        rows = [self._rows[index] for index in places]
        return self._through(places)[0] if self.there else _scored(self._scorer, rows)

    def compare(self, own: Mapping[int, np.ndarray[Any, Any]], then: Sequence[Numbers]) -> None:
        """Compare the routers' own choices; `then` has the log-probs with recorded experts."""
        places = [index for index, mine in own.items() if mine.any()]
        if not self.there or not places:
            return
        _, differing, compared = self._through(places)
        self._differing += differing
        self._seen += compared
        free = _scored(self._scorer, [self._rows[index] for index in places])
        for index, values in zip(places, free, strict=True):
            self.gaps[index][own[index]] = (values - then[index])[own[index]]

    def _through(self, places: Sequence[int]) -> tuple[list[Numbers], int, int]:
        rows = [row for index in places for row in self._rows[index]]
        choices = [choice for index in places for choice in self._choices[index]]
        scores, differing, compared = self._scorer.score_through(rows, choices)
        following = iter(scores)
        sizes = [len(self._rows[index]) for index in places]
        return [_joined(islice(following, size)) for size in sizes], differing, compared


def _joined(contexts: Iterable[Sequence[float]]) -> Numbers:
    return _join([np.array(values) for values in contexts])


def _scored(scorer: Scorer, trajectories: Sequence[Sequence[Row]]) -> list[Numbers]:
    following = iter(scorer.score([row for rows in trajectories for row in rows]))
    return [_joined(islice(following, len(rows))) for rows in trajectories]


def split(
    trajectory: Trajectory,
    step: int,
    *,
    trained: Numbers,
    then: Numbers,
    routing: Numbers | None = None,
) -> Split:
    """Split one trajectory's log ratios.

    `trained` and `then`: the trainer's log-probs under the step's first weights and the sampling
    weights, without each context's first token.
    """
    counted = counted_places(trajectory)
    recorded = _chosen(trajectory.logprobs, counted)
    sampler = _chosen(trajectory.sampler_logprobs, counted)
    versions = _versions(trajectory)
    return Split(
        trajectory=trajectory.trajectory,
        stale=np.array(
            [staleness_of(step, version) for version in versions.tolist()], dtype=np.int64
        ),
        staleness=trained - then,
        numerics=then - recorded,
        sampling=recorded - sampler,
        routing=routing,
    )


def report(
    step: int,
    splits: Sequence[Split],
    tokenization: Retokenized | None,
    rerouted: Rerouted | None = None,
) -> Mismatch:
    causes = CAUSES if rerouted is None else (*CAUSES, ROUTING)
    joined = {cause: _join([getattr(part, cause) for part in splits]) for cause in causes}
    total = _join([part.total for part in splits])
    stale = np.concatenate([part.stale for part in splits]) if splits else np.zeros(0, np.int64)
    metrics = [metrics_of(cause, joined[cause], total) for cause in causes]
    metrics.append(metrics_of("trained", _join([part.trained for part in splits]), total))
    metrics.append(metrics_of("all", total, total))
    by_staleness = {
        age: metrics_of(f"staleness {age}", joined["staleness"][stale == age], None)
        for age in sorted(set(stale.tolist()))
    }
    return Mismatch(
        step=step,
        trajectories=len(splits),
        tokens=len(total),
        metrics=tuple(metrics),
        by_staleness=by_staleness,
        tokenization=tokenization,
        rerouted=rerouted,
    )


def metrics_of(cause: str, values: Numbers, total: Numbers | None) -> RatioMetrics:
    """Aggregate one cause, with its share of `total` if given."""
    sizes = np.abs(values)
    return RatioMetrics(
        cause=cause,
        tokens=len(values),
        mean=float(values.mean()) if len(values) else 0.0,
        size=float(sizes.mean()) if len(values) else 0.0,
        p99=float(np.quantile(sizes, 0.99)) if len(values) else 0.0,
        largest=float(sizes.max(initial=0.0)),
        share=None if total is None else _share(values, total),
    )


def encoded_again(trajectory: Trajectory, texts: Encoder) -> list[Row] | None:
    """Return the rows with sampled stretches encoded again; None if all ids are equal.

    Prompts, environment texts and shared tokens stay as recorded.
    """
    own, contexts = np.asarray(trajectory.token_ids).tolist(), trajectory.meta.contexts
    rows: list[Row] = []
    for number, (first, last) in enumerate(bounds(contexts, trajectory.length)):
        ids = tokens_before(trajectory, first) if number else []
        mask = [0] * len(ids)
        inside = [
            segment
            for segment in trajectory.segments
            if first <= segment.start and segment.end <= last
        ]
        for start, end, sampled in stretches(inside):
            part = own[start:end]
            if sampled:
                part = texts.again(part)
            ids += part
            mask += [int(sampled)] * len(part)
        rows.append((ids, mask))
    equal = all(
        ids == list(row[0]) for (ids, _), row in zip(rows, rows_of(trajectory), strict=True)
    )
    return None if equal else rows


def stretches(segments: Sequence[Segment]) -> list[tuple[int, int, bool]]:
    """Return (start, end, sampled by the policy); joins a turn's segments, since text is encoded
    whole."""
    pieces: list[tuple[int, int, bool]] = []
    turn = -1
    for segment in segments:
        sampled = segment.kind == "model"
        if pieces and sampled and pieces[-1][2] and segment.turn == turn:
            pieces[-1] = (pieces[-1][0], segment.end, True)
        else:
            pieces.append((segment.start, segment.end, sampled))
        turn = segment.turn
    return pieces


def _retokenized(
    trajectories: Sequence[Trajectory],
    changed: Mapping[int, Sequence[Row]],
    gaps: Mapping[int, float],
) -> Retokenized:
    after = 0
    for index, rows in changed.items():
        for (ids, _), (own, mask, _) in zip(rows, rows_of(trajectories[index]), strict=True):
            pairs = enumerate(zip(own, ids, strict=False))
            first = next(
                (position for position, (a, b) in pairs if a != b), min(len(own), len(ids))
            )
            after += int(sum(mask[first:]))
    values = np.array(list(gaps.values()))
    return Retokenized(
        trajectories=len(trajectories),
        differing=len(changed),
        tokens=sum(trajectory.sampled for trajectory in trajectories),
        tokens_after=after,
        logprob_mean=float(values.mean()) if len(values) else None,
        logprob_largest=float(np.abs(values).max()) if len(values) else None,
    )


def _chosen(values: Sequence[float | None], counted: np.ndarray[Any, Any]) -> Numbers:
    return np.array([values[index] for index in counted.tolist()], dtype=np.float64)


def _versions(trajectory: Trajectory) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    versions = np.full(len(trajectory.token_ids), trajectory.version, dtype=np.int64)
    for segment in trajectory.segments:
        if segment.kind == "model":
            versions[segment.start : segment.end] = segment.version
    sampled: np.ndarray[tuple[int], np.dtype[np.int64]] = versions[counted_places(trajectory)]
    return sampled


def _join(parts: Sequence[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.zeros(0)


def _share(values: Numbers, total: Numbers) -> float | None:
    square = float(total @ total)
    return float(values @ total) / square if square else None


def _plain(value: RatioMetrics | Retokenized | Rerouted) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__slots__ if name != "cause"}
