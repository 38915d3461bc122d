"""State of the orchestrator, changed in place only by the fold.

Rules:

1. Only `apply_control`, `apply_decision` and `state_ops` change the state.
2. Call `State.touch` (or `mark`) after changing a worker, `leaves.touch` after changing a group or
   request.
3. Groups, requests and workers have `gc=False`, because collecting them takes longer than a round.
   Never let a cycle go through them.
4. Ended groups leave the state; only counters remain.
5. Never depend on the iteration order of a set of strings: it differs between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from dora_pipe.config.model import Config, async_batches
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
from dora_pipe.schemas.rounds import GENESIS_CHAIN, NO_VERSION, GroupSpec, Outcome, SampleOutcome

Phase = Literal["generating", "scoring", "finished", "taken", "ending"]
"""Phase of an open group: trajectories run; all ended, scored together; complete and in U; in a
batch; outcome certain, `end` decision pending.

U contains the training groups in the first three phases, `UNTAKEN`.
"""

UNTAKEN: Final = ("generating", "scoring", "finished")

Drain = Literal["no", "asked", "told"]


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constant fields of `run started`."""

    run: str
    seed: int
    dataset_digest: str
    dataset_rows: int
    eval_digest: str
    eval_rows: int
    assets_digest: str
    datasets: dict[str, DataSet] = {}
    scored_together: tuple[str, ...] = ()


class Request(msgspec.Struct, kw_only=True, gc=False):
    """Open trajectory: queued (`worker` is empty) or placed."""

    group: str
    sample: int
    attempt: int = 0
    """0 before the first placement."""
    faults: int = 0
    """Failed placements; bounded."""
    worker: str = ""
    incarnation: int = -1
    resume: Resume | None = None
    moving: tuple[str, int] | None = None
    """Destination of a move; an empty name is any free worker."""
    kv: Blob | None = None
    """KV cache of a move until the next placement."""
    moves: int = 0
    """Moves so far; bounded."""
    moved_ns: int = 0
    """Round time of the newest move."""
    began_ns: int = -1
    """Round time of the first placement."""


