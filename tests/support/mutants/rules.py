"""Mutants of rules that planner and fold share, so that a run follows the wrong rule consistently.

The mutants of the staleness bound match the counterexamples in docs/staleness.md.
"""

from __future__ import annotations

import dataclasses
import sys
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dora_pipe.bus.memory import MemoryWriter
from dora_pipe.config.model import async_batches
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.machine import TrainerMachine
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.errors import OutcomeUnknown
from dora_pipe.core.pure.records import Append
from dora_pipe.orchestrator import apply_control as rules_control
from dora_pipe.orchestrator import apply_decision as rules_decision
from dora_pipe.orchestrator import colocated, curriculum, fold, machine, serving, staleness
from dora_pipe.orchestrator import state_ops as transitions
from dora_pipe.orchestrator.apply_decision import train_spec
from dora_pipe.orchestrator.curriculum import NextRow
from dora_pipe.orchestrator.entities import Group, Request, Training, Verdict, Worker
from dora_pipe.orchestrator.index import queue_key
from dora_pipe.orchestrator.leases import Leases
from dora_pipe.orchestrator.staleness import Finished, Standing
from dora_pipe.orchestrator.state import State
from dora_pipe.orchestrator.state_ops import COMPLETE, outcome_of
from dora_pipe.producers.worker.request import seed_of
from dora_pipe.schemas.control import GroupScored, TakenGroup
from dora_pipe.schemas.identity import trajectory_seed
from dora_pipe.schemas.rounds import GroupSpec, Progressed
from dora_pipe.sim.seed_runner import SeedResult, run_seed
from tests.support.mutants.colocated import OF_COLOCATED
from tests.support.mutants.seeds import seeds_of
from tests.support.mutants.sessions import OF_EPISODES, OF_SESSIONS
from tests.support.mutants.versions import OF_VERSIONS

_MISSING: Final = object()


class Patches:
    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def everywhere(self, original: Any, value: Any) -> None:
        """Replace `original` in every other module of the package, under any name."""
        results = [
            (module, name)
            for key, module in list(sys.modules.items())
            if key.startswith("dora_pipe.") and not key.startswith(f"{__package__}.")
            for name, there in vars(module).items()
            if there is original
        ]
        assert results, f"nobody has {original}"
        for module, name in results:
            self.put(module, name, value)

    def undo(self) -> None:
        for owner, name, value in reversed(self._undo):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    what: str
    plant: Callable[[Patches], None]


@contextmanager
def mutated(name: str) -> Iterator[Mutant]:
    """Apply this bug in the block. Example: ``with mutated("gate-from-0"):``"""
    bug, patches = BUGS[name], Patches()
    try:
        bug.plant(patches)
        yield bug
    finally:
        patches.undo()


def finding(name: str, most: int) -> SeedResult | None:
    """Return the result of the first seed that detects this bug; search `most` seeds."""
    with mutated(name):
        results = (run_seed(seed) for seed in seeds_of(name, most))
        return next((result for result in results if not result.holds), None)


# Staleness bound


def _gate_from_0(patches: Patches) -> None:
    def feasible(deadlines: Mapping[int, int], step: int, per_step: int) -> bool:
        due = 0
        for deadline in sorted(deadlines):
            due += deadlines[deadline]
            if due > max(1, deadline - step + 1) * per_step:
                return False
        return True

    patches.everywhere(staleness.feasible, feasible)


def _gate_at_t(patches: Patches) -> None:
    patches.put(Standing, "step", property(lambda self: self.version))


def _first_finished(patches: Patches) -> None:
    order: dict[str, int] = {}

    def note(line: list[Finished], finished: Finished) -> None:
        if isinstance(finished, Finished):
            order.setdefault(finished.group, len(order))
        insort(line, finished)

    patches.put(transitions, "insort", note)
    _take_by(patches, lambda value: order.get(value.group, 0))


def _newest_first(patches: Patches) -> None:
    _take_by(patches, lambda value: (-value.deadline, -value.ordinal))


def _take_by(patches: Patches, key: Callable[[Finished], Any]) -> None:
    def take(
        finished: Sequence[Finished],
        deadlines: Mapping[int, int],
        *,
        step: int,
        per_step: int,
        taken: int,
    ) -> Sequence[Finished]:
        batch = sorted(finished, key=key)[: per_step - taken]
        if len(batch) < per_step - taken:
            return ()
        rest = Counter(deadlines)
        rest.subtract([*(entry.deadline for entry in batch), *[step] * taken])
        return batch if staleness.feasible(rest, step + 1, per_step) else ()

    patches.everywhere(staleness.next_batch, take)


