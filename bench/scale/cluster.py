"""Decides how the run of `dora-pipe sim scale` goes: `sim.modelled_cluster` with workers that are
lost and a trainer that dies, and with every record that control and decisions would get, encoded.

Time that it measures is CPU time of production's own code: the planner, the fold of control, the
sealing of a round.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import msgspec

from dora_pipe.bench.scale.size import LEASE_S, NOW_NS, Size
from dora_pipe.core.runtime import BUS_TURN_NS
from dora_pipe.orchestrator.machine import OFF_ENGINE_SHARE
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.rounds import (
    AnyDecision,
    AnyObservation,
    LeaseExpired,
    OffEngine,
    Round,
    fold_bytes,
    seal,
)
from dora_pipe.schemas.wire import encode
from dora_pipe.sim.modelled_cluster import NO_DIGEST, Cluster, ClusterPlan, ClusterRun
from dora_pipe.sim.modelled_worker import ModelledWorker, TrainerRates
from dora_pipe.sim.paradigms_planner import Production

ROUND_S: Final = 10 * BUS_TURN_NS / 1e9
"""Of virtual time from one round to the next, at least: every tenth turn of the bus."""


@dataclass(slots=True)
class Tally:
    """Records of a kind."""

    records: int = 0
    bytes: int = 0
    largest: int = 0
    cpu_s: float = 0.0
    """Folding them."""

    def add(self, size: int, cpu_s: float = 0.0) -> None:
        """One more."""
        self.records += 1
        self.bytes += size
        self.largest = max(self.largest, size)
        self.cpu_s += cpu_s


@dataclass(slots=True, kw_only=True)
class Losses:
    """What lost workers cost."""

    workers: int = 0
    requests: int = 0
    """That go on elsewhere."""
    sampled_again: float = 0.0
    """Tokens that no progress record had."""
    prefilled_again: float = 0.0
    """Tokens of prompts and of what progress records had."""
    trainer_s: float = 0.0
    """That its step took longer."""


@dataclass(slots=True, kw_only=True)
class ScaleRun:
    """What happened, from the first commit on: everything starts at once before it."""

    run: ClusterRun
    from_s: float = 0.0
    control: dict[str, Tally] = field(default_factory=dict)
    decisions: Tally = field(default_factory=Tally)
    rounds_ms: list[float] = field(default_factory=list)
    """Of each turn: planning and sealing one round."""
    decide_s: float = 0.0
    seal_s: float = 0.0
    observations: int = 0
    tokens: int = 0
    """Of trajectories that ended."""
    trajectories: int = 0
    losses: Losses = field(default_factory=Losses)
    state: State = field(default_factory=State)
    """At the end."""

    @property
    def seconds(self) -> float:
        """Of virtual time."""
        return self.run.wall_s - self.from_s

    @property
    def mean_tokens(self) -> int:
        """Sampled, of a trajectory."""
        return round(self.tokens / max(1, self.trajectories))

    @property
    def folded(self) -> Tally:
        """All of control."""
        every = self.control.values()
        return Tally(
            records=sum(one.records for one in every),
            bytes=sum(one.bytes for one in every),
            largest=max((one.largest for one in every), default=0),
            cpu_s=sum(one.cpu_s for one in every),
        )


class _Measured(Production):
    """Production's planner, each of whose rounds is sealed as the machine does."""

    def __init__(self) -> None:
        self.cluster: ScaleCluster | None = None

    def decide(self, state: State) -> list[AnyDecision]:
        began_s = time.thread_time()
        found = super().decide(state)
        assert self.cluster is not None
        self.cluster.seal(found, time.thread_time() - began_s)
        return found


