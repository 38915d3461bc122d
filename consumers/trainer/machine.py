"""State machine of the trainer, without IO.

phase        waits for                 then
restoring    Restored                  idle
idle         a batch of the next step  reading
             a part of that            part
part         the part's PartTrained    idle
reading      BatchFetched              training, or refusing if there are offenders
refusing     the refusal is durable    idle, for another attempt
training     StepTrained               publishing
publishing   PolicyPublished           committing
committing   the commit is durable     idle for the next step; part if one is being computed
ended

1. Only the commit record commits a step; files without it are orphans.
2. Only the newest attempt of a step counts. A newer one cancels an attempt in progress or
   revokes the last commit; changed weights are restored.
3. Nothing starts before the log as of startup is read: a batch may have been replaced.
4. Parts are speculative, used if the batch has the same parts. A part of the following step
   may be computed while the present one is published and committed.
5. After a stop request a step in training completes, and no other starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

import msgspec

from dora_pipe.config.logged import MINIBATCHES, REFERENCE
from dora_pipe.consumers.trainer.commits import (
    CHANGED_SHARE,
    DELTA_SHARE,
    CommitHistory,
    droppable,
    encode_history,
    files_of,
    rebuild_note,
)
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
from dora_pipe.consumers.trainer.status import Gauges, Phase, waits
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.pure.machine import (
    CaughtUp,
    HeldBack,
    LoopEvent,
    Now,
    Outputs,
    Publish,
    Published,
    StopAsked,
)
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.core.pure.status_schedule import Address, StatusSchedule
from dora_pipe.core.pure.wait_tracker import DEFAULT_LIMITS, Limits, WaitTracker
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import BatchRefused, StepCommitted, WeightsAdopted
from dora_pipe.schemas.dead_letter import encode_dead_letter
from dora_pipe.schemas.metrics import Cost, TrainerStatus
from dora_pipe.schemas.rounds import IncarnationGuard, StopRun, TakeBatch, TakePart
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.store.transfers.transfers import weights_url

LOG = logging.getLogger(__name__)
KEY: Final = b"trainer"  # key of all records of the trainer

_BREAKS_OFF: Final = frozenset({"restoring", "idle", "part", "reading", "refusing"})
"""Phases in which a stop loses nothing: a restart repeats the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    topics: Topics
    incarnation: int
    checkpoint_every: int
    heartbeat_ns: int
    keep_every: int = 0  # in checkpoints; 0 keeps all
    full_every: int = 1  # interval of full checkpoints; others are deltas
    limits: Limits = DEFAULT_LIMITS
    quiet_ns: int = 0  # interval of statuses without news
    transfers: str = ""  # address that serves the newest weights to workers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    decision: TakeBatch
    decisions_next: int


@dataclass(slots=True, kw_only=True)
class _StepParts:
    decisions: list[TakePart] = field(default_factory=list)
    begun: int = 0
    early_s: list[float] = field(default_factory=list)
    """Seconds per computed part, while idle."""
    overlap_s: list[float] = field(default_factory=list)
    """Seconds per computed part, while publishing the version before."""

    def decided(self, part: TakePart) -> None:
        del self.decisions[part.part :]
        del self.early_s[part.part :], self.overlap_s[part.part :]
        self.decisions.append(part)
        self.begun = min(self.begun, part.part)

    def again(self) -> None:
        self.begun, self.early_s, self.overlap_s = 0, [], []

    def computed(self, part: int, early_s: float, overlap_s: float) -> None:
        if len(self.early_s) == part < self.begun:
            self.early_s.append(early_s)
            self.overlap_s.append(overlap_s)


