"""Metrics records: the periodic status of each role; lossy, never state by themselves."""

from __future__ import annotations

import msgspec

from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.wire import Unknown, decode_tagged, kebab, kinds_of


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of a role since its imports, by what they were spent on."""

    total_s: float
    bus_s: float
    """Polling and appending."""
    control_s: float
    """Deciding: `react` without the codec."""
    codec_s: float
    """Encoding and decoding trajectories and progress."""
    rss_bytes: int


class Blocker(msgspec.Struct, frozen=True, array_like=True):
    """Who or what a wait ends with. Example: ``Blocker("group", "g0000000017")``"""

    kind: str
    """`group`, `trajectory`, `worker`, `version`, `step`, `role`, `topic` or `user`."""
    id: str


class Wait(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that a role waits for."""

    name: str
    """Which wait it is; stays the same while `words` may change: `batch`, `groups`, `reward`."""
    words: str
    since_ns: int
    """The role's wall clock when this wait began."""
    limit_ms: int | None = None
    """A longer wait raises an alarm; None: it may last as long as it likes."""
    overdue: bool = False
    """It is longer than its limit: the alarm."""
    still: bool = False
    """The role does nothing until it ends; the others go on beside its work."""
    blockers: tuple[Blocker, ...] = ()
    """The first few of those that it ends with, most urgent first."""
    more: int = 0
    """Blockers that are left out."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=kebab):
    """Base of the metrics records."""

    at_ns: int
    waits: tuple[Wait, ...] = ()
    """What the role waits for; the one that stops its work, if there is one, comes first."""
    cost: Cost

    @property
    def waits_for(self) -> str:
        """What the role waits for instead of working, in words; empty when it works."""
        return self.waits[0].words if self.waits and self.waits[0].still else ""


class AskedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of an agent that has no answer yet.

    Example: ``AskedCall("g0000000017-003", 4, 1750000000000000000, "slots")``
    """

    trajectory: str
    call: int
    """Its session's own number of it."""
    since_ns: int
    """When it came, wall clock."""
    waits_for: str
    """`slots`, `tokens`, or the words of another phase of a request."""


class FailingPlace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A server of a task, or the task's processes on the worker's machine, that has failed and has
    not answered since.

    Example: ``FailingPlace(task="games", url="tcp://games-1:7000", failures=3, since_ns=...,
    left_alone=True, why="the connection ended")``
    """

    task: str
    """Its name, or its kind where it is the only one."""
    url: str = ""
    """Empty: its processes here."""
    failures: int
    """In a row."""
    tries: int = 0
    """Processes, or connections, that were begun there since the first of them."""
    since_ns: int
    """When the first of them was, wall clock."""
    left_alone: bool = False
    """Nothing is asked of it for now; else it is tried with one process."""
    why: str
    """The last of them."""


class WorkerStatus(Metrics, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker does now."""

    worker: str
    epoch: int
    version: int
    """The version it hosts; -1 before the first."""
    active: int
    waiting: int
    kv_used_tokens: int
    tokens_total: int
    """Tokens sampled by this incarnation."""
    progress: dict[str, Resume]
    """Of every open request that has a progress record; where `since` is true, of those alone that
    have a newer one than the last status of this incarnation said."""
    weights_at: str = ""
    """URL of the weights it hosts, for other workers; empty: nowhere (docs/storage.md)."""
    since: bool = False
    """Whether `progress` is what has changed since the last status; absent: it is whole."""
    ended: tuple[str, ...] = ()
    """With `since`: requests that were in `progress` before and are not any more, sorted."""
    off_engine: int = 0
    """Requests that need no slot, on average over about the last second: a prompt, an environment,
    a reward, the codec or the log is waited for."""
    in_environment: int = 0
    """Requests whose environment or tool is waited for."""
    being_scored: int = 0
    """Requests whose reward is waited for."""
    with_agent: int = 0
    """Sessions none of whose calls needs the engine: their agents think, or do something else."""
    calls_open: int = 0
    """Calls of agents that have no answer yet."""
    call_since_ns: int = 0
    """When the oldest of these came, wall clock; 0 where there is none."""
    calls_oldest: tuple[AskedCall, ...] = ()
    """The oldest few of these, the first first."""
    calls_before: tuple[int, ...] = ()
    """Of each of these, how many requests go into a slot here before it; -1: it has one, or needs
    none yet. Empty: none of them waits for a slot."""

    @property
    def call_open_s(self) -> float:
        """How long the oldest open call has been so, as of this status."""
        return max(0.0, (self.at_ns - self.call_since_ns) / 1e9) if self.call_since_ns else 0.0

    prompt_tokens_computed: int = 0
    """Tokens that the engine of this incarnation has prefilled; 0 where it does not count."""
    prompt_tokens_reused: int = 0
    """Tokens it need not prefill: keys and values of equal beginnings were kept."""
    failing: tuple[FailingPlace, ...] = ()
    """Where its tasks run and do not work; at most 8 of them."""
    episodes_started_again: int = 0
    """Episodes that have lost their environment here and all that was sampled with it."""
    episodes_told_again: int = 0
    """Episodes that go on with another environment, which is told their turns again."""


def merged(before: WorkerStatus | None, status: WorkerStatus) -> WorkerStatus:
    """A status with its progress whole, after the one before it of the same worker, merged itself.

    Without that one, or after another incarnation's, it has what it says by itself: all of it is
    true, and the rest comes with the next whole status.
    """
    if not status.since:
        return status
    known = {} if before is None or before.epoch != status.epoch else before.progress
    progress = known | status.progress
    for name in status.ended:
        progress.pop(name, None)
    return msgspec.structs.replace(status, progress=progress, since=False, ended=())


class TrainerStatus(Metrics, frozen=True, kw_only=True):
    """What the trainer does now."""

    role_epoch: int
    step: int
    phase: str
    """Of a part of a batch with its number, from 0: `part 2`."""
    cached_records: int
    cached_bytes: int
    weights_at: str = ""
    """URL of the newest weights, as in a worker's status."""


class OrchestratorStatus(Metrics, frozen=True, kw_only=True):
    """What the orchestrator does now."""

    role_epoch: int
    version: int
    open_groups: int
    queued_requests: int
    closed_by: str = ""
    """The setting that lets no group be admitted, with its value; empty while one may be."""


AnyMetrics = WorkerStatus | TrainerStatus | OrchestratorStatus

_DECODER = msgspec.json.Decoder(AnyMetrics)
KINDS = kinds_of(AnyMetrics)


def decode_metrics(data: bytes) -> AnyMetrics | Unknown:
    """A metrics record; `Unknown` for a kind of a later version. Raises SchemaError."""
    return decode_tagged(data, _DECODER, KINDS)
