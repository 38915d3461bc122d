"""State of the orchestrator, changed in place only by the fold.

Rules:

1. Only `apply_control`, `apply_decision` and `state_ops` change the state.
2. Call `State.touch` after changing a worker, `leaves.touch` after changing a group or
   request.
3. Groups, requests and workers have `gc=False`, because collecting them takes longer than a round.
   Never let a cycle go through them.
4. Ended groups leave the state; only counters remain.
5. Never depend on the iteration order of a set of strings: it differs between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dora_pipe.config.model import Config, async_batches
from dora_pipe.orchestrator.digest import Leaves
from dora_pipe.orchestrator.entities import (
    Group,
    Request,
    Residence,
    Scoring,
    Training,
    Worker,
)
from dora_pipe.orchestrator.estimates import Estimates
from dora_pipe.orchestrator.failures import Failures
from dora_pipe.orchestrator.in_flight import InFlight
from dora_pipe.orchestrator.index import Index, QueueKey
from dora_pipe.orchestrator.rows import Curriculum, RowStats, Weights
from dora_pipe.orchestrator.staleness import Finished, Standing
from dora_pipe.orchestrator.watched import Watched
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.rounds import GENESIS_CHAIN, GroupSpec, SampleOutcome


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counters of the whole run."""

    outcomes: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    """Illegal records; ignored."""
    rejection: str = ""
    """Why the last one is illegal."""


@dataclass(slots=True, kw_only=True)
class State:
    """State of the orchestrator."""

    started: RunStarted | None = None
    """None before `run started`."""
    config: Config | None = None
    """Configuration in force."""

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
    """Prompt cursor of each task."""
    eval_ordinal: int = 0
    evaluations: dict[str, int] = field(default_factory=dict)
    """Newest version with all groups of an evaluation dispatched, by name."""
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

    def worker_of(self, name: str, incarnation: int) -> Worker | None:
        """Return a worker that still has this incarnation."""
        worker = self.workers.get(name)
        return worker if worker is not None and worker.incarnation == incarnation else None

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
