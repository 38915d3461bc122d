"""Replay of committed steps, for restarts and the `replay` command."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from dora_pipe.bus.bus import Bus
from dora_pipe.config.logged import REFERENCE
from dora_pipe.consumers.contributions import TEACHER, stored_contributions
from dora_pipe.consumers.learners.learner import Learner, Reference, Settings, TrainBatch
from dora_pipe.consumers.learners.settings import MASKED, MICRO_BATCH_TOKENS, PACKING
from dora_pipe.consumers.learners.with_teacher import Column, add_teacher_logprobs
from dora_pipe.consumers.trainer.batch_reader import BatchReader, committed_batch
from dora_pipe.consumers.trainer.commits import CommitHistory, CommitNote
from dora_pipe.core.errors import PolicyError
from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.control import RunStarted, StepCommitted
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore

LOG = logging.getLogger(__name__)

Alter = Callable[[TrainBatch, Settings], tuple[TrainBatch, Settings]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A committed step and its replay."""

    step: int
    digest_committed: str
    digest_replayed: str
    tensor: str | None
    metrics_committed: Mapping[str, float]
    metrics_replayed: Mapping[str, float]
    contributions_committed: str
    contributions: Sequence[Mapping[str, Any]]
    compute_s_committed: float
    compute_s_replayed: float
    numerics_committed: Mapping[str, str]
    numerics_replayed: Mapping[str, str]

    @property
    def equal(self) -> bool:
        return self.digest_committed == self.digest_replayed

    @property
    def other_numerics(self) -> list[str]:
        """Return differing fingerprint keys; without any, weights must be bit-equal."""
        keys = self.numerics_committed.keys() | self.numerics_replayed.keys()
        return sorted(
            key
            for key in keys
            if self.numerics_committed.get(key) != self.numerics_replayed.get(key)
        )


@dataclass(frozen=True, slots=True)
class StepFiles:
    """Files of a step; `digest_of` maps versions to digests."""

    store: PolicyStore
    digest_of: Callable[[int], str]

    def with_reference(self, batch: TrainBatch, settings: Settings) -> TrainBatch:
        """Return the batch with its reference, if any. Raises PolicyError."""
        version = settings.get(REFERENCE)
        if version is None:
            return batch
        digest = self.digest_of(int(version))
        reference = Reference(
            version=int(version), digest=digest, weights=self.store.weights(digest)
        )
        return replace(batch, reference=reference)

    def column(self, commit: StepCommitted) -> Column:
        """Return the logged teacher log-probs. Raises PolicyError if they are gone."""
        rows = stored_contributions(self.store, commit.contributions.sha256)
        if not rows or TEACHER not in rows[0]:
            raise PolicyError(
                f"step {commit.step}: the log-probs of its teacher are no longer in the store",
                hint="an endpoint is not reproducible, so this step cannot be replayed",
            )
        return {row["trajectory"]: row[TEACHER] for row in rows}


def replay_steps(
    bus: Bus,
    topics: Topics,
    store: PolicyStore,
    history: CommitHistory,
    learner: Learner,
    commits: Iterable[StepCommitted],
    *,
    clock: Clock,
    alter: Alter | None = None,
) -> Iterator[ReplayedStep]:
    """Replay contiguous steps from the learner's state (`load_base`).

    Uses trajectories as logged now, even if changed; `alter` changes batches and settings. Raises
    InvariantBroken if one is unreadable, BusError.
    """
    files = StepFiles(store, history.digest_of)
    first = next(commits := iter(commits), None)
    if first is None:
        return
    commits, starts = chain([first], commits), history.starts_from(first.step)
    reader = BatchReader(bus, topics.trajectories, run=topics.run, starts=starts, clock=clock)
    try:
        again = steps_again(reader, learner, commits, files=files, strict=False, alter=alter)
        for step in again:
            if step is not None:
                yield step
    finally:
        reader.close()


def load_base(
    store: PolicyStore, learner: Learner, started: RunStarted, notes: Sequence[CommitNote]
) -> int:
    """Load the newest usable checkpoint, else version 0; return the next step. Raises
    PolicyError."""
    for note in reversed(notes):
        if note.checkpoint is None:
            continue
        try:
            optimizer = store.verify_blob("optimizer", note.checkpoint.sha256)
            weights = store.weights(note.digest)
            learner.load(weights, digest=note.digest, optimizer=optimizer)
        except PolicyError as error:
            LOG.warning("checkpoint of step %d cannot be used: %s", note.step, error.message)
            continue
        return note.step + 1
    begun, digest = started.optimizer, started.policy.digest
    state = None if begun is None else store.verify_blob("optimizer", begun.sha256)
    learner.load(store.weights(digest), digest=digest, optimizer=state)
    return 0


def steps_again(
    reader: BatchReader,
    learner: Learner,
    commits: Iterable[StepCommitted],
    *,
    files: StepFiles,
    strict: bool,
    alter: Alter | None = None,
) -> Iterator[ReplayedStep | None]:
    """See `replay_steps`; yields None while waiting. `strict` rejects changed trajectories."""
    for commit in commits:
        batch = yield from committed_batch(reader, commit, strict=strict)
        settings = dict(commit.settings)
        if alter is not None:
            batch, altered = alter(batch, settings)
            settings = dict(altered)
        tokens = commit.numerics.get("micro_batch_tokens")
        if tokens is not None:
            settings[MICRO_BATCH_TOKENS] = int(tokens)
        if (way := commit.numerics.get("packing")) is not None:
            settings[PACKING] = way
        batch = files.with_reference(batch, settings)
        batch = yield from add_teacher_logprobs(
            learner, batch, settings, partial(files.column, commit)
        )
        result = learner.train(batch, settings)
        manifest = learner.manifest()
        yield ReplayedStep(
            step=commit.step,
            digest_committed=commit.digest_after,
            digest_replayed=manifest.digest,
            tensor=first_difference(commit.policy, manifest),
            metrics_committed=commit.metrics,
            metrics_replayed=result.metrics,
            contributions_committed=commit.contributions.sha256,
            contributions=result.contributions,
            compute_s_committed=commit.compute_s,
            compute_s_replayed=result.compute_s,
            numerics_committed=commit.numerics,
            numerics_replayed=numerics_again(learner, commit),
        )


def numerics_again(learner: Learner, commit: StepCommitted) -> dict[str, str]:
    """Return the learner's numerics for this step; all support masked packing."""
    own = learner.numerics()
    packed = {"packing": MASKED} if "packing" in own else {}
    return own | (packed if commit.numerics.get("packing") == MASKED else {})


def first_difference(committed: Manifest, replayed: Manifest) -> str | None:
    """Return the first differing tensor by name, or None."""
    ours = {tensor.name: tensor for tensor in replayed.tensors}
    theirs = {tensor.name: tensor for tensor in committed.tensors}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return name
    return None