class ScaleCluster(Cluster):
    """See the head of this file. Example: ``ScaleCluster(Size(), seed=1, load_s=20).measure()``"""

    def __init__(self, size: Size, *, seed: int, load_s: float, restart_s: float) -> None:
        self._size = size
        self._restart_s = restart_s
        self._observed: list[AnyObservation] = []
        self._folded: list[bytes] = []
        self._chain = NO_DIGEST
        self.found = ScaleRun(run=ClusterRun())
        planner = _Measured()
        lengths = size.lengths
        drawn = cache(lambda one: lengths.draw(seed=seed, ordinal=one, size=size.group_size))
        super().__init__(
            ClusterPlan(
                workers=size.sizes(),
                rates=size.rates(load_s),
                trainer=TrainerRates(fixed_s=0.0, token_s=size.token_s),
                lengths=drawn,
                group_size=size.group_size,
                per_step=size.per_step,
                steps=size.steps + size.max_staleness + 1,
                max_staleness=size.max_staleness,
                in_flight_batches=size.in_flight_batches,
                planner=planner,
                prompt_tokens=size.prompt_tokens,
                turns=size.turns(seed),
                round_s=ROUND_S,
            )
        )
        # It ends before fewer and fewer groups are let in because the run does.
        self.plan = replace(self.plan, steps=size.steps)
        planner.cluster = self
        self.found.run = self.run_
        self._due = self._failures()
        self._frozen: list[tuple[float, ModelledWorker]] = []
        self._gone: list[tuple[float, ModelledWorker]] = []
        self._trainer_dies_at = size.steps // 2

    def measure(self) -> ScaleRun:
        """The whole run."""
        self.run()
        self.found.state = self.state
        return self.found

    def _failures(self) -> list[tuple[int, str]]:
        """(after so many trajectories, the worker) of each, spread over all after the first two
        steps."""
        size, names = self._size, [one.name for one in self._size.sizes()]
        step = size.per_step * size.group_size
        count, total = min(size.failures, size.workers), size.steps * step
        return [
            (2 * step + one * (total - 2 * step) // count, names[one * 7 % size.workers])
            for one in range(count)
        ]

    # What is encoded and folded

    def _apply(self, record: AnyControl) -> int:
        value = encode(msgspec.structs.replace(record, at_ns=NOW_NS + int(self.now_s * 1e9)))
        began_s = time.thread_time()
        offset = super()._apply(record)
        spent_s = time.thread_time() - began_s
        self._folded.append(fold_bytes(offset, value))
        kind = type(record).__struct_config__.tag
        self.found.control.setdefault(str(kind), Tally()).add(len(value), spent_s)
        if kind == "step-committed" and self.state.version == 1:
            self._begin()
        return offset

    def _begin(self) -> None:
        """The first commit: forget what was before."""
        losses = self.found.losses
        self.found = ScaleRun(run=self.run_, from_s=self.now_s, losses=losses)

    def _note(self, observation: AnyObservation) -> None:
        if isinstance(observation, OffEngine):
            worker = self.state.workers[observation.worker]
            least = max(1, worker.slots // OFF_ENGINE_SHARE)
            if abs(observation.requests - worker.off_engine) < least:
                return
        self._observed.append(observation)
        super()._note(observation)

    def seal(self, decisions: list[AnyDecision], decide_s: float) -> None:
        """A round as bytes, if the machine would append one."""
        folded, observed = self._folded, self._observed
        if not (decisions or folded or observed):
            return
        self._folded, self._observed = [], []
        began_s = time.thread_time()
        round_ = Round(
            ordinal=self.run_.rounds,
            role_epoch=1,
            now_ns=NOW_NS + int(self.now_s * 1e9),
            control_next=self._offset,
            observations=tuple(observed),
            decisions=tuple(decisions),
        )
        self._chain, value = seal(self._chain, b"".join(folded), round_)
        seal_s = time.thread_time() - began_s
        found = self.found
        found.decisions.add(len(value))
        found.rounds_ms.append((decide_s + seal_s) * 1e3)
        found.decide_s += decide_s
        found.seal_s += seal_s
        found.observations += len(observed)

    def _entry(self, request: Any) -> Any:
        entry = super()._entry(request)
        self.found.trajectories += 1
        self.found.tokens += entry.tokens
        # As long as in a log of days.
        return msgspec.structs.replace(entry, offset=10**9 + entry.offset, bytes=10 * entry.tokens)

    # What fails

    def _advance(self, now_s: float) -> None:
        while self._due and self.run_.requests >= self._due[0][0]:
            self._freeze(self._due.pop(0)[1], now_s)
        if self._training is not None and self._training[0].step == self._trainer_dies_at:
            self._kill_trainer(now_s)
        super()._advance(now_s)
        while self._frozen and self._frozen[0][0] <= now_s:
            self._lose(self._frozen.pop(0)[1], now_s)
        while self._gone and self._gone[0][0] <= now_s:
            size = self._gone.pop(0)[1].size
            self._workers[size.name] = self._join(size)

    def _freeze(self, name: str, now_s: float) -> None:
        """A worker dies, and nobody knows yet."""
        worker = self._workers[name]
        worker.batch.stall(float("inf"))
        self._frozen.append((now_s + LEASE_S, worker))

    def _lose(self, worker: ModelledWorker, now_s: float) -> None:
        """Its lease is over: what it ran goes on from its last progress records."""
        name, losses = worker.size.name, self.found.losses
        del self._workers[name]
        self._ended = [one for one in self._ended if one[2] is not worker]
        heapq.heapify(self._ended)
        for trajectory in sorted(self.state.workers[name].requests):
            worker.release(trajectory)
            left = self._lefts.get(trajectory)
            if left is None:
                continue
            again = left.done % self._size.checkpoint_tokens
            left.done, left.left = left.done - again, left.left + again
            losses.requests += 1
            losses.sampled_again += again
            losses.prefilled_again += self._size.prompt_tokens + left.done
        losses.workers += 1
        self._note(LeaseExpired(worker=name, epoch=worker.epoch))
        self._gone.append((now_s + self._restart_s, worker))

    def _kill_trainer(self, now_s: float) -> None:
        """It dies in the middle of a step, which is done again after its restart."""
        assert self._training is not None
        batch, ends_s = self._training
        span = self.run_.spans[-1]
        if now_s < (span.taken_s + span.committed_s) / 2:
            return
        self._trainer_dies_at = -1
        again_s = now_s + self._restart_s + span.committed_s - span.taken_s
        self.found.losses.trainer_s += again_s - ends_s
        self._training = batch, again_s
        self.run_.spans[-1] = replace(span, committed_s=again_s)
