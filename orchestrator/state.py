"""What the orchestrator knows: one tree, changed in place by the fold alone; it decides nothing.

Rules:

1. State changes only in `apply_control`, `apply_decision` and `state_ops`, driven by `fold`.
   The planner applies its decisions through the same functions.
2. States compare by digest; `orchestrator.digest` says what it covers.
3. Whoever changes a worker, or what it has, calls `State.touch` (or, where rare, `mark`); whoever
   changes a group or a request calls `leaves.touch`.
4. What there are many of, groups, requests, workers, is not tracked by the garbage collector: no
   cycle goes through them, and to look at all of them takes it longer than a round takes.
5. Groups that have ended leave; counters stay. The size depends on what is open, not on how long
   the run is.

Warning: nothing here may depend on the order in which a set of strings iterates: that order
differs between processes. Sort, or use a dict.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from dora_pipe.config.model import Config, in_flight_batches
from dora_pipe.orchestrator.digest import Leaves
from dora_pipe.orchestrator.estimates import Estimates
from dora_pipe.orchestrator.failures import Failures
from dora_pipe.orchestrator.in_flight import InFlight
from dora_pipe.orchestrator.index import Index, QueueKey
from dora_pipe.orchestrator.rows import Curriculum, RowStats, Weights
from dora_pipe.orchestrator.scoring import Scoring
from dora_pipe.orchestrator.staleness import Finished, Standing
from dora_pipe.orchestrator.watched import Watched
from dora_pipe.schemas.control import DataSet, Resume, TakenGroup, TakenTrajectory
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import GENESIS_CHAIN, NO_VERSION, Fate, GroupSpec, SiblingFate

Phase = Literal["generating", "scoring", "finished", "taken", "ending"]
"""Of an open group: siblings run; all have ended and are scored together; complete and in U; in a
batch; its fate is known, not yet said.

U is exactly the training groups in one of the first three, `UNTAKEN`.
"""

UNTAKEN: Final = ("generating", "scoring", "finished")

Drain = Literal["no", "asked", "told"]


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `run started` says once for the whole run, beside the configuration."""

    run: str
    seed: int
    dataset_digest: str
    dataset_rows: int
    eval_digest: str
    eval_rows: int
    assets_digest: str
    datasets: dict[str, DataSet] = {}
    """Of the sources with a name."""
    scored_together: tuple[str, ...] = ()
    """Sources whose groups are scored together."""


class Request(msgspec.Struct, kw_only=True, gc=False):
    """A sibling that has not ended: queued (`worker` is empty) or placed."""

    group: str
    sibling: int
    attempt: int = 0
    """Of its newest placement; 0 before the first."""
    faults: int = 0
    """Placements that ended in an error or with the loss of the worker; bounded."""
    worker: str = ""
    epoch: int = -1
    resume: Resume | None = None
    moving: tuple[str, int] | None = None
    """The incarnation that shall go on with it; its present worker lets go of it first. Without a
    name, whichever is free: its worker is to sleep."""
    kv: Blob | None = None
    """The KV cache that a move left behind, while it waits for its placement."""
    moves: int = 0
    """How often it was asked to move; bounded."""
    moved_ns: int = 0
    """Round time of the newest of those."""
    began_ns: int = -1
    """Round time of its first placement."""


