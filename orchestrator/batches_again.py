"""Decides the batches of a run that trains on the steps of another one: one after the other.

It has no state but where it stands. A round takes the batch of the next step, once the commit of
the step before it is folded; the last one ends the run. Nothing is dispatched, placed or moved: who
sampled these trajectories has decided that. What the trainer refuses is no batch of the source, and
ends both roles: there is no other one to take instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.bus.port import Append, Record, TopicPartition
from dora_pipe.core.errors import InvariantBroken, SchemaError
from dora_pipe.core.runtime import CaughtUp, Now, Outputs, Publish, StopAsked
from dora_pipe.schemas.control import BatchRefused, StepCommitted, decode_control
from dora_pipe.schemas.rounds import (
    GENESIS_CHAIN,
    AnyDecision,
    Round,
    StopRun,
    TakeBatch,
    fold_bytes,
    seal,
)
from dora_pipe.schemas.topics import Topics

PLANNER: Final = "batches again"
"""As `run started` names it: nothing was planned."""

THE_END: Final = "the last step was trained again"

NEVER_NS: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """Effect: what batch was the one of this step?"""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRead:
    """Event: this one, with the settings that are to be in force."""

    take: TakeBatch


@dataclass(slots=True, kw_only=True)
class Standing:
    """Where the rounds of such a run stand."""

    step: int
    """That is to be committed next."""
    decided: int
    """The last step whose batch was taken; one below the first for none."""
    ordinal: int = -1
    """Of the last round."""
    chain: str = GENESIS_CHAIN
    control_next: int = 0
    now_ns: int = 0
    stopped: bool = False
    """The end was decided."""

    def round(self, round_: Round) -> None:
        self.ordinal, self.chain, self.now_ns = round_.ordinal, round_.chain, round_.now_ns
        self.control_next = round_.control_next
        for one in round_.decisions:
            if isinstance(one, TakeBatch):
                self.decided = one.step
            self.stopped = self.stopped or isinstance(one, StopRun)


class BatchesAgain:
    """A `core.runtime.Machine`; see the module. Steps are `standing.step` to `last`."""

    def __init__(self, standing: Standing, *, topics: Topics, last: int, role_epoch: int) -> None:
        self.standing = standing
        self._topics = topics
        self._last = last
        self._role_epoch = role_epoch
        self._asked = False
        self._caught_up = False
        self._stop_asked = False
        self._folded: list[bytes] = []
        self._control_next = standing.control_next

    def positions(self) -> Mapping[TopicPartition, int]:
        """Control, from where the last round ended."""
        return {TopicPartition(self._topics.control, 0): self.standing.control_next}

    @property
    def finished(self) -> bool:
        """Whether the end is decided, or this role was asked to stop."""
        return self.standing.stopped or self._stop_asked

    def wake_at(self) -> int:
        """Only when something comes."""
        return NEVER_NS

    def react(self, inputs: Sequence[Any], now: Now) -> Outputs:
        """Take in what was committed, and decide what follows. Raises InvariantBroken."""
        out = Outputs()
        decision: TakeBatch | None = None
        for one in inputs:
            if isinstance(one, Record):
                self._fold(one)
            elif isinstance(one, CaughtUp):
                self._caught_up = True
            elif isinstance(one, StopAsked):
                self._stop_asked = True
            elif isinstance(one, BatchRead):
                self._asked, decision = False, one.take
        at = self.standing
        if not self._caught_up or at.stopped:
            return out
        if at.step > self._last:
            out.publish.append(self._round(StopRun(reason=THE_END), now))
        elif decision is not None:
            out.publish.append(self._round(decision, now))
        elif at.decided < at.step and not self._asked:
            self._asked = True
            out.effects.append(ReadBatch(step=at.step))
        return out

    def _fold(self, record: Record) -> None:
        self._folded.append(fold_bytes(record.offset, record.value))
        self._control_next = record.offset + 1
        try:
            fact = decode_control(record.value)
        except SchemaError as error:
            raise InvariantBroken(f"control offset {record.offset}: {error.message}") from error
        if isinstance(fact, StepCommitted) and fact.step == self.standing.step:
            self.standing.step += 1
        elif isinstance(fact, BatchRefused) and fact.step == self.standing.step:
            first = fact.offenders[0]
            more = f" (and {len(fact.offenders) - 1} more)" if len(fact.offenders) > 1 else ""
            raise InvariantBroken(
                f"step {fact.step} cannot be trained again: {first.trajectory or first.group}: "
                f"{first.why}{more}",
                hint="`dora-pipe audit` of the source says what else its log has lost",
            )

    def _round(self, decision: AnyDecision, now: Now) -> Publish:
        at = self.standing
        round_ = Round(
            ordinal=at.ordinal + 1,
            role_epoch=self._role_epoch,
            now_ns=max(at.now_ns, now.wall_ns),
            control_next=self._control_next,
            decisions=(decision,),
            planned=False,
        )
        chain, value = seal(at.chain, b"".join(self._folded), round_)
        self._folded = []
        at.round(round_)
        at.chain = chain
        return Publish(record=Append(topic=self._topics.decisions, value=value))
