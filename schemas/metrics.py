"""Metrics records: periodic, lossy statuses of roles."""

from __future__ import annotations

import msgspec

from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.wire import Unknown, decode_tagged, kebab, kinds_of


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of a role since its imports."""

    total_s: float
    bus_s: float
    """Polling and appending."""
    control_s: float
    """Decisions: `react` without the codec."""
    codec_s: float
    """Encoding and decoding of trajectories and progress."""
    rss_bytes: int


class Blocker(msgspec.Struct, frozen=True, array_like=True):
    """Cause of a wait."""

    kind: str
    """One of `group`, `trajectory`, `worker`, `version`, `step`, `role`, `topic`, `user`."""
    id: str


class Wait(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Wait of a role."""

    name: str
    """Stable name while `description` may change: `batch`, `groups`, `reward`."""
    description: str
    since_ns: int
    """Unix time in ns of the start, by the role's clock."""
    limit_ms: int | None = None
    """Duration above which it is an alarm; None: unlimited."""
    overdue: bool = False
    """Whether it exceeds its limit: the alarm."""
    blocking: bool = False
    """Whether the role is idle until it ends; otherwise work continues."""
    blockers: tuple[Blocker, ...] = ()
    """The first few causes, most urgent first."""
    more: int = 0
    """Number of omitted blockers."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=kebab):
    """Base of metrics records."""

    at_ns: int
    waits: tuple[Wait, ...] = ()
    """Current waits, a blocking one first."""
    cost: Cost

    @property
    def waits_for(self) -> str:
        """Return the blocking wait in words, empty if the role works."""
        return self.waits[0].description if self.waits and self.waits[0].blocking else ""


class UnansweredCall(msgspec.Struct, frozen=True, array_like=True):
    """Unanswered call of an agent."""

    trajectory: str
    call: int
    """Number of the call in its session."""
    since_ns: int
    """Arrival, Unix time in ns."""
    waits_for: str
    """One of `slots`, `tokens`, or another phase of a request."""


class FailingServer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Server of a task, or its local processes, that failed and has not answered since."""

    task: str
    """Task name, or its kind if it is the only task."""
    url: str = ""
    """Empty for local processes."""
    failures: int
    """Consecutive failures."""
    tries: int = 0
    """Processes or connections started there since the first failure."""
    since_ns: int
    """Time of the first failure, Unix ns."""
    suspended: bool = False
    """Whether it gets no requests for now; otherwise one process tries it."""
    reason: str
    """Last error."""


class WorkerStatus(Metrics, frozen=True, kw_only=True, omit_defaults=True):
    """Status of a worker."""

    worker: str
    incarnation: int
    version: int
    """Version that it serves; -1 before the first."""
    active: int
    waiting: int
    kv_used_tokens: int
    tokens_total: int
    """Tokens sampled by this incarnation."""
    progress: dict[str, Resume]
    """Newest progress record of every open request."""
    weights_at: str = ""
    """URL of its weights for other workers."""
    since: bool = False
    """Whether `progress` has only changes since the last status of this incarnation."""
    ended: tuple[str, ...] = ()
    """Requests that left `progress`, sorted; only with `since`."""
    off_engine: int = 0
    """Requests that need no slot, averaged over about a second."""
    in_environment: int = 0
    """Requests waiting for an environment or tool."""
    being_scored: int = 0
    """Requests waiting for a reward."""
    with_agent: int = 0
    """Sessions without a call that needs the engine."""
    calls_open: int = 0
    call_since_ns: int = 0
    """Arrival of the oldest open call, Unix ns; 0 without one."""
    calls_oldest: tuple[UnansweredCall, ...] = ()
    """The oldest few calls, oldest first."""
    calls_before: tuple[int, ...] = ()
    """Requests that get a slot before each of these calls; -1: it needs none.

    Empty if none waits for a slot.
    """

    @property
    def call_open_s(self) -> float:
        """Return the age of the oldest unanswered call in seconds."""
        return max(0.0, (self.at_ns - self.call_since_ns) / 1e9) if self.call_since_ns else 0.0

    prompt_tokens_computed: int = 0
    """Tokens prefilled by this incarnation's engine; 0 if not counted."""
    prompt_tokens_reused: int = 0
    """Prompt tokens served from the prefix cache."""
    failing: tuple[FailingServer, ...] = ()
    """Failing servers of its tasks, at most 8."""


def merged(before: WorkerStatus | None, status: WorkerStatus) -> WorkerStatus:
    """Return a status with complete progress, from the worker's previous merged one.

    Without a previous one of the same incarnation, progress is partial until the next complete
    status.
    """
    if not status.since:
        return status
    earlier = {} if before is None or before.incarnation != status.incarnation else before.progress
    progress = earlier | status.progress
    for name in status.ended:
        progress.pop(name, None)
    return msgspec.structs.replace(status, progress=progress, since=False, ended=())


class TrainerStatus(Metrics, frozen=True, kw_only=True):
    """Status of the trainer."""

    incarnation: int
    step: int
    phase: str
    """Current phase; parts of a batch have a number from 0: `part 2`."""
    cached_records: int
    cached_bytes: int
    weights_at: str = ""
    """URL of its weights for other workers."""


class OrchestratorStatus(Metrics, frozen=True, kw_only=True):
    """Status of the orchestrator."""

    incarnation: int
    version: int
    open_groups: int
    queued_requests: int
    closed_by: str = ""
    """Setting and value that prevent new groups; empty if none."""


AnyMetrics = WorkerStatus | TrainerStatus | OrchestratorStatus

_DECODER = msgspec.json.Decoder(AnyMetrics)
KINDS = kinds_of(AnyMetrics)


def decode_metrics(data: bytes) -> AnyMetrics | Unknown:
    """Return a metrics record; `Unknown` for a later kind. Raises SchemaError."""
    return decode_tagged(data, _DECODER, KINDS)
