"""Workers and trainer of `orchestrator_world`, with faults."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from dora_pipe.orchestrator.entities import OPEN_TIMES
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.metrics import WorkerStatus
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import (
    NO_VERSION,
    AnyDecision,
    Assign,
    Cancel,
    Drain,
    Fence,
    Migrate,
    Schedule,
    ScheduledRequest,
    StopRun,
    TakeBatch,
)
from tests.support import orchestrator_records as records
from tests.support.singly import as_record

if TYPE_CHECKING:
    from tests.support.orchestrator_world import World


class PlayWorker:
    """Worker and its incarnations. A delayed closure runs only if `self.life` is unchanged."""

    def __init__(
        self, world: World, name: str, slots: int, prefetch: int, versions: int = 1
    ) -> None:
        self.world, self.name = world, name
        self.slots, self.prefetch = slots, prefetch
        self.versions = versions
        """Versions served at a time."""
        self.held: set[int] = set()
        self.life = 0
        self.incarnation = -1
        self.alive = False
        self.frozen = False
        self.version = -1
        self.draining = False
        self.waiting: deque[ScheduledRequest] = deque()
        self.running: dict[str, ScheduledRequest] = {}
        self.scored: dict[str, ScheduledRequest] = {}
        """Requests being scored, without a slot."""
        self.late: list[tuple[int, ScheduledRequest]] = []
        """(life, place) of requests that ended while it was frozen."""

    def join(self) -> None:
        self.life += 1
        self.alive, self.frozen, self.draining = True, False, False
        self.version = -1
        self.held.clear()
        self.waiting.clear()
        self.running.clear()
        self.scored.clear()
        self.late.clear()
        self.incarnation = self.world.tell(
            records.joined(
                self.name,
                slots=self.slots,
                prefetch=self.prefetch,
                moves=self.world.chances.moves,
                versions=self.versions,
                colocated=self.name in self.world.colocated,
            )
        )
        self._heartbeat(self.life)

    def die(self, away_s: float) -> None:
        self.alive = False
        self.life += 1
        self.world.after(away_s, self.join)

    def freeze(self, away_s: float) -> None:
        self.frozen = True
        life = self.life
        self.world.after(away_s, lambda: self._thaw(life))

    def hear(self, decision: AnyDecision) -> None:
        if not self.alive or isinstance(decision, StopRun):
            self.alive = self.alive and not isinstance(decision, StopRun)
            return
        if not isinstance(decision, Assign | Schedule | Migrate | Cancel | Drain | Fence):
            return
        if (decision.worker, decision.incarnation) != (self.name, self.incarnation):
            return
        if isinstance(decision, Assign):
            requests = [*self.running.values(), *self.waiting, *self.scored.values()]
            state = self.world.machine.state
            requests = [request for request in requests if request.trajectory in state.requests]
            may = self.versions > 1 or decision.version == NO_VERSION
            assert not requests or may, "assigned while it has requests"
            dropped = {request.spec.version for request in requests}.intersection(decision.drop)
            assert not dropped, "drops what it has requests of"
            assert self.held.issuperset(decision.drop), "drops what it does not have"
            self.held.difference_update(decision.drop)
            life, load_s = self.life, self.world.chances.load_s
            self.world.after(load_s, lambda: self._loaded(life, decision))
        elif isinstance(decision, Schedule):
            for request in decision.requests():
                self._place(request)
        elif isinstance(decision, Migrate):
            life, release_s = self.life, self.world.chances.release_s * self.world.chance.random()
            self.world.after(release_s, lambda: self._let_go(life, decision))
        elif isinstance(decision, Cancel):
            self.running.pop(decision.trajectory, None)
            self.waiting = deque(
                entry for entry in self.waiting if entry.trajectory != decision.trajectory
            )
        elif isinstance(decision, Drain):
            self.draining = True
            self._maybe_leave()
        elif not self.frozen:
            self.die(self.world.chance.random())

    def _let_go(self, life: int, move: Migrate) -> None:
        if life != self.life or not self.alive:
            return
        if self.frozen:
            self.world.after(0.5, lambda: self._let_go(life, move))
            return
        ran = self.running.get(move.trajectory)
        here = [entry for entry in (ran, *self.waiting) if entry is not None]
        for request in here:
            if (request.trajectory, request.attempt) != (move.trajectory, move.attempt):
                continue
            if request is ran:
                del self.running[move.trajectory]
            else:
                self.waiting.remove(request)
            resume = Resume(tokens=9, partition=0, offset=self.world.ledger.next_offset())
            kv = Blob(sha256=records.ASSETS, bytes=64) if request is ran else None
            self.world.tell(records.released(request, resume if request is ran else None, kv))
        self._fill()
        self._maybe_leave()

    def _place(self, request: ScheduledRequest) -> None:
        assert request.spec.version in self.held, "placed on a worker of another version"
        chance, chances = self.world.chance, self.world.chances
        here = len(self.running) + len(self.waiting) + len(self.scored)
        times = OPEN_TIMES if chances.score_s else 1
        # Some may have been canceled during scoring.
        late = len(self.scored.keys() - self.world.machine.state.requests.keys())
        assert here - late < times * (self.slots + self.prefetch), "overfull"
        self.waiting.append(request)
        if chance.random() < chances.crash:
            life = self.life
            self.world.after(chance.random(), lambda: self._crash(life))
        elif chance.random() < chances.freeze:
            self.freeze(chances.away_s * chance.random() * 2)
        self._fill()

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.popleft()
            self.running[request.trajectory] = request
            chances = self.world.chances
            tokens = 1 + self.world.chance.expovariate(1 / chances.tokens_mean)
            life = self.life
            self.world.after(tokens * chances.token_s, self._ender(life, request))

    def _ender(self, life: int, request: ScheduledRequest) -> Callable[[], None]:
        return lambda: self._ended(life, request)

    def _ended(self, life: int, request: ScheduledRequest) -> None:
        if life != self.life or self.running.get(request.trajectory) is not request:
            return
        if self.frozen:
            self.late.append((life, request))
            return
        del self.running[request.trajectory]
        if self.world.chances.score_s:
            self.scored[request.trajectory] = request
            self._score(life, request)
        else:
            self._report(request)
        self._fill()
        self._maybe_leave()

    def _score(self, life: int, request: ScheduledRequest) -> None:
        score_s = self.world.chances.score_s * self.world.chance.random()
        self.world.after(score_s, lambda: self._scored(life, request))

    def _scored(self, life: int, request: ScheduledRequest) -> None:
        if life != self.life or self.scored.get(request.trajectory) is not request:
            return
        if self.frozen:
            self._score(life, request)
            return
        del self.scored[request.trajectory]
        self._report(request)
        self._maybe_leave()

    def _report(self, request: ScheduledRequest) -> None:
        chance, chances = self.world.chance, self.world.chances
        if chance.random() < chances.failure:
            self.world.tell(records.failed(request, retryable=chance.random() < 0.5))
            return
        reward: float | None = float(chance.random() < 0.5)
        if chance.random() < chances.equal_rewards:
            reward = 1.0
        if chance.random() < chances.invalid:
            reward = None
        offset = self.world.ledger.next_offset()
        self.world.tell(as_record(records.logged(request, reward=reward, offset=offset)))

    def _loaded(self, life: int, assign: Assign) -> None:
        if life != self.life:
            return
        sleeps = assign.version == NO_VERSION
        if self.frozen or (sleeps and (self.running or self.waiting)):
            self.world.after(0.5, lambda: self._loaded(life, assign))
            return
        if self.draining and sleeps:
            return
        self.version = assign.version
        self.held = {*self.held, self.version} if self.versions > 1 else {self.version}
        assert len(self.held) <= self.versions, "more versions than it has room for"
        self.world.tell(records.ready(self.name, self.incarnation, assign.version, assign.digest))

    def _crash(self, life: int) -> None:
        if life == self.life and self.alive:
            self.die(self.world.chances.away_s * self.world.chance.random() * 2)

    def _thaw(self, life: int) -> None:
        if life != self.life:
            return
        self.frozen = False
        late, self.late = self.late, []
        for was, request in late:
            self._ended(was, request)
        if self.alive and self.incarnation in self.world.ledger.fenced:
            self.die(self.world.chance.random())

    def _maybe_leave(self) -> None:
        if self.draining and not (self.running or self.waiting or self.scored):
            self.world.tell(records.left(self.name, self.incarnation))
            self.die(1.0)

    def _heartbeat(self, life: int) -> None:
        if life != self.life or not self.alive:
            return
        if not self.frozen:
            self.world.status(self._status())
        self.world.after(self.world.config.timing.heartbeat_s, lambda: self._heartbeat(life))

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            at_ns=self.world.clock.wall_ns(),
            cost=self.world.cost(),
            worker=self.name,
            incarnation=self.incarnation,
            version=self.version,
            active=len(self.running),
            waiting=len(self.waiting),
            kv_used_tokens=self.world.chances.kv_tokens * len(self.running),
            tokens_total=0,
            progress={name: Resume(tokens=5, partition=0, offset=7) for name in self.running},
            off_engine=len(self.scored),
        )


class PlayTrainer:
    """Trainer that trains the newest batch of its next step, and restarts sometimes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.incarnation = 0
        world.tell(records.role_started("trainer", 0))

    def hear(self, decision: AnyDecision) -> None:
        if isinstance(decision, TakeBatch):
            seconds = self.world.chances.train_s * (0.5 + self.world.chance.random())
            self.world.after(seconds, lambda: self._train(decision))

    def _train(self, batch: TakeBatch) -> None:
        chance, chances = self.world.chance, self.world.chances
        if chance.random() < chances.trainer_restart:
            self.incarnation += 1
            self.world.tell(records.role_started("trainer", self.incarnation))
            self.world.after(chances.train_s, lambda: self._train(batch))
        elif chance.random() < chances.refusal:
            offender = chance.choice(batch.groups).group
            self.world.tell(
                records.refused(
                    batch.step, [offender], attempt=batch.attempt, incarnation=self.incarnation
                )
            )
        else:
            self.world.tell(
                records.committed(
                    batch.step, batch.groups, attempt=batch.attempt, incarnation=self.incarnation
                )
            )
