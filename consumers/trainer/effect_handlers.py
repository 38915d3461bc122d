"""Handlers of the trainer's slow effects.

Effects are generators that yield None while waiting, so they run in threads or step by step. One
thread, except that publishing may overlap with a part of the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import RecordPlace
from dora_pipe.consumers.contributions import write_contributions
from dora_pipe.consumers.learners.learner import (
    Learner,
    LeavesDevice,
    Settings,
    StepResult,
    TrainBatch,
    TrainsParts,
)
from dora_pipe.consumers.learners.with_teacher import add_teacher_logprobs, waits_for
from dora_pipe.consumers.trainer.batch_reader import (
    BYTES_MAX,
    RECORDS_MAX,
    BatchReader,
    FetchedRecord,
    batch_of,
    find,
    places_of,
)
from dora_pipe.consumers.trainer.checks import Arrived, check_batch
from dora_pipe.consumers.trainer.effects import (
    Adopted,
    BatchFetched,
    DropFiles,
    FetchBatch,
    PartTrained,
    PolicyPublished,
    PublishPolicy,
    Replayed,
    Restore,
    Restored,
    StepTrained,
    TrainerEffect,
    TrainerEvent,
    TrainPart,
    TrainStep,
    Unreadable,
    WriteHistory,
)
from dora_pipe.consumers.trainer.recovery import read_commits, write_snapshot
from dora_pipe.consumers.trainer.replay_steps import ReplayedStep, StepFiles, load_base, steps_again
from dora_pipe.consumers.trainer.status import Gauges
from dora_pipe.core.errors import NonFinite, ReplayDiverged, ResourceError, SchemaError
from dora_pipe.core.loop.retry import until_there_is_room
from dora_pipe.core.loop.runtime import Meter
from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import TakeBatch, TakePart
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.store.names import BlobKind
from dora_pipe.store.store import PolicyStore, PublishedVersion

LOG = logging.getLogger(__name__)

Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlersSetup:
    topics: Topics
    started: RunStarted
    """Version 0, with optimizer state if any."""
    starts: Mapping[int, int]
    adopt: bool = False
    snapshot: Path | None = None
    """File of the commits' snapshot."""
    leaves_device: bool = False
    records_max: int = RECORDS_MAX
    bytes_max: int = BYTES_MAX


