"""A tiny language for tests of the fold and the planner: one State, records by name, no machine.

Example::

    stage = Stage(groups__per_step=1).begin()
    stage.worker("w0", slots=2)          # joins, is assigned, reports ready
    stage.finish_all()                   # every placed request is logged with reward 1
    stage.commit()                       # the batch in training
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
from dora_pipe.schemas.rounds import AnyDecision, LeaseExpired, PlacedRequest, TakeBatch
from dora_pipe.schemas.wire import Unknown
from tests.support import orchestrator_records as records
from tests.support.singly import as_record, placed


class Stage:
    """A state under test and everything that was decided on the way."""

    def __init__(self, **changes: Any) -> None:
        self.config = records.make_config(**changes)
        self.samplers: Samplers | None = None
        """What rows are drawn with."""
        self.state = State()
        self.offset = 0
        self.decided: list[AnyDecision] = []
        self.placed: dict[str, PlacedRequest] = {}
        """The newest placement of every request, ended or not."""
        self.batch: TakeBatch | None = None
        """The newest batch decision."""

    def begin(self, *, rows: int = 10, eval_rows: int = 4, together: tuple[str, ...] = ()) -> Stage:
        """The run and the trainer start."""
        started = records.run_started(
            self.config, rows=rows, eval_rows=eval_rows, together=together
        )
        self.tell(started)
        self.tell(records.role_started("trainer", 0))
        return self

    def tell(self, record: AnyControl | TrajectoryLogged | Unknown | SchemaError) -> int:
        """Fold one control record; its offset."""
        offset, self.offset = self.offset, self.offset + 2
        apply_control(self.state, offset, as_record(record))
        return offset

    def plan(self, *, limit: int = 1000) -> list[AnyDecision]:
        """Decide, apply, and remember."""
        found = decide(self.state, limit=limit, samplers=self.samplers)
        self.decided += found
        self.placed |= {one.trajectory: one for one in placed(found)}
        for one in found:
            if isinstance(one, TakeBatch):
                self.batch = one
        return found

    def join(
        self,
        name: str,
        *,
        slots: int = 4,
        prefetch: int = 0,
        moves: bool = False,
        versions: int = 1,
        elastic: bool = False,
    ) -> int:
        """A worker joins; its role epoch."""
        joined = records.joined(
            name,
            slots=slots,
            prefetch=prefetch,
            moves=moves,
            versions=versions,
            elastic=elastic,
        )
        return self.tell(joined)

    def load(self) -> None:
        """Every worker that was assigned a version reports it ready."""
        for worker in list(self.state.workers.values()):
            if worker.loading:
                self.tell(records.ready(worker.name, worker.epoch, worker.target, worker.digest))

    def worker(
        self,
        name: str,
        *,
        slots: int = 4,
        prefetch: int = 0,
        moves: bool = False,
        versions: int = 1,
    ) -> int:
        """A worker joins, is assigned a version and has loaded it; then everybody plans."""
        epoch = self.join(name, slots=slots, prefetch=prefetch, moves=moves, versions=versions)
        self.settle()
        return epoch

    def settle(self) -> list[AnyDecision]:
        """Plan and load until there is nothing left to decide."""
        found = self.plan()
        while self._loading():
            self.load()
            more = self.plan()
            found += more
        return found

    def running(self, worker: str = "") -> list[str]:
        """Placed requests that are open, in order of their ids; of one worker if named."""
        return sorted(
            name
            for name, request in self.state.requests.items()
            if request.worker and worker in ("", request.worker)
        )

    def finish(self, trajectory: str, *, reward: float | None = 1.0) -> None:
        """A running request is logged."""
        self.tell(records.logged(self.placed[trajectory], reward=reward, offset=self.offset))

    def finish_all(self, *, reward: float | None = 1.0) -> None:
        """Everything that runs is logged, again and again until nothing more is placed."""
        while names := self.running():
            for name in names:
                self.finish(name, reward=reward)
            self.settle()

    def finish_group(self, group: str, *, reward: float | None = 1.0) -> None:
        """All siblings of a group that run now are logged."""
        for name in self.running():
            if name.startswith(group):
                self.finish(name, reward=reward)

    def commit(self) -> None:
        """The batch in training is committed."""
        assert self.batch is not None
        batch = self.batch
        self.tell(records.committed(batch.step, batch.groups, attempt=batch.attempt))

    def step(self) -> None:
        """All that runs is finished, what trains is committed, and everybody plans."""
        self.finish_all()
        if self.state.training is not None:
            self.commit()
        self.settle()

    def complete(self) -> None:
        """Steps until the run is over."""
        while not self.state.done:
            self.step()

    def release(self, trajectory: str, resume: Resume | None = None) -> None:
        """The worker of a request lets go of it, as it was asked to."""
        self.tell(records.released(self.placed[trajectory], resume))

    def later(self, seconds: float) -> None:
        """Round time goes on."""
        self.state.now_ns += int(seconds * 1e9)

    def lose(self, name: str) -> None:
        """The lease of a worker ends."""
        epoch = self.state.workers[name].epoch
        apply_observation(self.state, LeaseExpired(worker=name, epoch=epoch))

    def copy(self) -> State:
        """The state as it stands, to be compared with later."""
        return copy.deepcopy(self.state)

    def _loading(self) -> bool:
        return any(worker.loading and worker.usable for worker in self.state.workers.values())


def unchanged(before: State, after: State) -> bool:
    """Whether nothing but the counters differs."""
    one, other = copy.deepcopy(before), copy.deepcopy(after)
    other.counters = one.counters
    return digest_of(one) == digest_of(other)
