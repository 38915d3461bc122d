"""Short commands for tests of fold and planner, without a machine.

stage = Stage(rollout__prompts_per_step=1).begin()
stage.worker("w0", slots=2)  # joins, is assigned, reports ready
stage.finish_all()  # every placed request is logged with reward 1
stage.commit()  # the batch in training
"""

from __future__ import annotations

import copy
from typing import Any

from dora_pipe.core.errors import SchemaError
from dora_pipe.orchestrator.apply_control import apply_control
from dora_pipe.orchestrator.curriculum import Samplers
from dora_pipe.orchestrator.digest import digest_of
from dora_pipe.orchestrator.fold import apply_observation
from dora_pipe.orchestrator.planner import decide
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import AnyControl, Resume, TrajectoryLogged
from dora_pipe.schemas.rounds import AnyDecision, LeaseExpired, ScheduledRequest, TakeBatch
from dora_pipe.schemas.wire import Unknown
from tests.support import orchestrator_records as records
from tests.support.singly import as_record, placed


class Stage:
    def __init__(self, **changes: Any) -> None:
        self.config = records.make_config(**changes)
        self.samplers: Samplers | None = None
        """Samplers of rows."""
        self.state = State()
        self.offset = 0
        self.decided: list[AnyDecision] = []
        self.placed: dict[str, ScheduledRequest] = {}
        """Newest placement of each request, ended or not."""
        self.batch: TakeBatch | None = None
        """Newest batch decision."""

    def begin(self, *, rows: int = 10, eval_rows: int = 4, together: tuple[str, ...] = ()) -> Stage:
        started = records.run_started(
            self.config, rows=rows, eval_rows=eval_rows, together=together
        )
        self.tell(started)
        self.tell(records.role_started("trainer", 0))
        return self

    def tell(self, record: AnyControl | TrajectoryLogged | Unknown | SchemaError) -> int:
        offset, self.offset = self.offset, self.offset + 2
        apply_control(self.state, offset, as_record(record))
        return offset

    def plan(self, *, limit: int = 1000) -> list[AnyDecision]:
        subject = decide(self.state, limit=limit, samplers=self.samplers)
        self.decided += subject
        self.placed |= {request.trajectory: request for request in placed(subject)}
        for decision in subject:
            if isinstance(decision, TakeBatch):
                self.batch = decision
        return subject

    def join(
        self,
        name: str,
        *,
        slots: int = 4,
        prefetch: int = 0,
        moves: bool = False,
        versions: int = 1,
        colocated: bool = False,
    ) -> int:
        joined = records.joined(
            name,
            slots=slots,
            prefetch=prefetch,
            moves=moves,
            versions=versions,
            colocated=colocated,
        )
        return self.tell(joined)

    def load(self) -> None:
        for worker in list(self.state.workers.values()):
            if worker.loading:
                self.tell(
                    records.ready(worker.name, worker.incarnation, worker.target, worker.digest)
                )

    def worker(
        self,
        name: str,
        *,
        slots: int = 4,
        prefetch: int = 0,
        moves: bool = False,
        versions: int = 1,
    ) -> int:
        incarnation = self.join(
            name, slots=slots, prefetch=prefetch, moves=moves, versions=versions
        )
        self.settle()
        return incarnation

    def settle(self) -> list[AnyDecision]:
        decisions = self.plan()
        while self._loading():
            self.load()
            more = self.plan()
            decisions += more
        return decisions

    def running(self, worker: str = "") -> list[str]:
        return sorted(
            name
            for name, request in self.state.requests.items()
            if request.worker and worker in ("", request.worker)
        )

    def finish(self, trajectory: str, *, reward: float | None = 1.0) -> None:
        self.tell(records.logged(self.placed[trajectory], reward=reward, offset=self.offset))

    def finish_all(self, *, reward: float | None = 1.0) -> None:
        while names := self.running():
            for name in names:
                self.finish(name, reward=reward)
            self.settle()

    def finish_group(self, group: str, *, reward: float | None = 1.0) -> None:
        for name in self.running():
            if name.startswith(group):
                self.finish(name, reward=reward)

    def commit(self) -> None:
        assert self.batch is not None
        batch = self.batch
        self.tell(records.committed(batch.step, batch.groups, attempt=batch.attempt))

    def step(self) -> None:
        self.finish_all()
        if self.state.training is not None:
            self.commit()
        self.settle()

    def complete(self) -> None:
        while not self.state.done:
            self.step()

    def release(self, trajectory: str, resume: Resume | None = None) -> None:
        self.tell(records.released(self.placed[trajectory], resume))

    def later(self, seconds: float) -> None:
        self.state.now_ns += int(seconds * 1e9)

    def lose(self, name: str) -> None:
        incarnation = self.state.workers[name].incarnation
        apply_observation(self.state, LeaseExpired(worker=name, incarnation=incarnation))

    def copy(self) -> State:
        return copy.deepcopy(self.state)

    def _loading(self) -> bool:
        return any(worker.loading and worker.usable for worker in self.state.workers.values())


def unchanged(before: State, after: State) -> bool:
    state, other = copy.deepcopy(before), copy.deepcopy(after)
    other.counters = state.counters
    return digest_of(state) == digest_of(other)