class EffectHandlers:
    """Handlers; `make_learner` is called on first use."""

    def __init__(
        self,
        setup: HandlersSetup,
        *,
        bus: Bus,
        store: PolicyStore,
        make_learner: Callable[[], Learner],
        clock: Clock,
        meter: Meter,
    ) -> None:
        self._setup = setup
        self._bus = bus
        self._store = store
        self._make_learner = make_learner
        self._clock = clock
        self._learner: Learner | None = None
        self._fetched: tuple[Key, TrainBatch] | None = None
        self._trained: tuple[Key, StepResult] | None = None
        self._no_room = ""
        self.reader = BatchReader(
            bus,
            setup.topics.trajectories,
            run=setup.topics.run,
            starts=setup.starts,
            clock=clock,
            meter=meter,
            records_max=setup.records_max,
            bytes_max=setup.bytes_max,
        )

    def run(self, effect: TrainerEffect) -> Iterator[TrainerEvent | None]:
        """Yield the events of an effect; None while it waits."""
        if isinstance(effect, Restore):
            return self._restore(effect)
        if isinstance(effect, TrainPart):
            return self._train_part(effect)
        if isinstance(effect, FetchBatch):
            return self._fetch(effect)
        if isinstance(effect, TrainStep):
            return self._train(effect)
        if isinstance(effect, DropFiles):
            return self._drop(effect)
        if isinstance(effect, WriteHistory):
            return self._write_history(effect)
        return self._publish(effect)

    def idle(self) -> Iterator[TrainerEvent]:
        """Read ahead without waiting."""
        self.reader.read_ahead(timeout_s=0.0)
        yield from self._unreadable()

    def gauges(self) -> Gauges:
        waiting = waits_for(self._learner) or self.reader.waits_for
        return Gauges(self.reader.records, self.reader.bytes, waiting, self._no_room)

    def close(self) -> None:
        self.reader.close()

    @property
    def learner(self) -> Learner:
        if self._learner is None:
            self._learner = self._make_learner()
        return self._learner

    def _restore(self, effect: Restore) -> Iterator[TrainerEvent | None]:
        self._fetched = self._trained = None
        learner = self.learner
        base = load_base(self._store, learner, self._setup.started, effect.notes)
        commits = read_commits(
            self._bus, self._setup.topics, effect.notes[base : effect.step], self._clock
        )
        digests = [self._setup.started.policy.digest, *(note.digest for note in effect.notes)]
        files = StepFiles(self._store, digests.__getitem__)
        again = steps_again(self.reader, learner, commits, files=files, strict=True)
        for replayed in again:
            if replayed is None:
                yield None
            elif replayed.equal:
                LOG.info("step %d replayed, weights equal", replayed.step)
                yield Replayed(step=replayed.step)
            else:
                last = replayed.step == effect.step - 1
                if adopted := (yield from self._diverged(replayed, last=last)):
                    yield adopted
        digest = learner.manifest().digest
        if not self._store.has_weights(digest):
            yield from self._version()
        self._leave_device()
        yield Restored(step=effect.step, digest=digest, numerics=learner.numerics())

    def _diverged(
        self, replayed: ReplayedStep, *, last: bool
    ) -> Generator[None, None, Adopted | None]:
        """Adopt committed weights if allowed, skipping dropped ones. Raises ReplayDiverged,
        PolicyError."""
        other = replayed.other_numerics
        because = f"other {', '.join(other)}" if other else "although the numerics are the same"
        why = f"tensor {replayed.tensor} differs ({because})"
        if not self._setup.adopt:
            raise ReplayDiverged(
                f"step {replayed.step} gave other weights than those committed: {why}",
                hint="--adopt continues from the committed weights; audit reports the difference",
            )
        if not last and not self._store.has_weights(replayed.digest_committed):
            LOG.warning("step %d: %s; its committed weights were dropped", replayed.step, why)
            return None
        # A learner loads only from files; the replay's optimizer state is the best available.
        blob = yield from self._blob("optimizer", self.learner.save_optimizer)
        self.learner.load(
            self._store.weights(replayed.digest_committed),
            digest=replayed.digest_committed,
            optimizer=self._store.verify_blob("optimizer", blob.sha256),
        )
        LOG.warning("step %d: committed weights adopted, %s", replayed.step, why)
        return Adopted(
            step=replayed.step,
            digest_committed=replayed.digest_committed,
            digest_replayed=replayed.digest_replayed,
            why=why,
        )

    def _train_part(self, effect: TrainPart) -> Iterator[TrainerEvent | None]:
        """Errors are reported later, for the whole batch."""
        decision, start_ns = effect.decision, self._clock.now_ns()
        arrived, _ = yield from self._find(decision)
        learner = self.learner
        wrong = check_batch(decision, arrived, effect.known)
        if isinstance(learner, TrainsParts) and not wrong:
            batch = batch_of(decision.step, decision.groups, _all_whole(arrived))
            try:
                batch = yield from self._with_files(batch, decision.settings, effect.reference)
                learner.train_part(batch, decision.settings)
            except NonFinite as error:
                LOG.warning("part %d of step %d: %s", decision.part, decision.step, error.message)
        yield PartTrained(
            step=decision.step,
            attempt=decision.attempt,
            part=decision.part,
            seconds=(self._clock.now_ns() - start_ns) / 1e9,
        )

    def _fetch(self, effect: FetchBatch) -> Iterator[TrainerEvent | None]:
        decision = effect.decision
        self._fetched = None
        self.reader.drop_before(effect.known.next_step)
        arrived, unreadable = yield from self._find(decision)
        offenders = check_batch(decision, arrived, effect.known)
        if not offenders:
            key, parts = (decision.step, decision.attempt), decision.parts
            trajectories = _all_whole(arrived)
            self._fetched = key, batch_of(decision.step, decision.groups, trajectories, parts=parts)
            self.reader.drop(places_of(decision.groups))
        yield from self._unreadable()
        yield from unreadable
        yield BatchFetched(step=decision.step, attempt=decision.attempt, offenders=offenders)

    def _find(
        self, decision: TakeBatch | TakePart
    ) -> Generator[None, None, tuple[dict[str, Arrived], list[Unreadable]]]:
        records = yield from find(self.reader, decision.groups)
        unreadable: list[Unreadable] = []
        arrived: dict[str, Arrived] = {}
        for taken in (trajectory for group in decision.groups for trajectory in group.trajectories):
            fetched = records[RecordPlace(taken.partition, taken.offset)]
            arrived[taken.trajectory], letter = self._arrived(fetched)
            unreadable += [] if letter is None else [letter]
        return arrived, unreadable

    def _arrived(self, fetched: FetchedRecord) -> tuple[Arrived, Unreadable | None]:
        if fetched.error is not None or fetched.record is None:
            return Arrived(why=fetched.why), None
        try:
            with self.reader.meter.spend("codec"):
                trajectory = self.reader.view(fetched.record.value)
        except SchemaError as error:
            letter = self.reader.dead_letter(fetched.record, error)
            return Arrived(why=f"unreadable: {error.message}"), Unreadable(dead_letter=letter)
        return Arrived(headers=fetched.headers, sha256=fetched.sha256, trajectory=trajectory), None

    def _train(self, effect: TrainStep) -> Iterator[TrainerEvent | None]:
        key = (effect.step, effect.attempt)
        assert self._fetched is not None
        assert self._fetched[0] == key
        batch = self._fetched[1]
        self._fetched = None
        batch = yield from self._with_files(batch, effect.settings, effect.reference)
        result = self.learner.train(batch, effect.settings)
        self._trained = key, result
        yield StepTrained(
            step=effect.step,
            attempt=effect.attempt,
            metrics=result.metrics,
            compute_s=result.compute_s,
        )

    def _with_files(
        self, batch: TrainBatch, settings: Settings, reference: str
    ) -> Generator[None, None, TrainBatch]:
        files = StepFiles(self._store, lambda version: reference)
        batch = files.with_reference(batch, settings)
        return (yield from add_teacher_logprobs(self.learner, batch, settings))

    def _publish(self, effect: PublishPolicy) -> Iterator[TrainerEvent | None]:
        """Publish files before the commit that names them; retries reuse equal files."""
        assert self._trained is not None
        key, result = self._trained
        assert key == (effect.step, effect.attempt)
        version = yield from self._version(before=effect.before, full=effect.full)
        contributions = yield from self._blob(
            "contributions", lambda path: write_contributions(path, result.contributions)
        )
        checkpoint = None
        if effect.checkpoint:
            checkpoint = yield from self._blob("optimizer", self.learner.save_optimizer)
        self._trained = None
        self._leave_device()  # Colocated workers wake up with the commit.
        yield PolicyPublished(
            step=effect.step,
            attempt=effect.attempt,
            manifest=version.manifest,
            contributions=contributions,
            checkpoint=checkpoint,
            full=version.whole,
            delta=version.delta,
            changed_share=version.change.share if version.change else 0.0,
        )

    def _leave_device(self) -> None:
        if self._setup.leaves_device:
            learner = self.learner
            assert isinstance(learner, LeavesDevice)
            learner.leave_device()

    def _version(
        self, *, before: str = "", full: bool = True
    ) -> Generator[None, None, PublishedVersion]:
        save = self.learner.save_weights
        publish = partial(self._store.publish_version, save, before=before, whole=full)
        return until_there_is_room("publishing weights", publish, self._clock, self._tell_room)

    def _blob(self, kind: BlobKind, write: Callable[[Path], None]) -> Generator[None, None, Blob]:
        publish = partial(self._store.publish_blob, kind, write)
        what = "publishing a checkpoint" if kind == "optimizer" else f"publishing {kind}"
        return until_there_is_room(what, publish, self._clock, self._tell_room)

    def _tell_room(self, why: str) -> None:
        self._no_room = why

    def _drop(self, effect: DropFiles) -> Iterator[TrainerEvent]:
        try:
            for digest in effect.weights:
                self._store.drop_weights(digest)
                self._store.drop_delta(digest)
            for sha256 in effect.optimizers:
                self._store.drop_blob("optimizer", sha256)
        except ResourceError as error:
            LOG.warning("dropped versions stay in the store: %s", error.message)
        yield from ()

    def _write_history(self, effect: WriteHistory) -> Iterator[TrainerEvent]:
        if self._setup.snapshot is not None:
            write_snapshot(self._setup.snapshot, effect.content)
        yield from ()

    def _unreadable(self) -> Iterator[Unreadable]:
        for letter in self.reader.dead_letters():
            yield Unreadable(dead_letter=letter)


def _all_whole(arrived: Mapping[str, Arrived]) -> dict[str, Trajectory]:
    return {
        name: record.trajectory for name, record in arrived.items() if record.trajectory is not None
    }
