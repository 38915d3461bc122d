"""The batch of a step as a learner takes it, from the places in the log that a decision names.

Generators yield None while the log has not come as far as they need; what drives them decides how
to wait.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Final

from dora_pipe.bus.claim_check import lost_claim
from dora_pipe.bus.port import Bus
from dora_pipe.consumers.learners.port import LoggedAt, TrainBatch, TrainGroup
from dora_pipe.consumers.place_reader import Place
from dora_pipe.consumers.trainer.batch_reader import BatchReader, Found
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import InvariantBroken, SchemaError
from dora_pipe.schemas.control import StepCommitted, TakenGroup
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import sha256_hex

WAIT_S: Final = 0.05
"""One wait for records that a step needs."""


def committed_batch(
    reader: BatchReader, commit: StepCommitted, *, strict: bool
) -> Generator[None, None, TrainBatch]:
    """The batch of a commit from the log. Raises InvariantBroken for what it cannot be."""
    found = yield from find(reader, commit.groups)
    trajectories: dict[str, Trajectory] = {}
    sha256s: dict[str, str] = {}
    for taken in (one for group in commit.groups for one in group.trajectories):
        at = found[Place(taken.partition, taken.offset)]
        who = f"step {commit.step}: trajectory {taken.trajectory}"
        if at.record is None or (strict and at.why):
            raise InvariantBroken(f"{who}: {at.why}")
        if strict and at.sha256 != taken.sha256:
            raise InvariantBroken(f"{who} has other bytes than those that were trained")
        try:
            with reader.meter.spend("codec"):
                trajectories[taken.trajectory] = decode_trajectory(at.record.value)
        except SchemaError as error:
            why = lost_claim(at.record) or error.message
            raise InvariantBroken(f"{who} cannot be read: {why}") from error
        sha256s[taken.trajectory] = sha256_hex(at.record.value)
    return batch_of(commit.step, commit.groups, trajectories, sha256s)


def batch_of_commit(bus: Bus, topics: Topics, commit: StepCommitted, *, clock: Clock) -> TrainBatch:
    """The batch of a commit. Raises InvariantBroken for other bytes than trained, BusError."""
    reader = BatchReader(bus, topics.trajectories, run=topics.run, starts={}, clock=clock)
    try:
        waiting = committed_batch(reader, commit, strict=True)
        while True:
            try:
                next(waiting)
            except StopIteration as done:
                batch: TrainBatch = done.value
                return batch
    finally:
        reader.close()


def find(
    reader: BatchReader, groups: Sequence[TakenGroup]
) -> Generator[None, None, dict[Place, Found]]:
    """What lies at the places of a batch, whole; records stay in the cache."""
    places = places_of(groups)
    while (found := reader.find(places, timeout_s=WAIT_S)) is None:
        yield None
    return found


def places_of(groups: Sequence[TakenGroup]) -> list[Place]:
    """Where the trajectories of a batch lie."""
    return [Place(one.partition, one.offset) for group in groups for one in group.trajectories]


def batch_of(
    step: int,
    groups: Sequence[TakenGroup],
    trajectories: Mapping[str, Trajectory],
    sha256s: Mapping[str, str] | None = None,
) -> TrainBatch:
    """A batch as the learner takes it: groups in dispatch order, siblings in theirs.

    `sha256s` are of the values as they lie in the log now, where that may be other than taken.
    """
    ordered = sorted(groups, key=lambda group: group.group)
    return TrainBatch(step=step, groups=[_group(one, trajectories, sha256s) for one in ordered])


def _group(
    group: TakenGroup, trajectories: Mapping[str, Trajectory], sha256s: Mapping[str, str] | None
) -> TrainGroup:
    siblings = sorted(group.trajectories, key=lambda taken: taken.trajectory)
    return TrainGroup(
        group=group.group,
        version=group.version,
        trajectories=[trajectories[taken.trajectory] for taken in siblings],
        places=[
            LoggedAt(
                partition=taken.partition,
                offset=taken.offset,
                sha256=taken.sha256 if sha256s is None else sha256s[taken.trajectory],
            )
            for taken in siblings
        ],
    )
