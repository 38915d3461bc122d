"""The log of a trajectory's continuations (`worker_log`); decides what of them is placed.

Each continuation is a request that has lost its worker at the cut: its progress record is the
recorded prefix, so that the worker goes on from there as from any (`producers.worker.episodes`): it
tells an environment the recorded turns again and compares the answers. Samples that the log has are
not placed again, so that a command which was ended goes on; who samples what is missing draws the
same tokens.

    cut at token 40, sample 3 -> request g0000000040-003 of the log g0000000042-003-v7
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from dora_pipe.audit.fork import (
    Continued,
    Cut,
    Owner,
    continued_of,
    prefix_difference,
    prefix_of,
)
from dora_pipe.audit.worker_log import Work, WorkerLog
from dora_pipe.bus.port import Append, Bus
from dora_pipe.core.errors import ReplayDiverged, UsageError
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
from dora_pipe.schemas.rounds import (
    AnyDecision,
    GroupSpec,
    Place,
    PlacedSibling,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import encode_any_progress

WORKER: Final = "fork"
"""Name of the worker."""

REASON: Final = "a continuation of a recorded trajectory"

ANOTHER_PLACE: Final = "another folder: --out DIR"

RECORDS_APPENDED_MAX: Final = 256
"""In one durable call."""

Sample = tuple[Cut, int]
"""A cut and the number of one of its samples."""


def fork_id(trajectory: str, version: int) -> str:
    """``fork_id("g0000000042-003", 7) == "g0000000042-003-v7"``: of the log and its folder."""
    return f"{trajectory}-v{version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkLog:
    """The continuations of one trajectory under one version.

    Example: ``ForkLog(bus=bus, recorded=trajectory, version=7, digest="ab12...")``
    """

    bus: Bus
    recorded: Trajectory
    version: int
    digest: str
    """Of the version's weights (hex)."""

    @property
    def topics(self) -> Topics:
        return Topics(fork_id(self.recorded.trajectory, self.version))

    @property
    def log(self) -> WorkerLog:
        """The log, whoever continues what."""
        return WorkerLog(bus=self.bus, topics=self.topics, reason=REASON)

    def begin(self, started: RunStarted) -> None:
        """Write the first record, or find it there. Raises UsageError where another one is."""
        self.log.begin(started, hint=ANOTHER_PLACE)

    def samples(self) -> dict[Sample, Trajectory]:
        """Every continuation that the log has, the first where it has several."""
        found: dict[Sample, Trajectory] = {}
        cuts: dict[int, Cut] = {}
        for one in self.log.trajectories():
            _, token, sample = parse_trajectory_id(one.trajectory)
            cut = cuts.setdefault(token, Cut(token=token, turn=_turn_at(self.recorded, token)))
            found.setdefault((cut, sample), one)
        return found

    def continued(self) -> dict[Cut, dict[int, Continued]]:
        """What counts of each, by cut and sample. Raises ReplayDiverged where what stands before
        the cut is not what was recorded."""
        found: dict[Cut, dict[int, Continued]] = {}
        for (cut, sample), one in self.samples().items():
            why = prefix_difference(self.recorded, one, cut)
            if why:
                raise _diverged(self.recorded, why)
            found.setdefault(cut, {})[sample] = continued_of(one, cut)
        return found

    def fill(
        self,
        wanted: Sequence[Sample],
        work: Work,
    ) -> list[RequestFailed]:
        """Have all of these sampled that the log lacks; those that were lost are returned.

        `work` is a worker on this log until it has left, which tells when it has joined. Raises
        UsageError for a task that nothing can be continued in, ReplayDiverged for an environment
        that answers otherwise than was recorded.
        """
        lost: list[RequestFailed] = []
        while True:
            there = self.samples().keys() | {_sample_of(self.recorded, one) for one in lost}
            missing = [one for one in wanted if one not in there]
            if not missing:
                return lost
            at = self.log.end
            work(partial(self._joined, missing))
            failed = [one for _, one in self.log.control(at) if isinstance(one, RequestFailed)]
            for one in failed:
                if one.error == REPLAY_DIFFERS:
                    raise _diverged(self.recorded, one.message)
            if not failed and len(self.samples()) == len(there) - len(lost):
                raise ReplayDiverged(f"{self.topics.run}: its worker left without a sample")
            lost += failed

    def _joined(
        self, missing: Sequence[Sample], setup: WorkerSetup, facts: Mapping[str, TaskFacts]
    ) -> None:
        here = facts[self.recorded.meta.source]
        self._check(setup, here)
        self._place(setup, here, missing[: setup.requests_max])

    def _check(self, setup: WorkerSetup, facts: TaskFacts) -> None:
        """Raise UsageError where a cut cannot be gone on from, or would not be as those before."""
        name, source = self.recorded.trajectory, self.recorded.meta.source
        if source in setup.agents:
            raise UsageError(f"{name} is of an agent, whose own process cannot be continued")
        if not (facts.single_turn or facts.replayable):
            raise UsageError(
                f"the environment of {name} does not say that it can be told its turns again",
                hint="`replayable` of the task says so; --replayable tries it, and compares all"
                " that it answers",
            )
        joins = {at: one for at, one in self.log.control() if isinstance(one, WorkerJoined)}
        epochs = {one.meta.epoch for one in self.samples().values()}
        for epoch in sorted(epochs):
            if _makes(joins[epoch]) != _makes(joins[setup.epoch]):
                raise UsageError(
                    f"{self.topics.run} has continuations of another engine, task or reward",
                    hint=ANOTHER_PLACE,
                )

    def _place(self, setup: WorkerSetup, facts: TaskFacts, wanted: Sequence[Sample]) -> None:
        """Give each its prefix, and the worker all of them, after which it leaves."""
        with closing(self.bus.writer()) as writer:
            resumes = self._resumes(writer.append, wanted, episode=not facts.single_turn)
            decisions: list[AnyDecision] = []
            for cut in dict.fromkeys(cut for cut, _ in wanted):
                siblings = tuple(
                    PlacedSibling(sibling=sample, attempt=1, resume=resumes.get((cut, sample)))
                    for at, sample in wanted
                    if at == cut
                )
                decisions.append(
                    Place(
                        reason=REASON,
                        spec=self._spec(cut),
                        worker=setup.worker,
                        epoch=setup.epoch,
                        siblings=siblings,
                    )
                )
            now_ns = self.recorded.meta.times.placed
            self.log.decide(
                writer,
                setup,
                decisions,
                version=self.version,
                digest=self.digest,
                now_ns=now_ns,
            )

    def _resumes(
        self,
        append: Callable[[Sequence[Append]], Sequence[int]],
        wanted: Sequence[Sample],
        *,
        episode: bool,
    ) -> dict[Sample, Resume]:
        """Write the prefix of each sample; where it lies. None where the cut is at the prompt."""
        records: list[tuple[Sample, int, Append]] = []
        for cut, sample in wanted:
            name = trajectory_id(group_id(self.recorded.meta.purpose, cut.token), sample)
            owner = Owner(trajectory=name, version=self.version, digest=self.digest)
            prefix = prefix_of(self.recorded, cut, owner, episode=episode)
            if prefix is not None:
                tokens = sum(self.recorded.loss_mask[: cut.token])
                value = encode_any_progress(prefix)
                one = Append(topic=self.topics.progress, key=name.encode(), value=value)
                records.append(((cut, sample), tokens, one))
        found: dict[Sample, Resume] = {}
        for at in range(0, len(records), RECORDS_APPENDED_MAX):
            some = records[at : at + RECORDS_APPENDED_MAX]
            offsets = append([one for _, _, one in some])
            for (key, tokens, _), offset in zip(some, offsets, strict=True):
                found[key] = Resume(tokens=tokens, partition=0, offset=offset)
        return found

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


def _makes(joined: WorkerJoined) -> tuple[Any, ...]:
    """What another one of makes other continuations of."""
    engine = (joined.engine, joined.engine_version, joined.dtype, joined.device)
    return (*engine, joined.reward_digest, joined.template_digest, joined.packages)


def _turn_at(recorded: Trajectory, token: int) -> int:
    found = [one.turn for one in recorded.segments if one.start <= token < one.end]
    return found[0] if found else -1


def _sample_of(recorded: Trajectory, failed: RequestFailed) -> Sample:
    _, token, sample = parse_trajectory_id(failed.trajectory)
    return Cut(token=token, turn=_turn_at(recorded, token)), sample


def _diverged(recorded: Trajectory, why: str) -> ReplayDiverged:
    return ReplayDiverged(
        f"{recorded.trajectory} cannot be brought to its turns again: {why}",
        hint="a task that draws, asks a clock or remembers cannot be continued",
    )