def _overdue_then_oldest(patches: Patches) -> None:
    def admissible(deadlines: Mapping[int, int], standing: Standing) -> int:
        untaken = sum(deadlines.values())
        room = (standing.max_staleness + 1 - standing.training) * standing.per_step - untaken
        return max(0, min(room, (standing.steps - standing.step) * standing.per_step - untaken))

    def take(
        finished: Sequence[Finished],
        deadlines: Mapping[int, int],
        *,
        step: int,
        per_step: int,
        taken: int,
    ) -> Sequence[Finished]:
        lacks = per_step - taken
        return finished[:lacks] if len(finished) >= lacks else ()

    patches.everywhere(staleness.admissible, admissible)
    patches.everywhere(staleness.next_batch, take)


def _old_stamp(patches: Patches) -> None:
    def stamped(state: State, row: NextRow) -> GroupSpec:
        spec, outcomes = train_spec(state, row), state.counters.outcomes
        oldest = min(state.policies)
        if (
            not (outcomes.get("failed", 0) or outcomes.get("filtered", 0))
            or oldest == state.version
        ):
            return spec
        late = state.version - oldest
        return msgspec.structs.replace(
            spec, version=oldest, digest=state.policies[oldest], deadline=spec.deadline - late
        )

    patches.everywhere(train_spec, stamped)


def _training_is_free(patches: Patches) -> None:
    right = staleness.admissible

    def admissible(deadlines: Mapping[int, int], standing: Standing) -> int:
        more = dataclasses.replace(
            standing, async_batches=standing.async_batches + standing.training
        )
        return right(deadlines, more)

    patches.everywhere(staleness.admissible, admissible)


def _short_batch(patches: Patches) -> None:
    right = staleness.next_batch

    def take(
        finished: Sequence[Finished],
        deadlines: Mapping[int, int],
        *,
        step: int,
        per_step: int,
        taken: int,
    ) -> Sequence[Finished]:
        subset = finished[: max(1, per_step - taken - 1)]
        full = right(finished, deadlines, step=step, per_step=per_step, taken=taken)
        return full or subset

    patches.everywhere(staleness.next_batch, take)


def _unfinished(patches: Patches) -> None:
    def outcome(group: Group, rules: Any, *, over: bool = False) -> Any:
        outcome = outcome_of(group, rules, over=over)
        early = group.spec.purpose == "train" and group.spec.samples - group.ended == 1
        return COMPLETE if outcome is None and early and group.valid else outcome

    patches.everywhere(outcome_of, outcome)


def _spares_awaited(patches: Patches) -> None:
    def outcome(group: Group, rules: Any, *, over: bool = False) -> Any:
        outcome = outcome_of(group, rules, over=over)
        waits = group.ended < group.spec.samples and group.phase == "generating" and not over
        return None if waits and outcome is COMPLETE else outcome

    patches.everywhere(outcome_of, outcome)


def _expired_fails(patches: Patches) -> None:
    def outcome(group: Group, rules: Any, *, over: bool = False) -> Any:
        if over and group.spec.purpose == "train":
            return Verdict(outcome="failed", why="its time was over")
        return outcome_of(group, rules, over=over)

    patches.everywhere(outcome_of, outcome)


def _expires_early(patches: Patches) -> None:
    right = vars(machine.OrchestratorMachine)["_group_timeout_ns"].fget

    def timeout_ns(self: Any) -> int | None:
        return None if (whole_ns := right(self)) is None else whole_ns // 2

    patches.put(machine.OrchestratorMachine, "_group_timeout_ns", property(timeout_ns))


# Requests and workers


def _redundant_trained(patches: Patches) -> None:
    right = rules_control._present

    def present(state: State, *args: Any) -> Any:
        redundant, state.redundant = state.redundant, {}
        try:
            return right(state, *args)
        finally:
            state.redundant = redundant

    patches.put(rules_control, "_present", present)


def _fenced_counts(patches: Patches) -> None:
    def present(state: State, record: Any, trajectory: str, attempt: int) -> Any:
        return state.requests.get(trajectory)

    patches.put(State, "worker_of", lambda self, name, incarnation: self.workers.get(name))
    patches.put(rules_control, "_present", present)


def _old_scores_count(patches: Patches) -> None:
    def scored(state: State, offset: int, record: GroupScored) -> str:
        group = state.groups.get(record.group)
        if record.group in state.scoring and group is not None and not record.error:
            rewards = {sample.trajectory: sample.reward for sample in record.samples}
            transitions.end_scoring(state, group, rewards)
        return ""

    patches.put(rules_control, "_APPLY", {**rules_control._APPLY, GroupScored: scored})


