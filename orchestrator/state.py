"""What the orchestrator knows: one tree, changed in place by the fold alone; it decides nothing.

Rules:

1. State changes only in `orchestrator.rules_*` and `orchestrator.transitions`, driven by `fold`.
   The planner applies its decisions through the same functions.
2. States compare by digest: sha256 of the canonical JSON of everything but the chain, the frozen
   keys, and the index, which follows from the rest.
3. Whoever changes a worker, or what it has, calls `index.touch` (or, where rare, `mark`).
4. Groups that have ended leave; counters stay. The size depends on what is open, not on how long
   the run is.

Warning: nothing here may depend on the order in which a set of strings iterates: that order
differs between processes. Sort, or use a dict.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

import msgspec

from dora_pipe.config.model import Config, in_flight_batches
from dora_pipe.orchestrator.estimates import Estimates
from dora_pipe.orchestrator.index import Index
from dora_pipe.orchestrator.queues import QueueKey
from dora_pipe.orchestrator.residents import Residence
from dora_pipe.orchestrator.settings import logged_keys
from dora_pipe.orchestrator.staleness import Finished, Standing
from dora_pipe.schemas.control import Resume, TakenGroup, TakenTrajectory
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import GENESIS_CHAIN, Fate, GroupSpec
from dora_pipe.schemas.wire import canonical, sha256_hex

Phase = Literal["generating", "finished", "taken", "ending"]
"""Of an open group: siblings run; complete and in U; in a batch; its fate is known, not yet said.

U is exactly the training groups that are generating or finished.
"""

Drain = Literal["no", "asked", "told"]

STATE_FORM: Final = "1"
"""What a digest covers, by name: another form with every field that comes or goes, so that a later
version can go on with a log whose digests it cannot make again."""

RESIDENT_FORM: Final = "2"
"""Of a state in which workers host several versions at once: with `residents`."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What `run started` says once for the whole run, beside the configuration."""

    run: str
    seed: int
    dataset_digest: str
    dataset_rows: int
    eval_digest: str
    eval_rows: int
    assets_digest: str


@dataclass(slots=True, kw_only=True)
class Request:
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
    """The incarnation that shall go on with it; its present worker lets go of it first."""
    kv: Blob | None = None
    """The KV cache that a move left behind, while it waits for its placement."""
    moves: int = 0
    """How often it was asked to move; bounded."""
    moved_ns: int = 0
    """Round time of the newest of those."""
    began_ns: int = -1
    """Round time of its first placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a sibling ended; without a trajectory when it failed."""

    taken: TakenTrajectory | None
    reward: float | None
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A group's fate before the decision says so. Example: ``Verdict(fate="filtered", why=...)``"""

    fate: Fate
    why: str


@dataclass(slots=True, kw_only=True)
class Group:
    """An open group and what its siblings have come to, by sibling."""

    spec: GroupSpec
    results: list[Result | None]
    ended: int = 0
    valid: int = 0
    phase: Phase = "generating"
    verdict: Verdict | None = None

    @property
    def key(self) -> Finished:
        """Its place among the finished groups."""
        return Finished(self.spec.deadline, self.spec.ordinal, self.spec.group)

    def taken(self) -> TakenGroup:
        """The group as a batch lists it, siblings in order."""
        found = [result.taken for result in self.results if result is not None]
        return TakenGroup(
            group=self.spec.group,
            version=self.spec.version,
            deadline=self.spec.deadline,
            trajectories=tuple(one for one in found if one is not None),
        )


@dataclass(slots=True, kw_only=True)
class Worker:
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
    requests: set[str] = field(default_factory=set)
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

    @property
    def loading(self) -> bool:
        """Whether it has not reported its target yet; such a worker is never re-targeted."""
        return self.target != self.hosted

    @property
    def usable(self) -> bool:
        """Whether it may be given anything at all."""
        return not self.silent and self.drain == "no"

    @property
    def load(self) -> int:
        """Requests that it has or shall have, without those that move away."""
        return len(self.requests) - self.leaving + self.arriving

    @property
    def room(self) -> int:
        """Requests that may still be placed on it, prefetch included."""
        return self.slots + self.prefetch - len(self.requests) - self.arriving

    @property
    def open(self) -> bool:
        """Whether a request may be placed on it."""
        return self.target == self.hosted and not self.pressed and self.usable and self.room > 0

    @property
    def settled(self) -> bool:
        """Whether nothing is under way that it waits for: no load, nobody who arrives."""
        return self.target == self.hosted and not self.arriving


@dataclass(slots=True, kw_only=True)
class Training:
    """The batch that is being trained."""

    step: int
    attempt: int
    digest: str
    """`batch_digest` of the groups."""
    groups: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Tally:
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

    version: int = 0
    """t: the number of committed steps."""
    policies: dict[int, str] = field(default_factory=dict)
    """Weights digest of the newest version and of every version that an open group carries."""
    pins: dict[int, int] = field(default_factory=dict)
    """Open groups per version."""
    training: Training | None = None
    attempt: int = 1
    """Of the next batch decision for step t."""

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
    workers: dict[str, Worker] = field(default_factory=dict)
    residents: dict[str, Residence] = field(default_factory=dict)
    """What those workers have that host several versions at once, by name."""
    trigger: str = ""
    """Why it has to be looked at anew which worker hosts what; empty when it has been."""
    seen: Estimates = field(default_factory=Estimates)
    """What the planner expects of time."""

    ordinal: int = 0
    """Of the next training group: the prompt cursor."""
    eval_ordinal: int = 0
    """Of the next evaluation group."""
    evaluated: int = -1
    """The newest version whose evaluation is dispatched in full."""
    eval_row: int = 0
    """Rows of the evaluation data dispatched for version t, while that is not finished."""

    paused: bool = False
    stop_at: int | None = None
    """A user's stop: the run ends when so many steps are committed, if not before."""
    stop_now: bool = False
    """Evaluations are not waited for either."""
    done: bool = False
    """`stop run` was decided: the log of the run is complete."""

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
    tally: Tally = field(default_factory=Tally)
    chain: str = GENESIS_CHAIN
    index: Index = field(default_factory=Index)
    """Follows from the workers; see `orchestrator.index`."""

    def standing(self) -> Standing:
        """Where the run stands, for the rules of `staleness`."""
        assert self.config is not None
        return Standing(
            version=self.version,
            training=self.training is not None,
            max_staleness=self.config.staleness.max_staleness,
            in_flight_batches=in_flight_batches(self.config.staleness),
            per_step=self.config.groups.per_step,
            steps=self.steps,
        )

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

    def digest(self) -> str:
        """Form and hex digest of everything but chain, index and the keys that no run changes."""
        left_out = {"chain", "index"} | (set() if self.residents else {"residents"})
        names = [one.name for one in fields(self) if one.name not in left_out]
        plain = {name: getattr(self, name) for name in names}
        form = RESIDENT_FORM if self.residents else STATE_FORM
        return f"{form}:{sha256_hex(canonical(_plain(plain)))}"


def is_comparable(digest: str) -> bool:
    """Whether a recorded digest covers what the digests of this version cover."""
    return digest.partition(":")[0] in (STATE_FORM, RESIDENT_FORM)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Maps keyed by a number become sorted pairs: canonical JSON has no such maps."""
    state["config"] = state["config"] and logged_keys(state["config"])
    for name in ("policies", "pins", "deadlines", "queues"):
        state[name] = sorted(state[name].items())
    tally: Tally = state["tally"]
    counters = {one.name: getattr(tally, one.name) for one in fields(tally)}
    state["tally"] = counters | {"staleness": sorted(tally.staleness.items())}
    return state
