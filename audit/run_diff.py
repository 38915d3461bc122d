"""Where two runs part: what they were made of, what was decided, and the first trajectory that
comes out otherwise under equal weights, with its cause.

Pure: it is given tables and records of both. Runs of one configuration part by time alone, since
which group is finished when depends on the machine; so decisions are compared in their order, and
trajectories only where weights, row and seed are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np

from dora_pipe.catalogue.database import Catalogue
from dora_pipe.catalogue.marks import SETTINGS
from dora_pipe.config.changes import LOGGED
from dora_pipe.schemas.trajectory import Trajectory

T = TypeVar("T")

Cause = Literal["prompt", "sampling", "numerics", "reward"]

MADE_OF: Final = """
    select seed, planner, package, schema_version, dataset_digest, dataset_rows, eval_digest,
           eval_rows, assets_digest from runs"""

WORKERS: Final = """
    select count(distinct worker) as workers,
           string_agg(distinct engine || ' ' || engine_version, ', ') as engines,
           string_agg(distinct device || ' ' || dtype, ', ') as computed_on,
           string_agg(distinct reward_digest, ', ') as reward_digest,
           string_agg(distinct template_digest, ', ') as template_digest from workers"""

GROUPS: Final = """
    select group_id, row, version from groups where purpose = 'train' order by ordinal"""

BATCHES: Final = """
    select step, list(group_id order by group_id) from groups where fate = 'trained'
    group by step order by step"""

RETRAINED: Final = "select retrained_from from runs"

STEPS: Final = "select step, reward, seconds, staleness_mean from steps order by step"

EVALUATIONS: Final = """
    select evaluation, version, avg(reward) from groups where fate = 'evaluated'
    group by evaluation, version order by evaluation, version"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """What of a run is compared."""

    config: Mapping[str, Any]
    """Plain values by dotted key."""
    made_of: Mapping[str, Any]
    versions: Sequence[str | None]
    """Weights digests, from version 0 on; None for those that a run has not, which was trained
    again from a later one on."""
    groups: Sequence[tuple[str, int, int]]
    """(group, row, version) of training, in the order of dispatch."""
    batches: Sequence[tuple[str, ...] | None]
    """The groups that each step has trained, from step 0 on; None for those that a run has not."""
    steps: Sequence[tuple[int, float | None, float | None, float]]
    """(step, reward, seconds, staleness)."""
    evaluations: Mapping[tuple[str, int], float | None]
    """Mean reward by (evaluation, version)."""
    changes: Sequence[tuple[int, str]] = ()
    """(step, change) of settings that changed in the run."""
    borrows: bool = False
    """It was trained again on another run's trajectories: none of its groups is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first place at which two sequences differ. Example: ``Parting(at=3, of=(20, 20),
    values=("ab12", "cd34"))``; `at` is None where they are the same."""

    at: int | None
    of: tuple[int, int]
    """How long each is."""
    values: tuple[Any, Any] = (None, None)
    """What stands there; None behind the end of one."""

    def words(self, what: str) -> str:
        """In words; `what` is a thing of them: ``"the same before step 3 of 20 and 20"``."""
        lengths = f"{self.of[0]} and {self.of[1]}"
        if self.at is None:
            return f"the same {self.of[0]}"
        if None in self.values:
            return f"the same as far as both go ({lengths})"
        return f"the same before {what} {self.at} of {lengths}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiff:
    """Where two runs part."""

    config: Mapping[str, tuple[Any, Any]]
    """Keys whose values differ; None where one run does not have it."""
    changes: tuple[Sequence[tuple[int, str]], Sequence[tuple[int, str]]]
    """Of each run, (step, change) of settings that changed in it."""
    made_of: Mapping[str, tuple[Any, Any]]
    versions: Parting
    dispatched: Parting
    batches: Parting

    @property
    def settings(self) -> str:
        """How settings of steps differ: from the start on, or because they changed in a run."""
        differences = [
            f"{key} {first} and {second}"
            for key, (first, second) in self.config.items()
            if key in LOGGED or key.startswith("trainer.")
        ]
        if self.changes[0] != self.changes[1]:
            for run, changes in zip(("the first", "the other"), self.changes, strict=True):
                differences += [f"{run} {change} at step {step}" for step, change in changes]
        return "; ".join(differences) or "the same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A trajectory of both runs that is not the same. Example: ``Difference(trajectory=
    "g0000000042-003", cause="numerics", place=17, words="log-probs before it differ by 3e-07")``.
    """

    trajectory: str
    cause: Cause
    place: int | None
    """Of the first token that differs, in the sequence."""
    words: str