class Result(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Result of an ended trajectory; `taken` is empty if it failed."""

    taken: TakenTrajectory | None
    reward: float | None
    tokens: int
    scored: bool = False
    """Whether the reward comes from scoring the group together."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Group outcome before its `end`. Example: ``Verdict(outcome="filtered", why=...)``"""

    outcome: Outcome
    why: str
    error: str = ""
    """Class and first line."""
    trajectory: str = ""
    """Trajectory with that error."""


class Group(msgspec.Struct, kw_only=True, gc=False):
    """Open group with its results by sample index."""

    spec: GroupSpec
    results: list[Result | None]
    ended: int = 0
    valid: int = 0
    phase: Phase = "generating"
    verdict: Verdict | None = None

    @property
    def key(self) -> Finished:
        """Return the sort key among the finished groups."""
        return Finished(self.spec.deadline, self.spec.ordinal, self.spec.group)

    def taken(self) -> TakenGroup:
        """Return the group as a batch lists it, trajectories in order."""
        ended = [
            result for result in self.results if result is not None and result.taken is not None
        ]
        return TakenGroup(
            group=self.spec.group,
            version=self.spec.version,
            deadline=self.spec.deadline,
            trajectories=tuple([result.taken for result in ended if result.taken is not None]),
            rewards={
                result.taken.trajectory: result.reward
                for result in ended
                if result.scored and result.taken is not None and result.reward is not None
            },
        )


KV_PRESSURE: Final = 0.95
"""KV cache usage above which a worker gets no new requests and releases some."""

OPEN_TIMES: Final = 6
"""Maximum open requests as a multiple of slots plus prefetch. Each costs memory; a worker
rejects more than eight times as many."""

OPEN_MAX: Final = 4096
"""Cap of that maximum: a task pool takes 8192 concurrent calls."""


class Worker(msgspec.Struct, kw_only=True, gc=False):
    """Worker incarnation: its assignment (`target`) and last report (`served`)."""

    name: str
    incarnation: int
    slots: int
    prefetch: int
    target: int = -1
    """Assigned version; -1 before the first assignment."""
    digest: str = ""
    target_ns: int = 0
    """Round time of the last target change."""
    served: int = -1
    """Version last reported ready."""
    silent: bool = False
    """Whether the lease has expired."""
    drain: Drain = "no"
    requests: set[str] = msgspec.field(default_factory=set)
    """Ids of its open requests."""
    arriving: int = 0
    """Requests moving here; each reserves room."""
    leaving: int = 0
    """Requests moving away."""
    moves: bool = False
    """Whether it can release running requests."""
    kv_tokens: int = 0
    """Capacity of its KV cache in tokens."""
    pressed: int = 0
    """Tokens when last observed above the threshold; 0 if below."""
    load_ns: int = 0
    """Reported time to load its version."""
    off_engine: int = 0
    """Open requests that need no slot."""
    colocated: bool = False
    """Whether it is colocated with the trainer; see `orchestrator.colocated`."""

    @property
    def loading(self) -> bool:
        """Whether the target is not reported yet; such a worker is never retargeted."""
        return self.target != self.served

    @property
    def usable(self) -> bool:
        """Whether it may get anything."""
        return not self.silent and self.drain == "no"

    @property
    def present(self) -> int:
        """Requests placed or arriving, without those leaving."""
        return len(self.requests) - self.leaving + self.arriving

    @property
    def load(self) -> int:
        """Present requests that need a slot."""
        return max(0, len(self.requests) - self.leaving - self.off_engine) + self.arriving

    @property
    def free(self) -> int:
        """Free slots, at most the remaining open requests."""
        room = self.most - len(self.requests) - self.arriving
        return max(0, min(self.slots - self.load, room))

    @property
    def room(self) -> int:
        """Requests that may still be placed, prefetch included."""
        places = min(self.slots + self.prefetch + self.off_engine, self.most)
        return places - len(self.requests) - self.arriving

    @property
    def most(self) -> int:
        """Maximum open requests."""
        size = self.slots + self.prefetch
        return max(2 * size, min(OPEN_TIMES * size, OPEN_MAX))

    @property
    def open(self) -> bool:
        """Whether a request may be placed here."""
        return (  # Inlines `usable`: a plan asks thousands of times.
            self.target == self.served
            and not self.pressed
            and not self.silent
            and self.drain == "no"
            and self.room > 0
        )

    @property
    def awake(self) -> bool:
        """Whether it has or expects weights."""
        return max(self.target, self.served) > NO_VERSION

    @property
    def settled(self) -> bool:
        """Whether it is neither loading nor expecting requests."""
        return self.target == self.served and not self.arriving


@dataclass(slots=True, kw_only=True)
class Residence:
    """Versions of a worker that hosts several at once."""

    most: int
    """Maximum versions; at least 2."""
    held: list[int] = field(default_factory=list)
    """Versions it holds, sorted."""


@dataclass(slots=True, kw_only=True)
class Training:
    """Batch in training."""

    step: int
    attempt: int
    digest: str
    groups: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counters of the whole run."""

    dispatched: int = 0
    evaluations: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    """Trained groups by staleness."""
    logged: int = 0
    """Logged trajectories."""
    tokens: int = 0
    """Their sampled tokens."""
    samples_failed: int = 0
    requeued: int = 0
    moved: int = 0
    """Requests released for a move."""
    superseded: int = 0
    """Records of trajectories that are not needed."""
    fenced: int = 0
    """Records of old incarnations."""
    rejected: int = 0
    """Illegal records; ignored."""
    unknown: int = 0
    """Records of an unknown kind."""
    unreadable: int = 0
    rejection: str = ""


@dataclass(slots=True, kw_only=True)
class State:
    """State of the orchestrator."""

    facts: Facts | None = None
    """None before `run started`."""
    config: Config | None = None
    """Configuration in force."""
    planner: str = ""
    """Planner of `run started`; later ones keep its plan size."""

    version: int = 0
    """t: number of committed steps."""
    policies: dict[int, str] = field(default_factory=dict)
    """Weights digests of the newest version and those of open groups."""
    pins: dict[int, int] = field(default_factory=dict)
    """Open groups per version."""
    training: Training | None = None
    attempt: int = 1
    in_flight: InFlight | None = None
    """None if the limit was never automatic."""
    parts: list[tuple[str, ...]] = field(default_factory=list)
    """Groups taken in parts for an incomplete batch; they stay in U, due at that step."""

    groups: dict[str, Group] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    deadlines: dict[int, int] = field(default_factory=dict)
    """U: groups per deadline."""
    finished: list[Finished] = field(default_factory=list)
    """Complete groups of U, sorted."""
    ending: list[str] = field(default_factory=list)
    """Groups that wait for their `end` decision."""
    queues: dict[int, list[QueueKey]] = field(default_factory=dict)
    """Queued requests per version, sorted; never empty lists."""
    released: dict[str, None] = field(default_factory=dict)
    """Queued requests with a reserved slot, in order."""
    scoring: dict[str, Scoring] = field(default_factory=dict)
    redundant: dict[str, SampleOutcome] = field(default_factory=dict)
    """Groups whose open trajectories are not needed, with their outcome, in order."""
    workers: dict[str, Worker] = field(default_factory=dict)
    residents: dict[str, Residence] = field(default_factory=dict)
    """By worker."""
    trigger: str = ""
    """Reason to reconsider the serving of versions; empty when done."""
    seen: Estimates = field(default_factory=Estimates)

    ordinal: int = 0
    """Prompt cursor."""
    drawn: dict[str, int] = field(default_factory=dict)
    """Prompt cursor of each named task."""
    eval_ordinal: int = 0
    evaluated: int = -1
    """Newest version with its unnamed evaluation fully dispatched."""
    evaluations: dict[str, int] = field(default_factory=dict)
    """The same per named evaluation."""
    eval_row: int = 0
    """Dispatched evaluation rows of version t."""

    rows: dict[str, RowStats] = field(default_factory=dict)
    """By keys such as `train/math#17`."""
    curricula: dict[str, Curriculum] = field(default_factory=dict)
    """By source."""
    samplers: dict[str, str] = field(default_factory=dict)
    weights: dict[str, Weights] = field(default_factory=dict)
    """Cached weights by source."""

    watched: Watched | None = None

    paused: bool = False
    stop_at: int | None = None
    """Step at which a stop ends the run."""
    stop_now: bool = False
    """Whether the stop skips evaluations too."""
    done: bool = False
    """Whether `stop run` was decided."""
    failures: Failures = field(default_factory=Failures)

    orchestrator_incarnation: int = -1
    trainer_incarnation: int = -1
    rounds: int = 0
    """Ordinal of the next round."""
    round_incarnation: int = -1
    now_ns: int = 0
    control_next: int = 0
    """Next control offset to fold."""
    counters: Counters = field(default_factory=Counters)
    chain: str = GENESIS_CHAIN
    index: Index = field(default_factory=Index)
    """Derived from workers and groups; see `orchestrator.index`."""
    leaves: Leaves = field(default_factory=Leaves)
    """Hashes for the digest."""

    @property
    def in_parts(self) -> list[str]:
        """Return the groups of all parts."""
        return [name for part in self.parts for name in part]

    def standing(self) -> Standing:
        """Return the inputs of the rules in `staleness`."""
        assert self.config is not None
        return Standing(
            version=self.version,
            training=self.training is not None,
            max_staleness=self.config.staleness.max_staleness,
            async_batches=self.async_batches,
            per_step=self.config.rollout.prompts_per_step,
            steps=self.steps,
        )

    @property
    def async_batches(self) -> float:
        """Batches in flight currently allowed."""
        assert self.config is not None
        most = async_batches(self.config.staleness)
        return most if self.automatic is None else min(self.automatic.batches, most)

    @property
    def automatic(self) -> InFlight | None:
        """Return the automatic in-flight limit; None if the configuration sets a number."""
        assert self.config is not None
        if self.config.staleness.async_batches != "auto":
            return None
        return self.in_flight or InFlight()

    @property
    def partial_rollout(self) -> bool:
        """Whether running requests continue under new versions."""
        return self.config is not None and self.config.staleness.partial_rollout

    def may_run(self, spec: GroupSpec, version: int) -> bool:
        """Report whether a version may sample for a group: its own, or with partial rollout a
        later one."""
        later = self.partial_rollout and spec.purpose == "train" and version > spec.version
        return later or version == spec.version

    def queue_of(self, spec: GroupSpec) -> int:
        """Return the newest version that may run a group's requests."""
        return self.version if self.may_run(spec, self.version) else spec.version

    @property
    def steps(self) -> int:
        """Steps after which the run ends."""
        assert self.config is not None
        steps = self.config.run.steps
        return steps if self.stop_at is None else min(steps, self.stop_at)

    def touch(self, worker: Worker) -> None:
        """Record that a worker joined or changed."""
        self.index.touch(worker)
        self._touch_leaves(worker)

    def mark(self, worker: Worker) -> None:
        """Like `touch`, for silence, drain and pressure."""
        self.index.mark(worker)
        self._touch_leaves(worker)

    def remove(self, worker: Worker) -> None:
        self._touch_leaves(worker)
        del self.workers[worker.name]
        self.residents.pop(worker.name, None)
        self.index.remove(worker)

    def digest(self) -> str:
        """Return the hex digest; the cost grows with the changes."""
        return self.leaves.digest(self)

    def _touch_leaves(self, worker: Worker) -> None:
        self.leaves.touch("worker", worker.name)
        if worker.name in self.residents:
            self.leaves.touch("resident", worker.name)
