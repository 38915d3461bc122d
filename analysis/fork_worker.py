"""Sample the continuations of a trajectory with one worker on a temporary log.

Each continuation is a request that lost its worker at the cut: its progress record is the recorded
prefix, and the worker resumes from there as it resumes any request. It gives an environment the
recorded turns again and compares the answers.

    cut at token 40, sample 3 -> request g0000000040-003
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from dora_pipe.analysis.fork import Cut, Owner, prefix_difference, prefix_of
from dora_pipe.analysis.worker_log import Report, WorkerLog, WorkerParts, started_of, work_on
from dora_pipe.bus.port import Append, Bus, Writer
from dora_pipe.core.errors import InvariantBroken, ReplayDiverged, UsageError
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.schemas.control import (
    REPLAY_DIFFERS,
    RequestFailed,
    Resume,
    RunStarted,
    WorkerJoined,
)
from dora_pipe.schemas.identity import (
    SIBLINGS_MAX,
    cut_seed,
    group_id,
    parse_trajectory_id,
    trajectory_id,
)
from dora_pipe.schemas.rounds import AnyDecision, GroupSpec, PlacedSibling
from dora_pipe.schemas.rounds import Place as PlaceDecision
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import encode_any_progress

WORKER: Final = "fork"
REASON: Final = "a continuation of a recorded trajectory"

Wanted = tuple[Cut, int]
"""A cut and the number of one of its samples."""


@dataclass(slots=True, kw_only=True)
class Continuations:
    """The continuations of one trajectory under one version.

    Example: ``Continuations(bus=bus, recorded=one, started=started, ...).sample(cuts, 16)``
    """

    bus: Bus
    """An empty log."""
    recorded: Trajectory
    started: RunStarted
    version: int
    digest: str
    parts: WorkerParts
    report: Report
    lost: dict[Wanted, RequestFailed] = field(default_factory=dict)
    """Samples that infrastructure lost (a time limit, a dead process)."""
    joins: list[WorkerJoined] = field(default_factory=list)
    """The workers that sampled."""

    def sample(self, cuts: Sequence[Cut], samples: int) -> dict[Cut, list[Trajectory]]:
        """Sample so many continuations from each cut, and check the tokens before it.

        Raises UsageError for a task that cannot be continued, ReplayDiverged for an environment
        that answers differently.
        """
        log = WorkerLog(bus=self.bus, topics=self.topics, reason=REASON)
        log.begin(started_of(self.started, self.topics.run), hint="")
        wanted = [(cut, sample) for cut in cuts for sample in range(samples)]
        work = work_on(
            log, WORKER, self.parts, phase="sampling", total=len(wanted), report=self.report
        )
        done: dict[Wanted, Trajectory] = {}
        while missing := [one for one in wanted if one not in done and one not in self.lost]:
            work(partial(self._place, log, missing))
            before = len(done) + len(self.lost)
            cut_of = {(cut.token, sample): (cut, sample) for cut, sample in wanted}
            done = {cut_of[_place_of(one.trajectory)]: one for one in log.trajectories()}
            for _, fact in log.control():
                if isinstance(fact, RequestFailed):
                    self._failed(cut_of[_place_of(fact.trajectory)], fact)
            if len(done) + len(self.lost) == before:
                raise InvariantBroken("the worker left without a sample")
        self.joins = log.joins()
        self._check_prefixes(done)
        return {cut: [done[cut, at] for at in range(samples) if (cut, at) in done] for cut in cuts}

    @property
    def topics(self) -> Topics:
        """The topics of the temporary log."""
        return Topics(f"{self.recorded.trajectory}-v{self.version}")

    def _failed(self, wanted: Wanted, fact: RequestFailed) -> None:
        if fact.error == REPLAY_DIFFERS:
            raise self._diverged(fact.message)
        self.lost[wanted] = fact

    def _check_prefixes(self, done: Mapping[Wanted, Trajectory]) -> None:
        for (cut, _), continued in done.items():
            if why := prefix_difference(self.recorded, continued, cut):
                raise self._diverged(why)

    def _diverged(self, why: str) -> ReplayDiverged:
        return ReplayDiverged(
            f"{self.recorded.trajectory} cannot return to its turns: {why}",
            hint="the task must answer equal turns equally: no chance, no clock, no memory",
        )

    def _place(
        self,
        log: WorkerLog,
        missing: Sequence[Wanted],
        setup: WorkerSetup,
        facts: Mapping[str, TaskFacts],
    ) -> None:
        """Place what the worker that joined can hold, each request with its prefix."""
        here = facts[self.recorded.meta.source]
        if not (here.single_turn or here.replayable):
            raise UsageError(
                f"the environment of {self.recorded.trajectory} does not declare `replayable`",
                hint="--replayable tries it anyway, and compares all its answers",
            )
        some = missing[: setup.requests_max]
        with closing(self.bus.writer()) as writer:
            resumes = self._write_prefixes(writer, some, episode=not here.single_turn)
            decisions: list[AnyDecision] = [
                PlaceDecision(
                    reason=REASON,
                    spec=self._spec(cut),
                    worker=setup.worker,
                    epoch=setup.epoch,
                    siblings=tuple(
                        PlacedSibling(sibling=sample, attempt=1, resume=resumes.get((cut, sample)))
                        for at, sample in some
                        if at == cut
                    ),
                )
                for cut in dict.fromkeys(cut for cut, _ in some)
            ]
            log.decide(
                writer,
                setup,
                decisions,
                version=self.version,
                digest=self.digest,
                now_ns=self.recorded.meta.times.placed,
            )

    def _write_prefixes(
        self, writer: Writer, wanted: Sequence[Wanted], *, episode: bool
    ) -> dict[Wanted, Resume]:
        """Write the prefix of each sample and return its place; none where the cut is at the
        prompt."""
        appends: dict[Wanted, Append] = {}
        for cut, sample in wanted:
            name = trajectory_id(group_id(self.recorded.meta.purpose, cut.token), sample)
            owner = Owner(trajectory=name, version=self.version, digest=self.digest)
            prefix = prefix_of(self.recorded, cut, owner, episode=episode)
            if prefix is not None:
                value = encode_any_progress(prefix)
                topic = self.topics.progress
                appends[cut, sample] = Append(topic=topic, key=name.encode(), value=value)
        offsets = writer.append([*appends.values()]) if appends else []
        mask = self.recorded.loss_mask
        return {
            one: Resume(tokens=sum(mask[: one[0].token]), partition=0, offset=offset)
            for one, offset in zip(appends, offsets, strict=True)
        }

    def _spec(self, cut: Cut) -> GroupSpec:
        meta = self.recorded.meta
        return GroupSpec(
            group=group_id(meta.purpose, cut.token),
            ordinal=cut.token,
            purpose=meta.purpose,
            version=self.version,
            digest=self.digest,
            deadline=-1,
            partition=0,
            dataset_digest=meta.dataset_digest,
            index=meta.index,
            data_epoch=meta.data_epoch,
            seed=cut_seed(meta.seed, cut.token),
            size=SIBLINGS_MAX,
            task=meta.task,
            evaluation=meta.evaluation,
        )


def _place_of(name: str) -> tuple[int, int]:
    _, token, sample = parse_trajectory_id(name)
    return token, sample
