"""A stage whose records and plans lie in a log, as an orchestrator writes them.

Example::

    stage = LoggedStage(groups__per_step=1)
    stage.begin()
    stage.worker("w0", slots=2)
    ended_groups(stage.bus, stage.topics, first=0, last=3)
"""

from __future__ import annotations

from typing import Any

import msgspec

from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.port import Append, TopicSpec
from dora_pipe.core.errors import SchemaError
from dora_pipe.orchestrator.apply_control import apply_control
from dora_pipe.orchestrator.fold import close_round, is_digest_due
from dora_pipe.schemas.control import AnyControl, TrajectoryLogged
from dora_pipe.schemas.rounds import AnyDecision, LeaseExpired, Round, TakeBatch, fold_bytes, seal
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import Unknown, encode
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage
from tests.support.singly import as_record


class LoggedStage(Stage):
    """Every plan is a round, with the records that were told since the one before it."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.topics = Topics(records.RUN)
        self.bus = MemoryBus(MemoryLog())
        topics = (self.topics.control, self.topics.decisions)
        self.bus.create([TopicSpec(name=one, partitions=1) for one in topics])
        self.taken: dict[int, TakeBatch] = {}
        """The newest batch of every step."""
        self._writer = self.bus.writer()
        self._folded: list[bytes] = []
        self._observed: list[LeaseExpired] = []

    def tell(self, record: AnyControl | TrajectoryLogged | Unknown | SchemaError) -> int:
        """Append one control record, and fold it."""
        assert not isinstance(record, Unknown | SchemaError)
        told: AnyControl = as_record(record)
        value = encode(told)
        (offset,) = self._writer.append([Append(topic=self.topics.control, value=value)])
        self._folded.append(fold_bytes(offset, value))
        self.offset = offset + 1
        apply_control(self.state, offset, told)
        return offset

    def lose(self, name: str) -> None:
        """The lease of a worker ends, as the next round says."""
        epoch = self.state.workers[name].epoch
        self._observed.append(LeaseExpired(worker=name, epoch=epoch))
        super().lose(name)

    def plan(self, *, limit: int = 500) -> list[AnyDecision]:
        """Decide, and append the round; there is none after the end."""
        if self.state.done:
            return []
        found, state = super().plan(limit=limit), self.state
        self.taken |= {one.step: one for one in found if isinstance(one, TakeBatch)}
        round_ = Round(
            ordinal=state.rounds,
            role_epoch=0,
            now_ns=state.now_ns,
            control_next=self.offset,
            observations=tuple(self._observed),
            decisions=tuple(found),
        )
        close_round(state, round_)
        if is_digest_due(state, round_.ordinal):
            round_ = msgspec.structs.replace(round_, state_digest=state.digest())
        state.chain, value = seal(state.chain, b"".join(self._folded), round_)
        self._folded, self._observed = [], []
        self._writer.append([Append(topic=self.topics.decisions, value=value)])
        return found