def _alone_trained(patches: Patches) -> None:
    def taken(group: Group) -> TakenGroup:
        return msgspec.structs.replace(right(group), rewards={})

    right = Group.taken
    patches.put(Group, "taken", taken)


def _part_too_soon(patches: Patches) -> None:
    def part(
        finished: Sequence[Finished], *_: object, size: int, **position: int
    ) -> Sequence[Finished]:
        fits = len(finished) >= size and position["taken"] + size < position["per_step"]
        return finished[-size:] if fits else ()

    patches.everywhere(staleness.next_part, part)


def _part_lost(patches: Patches) -> None:
    right = colocated.batch_due

    def due(state: State) -> list[str]:
        names = right(state)
        return names[len(state.parts[-1]) :] if names and state.parts else names

    patches.everywhere(right, due)


def _part_twice(patches: Patches) -> None:
    def taken(state: State, names: Sequence[str]) -> None:
        state.parts.append(tuple(names))

    patches.everywhere(transitions.take_part, taken)


def _part_outlives(patches: Patches) -> None:
    def ended(state: State, training: Training) -> None:
        state.training = None
        state.attempt = training.attempt + 1

    patches.everywhere(transitions.end_training, ended)


def _update_while_written(patches: Patches) -> None:
    patches.put(TrainerMachine, "_must_wait", lambda self, part: False)


def _progress_lost(patches: Patches) -> None:
    patches.everywhere(transitions.note_progress, lambda state, trajectory, resume: None)


def _placed_twice(patches: Patches) -> None:
    right, require = transitions.schedule, rules_decision._require

    def schedule(state: State, trajectory: str, attempt: int, worker: Worker) -> None:
        again = state.requests[trajectory].worker
        if again:
            state.workers[again].requests.discard(trajectory)
        right(state, trajectory, attempt, worker)
        spec = state.groups[state.requests[trajectory].group].spec
        if spec.ordinal % 3 == 0 and trajectory.endswith("-000") and attempt == 1:
            queue = state.queues.setdefault(spec.version, [])
            insort(queue, queue_key(spec, 0))

    def lax(holds: bool, otherwise: str) -> None:
        require(holds or otherwise.endswith("is already placed"), otherwise)

    patches.everywhere(transitions.schedule, schedule)
    patches.put(rules_decision, "_require", lax)


def _beyond_c(patches: Patches) -> None:
    def most(state: State) -> float:
        assert state.config is not None
        return async_batches(state.config.staleness)

    patches.put(State, "async_batches", property(most))


def _attempts_for_ever(patches: Patches) -> None:
    def fault(state: State, trajectory: str, error: str) -> None:
        transitions.requeue(state, trajectory)

    patches.everywhere(transitions.fault, fault)


def _leaving_counts(patches: Patches) -> None:
    right = transitions.close_worker

    def close(state: State, worker: Worker, *, orderly: bool) -> None:
        right(state, worker, orderly=False)

    patches.everywhere(right, close)


def _lease_in_outage(patches: Patches) -> None:
    patches.put(Leases, "turn", lambda self, now_ns: None)


def _lease_from_birth(patches: Patches) -> None:
    patches.put(Leases, "renew", lambda self, value, now_ns: None)


def _too_many(patches: Patches) -> None:
    room = Worker.room
    assert isinstance(room, property) and room.fget is not None
    more = room.fget
    patches.put(Worker, "room", property(lambda self: more(self) + 1))


def _off_engine_stays(patches: Patches) -> None:
    right = transitions._take_off

    def take_off(state: State, trajectory: str, request: Request) -> None:
        worker = state.workers.get(request.worker)
        before = 0 if worker is None else worker.off_engine
        right(state, trajectory, request)
        if worker is not None:
            worker.off_engine = min(before, len(worker.requests))
            state.touch(worker)

    patches.put(transitions, "_take_off", take_off)


def _orphan_forgotten(patches: Patches) -> None:
    patches.everywhere(serving.orphans, lambda *args: [])


def _attempt_in_seed(patches: Patches) -> None:
    def seed(request: Any) -> int:
        return trajectory_seed(request.spec.seed + request.attempt, request.sample)

    patches.everywhere(seed_of, seed)


# Restarts and appends


def _commit_again(patches: Patches) -> None:
    def forgetful(*args: Any) -> CommitHistory:
        history = read_history(*args)
        if history.notes:
            history.revoke()
        history.decisions_next = 0
        return history

    patches.everywhere(read_history, forgetful)


def _restart_forgets(patches: Patches) -> None:
    right = fold.apply_observation

    def apply(state: State, observation: Any) -> None:
        if not isinstance(observation, Progressed):
            right(state, observation)

    patches.put(fold, "apply_observation", apply)