def run_of(tables: Catalogue, config: Mapping[str, Any]) -> ComparedRun:
    """A run by its tables; `config` has plain values by dotted key."""
    (made_of,), (workers,) = tables.records(MADE_OF), tables.records(WORKERS)
    ((source,),) = tables.query(RETRAINED)
    return ComparedRun(
        config=config,
        made_of=made_of if source else {**made_of, **workers},
        versions=_by_number(tables.query("select version, digest from versions")),
        groups=[] if source else list(tables.query(GROUPS)),
        batches=_by_number((step, tuple(own)) for step, own in tables.query(BATCHES)),
        steps=list(tables.query(STEPS)),
        evaluations={
            (name, version): reward for name, version, reward in tables.query(EVALUATIONS)
        },
        changes=tables.query(SETTINGS),
        borrows=bool(source),
    )


def diff(one: ComparedRun, other: ComparedRun) -> RunDiff:
    return RunDiff(
        config=_differing(one.config, other.config),
        changes=(one.changes, other.changes),
        made_of=_made_otherwise(one, other),
        versions=_numbered(one.versions, other.versions),
        dispatched=parting(one.groups, other.groups),
        batches=_numbered(one.batches, other.batches),
    )


def _made_otherwise(one: ComparedRun, other: ComparedRun) -> dict[str, tuple[Any, Any]]:
    """What they are made of otherwise; who samples is no question of a run that borrows."""
    keys = {*one.made_of, *other.made_of}
    if one.borrows or other.borrows:
        keys = {*one.made_of} & {*other.made_of}
    here, there = ({key: run.made_of.get(key) for key in keys} for run in (one, other))
    return _differing(here, there)


def _by_number(rows: Iterable[tuple[int, T]]) -> list[T | None]:
    found = dict(rows)
    return [found.get(number) for number in range(max(found, default=-1) + 1)]


def _numbered(one: Sequence[T | None], other: Sequence[T | None]) -> Parting:
    """What both have under a number, versions and batches; what one has not cannot be compared."""
    return parting(_filled(one, other), _filled(other, one))


def _filled(one: Sequence[T | None], other: Sequence[T | None]) -> list[T | None]:
    """The other's where there is none."""
    return [
        other[at] if found is None and at < len(other) else found for at, found in enumerate(one)
    ]


def parting(one: Sequence[Any], other: Sequence[Any]) -> Parting:
    """The first place at which they differ; the end of the shorter one is such a place.

    Example: ``parting("abc", "abd").at == 2``
    """
    pairs = enumerate(itertools.zip_longest(one, other))
    at, values = next(((at, pair) for at, pair in pairs if pair[0] != pair[1]), (None, None))
    return Parting(at=at, of=(len(one), len(other)), values=values or (None, None))


def difference(one: Trajectory, other: Trajectory, *, alike: bool) -> Difference | None:
    """What is otherwise in a trajectory of equal weights and row, and why; None where nothing is.

    `alike`: seed and settings of sampling are the same, so that only what was computed can differ.
    """
    name, prompt = one.trajectory, one.meta.prompt_tokens
    ids, others = np.asarray(one.token_ids), np.asarray(other.token_ids)
    if prompt != other.meta.prompt_tokens or not np.array_equal(ids[:prompt], others[:prompt]):
        place = _first(ids[:prompt], others[: other.meta.prompt_tokens])
        words = f"prompts of {prompt} and {other.meta.prompt_tokens} tokens"
        return Difference(trajectory=name, cause="prompt", place=place, words=words)
    if np.array_equal(ids, others):
        if one.reward == other.reward:
            return None
        words = f"the same text is worth {one.reward} and {other.reward}"
        return Difference(trajectory=name, cause="reward", place=None, words=words)
    place = _first(ids, others)
    gap = _gap(one, other, place)
    said = f"log-probs before it differ by up to {gap:.2g}" if gap else "equal log-probs before it"
    cause: Cause = "numerics" if alike or gap else "sampling"
    return Difference(trajectory=name, cause=cause, place=place, words=said)


def comparable(one: Trajectory, other: Trajectory) -> bool:
    """Whether both were sampled under the same weights, from the same row."""
    here, there = one.meta, other.meta
    return (one.digest, here.purpose, here.index, here.source) == (
        other.digest,
        there.purpose,
        there.index,
        there.source,
    )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    found: Iterator[tuple[str, tuple[Any, Any]]] = (
        (key, (one.get(key), other.get(key))) for key in sorted({*one, *other})
    )
    return {key: pair for key, pair in found if pair[0] != pair[1]}


def _first(ids: np.ndarray[Any, Any], others: np.ndarray[Any, Any]) -> int:
    shorter = min(len(ids), len(others))
    places = np.flatnonzero(ids[:shorter] != others[:shorter])
    return int(places[0]) if len(places) else shorter


def _gap(one: Trajectory, other: Trajectory, place: int) -> float:
    """The largest distance of two log-probs of the same token before a place."""
    pairs = zip(one.logprobs[:place], other.logprobs[:place], strict=True)
    gaps = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    return max(gaps, default=0.0)
