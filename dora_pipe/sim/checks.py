"""What every decision of an orchestrator must not do, asked of the account before it is booked.

The rules are those of docs/invariants.md, written from the design and not from the planner: what is
left to the planner (which worker gets which request) is not looked at. `CHECKS` names them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.rounds import (
    Assign,
    Cancel,
    Dispatch,
    Drain,
    End,
    Fence,
    GroupSpec,
    LeaseExpired,
    Move,
    Place,
    PlacedSibling,
    Progressed,
    Round,
    StopRun,
    TakeBatch,
)
from dora_pipe.sim.account import Account, Wrong
from dora_pipe.sim.account_shapes import GroupAccount, RequestAccount, WorkerAccount

CHECKS: Final[dict[str, str]] = {
    "fate": "S1: every dispatched group has exactly one fate, the one its siblings came to",
    "deadline": "S2: no group is trained at a step beyond its deadline",
    "feasible": "S3: what is dispatched and not taken can be trained in time at every moment",
    "once": "S4: a trajectory is trained at most once",
    "placement": "S5: a request is placed once at a time, where its version is hosted, in a slot",
    "binding": "S6, S7: a batch has the first record of the present attempt, of the living only",
    "batch": "S2: a batch has the B finished groups of the earliest deadlines, no more, no fewer",
    "commit": "S8: a step commits the batch that was taken, once",
    "weights": "S8: a step begins with the weights that the last one left",
    "assign": "S10: a worker changes its version only while it is empty and loads nothing",
    "lease": "S11: nobody is fenced who was heard, or while the orchestrator did not listen",
    "attempts": "S12: attempts count up by one; a request is placed boundedly often after faults",
    "progress": "S14: a request that is placed again goes on from the newest progress known",
    "capacity": "S15: no more groups are in flight than in_flight_batches allows",
    "admission": "S16: nothing is admitted while paused, or while an older version has no host",
    "C1": "S17: every token of a trajectory is what its version samples; so are hosted weights",
    "move": "S18: a request moves only to a living host of its version, and at most once at a time",
    "epochs": "R4: role epochs count up; nothing is decided or committed under an older one",
    "retired": "S19: an incarnation that has left says nothing more",
    "kept": "S20: a version that an open group carries, or a worker has, lies in the store",
    "rounds": "R2-R4: rounds are contiguous, their chain is whole, each folds what came before",
    "log": "R1: the audit of the whole log finds nothing",
    "role": "no role finds its own state broken",
    "live": "L2: once faults stop, the run ends; whoever waits then waits for something named",
}
"""Every checker: what holds when it finds nothing."""


class Checks:
    """Books decisions, and says what is wrong with them."""

    def __init__(self, account: Account, wrong: Wrong) -> None:
        self._at = account
        self._wrong = wrong

    def round(self, round_: Round) -> None:
        """Observations, then decisions; then the bound must hold."""
        for one in round_.observations:
            if isinstance(one, LeaseExpired):
                worker = self._at.living(one.worker, one.epoch)
                if worker is not None:
                    worker.silent = True
            elif isinstance(one, Progressed):
                request = self._at.requests.get(one.trajectory)
                if request is not None and not request.over:
                    self._at.note_progress(one.trajectory, one.resume)
        for decision in round_.decisions:
            _DECISIONS[type(decision)](self, decision)
        if self._at.config is not None:
            self._require("feasible", self._at.overdue(self._at.u(), self._at.step))

    def _require(self, check: str, wrong: str) -> None:
        """A sentence is a violation, the empty one is none."""
        if wrong:
            self._wrong(check, wrong)

    # Groups

    def _dispatch(self, decision: Dispatch) -> None:
        spec, at = decision.spec, self._at
        if spec.group in at.groups:
            self._wrong("fate", f"{spec.group} is dispatched a second time")
        if at.paused:
            self._wrong("admission", f"{spec.group} is dispatched while the run is paused")
        if spec.version != at.version or spec.digest != at.digests[at.version]:
            self._wrong("C1", f"{spec.group} gets version {spec.version}, {at.version} is newest")
        if spec.ordinal != at.ordinals[spec.purpose]:
            self._wrong("fate", f"{spec.group} is not the group that comes next")
        at.ordinals[spec.purpose] += 1
        if spec.purpose == "train":
            self._admit(spec)
        at.groups[spec.group] = GroupAccount(spec)
        for sibling in range(spec.size):
            name = trajectory_id(spec.group, sibling)
            at.requests[name] = RequestAccount(spec.group, sibling)

    def _admit(self, spec: GroupSpec) -> None:
        at = self._at
        assert at.config is not None
        per_step = at.config.groups.per_step
        deadline = at.version + at.config.staleness.max_staleness
        if spec.deadline != deadline:
            self._wrong("deadline", f"{spec.group} gets deadline {spec.deadline}, not {deadline}")
        flying = len(at.u()) + per_step * (at.training is not None)
        if flying >= at.limit:
            self._wrong("capacity", f"{spec.group} joins {flying} in flight of {at.limit}")
        if len(at.u()) >= (at.steps - at.step) * per_step:
            self._wrong("capacity", f"{spec.group} is admitted and no step is left for it")
        self._require("feasible", at.overdue([*at.u(), GroupAccount(spec)], at.step))
        there = [one for one in at.workers.values() if not (one.out or one.draining)]
        hosted = {version for one in there for version in (one.target, *one.held)}
        orphans = sorted(at.queued() - hosted)
        if orphans:
            what = f"{spec.group} is admitted while version {orphans[0]} has no host"
            self._wrong("admission", what)

    def _take(self, batch: TakeBatch) -> None:
        at, key = self._at, (batch.step, batch.attempt)
        assert at.config is not None
        per_step = at.config.groups.per_step
        if at.training is not None:
            self._wrong("batch", f"batch {key} is taken while step {at.training.step} is training")
        if key != (at.version, at.attempt) or batch.step >= at.steps:
            self._wrong("batch", f"batch {key} is taken, {(at.version, at.attempt)} comes next")
        line = sorted((one for one in at.u() if one.phase == "finished"), key=lambda one: one.place)
        due = [one.spec.group for one in line[:per_step]]
        named = [one.group for one in batch.groups]
        for name in named:
            group = at.groups.get(name)
            if group is None or group.phase != "finished" or group.spec.purpose != "train":
                self._wrong("batch", f"batch {key} has {name}, which is not finished")
            elif batch.step > group.spec.deadline:
                self._wrong(
                    "deadline", f"{name} is taken at step {batch.step}, beyond its deadline"
                )
        if sorted(named) != sorted(due) or len(named) != per_step:
            self._wrong("batch", f"batch {key} is {named}, due are {due}")
        for taken in batch.groups:
            group = at.groups[taken.group]
            if taken != group.taken():
                self._wrong("binding", f"batch {key} has other records of {taken.group}")
            group.phase = "taken"
        at.training = batch

    def _end(self, decision: End) -> None:
        at, name = self._at, decision.group
        group = at.groups.get(name)
        if group is None or group.fate:
            self._wrong("fate", f"{name} ends as {decision.fate}, but it is not open")
            return
        left = [trajectory_id(name, sibling) for sibling in range(group.spec.size)]
        left = [one for one in left if not at.requests[one].over]
        running = [one for one in left if at.requests[one].epoch >= 0]
        if running:
            self._wrong("fate", f"{name} ends while {running[0]} is placed")
        if decision.fate == "cancelled" and not group.due_fate:
            surplus = len(at.u()) > (at.steps - at.step) * self._per_step
            if not (surplus if group.spec.purpose == "train" else at.stop_now):
                self._wrong("fate", f"{name} is cancelled, although a step is left for it")
        elif decision.fate != group.due_fate:
            found = group.due_fate or "not over"
            self._wrong("fate", f"{name} ends as {decision.fate}, but it is {found}")
        for one in left:
            at.requests[one].over = True
        at.end(group, decision.fate)

    def _stop(self, decision: StopRun) -> None:
        at = self._at
        open_ = [name for name, group in at.groups.items() if not group.fate]
        if open_:
            self._wrong("fate", f"the run stops while {open_[0]} is open")
        if at.version < at.steps:
            self._wrong("fate", f"the run stops before step {at.version}")

    @property
    def _per_step(self) -> int:
        assert self._at.config is not None
        return self._at.config.groups.per_step

    # Requests

    def _place(self, decision: Place) -> None:
        at, spec = self._at, decision.spec
        group = at.groups.get(spec.group)
        worker = at.living(decision.worker, decision.epoch)
        if group is None or group.spec != spec or group.phase in ("doomed", "over"):
            self._wrong("placement", f"{spec.group} is placed, but it is not open, or not so")
            return
        if worker is None or worker.draining:
            self._wrong("placement", f"{spec.group} is placed on {decision.worker}, which is out")
            return
        if not worker.has(spec.version):
            what = f"{spec.group} of version {spec.version} is placed on {worker.name}, "
            self._wrong("placement", what + f"which hosts {worker.hosted}, target {worker.target}")
        for one in decision.siblings:
            self._place_one(trajectory_id(spec.group, one.sibling), one, worker)
        if len(worker.requests) > worker.slots + worker.prefetch:
            self._wrong("placement", f"{worker.name} has {len(worker.requests)} requests: too many")

    def _place_one(self, name: str, one: PlacedSibling, worker: WorkerAccount) -> None:
        at = self._at
        assert at.config is not None
        request = at.requests[name]
        if request.over or request.epoch >= 0:
            what = "is over" if request.over else f"is placed on epoch {request.epoch} already"
            self._wrong("placement", f"{name} is placed on {worker.name}, but it {what}")
            at.let_go(name)
        if one.attempt != request.attempt + 1:
            self._wrong("attempts", f"{name} is placed as {one.attempt} after {request.attempt}")
        if request.faults >= at.config.groups.attempts_max:
            self._wrong("attempts", f"{name} is placed again after {request.faults} faults")
        tokens = 0 if one.resume is None else one.resume.tokens
        known = 0 if request.resume is None else request.resume.tokens
        if one.resume != request.resume or tokens < max(known, request.known_tokens):
            known = max(known, request.known_tokens)
            self._wrong("progress", f"{name} goes on from {tokens} tokens of {known} known ones")
        if one.kv != request.kv:
            self._wrong("move", f"{name} is placed with another KV cache than it left")
        request.attempt, request.epoch = one.attempt, worker.epoch
        request.moving = request.kv = None
        worker.requests.add(name)

    def _move(self, decision: Move) -> None:
        at, name = self._at, decision.trajectory
        request, to = at.requests[name], at.living(decision.to, decision.to_epoch)
        placed = (request.attempt, request.epoch)
        if request.over or placed != (decision.attempt, decision.epoch):
            self._wrong("move", f"{name} is moved from where it is not placed")
        if request.moving is not None:
            self._wrong("move", f"{name} is moved while it moves to {request.moving[0]}")
        version = at.groups[request.group].spec.version
        if to is None or to.draining or not to.has(version):
            self._wrong("move", f"{name} moves to {decision.to}, which does not host {version}")
        if decision.to_epoch == decision.epoch:
            self._wrong("move", f"{name} moves to where it is")
        request.moving = (decision.to, decision.to_epoch)

    def _cancel(self, decision: Cancel) -> None:
        request = self._at.requests[decision.trajectory]
        if request.over or (request.attempt, request.epoch) != (decision.attempt, decision.epoch):
            what = f"{decision.trajectory} is cancelled where it is not placed"
            self._wrong("placement", what)
        self._at.let_go(decision.trajectory)
        request.over = True

    # Workers

    def _assign(self, decision: Assign) -> None:
        at = self._at
        worker = at.living(decision.worker, decision.epoch)
        if worker is None or worker.draining:
            self._wrong("assign", f"{decision.worker} is out and gets version {decision.version}")
            return
        self._drops(decision, worker)
        if (worker.requests and worker.most == 1) or worker.target != worker.hosted:
            what = f"has {len(worker.requests)} requests, target {worker.target}"
            self._wrong("assign", f"{worker.name} gets version {decision.version}, but it {what}")
        if at.digests.get(decision.version) != decision.digest:
            self._wrong("C1", f"{worker.name} gets other weights for version {decision.version}")
        worker.target = decision.version

    def _drops(self, decision: Assign, worker: WorkerAccount) -> None:
        """What it lets go of is there, and nobody there needs it; what it keeps has room."""
        at, dropped = self._at, set(decision.drop)
        used = {at.groups[at.requests[one].group].spec.version for one in worker.requests}
        if not dropped <= worker.held or dropped & used:
            what = f"drops {sorted(dropped)} of {sorted(worker.held)}, {sorted(used)} are in use"
            self._wrong("assign", f"{worker.name} {what}")
        worker.held -= dropped
        if worker.most > 1 and len({*worker.held, decision.version}) > worker.most:
            self._wrong("assign", f"{worker.name} gets more than {worker.most} versions")

    def _fence(self, decision: Fence) -> None:
        worker = self._at.living(decision.worker, decision.epoch)
        if worker is None:
            self._wrong("lease", f"{decision.worker} is fenced, but it is out already")
            return
        if not worker.silent:
            self._wrong("lease", f"{worker.name} is fenced, but nobody observed that it is silent")
        self._at.close(worker, "fenced")

    def _drain(self, decision: Drain) -> None:
        if self._at.living(decision.worker, decision.epoch) is None:
            self._wrong("assign", f"{decision.worker} is drained, but it is out already")


_DECISIONS: Final[dict[type[Any], Callable[[Checks, Any], None]]] = {
    Dispatch: Checks._dispatch,
    TakeBatch: Checks._take,
    End: Checks._end,
    StopRun: Checks._stop,
    Place: Checks._place,
    Move: Checks._move,
    Cancel: Checks._cancel,
    Assign: Checks._assign,
    Fence: Checks._fence,
    Drain: Checks._drain,
}