def _unknown_is_done(patches: Patches) -> None:
    right = MemoryWriter.append

    def append(self: MemoryWriter, records: Sequence[Append]) -> list[int]:
        try:
            return right(self, records)
        except OutcomeUnknown:
            if self._name is not None:
                raise
            return [0] * len(records)

    patches.put(MemoryWriter, "append", append)


def _chain_without_control(patches: Patches) -> None:
    patches.put(machine, "fold_bytes", lambda offset, value: b"")


def _counted_at_once(patches: Patches) -> None:
    def note(state: State, group: Group) -> None:
        right(state, group)
        for source in state.curricula:
            curriculum.count_pending(state, source)

    right = curriculum.note_ended
    patches.everywhere(right, note)


def _weights_stay(patches: Patches) -> None:
    def count(state: State) -> None:
        kept = dict(state.weights)
        right(state)
        state.weights.update(kept)

    right = curriculum.new_version
    patches.everywhere(right, count)


def _untouched(patches: Patches) -> None:
    patches.put(State, "_touch_leaves", lambda self, worker: None)


_ALL: Final = (
    *OF_SESSIONS,
    *OF_EPISODES,
    *OF_VERSIONS,
    *OF_COLOCATED,
    ("gate-from-0", "feasible asks for j >= 0 only: what is overdue is not seen", _gate_from_0),
    ("gate-at-t", "the bound is asked at t instead of s while a step trains", _gate_at_t),
    ("first-finished", "batches take what finished first", _first_finished),
    ("newest-first", "batches take the latest deadlines first", _newest_first),
    (
        "overdue-then-oldest",
        "batches take what is overdue, then the oldest; capacity (eta + t + 1) * B",
        _overdue_then_oldest,
    ),
    ("old-stamp", "a replacement gets the version of what it replaces", _old_stamp),
    ("training-is-free", "a batch in training does not count against C * B", _training_is_free),
    ("short-batch", "a batch is taken with a group less", _short_batch),
    ("unfinished", "a group counts as finished before its last trajectory", _unfinished),
    ("spares-awaited", "a group waits for its spare trajectories", _spares_awaited),
    ("redundant-trained", "a redundant trajectory is trained", _redundant_trained),
    ("expired-fails", "a group whose time is over fails, whatever it has", _expired_fails),
    ("expires-early", "the time of a group is over at its half", _expires_early),
    ("fenced-counts", "the record of a fenced attempt counts", _fenced_counts),
    ("old-scores-count", "scores of a group count whoever was asked last", _old_scores_count),
    ("alone-trained", "batches leave out what their groups were scored", _alone_trained),
    ("progress-lost", "a lost request starts again from its prompt", _progress_lost),
    ("placed-twice", "a request is placed while it is placed", _placed_twice),
    ("part-too-soon", "a part leaves no room for groups that are due", _part_too_soon),
    ("part-lost", "a batch forgets its last part", _part_lost),
    ("part-twice", "the groups of a part are taken again", _part_twice),
    ("part-outlives", "a part stays although the step before it is refused", _part_outlives),
    (
        "update-while-written",
        "an update begins while the weights are written that it changes",
        _update_while_written,
    ),
    ("beyond-c", "an automatic C is not kept: the bound alone counts", _beyond_c),
    ("attempts-for-ever", "faults are not counted", _attempts_for_ever),
    ("leaving-counts", "leaving in order counts as a fault", _leaving_counts),
    ("lease-in-outage", "leases run down while nobody listens", _lease_in_outage),
    ("lease-from-birth", "a lease is not renewed by what is heard", _lease_from_birth),
    ("too-many", "a worker gets a request more than it has room for", _too_many),
    (
        "off-engine-stays",
        "who leaves a worker is still counted among those that need no slot",
        _off_engine_stays,
    ),
    ("orphan-forgotten", "a version without a host is not seen", _orphan_forgotten),
    ("attempt-in-seed", "the attempt enters the seed of a request", _attempt_in_seed),
    ("commit-again", "a restarted trainer has forgotten its last commit", _commit_again),
    ("restart-forgets", "a restarted orchestrator folds no progress", _restart_forgets),
    ("unknown-is-done", "a worker takes an unknown outcome for done", _unknown_is_done),
    ("chain-without-control", "the chain leaves control out", _chain_without_control),
    ("counted-at-once", "rewards of rows are newer than the version", _counted_at_once),
    ("weights-stay", "rows are drawn by weights of an older version", _weights_stay),
    ("untouched", "the digest does not see that a worker has changed", _untouched),
)

BUGS: Final[dict[str, Mutant]] = {
    name: Mutant(name=name, what=what, plant=plant) for name, what, plant in _ALL
}