class TrainerMachine:
    """State machine of the trainer; updates `history`. `cached` returns gauges."""

    def __init__(
        self,
        setup: TrainerSetup,
        history: CommitHistory,
        *,
        cost: Callable[[], Cost],
        cached: Callable[[], Gauges],
    ) -> None:
        self.phase: Phase = "restoring"
        self.history = history
        self._setup = setup
        self._cost = cost
        self._cached = cached
        self._guard = IncarnationGuard()
        self._taken: dict[int, _Taken] = {}  # newest attempt by step
        self._parts: dict[int, _StepParts] = {}
        self._part_in_work = False
        self._free_ns = 0  # start of the time in which only parts can be computed
        self._present: _Taken | None = None
        self._refused: tuple[int, int] = (-1, 0)
        self._trained: StepTrained | None = None
        self._commit: StepCommitted | None = None
        self._numerics: Mapping[str, str] = {}
        self._adopted = False
        self._replaying = 0
        self._caught_up = False
        self._run_over = False
        self._stop_asked = False
        self._begun = False
        self._schedule = StatusSchedule(heartbeat_ns=setup.heartbeat_ns, quiet_ns=setup.quiet_ns)
        self._waits = WaitTracker("trainer", setup.limits)
        self._out: Outputs[TrainerEffect] = Outputs()

    # Machine interface

    def positions(self) -> Mapping[TopicPartition, int]:
        """Return the offset to read decisions from."""
        return {TopicPartition(self._setup.topics.decisions, 0): self.history.decisions_next}

    @property
    def finished(self) -> bool:
        """Return whether the run is over or the role has stopped."""
        return self.phase == "ended"

    def wake_at(self) -> int:
        """Return when the next heartbeat is due."""
        return self._schedule.due_ns

    def react(self, inputs: Sequence[LoopEvent | TrainerEvent], now: Now) -> Outputs[TrainerEffect]:
        """Process inputs, start work, publish a status when due."""
        self._out = Outputs()
        if not self._begun:
            self._begun = True
            self._restore()
        for event in inputs:
            self._handle(event, now)
        self._advance()
        self._heartbeat(now)
        return self._out

    # Inputs

    def _handle(self, event: LoopEvent | TrainerEvent, now: Now) -> None:
        match event:
            case Record():
                self._on_record(event)
            case CaughtUp():
                self._caught_up = True
            case HeldBack():
                pass  # Late decisions are obeyed late.
            case StopAsked():
                self._stop_asked = True
            case Published():
                self._on_published(event, now)
            case Replayed():
                self._replaying = event.step + 1
            case Adopted():
                self._on_adopted(event, now)
            case Restored():
                self._on_restored(event, now)
            case PartTrained():
                self._on_part_trained(event, now)
            case BatchFetched():
                self._on_fetched(event, now)
            case StepTrained():
                self._on_trained(event)
            case PolicyPublished():
                self._on_policy(event, now)
            case Unreadable():
                self._on_unreadable(event)
            case _:
                assert_never(event)

    def _on_record(self, record: Record) -> None:
        round_ = self._guard.read(record.offset, record.value)
        if round_ is None:
            LOG.warning("decisions offset %d: a round of an older orchestrator", record.offset)
            return
        for decision in round_.decisions:
            if isinstance(decision, TakePart):
                self._on_part(decision)
            elif isinstance(decision, TakeBatch):
                self._on_batch(_Taken(decision=decision, decisions_next=record.offset + 1))
            elif isinstance(decision, StopRun):
                self._run_over = True

    def _on_batch(self, taken: _Taken) -> None:
        step, attempt = taken.decision.step, taken.decision.attempt
        newest = self._taken.get(step)
        if newest is None or attempt > newest.decision.attempt:
            self._taken[step] = taken
            self._run_over = False

    def _on_part(self, part: TakePart) -> None:
        self._parts.setdefault(part.step, _StepParts()).decided(part)

    def _on_adopted(self, event: Adopted, now: Now) -> None:
        self._adopted = True
        self._replaying = event.step + 1
        adopted = WeightsAdopted(
            at_ns=now.wall_ns,
            step=event.step,
            incarnation=self._setup.incarnation,
            digest_committed=event.digest_committed,
            digest_replayed=event.digest_replayed,
            reason=event.why,
        )
        self._append(self._setup.topics.control, adopted)

    def _on_restored(self, event: Restored, now: Now) -> None:
        assert event.step == self.history.next_step
        assert event.digest == self.history.digest_of(event.step)
        self._numerics = event.numerics
        self._free_ns = now.mono_ns
        self._end_attempt("idle")

    def _on_fetched(self, event: BatchFetched, now: Now) -> None:
        if self._is_dropped():
            self._end_attempt("idle")
        elif event.offenders:
            self.phase = "refusing"
            refused = BatchRefused(
                at_ns=now.wall_ns,
                step=event.step,
                attempt=event.attempt,
                incarnation=self._setup.incarnation,
                offenders=event.offenders,
            )
            self._refused = (event.step, event.attempt)
            self._append(self._setup.topics.control, refused, tag="refused")
        else:
            self.phase = "training"
            settings = self._decision.settings
            self._out.effects.append(
                TrainStep(
                    step=event.step,
                    attempt=event.attempt,
                    settings=settings,
                    reference=self.history.reference_of(settings),
                )
            )

    def _on_part_trained(self, event: PartTrained, now: Now) -> None:
        self._part_in_work = False
        free_s = (now.mono_ns - self._free_ns) / 1e9 if self.phase == "part" else 0.0
        if event.step in self._parts:
            early_s = min(event.seconds, free_s)
            self._parts[event.step].computed(event.part, early_s, event.seconds - early_s)
        if self.phase == "part":
            self.phase = "idle"

    def _on_trained(self, event: StepTrained) -> None:
        if self._is_dropped():
            self._restore()
            return
        self.phase = "publishing"
        self._trained = event
        version, every = event.step + 1, self._setup.full_every
        setup = self._setup
        checkpoint = version % setup.checkpoint_every == 0
        checkpoint = checkpoint or self._adopted
        self._out.effects.append(
            PublishPolicy(
                step=event.step,
                attempt=event.attempt,
                checkpoint=checkpoint,
                before=self.history.digest_of(event.step) if every > 1 else "",
                full=checkpoint or version % every == 0,
            )
        )

    def _on_policy(self, event: PolicyPublished, now: Now) -> None:
        if self._is_dropped():
            self._restore()
            return
        self.phase = "committing"
        self._commit = self._committed(event, now)
        self._append(self._setup.topics.control, self._commit, tag="committed")

    def _on_published(self, event: Published, now: Now) -> None:
        if event.tag == "refused":
            self._end_attempt("idle")
            return
        assert self._commit is not None
        counted = self.history.add(event.offset, self._commit)
        assert counted, self._commit.step
        LOG.info("step %d committed", self._commit.step)
        if self._commit.dropped:
            dropped = self._commit.dropped
            LOG.info("deleted: %s", rebuild_note(self._setup.topics.run, dropped))
            files = files_of(self.history, dropped)
            self._out.effects.append(DropFiles(weights=files.weights, optimizers=files.optimizers))
        if self._commit.checkpoint is not None:
            self._out.effects.append(WriteHistory(content=encode_history(self.history)))
        self._adopted = False
        self._free_ns = now.mono_ns
        self._end_attempt("part" if self._part_in_work else "idle")

    def _on_unreadable(self, event: Unreadable) -> None:
        letter = event.dead_letter
        try:
            value, headers = encode_dead_letter(letter)
        except SchemaError as unfit:
            LOG.error("offset %d of %s: %s", letter.offset, letter.topic, unfit.message)
            return
        topic = self._setup.topics.dead_letters
        append = Append(topic=topic, key=KEY, value=value, headers=headers)
        self._out.publish.append(Publish(record=append))

    # Outputs

    def _advance(self) -> None:
        if self._stop_asked and (self.phase in _BREAKS_OFF or self._cached().blocking(self.phase)):
            self.phase = "ended"
        if self.phase in ("publishing", "committing"):
            self._begin_part(self._decision.step + 1, after=self._decision)
        if self.phase != "idle" or not self._caught_up:
            return
        if self._is_revoked():
            LOG.warning("the commit of step %d was rejected", self.history.next_step - 1)
            self.history.revoke()
            self._restore()
            return
        step = self.history.next_step
        self._taken = {number: taken for number, taken in self._taken.items() if number >= step - 1}
        self._parts = {number: parts for number, parts in self._parts.items() if number >= step - 1}
        taken = self._taken.get(step)
        if taken is not None and (step, taken.decision.attempt) != self._refused:
            self._fetch(taken)
        elif self._begin_part(step):
            self.phase = "part"
        elif self._run_over:
            self.phase = "ended"

    def _begin_part(self, step: int, after: TakeBatch | None = None) -> bool:
        parts = self._parts.get(step)
        if self._part_in_work or parts is None or parts.begun == len(parts.decisions):
            return False
        part = parts.decisions[parts.begun]
        if after is not None and (self._stop_asked or self._is_dropped() or self._must_wait(part)):
            return False
        parts.begun += 1
        self._part_in_work = True
        self._out.effects.append(
            TrainPart(
                decision=part,
                known=self.history.known(part, run=self._setup.topics.run, after=after),
                reference=self.history.reference_of(part.settings),
            )
        )
        return True

    def _must_wait(self, part: TakePart) -> bool:
        if self.phase == "publishing" and int(part.settings.get(MINIBATCHES, 1)) > 1:
            return True
        return int(part.settings.get(REFERENCE, 0)) > self.history.next_step

    def _fetch(self, taken: _Taken) -> None:
        self.phase = "reading"
        self._present = taken
        self._out.effects.append(
            FetchBatch(
                decision=taken.decision,
                known=self.history.known(taken.decision, run=self._setup.topics.run),
            )
        )

    def _committed(self, event: PolicyPublished, now: Now) -> StepCommitted:
        assert self._present is not None
        assert self._trained is not None
        decision = self._decision
        spent = self._parts.get(decision.step, _StepParts())
        return StepCommitted(
            at_ns=now.wall_ns,
            step=decision.step,
            attempt=decision.attempt,
            incarnation=self._setup.incarnation,
            groups=decision.groups,
            batch_digest=batch_digest(decision.groups),
            digest_before=self.history.digest_of(decision.step),
            digest_after=event.manifest.digest,
            policy=event.manifest,
            contributions=event.contributions,
            metrics={**self._trained.metrics, **_of_delta(event)},
            settings=decision.settings,
            numerics=dict(self._numerics),
            parts=decision.parts,
            early_s=tuple(spent.early_s[: len(decision.parts)]),
            overlap_s=sum(spent.overlap_s[: len(decision.parts)]),
            decisions_next=self._present.decisions_next,
            compute_s=self._trained.compute_s,
            checkpoint=event.checkpoint,
            adopted=self._adopted,
            dropped=droppable(
                self.history, event.checkpoint, decision.pins, self._setup.keep_every
            ),
            full=event.full,
            delta=event.delta,
        )

    def _restore(self) -> None:
        self._end_attempt("restoring")
        for parts in self._parts.values():
            parts.again()
        self._replaying = 0
        self._adopted = False
        step = self.history.next_step
        self._out.effects.append(Restore(step=step, notes=tuple(self.history.notes)))

    def _end_attempt(self, phase: Phase) -> None:
        self.phase = phase
        self._present = self._trained = self._commit = None

    @property
    def _decision(self) -> TakeBatch:
        assert self._present is not None
        return self._present.decision

    def _is_dropped(self) -> bool:
        newest = self._taken.get(self._decision.step)
        return newest is not None and newest.decision.attempt > self._decision.attempt

    def _is_revoked(self) -> bool:
        if not self.history.notes:
            return False
        newest = self._taken.get((last := self.history.notes[-1]).step)
        return newest is not None and newest.decision.attempt > last.attempt

    def _append(self, topic: str, what: msgspec.Struct, tag: str = "") -> None:
        append = Append(topic=topic, key=KEY, value=encode(what))
        self._out.publish.append(Publish(record=append, tag=tag))

    def _heartbeat(self, now: Now) -> None:
        """Publish a status when due; waits are updated every turn."""
        gauges, step = self._cached(), self.history.next_step
        pending = waits(
            self.phase,
            step,
            replayed=self._replaying,
            caught_up=self._caught_up,
            refused=self._refused,
            reading=gauges.blocking(self.phase),
            parts=self._parts[step].begun if step in self._parts else 0,
        )
        present = self._waits.update(pending, mono_ns=now.mono_ns, wall_ns=now.wall_ns)
        if now.mono_ns < self._schedule.due_ns:
            return
        status = TrainerStatus(
            at_ns=now.wall_ns,
            waits=present,
            cost=self._cost(),
            incarnation=self._setup.incarnation,
            step=step,
            phase=f"part {self._parts[step].begun - 1}" if self.phase == "part" else self.phase,
            cached_records=gauges.records,
            cached_bytes=gauges.bytes,
            weights_at=weights_url(self._setup.transfers, self.history.digest_of(step)),
        )
        to = Address(self._setup.topics.metrics, KEY)
        self._out.publish += self._schedule.publish(status, to, now.mono_ns)


def _of_delta(event: PolicyPublished) -> dict[str, float]:
    if event.delta is None:
        return {}
    share = event.delta.bytes / max(1, event.manifest.bytes)
    return {CHANGED_SHARE: event.changed_share, DELTA_SHARE: share}
