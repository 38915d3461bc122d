"""Trains committed steps again, from the log and a checkpoint alone; decides what counts as equal.

A restarted trainer goes through here, and so does the `replay` command: it is the same training
step on the same bytes, and its weights must have the committed digest. Generators yield None while
the log has not come as far as they need; what drives them decides how to wait.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dora_pipe.bus.claims import lost_claim
from dora_pipe.bus.port import Bus
from dora_pipe.clock import Clock
from dora_pipe.consumers.commits import CommitNote
from dora_pipe.consumers.reader import BatchReader, Found, Place
from dora_pipe.consumers.trainers.port import LoggedAt, TrainBatch, Trainer, TrainGroup
from dora_pipe.consumers.trainers.settings import MICRO_BATCH_TOKENS
from dora_pipe.errors import InvariantBroken, PolicyError, SchemaError
from dora_pipe.policies.store import PolicyStore
from dora_pipe.schemas.control import StepCommitted, TakenGroup
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import sha256_hex

LOG = logging.getLogger(__name__)

WAIT_S: Final = 0.05
"""One wait for records that a step needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A committed step and what came out when it was trained again."""

    step: int
    digest_committed: str
    digest_replayed: str
    tensor: str | None
    """The first tensor (by name) that differs; None when the weights are bit-equal."""
    compute_s_committed: float
    compute_s_replayed: float
    numerics_committed: Mapping[str, str]
    numerics_replayed: Mapping[str, str]

    @property
    def equal(self) -> bool:
        """Whether the weights are bit-equal."""
        return self.digest_committed == self.digest_replayed

    @property
    def other_numerics(self) -> list[str]:
        """Keys of the fingerprint that differ: equal bits are only promised when there are none."""
        keys = self.numerics_committed.keys() | self.numerics_replayed.keys()
        return sorted(
            key
            for key in keys
            if self.numerics_committed.get(key) != self.numerics_replayed.get(key)
        )


def replay_steps(
    bus: Bus, topics: Topics, trainer: Trainer, commits: Iterable[StepCommitted], *, clock: Clock
) -> Iterator[ReplayedStep]:
    """Train the steps of `commits` (contiguous, in order) again, one by one.

    `trainer` has the weights and optimizer state before the first of them (`load_base`). Every
    trajectory is taken as it lies in the log now, also if it was changed: what that changes in the
    weights is the answer. Raises InvariantBroken for one that cannot be read at all, BusError.
    """
    reader = BatchReader(bus, topics.trajectories, run=topics.run, starts={}, clock=clock)
    try:
        for step in steps_again(reader, trainer, commits, strict=False):
            if step is not None:
                yield step
    finally:
        reader.close()


def load_base(
    store: PolicyStore, trainer: Trainer, initial: Manifest, notes: Sequence[CommitNote]
) -> int:
    """Load the newest usable checkpoint among `notes`, else version 0; the step that comes next.

    Raises PolicyError when version 0 is needed and cannot be used.
    """
    for note in reversed(notes):
        if note.checkpoint is None:
            continue
        try:
            optimizer = store.verify_blob("optimizer", note.checkpoint.sha256)
            weights = store.weights(note.digest)
            trainer.load(weights, digest=note.digest, optimizer=optimizer)
        except PolicyError as error:
            LOG.warning("checkpoint of step %d cannot be used: %s", note.step, error.message)
            continue
        return note.step + 1
    weights = store.weights(initial.digest)
    trainer.load(weights, digest=initial.digest, optimizer=None)
    return 0


def steps_again(
    reader: BatchReader,
    trainer: Trainer,
    commits: Iterable[StepCommitted],
    *,
    strict: bool,
) -> Iterator[ReplayedStep | None]:
    """See `replay_steps`; yields None while waiting. `strict` refuses changed trajectories."""
    for commit in commits:
        batch = yield from committed_batch(reader, commit, strict=strict)
        settings = dict(commit.settings)
        tokens = commit.numerics.get("micro_batch_tokens")
        if tokens is not None:
            settings[MICRO_BATCH_TOKENS] = int(tokens)
        result = trainer.train(batch, settings)
        manifest = trainer.manifest()
        yield ReplayedStep(
            step=commit.step,
            digest_committed=commit.digest_after,
            digest_replayed=manifest.digest,
            tensor=first_difference(commit.policy, manifest),
            compute_s_committed=commit.compute_s,
            compute_s_replayed=result.compute_s,
            numerics_committed=commit.numerics,
            numerics_replayed=trainer.numerics(),
        )


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
    """The batch of a commit, read as it lies in the log now. Raises InvariantBroken, BusError."""
    reader = BatchReader(bus, topics.trajectories, run=topics.run, starts={}, clock=clock)
    try:
        waiting = committed_batch(reader, commit, strict=False)
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
    """A batch as the trainer takes it: groups in dispatch order, siblings in theirs.

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


def first_difference(committed: Manifest, replayed: Manifest) -> str | None:
    """The first tensor, by name, that one of two manifests has differently; None if none."""
    ours = {tensor.name: tensor for tensor in replayed.tensors}
    theirs = {tensor.name: tensor for tensor in committed.tensors}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return name
    return None