class Result(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """How a sibling ended; without a trajectory when it failed."""

    taken: TakenTrajectory | None
    reward: float | None
    tokens: int
    scored: bool = False
    """Its reward is of the group's scores, not of its record alone."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group's fate before the decision says so. Example: ``Outcome(fate="filtered", why=...)``"""

    fate: Fate
    why: str
    error: str = ""
    """Of the sibling that decided it, where its fate is `failed`: class and first line."""
    trajectory: str = ""
    """That sibling."""


class Group(msgspec.Struct, kw_only=True, gc=False):
    """An open group and what its siblings have come to, by sibling."""

    spec: GroupSpec
    results: list[Result | None]
    ended: int = 0
    valid: int = 0
    phase: Phase = "generating"
    outcome: Outcome | None = msgspec.field(default=None, name="verdict")

    @property
    def key(self) -> Finished:
        """Its place among the finished groups."""
        return Finished(self.spec.deadline, self.spec.ordinal, self.spec.group)

    def taken(self) -> TakenGroup:
        """The group as a batch lists it, siblings in order."""
        ended = [one for one in self.results if one is not None and one.taken is not None]
        return TakenGroup(
            group=self.spec.group,
            version=self.spec.version,
            deadline=self.spec.deadline,
            trajectories=tuple([one.taken for one in ended if one.taken is not None]),
            rewards={
                one.taken.trajectory: one.reward
                for one in ended
                if one.scored and one.taken is not None and one.reward is not None
            },
        )


KV_PRESSURE: Final = 0.95
"""A worker whose KV cache is fuller than this share gets nothing new and lets requests go."""

OPEN_TIMES: Final = 6
"""A worker has at most so many times its slots and prefetch of requests, however many of them need
no slot: each costs memory, and a worker refuses more than eight times as many."""

OPEN_MAX: Final = 4096
"""Nor more than so many, or twice its slots and prefetch: a task pool takes 8192 calls at once."""


class Worker(msgspec.Struct, kw_only=True, gc=False):
    """One incarnation of a worker: what it shall be (`target`) and what it reported (`hosted`)."""

    name: str
    epoch: int
    slots: int
    prefetch: int
    target: int = -1
    """The version it was assigned; -1: none yet."""
    digest: str = ""
    """Weights digest of its target."""
    target_ns: int = 0
    """Round time at which its target changed last."""
    hosted: int = -1
    """The version it last reported ready."""
    silent: bool = False
    """Its lease has expired; it is fenced next."""
    drain: Drain = "no"
    requests: set[str] = msgspec.field(default_factory=set)
    """Trajectory ids of the open requests placed on it."""
    arriving: int = 0
    """Requests that move here and are not placed yet; they have their room."""
    leaving: int = 0
    """Those of `requests` that move away."""
    moves: bool = False
    """It declared that it can let go of running requests."""
    kv_tokens: int = 0
    """What its KV cache holds."""
    pressed: int = 0
    """Tokens in its KV cache when that was last seen fuller than the threshold; 0: it is not."""
    load_ns: int = 0
    """How long it took to load its version, as it reported."""
    off_engine: int = 0
    """Of `requests`, those that need no slot, as was last observed, less those that have left."""
    elastic: bool = False
    """It shares its GPUs with the trainer in time: see `orchestrator.elastic`."""

    @property
    def loading(self) -> bool:
        """Whether it has not reported its target yet; such a worker is never re-targeted."""
        return self.target != self.hosted

    @property
    def usable(self) -> bool:
        """Whether it may be given anything at all."""
        return not self.silent and self.drain == "no"

    @property
    def present(self) -> int:
        """Requests that it has or shall have, without those that move away."""
        return len(self.requests) - self.leaving + self.arriving

    @property
    def load(self) -> int:
        """Of `present`, those that need a slot."""
        return max(0, len(self.requests) - self.leaving - self.off_engine) + self.arriving

    @property
    def free(self) -> int:
        """Slots that nobody needs, as far as requests may still be placed on it."""
        left = self.most - len(self.requests) - self.arriving
        return max(0, min(self.slots - self.load, left))

    @property
    def room(self) -> int:
        """Requests that may still be placed on it, prefetch included."""
        places = min(self.slots + self.prefetch + self.off_engine, self.most)
        return places - len(self.requests) - self.arriving

    @property
    def most(self) -> int:
        """Requests that may be open on it, whatever they wait for."""
        size = self.slots + self.prefetch
        return max(2 * size, min(OPEN_TIMES * size, OPEN_MAX))

    @property
    def open(self) -> bool:
        """Whether a request may be placed on it."""
        return (  # `usable` in one: a plan asks thousands of times.
            self.target == self.hosted
            and not self.pressed
            and not self.silent
            and self.drain == "no"
            and self.room > 0
        )

    @property
    def awake(self) -> bool:
        """Whether it has weights or requests, or may get some: not so of one that sleeps."""
        return max(self.target, self.hosted) > NO_VERSION

    @property
    def settled(self) -> bool:
        """Whether nothing is under way that it waits for: no load, nobody who arrives."""
        return self.target == self.hosted and not self.arriving


@dataclass(slots=True, kw_only=True)
class Residence:
    """Of one worker that hosts several versions at once."""

    most: int
    """How many; at least 2."""
    held: list[int] = field(default_factory=list)
    """Those that it has, sorted."""


@dataclass(slots=True, kw_only=True)
class Training:
    """The batch that is being trained."""

    step: int
    attempt: int
    digest: str
    """`batch_digest` of the groups."""
    groups: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counters of the whole run; what has left the state is still counted here."""

    dispatched: int = 0
    """Training groups."""
    evaluations: int = 0
    """Evaluation groups."""
    fates: dict[str, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    """Trained groups by staleness."""
    logged: int = 0
    """Trajectories that count."""
    tokens: int = 0
    """Sampled tokens of those."""
    siblings_failed: int = 0
    requeued: int = 0
    moved: int = 0
    """Requests that a worker let go of because they move."""
    superseded: int = 0
    """Trajectory and failure records that are not part of their group's result."""
    fenced: int = 0
    """Records of incarnations that are out."""
    rejected: int = 0
    """Known records that are illegal where they stand; they change nothing else."""
    unknown: int = 0
    """Records of a kind that this version does not know."""
    unreadable: int = 0
    rejection: str = ""
    """Why the newest of the rejected was."""


@dataclass(slots=True, kw_only=True)
class State:
    """Everything; see the rules at the head of this file."""

    facts: Facts | None = None
    """None before `run started`; everything else is illegal until then."""
    config: Config | None = None
    """The frozen keys of `run started`, the logged ones as they are in force."""
    planner: str = ""
    """That of `run started`: whoever goes on with a run cuts its plans where it did."""

    version: int = 0
    """t: the number of committed steps."""
    policies: dict[int, str] = field(default_factory=dict)
    """Weights digest of the newest version and of every version that an open group carries."""
    pins: dict[int, int] = field(default_factory=dict)
    """Open groups per version."""
    training: Training | None = None
    attempt: int = 1
    """Of the next batch decision for step t."""
    in_flight: InFlight | None = None
    """What C follows, where it is automatic, or was."""
    parts: list[tuple[str, ...]] = field(default_factory=list)
    """Groups that the next step has in parts, while its batch is not whole. They are in U, due at
    that step: t, or t + 1 while t is training."""

    groups: dict[str, Group] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    deadlines: dict[int, int] = field(default_factory=dict)
    """U: groups per deadline."""
    finished: list[Finished] = field(default_factory=list)
    """Complete groups of U, sorted."""
    ending: list[str] = field(default_factory=list)
    """Groups whose fate is known and not yet said."""
    queues: dict[int, list[QueueKey]] = field(default_factory=dict)
    """Queued requests per version, sorted; no empty list stays."""
    released: dict[str, None] = field(default_factory=dict)
    """Queued requests whose place is kept on the worker that they move to, in order."""
    scoring: dict[str, Scoring] = field(default_factory=dict)
    """Groups whose siblings are scored together now."""
    surplus: dict[str, SiblingFate] = field(default_factory=dict)
    """Groups that wait for none of their siblings that are still open, and what becomes of those;
    in the order in which that was found. A group leaves when they have ended."""
    workers: dict[str, Worker] = field(default_factory=dict)
    residents: dict[str, Residence] = field(default_factory=dict)
    """What those workers have that host several versions at once, by name."""
    trigger: str = ""
    """Why it has to be looked at anew which worker hosts what; empty when it has been."""
    seen: Estimates = field(default_factory=Estimates)
    """What the planner expects of time."""

    ordinal: int = 0
    """Of the next training group: the prompt cursor."""
    drawn: dict[str, int] = field(default_factory=dict)
    """Training groups per task, where tasks have names: the prompt cursor of each."""
    eval_ordinal: int = 0
    """Of the next evaluation group."""
    evaluated: int = -1
    """The newest version whose evaluation is dispatched in full; of an evaluation without a name.
    """
    evaluations: dict[str, int] = field(default_factory=dict)
    """The same of those that have names."""
    eval_row: int = 0
    """Rows of the evaluation data dispatched for version t, while that is not finished."""

    rows: dict[str, RowStats] = field(default_factory=dict)
    """Reward counters of the rows of tasks that have a curriculum, as `train/math#17`."""
    curricula: dict[str, Curriculum] = field(default_factory=dict)
    """What else is known of those tasks, by source."""
    samplers: dict[str, str] = field(default_factory=dict)
    """sha256 of the sources that rows are drawn with, as the newest orchestrator has them."""
    weights: dict[str, Weights] = field(default_factory=dict)
    """By source, what the next rows are drawn by, once that was asked for; follows from `rows`."""

    watched: Watched | None = None
    """The evaluation that decides which version is the best, if one does and has begun."""

    paused: bool = False
    stop_at: int | None = None
    """A user's stop: the run ends when so many steps are committed, if not before."""
    stop_now: bool = False
    """Evaluations are not waited for either."""
    done: bool = False
    """`stop run` was decided: the log of the run is complete."""
    failures: Failures = field(default_factory=Failures)
    """Training groups that failed lately, and whether the run was halted for it."""

    orchestrator_epoch: int = -1
    trainer_epoch: int = -1
    rounds: int = 0
    """Ordinal of the next round."""
    round_epoch: int = -1
    """Role epoch of the last round."""
    now_ns: int = 0
    """Time of the last round."""
    control_next: int = 0
    """Control records with a smaller offset are folded."""
    counters: Counters = field(default_factory=Counters)
    chain: str = GENESIS_CHAIN
    index: Index = field(default_factory=Index)
    """Follows from the workers and groups; see `orchestrator.index`."""
    leaves: Leaves = field(default_factory=Leaves)
    """What the digest has seen of groups, requests and workers."""

    @property
    def in_parts(self) -> list[str]:
        """The groups of all parts, in order."""
        return [name for part in self.parts for name in part]

    def standing(self) -> Standing:
        """Where the run stands, for the rules of `staleness`."""
        assert self.config is not None
        return Standing(
            version=self.version,
            training=self.training is not None,
            max_staleness=self.config.staleness.max_staleness,
            in_flight_batches=self.in_flight_batches,
            per_step=self.config.groups.per_step,
            steps=self.steps,
        )

    @property
    def in_flight_batches(self) -> float:
        """C in force."""
        assert self.config is not None
        most = in_flight_batches(self.config.staleness)
        return most if self.automatic is None else min(self.automatic.batches, most)

    @property
    def automatic(self) -> InFlight | None:
        """What C follows; None while it is a number of the configuration."""
        assert self.config is not None
        if self.config.staleness.in_flight_batches != "auto":
            return None
        return self.in_flight or InFlight()

    @property
    def interruptible(self) -> bool:
        """Whether running requests go on under new versions."""
        return self.config is not None and self.config.staleness.interruptible

    def may_run(self, spec: GroupSpec, version: int) -> bool:
        """Whether a version may sample for a group: its own, or a later one where it may mix."""
        later = self.interruptible and spec.purpose == "train" and version > spec.version
        return later or version == spec.version

    def queue_of(self, spec: GroupSpec) -> int:
        """In which queue its requests wait: that of the newest version which may run it."""
        return self.version if self.may_run(spec, self.version) else spec.version

    @property
    def steps(self) -> int:
        """The run ends when so many steps are committed."""
        assert self.config is not None
        steps = self.config.run.steps
        return steps if self.stop_at is None else min(steps, self.stop_at)

    def touch(self, worker: Worker) -> None:
        """A worker has joined or has changed in any way."""
        self.index.touch(worker)
        self._touch_leaves(worker)

    def mark(self, worker: Worker) -> None:
        """As `touch`, of what changes rarely: silence, drain, pressure."""
        self.index.mark(worker)
        self._touch_leaves(worker)

    def remove(self, worker: Worker) -> None:
        self._touch_leaves(worker)
        del self.workers[worker.name]
        self.residents.pop(worker.name, None)
        self.index.remove(worker)

    def digest(self) -> str:
        """Return the hex digest; its cost grows with what has changed since the last one."""
        return self.leaves.digest(self)

    def _touch_leaves(self, worker: Worker) -> None:
        self.leaves.touch("worker", worker.name)
        if worker.name in self.residents:
            self.leaves.touch("resident", worker.name)
