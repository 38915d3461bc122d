"""What an evaluation says of weights that no run has evaluated: its rows, sampled on a log of their
own (`worker_log`); decides which rows are asked, how often, and what each draw counts.

The *draws* of an evaluation are its siblings, row after row, and then again with further seeds:

    2 rows of 2 siblings:   draw   0  1  2  3  4  5 ...
                            group  0  0  1  1  2  2      2 is row 0 once more
                            sibling 0  1  0  1  0  1

The groups are those of a run's own evaluation (`orchestrator.evaluations`), so that equal weights
give equal answers where the environment does, and draw i is of the same row and seed for all
weights. A request that fails otherwise than by its task's code is asked again as an orchestrator
would, `groups.attempts_max` times in all; siblings that are scored together are so when all of
their group have ended. What has no valid reward then has no value, as in a run's evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from dora_pipe.analysis.worker_log import Work, WorkerLog
from dora_pipe.bus.port import Bus
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config, Evaluation
from dora_pipe.config.several import SEVERAL, tables_of
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.evaluations import evaluation_group, evaluation_rows
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.schemas.control import (
    GroupScored,
    LoggedEntry,
    RequestFailed,
    RunStarted,
    TakenTrajectory,
    TrajectoriesLogged,
    config_digest,
    error_class,
)
from dora_pipe.schemas.identity import derive_seed, group_id, source_of, trajectory_id
from dora_pipe.schemas.rounds import AnyDecision, GroupSpec, Place, PlacedSibling, ScoreGroup
from dora_pipe.schemas.topics import Topics

NAME: Final = "bisect"
"""Of the log, and of its worker."""

VERSION: Final = 1
"""Of the weights that are asked, whatever version they are of the run."""

REASON: Final = "an evaluation of weights that were made again"

SCORED_MAX: Final = 64
"""Groups that one worker is asked to score before it leaves."""

Draw = tuple[int, int]
"""The ordinal of a group and a sibling."""


def asking_only(started: RunStarted, evaluation: Evaluation) -> RunStarted:
    """`run started` of a log that asks nothing else: other tasks of the run are none of its worker,
    which need not start them."""
    names = {
        "task": logged_config(started.config).task_of(evaluation).name,
        "evaluation": evaluation.name,
    }
    plain = dict(started.config)
    for section, name in names.items():
        several = tables_of(plain, section)
        if len(several) > 1:
            plain[section] = next(one for one in several if one.get("name", "") == name)
            del plain[SEVERAL[section][0]]
    return msgspec.structs.replace(started, config=plain, config_digest=config_digest(plain))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDraws:
    """The draws of an evaluation of a run; see the module."""

    started: RunStarted
    config: Config
    evaluation: Evaluation

    @property
    def source(self) -> str:
        """As `GroupSpec.source` says it."""
        return source_of("eval", self.evaluation.name)

    @property
    def rows(self) -> int:
        """That it asks once."""
        return evaluation_rows(self.started, self.evaluation)

    @property
    def together(self) -> bool:
        """Whether siblings are also scored together."""
        return self.source in self.started.scored_together

    def draw(self, at: int) -> Draw:
        """Of a number from 0 on."""
        return divmod(at, self.evaluation.siblings)

    def needed(self, first: int, last: int) -> list[Draw]:
        """What has to be sampled for draws `first` .. `last - 1`: of those that are scored
        together, their siblings too."""
        wanted = [self.draw(at) for at in range(first, last)]
        if not self.together:
            return wanted
        groups = dict.fromkeys(group for group, _ in wanted)
        return [(group, one) for group in groups for one in range(self.evaluation.siblings)]

    def spec(self, ordinal: int, digest: str) -> GroupSpec:
        """The group with this ordinal, of weights with this digest."""
        again, row = divmod(ordinal, self.rows)
        spec = evaluation_group(
            self.started,
            self.config,
            self.evaluation,
            row,
            ordinal=ordinal,
            version=VERSION,
            digest=digest,
        )
        seed = derive_seed("draw", spec.seed, again) if again else spec.seed
        return msgspec.structs.replace(spec, seed=seed, partition=0)


@dataclass(slots=True, kw_only=True)
class AskedDraws:
    """What has become of requests and groups, as a log has it."""

    attempts_max: int
    entries: dict[str, tuple[int, LoggedEntry]] = field(default_factory=dict)
    """The first of each trajectory, behind the epoch of its worker."""
    lost: dict[str, str] = field(default_factory=dict)
    """Why a request has no trajectory, and is not asked again."""
    scores: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """By group, what each of its trajectories counts."""
    unscored: dict[str, str] = field(default_factory=dict)
    """Why a group has no scores, and is not asked again."""
    faults: Counter[str] = field(default_factory=Counter)
    """Attempts at a trajectory, or a group, that came to nothing."""

    def add(self, fact: Any) -> None:
        """Take the next fact."""
        match fact:
            case TrajectoriesLogged():
                for one in fact.trajectories:
                    self.entries.setdefault(one.trajectory, (fact.epoch, one))
            case RequestFailed():
                error = f"{fact.error}: {fact.message}"
                self._failed(self.lost, fact.trajectory, error, retryable=fact.retryable)
            case GroupScored() if fact.error:
                self._failed(self.unscored, fact.group, fact.error, retryable=fact.retryable)
            case GroupScored():
                self.scores[fact.group] = {one.trajectory: one.reward for one in fact.siblings}

    def _failed(self, ended: dict[str, str], name: str, error: str, *, retryable: bool) -> None:
        self.faults[name] += 1
        if not retryable or self.faults[name] >= self.attempts_max:
            ended[name] = error

    def is_over(self, trajectory: str) -> bool:
        """Whether it is not asked again."""
        return trajectory in self.entries or trajectory in self.lost

    def siblings(self, group: str, size: int) -> tuple[TakenTrajectory, ...]:
        """Those of a group that are scored together: with a valid reward of their own, in order."""
        names = (trajectory_id(group, one) for one in range(size))
        found = (self.entries[name] for name in names if name in self.entries)
        return tuple(_taken(epoch, one) for epoch, one in found if one.reward is not None)

    def value(self, trajectory: str, group: str, *, together: bool) -> float | None:
        """What a draw counts; None where it has no valid reward."""
        _, entry = self.entries.get(trajectory, (0, None))
        if entry is None or entry.reward is None or not together:
            return None if entry is None else entry.reward
        return self.scores.get(group, {}).get(trajectory)

    def error(self, trajectory: str, group: str) -> str:
        """The class of the error of a draw without a value."""
        _, entry = self.entries.get(trajectory, (0, None))
        own = self.lost.get(trajectory, "") if entry is None else entry.error
        return error_class(own or self.unscored.get(group, ""))


def _taken(epoch: int, entry: LoggedEntry) -> TakenTrajectory:
    return TakenTrajectory(
        trajectory=entry.trajectory,
        attempt=entry.attempt,
        epoch=epoch,
        partition=entry.partition,
        offset=entry.offset,
        sha256=entry.sha256,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawValues:
    """Values of some draws, in order."""

    values: Sequence[float | None]
    errors: Mapping[str, int]
    """Of those that have none, by class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLog:
    """The log of an evaluation of weights.

    Example: ``EvaluationLog(bus=bus, draws=draws, digest="ab12...").values(0, 256, work)``
    """

    bus: Bus
    draws: EvaluationDraws
    digest: str
    """Of the weights (hex)."""

    @property
    def log(self) -> WorkerLog:
        """The log, whatever it is of."""
        return WorkerLog(bus=self.bus, topics=Topics(NAME), reason=REASON)

    def begin(self, started: RunStarted) -> None:
        """Write the first record, or find it there. Raises UsageError where another one is."""
        self.log.begin(started, hint="remove the folder of the probe, in bisect/ of the run")

    def values(self, first: int, last: int, work: Work) -> DrawValues:
        """Of draws `first` .. `last - 1`; what the log lacks is sampled.

        Raises InvariantBroken for a worker that leaves without having done anything.
        """
        needed = self.draws.needed(first, last)
        sampled = self._sampled()
        while True:
            missing = [one for one in needed if not sampled.is_over(_name(one))]
            unscored = [] if missing else list(self._unscored(needed, sampled))
            if not missing and not unscored:
                break
            before = self.log.end
            work(partial(self._joined, sampled, missing, unscored))
            sampled = self._sampled()
            answers = (TrajectoriesLogged, RequestFailed, GroupScored)
            if not any(isinstance(one, answers) for _, one in self.log.control(before)):
                raise InvariantBroken(f"the worker of {NAME} left without an answer")
        return self._values([self.draws.draw(at) for at in range(first, last)], sampled)

    def _sampled(self) -> AskedDraws:
        sampled = AskedDraws(attempts_max=self.draws.config.groups.attempts_max)
        for _, fact in self.log.control():
            sampled.add(fact)
        return sampled

    def _unscored(self, needed: Iterable[Draw], sampled: AskedDraws) -> Iterator[int]:
        """Groups of which all have ended, and that wait to be scored together."""
        if not self.draws.together:
            return
        for ordinal in dict.fromkeys(group for group, _ in needed):
            name = group_id("eval", ordinal)
            ended = name in sampled.scores or name in sampled.unscored
            if not ended and sampled.siblings(name, self.draws.evaluation.siblings):
                yield ordinal

    def _joined(
        self,
        sampled: AskedDraws,
        missing: Sequence[Draw],
        unscored: Sequence[int],
        setup: WorkerSetup,
        facts: Mapping[str, TaskFacts],
    ) -> None:
        decisions: list[AnyDecision] = [
            *self._places(sampled, missing[: setup.requests_max], setup),
            *(self._score(sampled, one, setup) for one in unscored[:SCORED_MAX]),
        ]
        with closing(self.bus.writer()) as writer:
            self.log.decide(
                writer,
                setup,
                decisions,
                version=VERSION,
                digest=self.digest,
                now_ns=self.draws.started.at_ns,
            )

    def _places(
        self, sampled: AskedDraws, wanted: Sequence[Draw], setup: WorkerSetup
    ) -> Iterator[Place]:
        by_group: dict[int, list[int]] = {}
        for group, sibling in wanted:
            by_group.setdefault(group, []).append(sibling)
        for group, siblings in by_group.items():
            placed = (
                PlacedSibling(sibling=one, attempt=1 + sampled.faults[_name((group, one))])
                for one in siblings
            )
            yield Place(
                reason=REASON,
                spec=self.draws.spec(group, self.digest),
                worker=setup.worker,
                epoch=setup.epoch,
                siblings=tuple(placed),
            )

    def _score(self, sampled: AskedDraws, ordinal: int, setup: WorkerSetup) -> ScoreGroup:
        spec = self.draws.spec(ordinal, self.digest)
        return ScoreGroup(
            reason=REASON,
            spec=spec,
            worker=setup.worker,
            epoch=setup.epoch,
            attempt=1 + sampled.faults[spec.group],
            trajectories=sampled.siblings(spec.group, spec.size),
        )

    def _values(self, wanted: Sequence[Draw], sampled: AskedDraws) -> DrawValues:
        together = self.draws.together
        names = [(_name(one), group_id("eval", one[0])) for one in wanted]
        values = [sampled.value(*one, together=together) for one in names]
        errors = (
            sampled.error(*one) for one, value in zip(names, values, strict=True) if value is None
        )
        return DrawValues(values=values, errors=Counter(errors))


def _name(draw: Draw) -> str:
    group, sibling = draw
    return trajectory_id(group_id("eval", group), sibling)
