"""The rollout worker without IO: obeys decisions meant for its own incarnation, and checks them.

It reads the decisions topic and nothing else, from a position taken before it joined: whatever was
decided about this incarnation lies behind it. It hosts one version and has a target. While the two
differ, requests of the hosted version that it already has are finished (a decision may take them
away), then the target is loaded; requests of the target wait for it. Any other version is refused.

Three ways out. Drained: nothing more is taken, what is here is finished, then `worker left`. Asked
to stop: running requests get a last progress record, finished ones are still logged, then
`worker left` says how far each had come. Fenced: everything is dropped, nothing is published any
more under this epoch, the loop ends; the role joins again under a new epoch, if nobody else has
taken its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from dora_pipe.bus.port import Append, Record, TopicPartition
from dora_pipe.producers.effects import DropWeights, LoadFailed, LoadWeights
from dora_pipe.producers.engines.port import WeightsLoaded
from dora_pipe.producers.interrupts import reloaded
from dora_pipe.producers.moves import move
from dora_pipe.producers.requests import Requests
from dora_pipe.producers.residents import Residents
from dora_pipe.producers.rows import (
    ANY_VERSION,
    NOTHING,
    WAITING_PHASES,
    Hosted,
    Phase,
    WorkerSetup,
    pin_of,
)
from dora_pipe.producers.transitions import PROGRESS_TAG, REQUEST_EVENTS, take, take_published
from dora_pipe.producers.waits import Situation, waits
from dora_pipe.runtime import BUS_TURN_NS, CaughtUp, Now, Outputs, Publish, Published, StopAsked
from dora_pipe.schemas.control import WorkerLeft, WorkerReady
from dora_pipe.schemas.metrics import Cost, WorkerStatus
from dora_pipe.schemas.rounds import (
    Assign,
    Cancel,
    Drain,
    Fence,
    Move,
    Place,
    PlacedRequest,
    StopRun,
    Succession,
)
from dora_pipe.schemas.wire import encode
from dora_pipe.transfers.port import weights_url
from dora_pipe.waiting import Found, WaitBook

Outcome = Literal["running", "left", "fenced", "replaced", "failed"]
"""`replaced`: a decision names a later incarnation of this worker's name."""

PROGRESS_STATUS_NS: Final = BUS_TURN_NS
"""A status follows an acknowledged progress record at once, but so long after the last one: what it
names is what a lost request goes on from."""


class WorkerMachine:
    """One incarnation of a rollout worker.

    Example: ``Runtime(WorkerMachine(setup, cost=meter.cost, kv_used=...), ...).run(stop)``;
    afterwards `outcome` and `error` say how it ended.
    """

    def __init__(
        self, setup: WorkerSetup, *, cost: Callable[[], Cost], kv_used: Callable[[], int]
    ) -> None:
        self.setup = setup
        self.requests = Requests(setup)
        self.hosted = NOTHING
        self.target = NOTHING
        self.loading: Hosted | None = None
        self.residents = Residents(setup.versions_resident)
        self.outcome: Outcome = "running"
        self.error = ""
        self.error_here = False
        """What went wrong is of this process or machine; see `LoadFailed`."""
        self.run_over = False
        self._cost = cost
        self._kv_used = kv_used
        self._draining = ""
        self._leaving = ""
        self._leave_by_ns = 0
        self._status_ns = 0
        self._said_ns = -PROGRESS_STATUS_NS
        self._waits = WaitBook(setup.worker, setup.limits)
        self._loading_ns = 0
        self._tokens = (0, 0)  # how many, and when there were fewer, or nothing to sample
        self._succession = Succession()

    @property
    def finished(self) -> bool:
        """Whether this incarnation is over."""
        return self.outcome != "running"

    def positions(self) -> Mapping[TopicPartition, int]:
        """The decisions, from before this incarnation joined."""
        decisions = TopicPartition(self.setup.topics.decisions, 0)
        return {decisions: self.setup.decisions_from}

    def wake_at(self) -> int:
        """When the next status is due, or the end of patience while leaving."""
        if self._leaving:
            return min(self._status_ns, self._leave_by_ns)
        return self._status_ns

    def react(self, inputs: Sequence[Any], now: Now) -> Outputs:
        """Take the inputs in order, then start whatever has become possible."""
        out = self.requests.out = Outputs()
        self.requests.now_ns = now.mono_ns
        for one in inputs:
            if not self.finished:
                _INPUTS[type(one)](self, one, now)
        if not self.finished:
            self._go_on(now)
        if self.outcome in ("fenced", "replaced"):
            self.requests.drop_all()
            return Outputs()
        return out

    def waits(self, now_ns: int) -> list[Found]:
        """What it waits for at this monotonic time."""
        at = Situation(
            hosted=self.hosted.version,
            loading=self.loading.version if self.loading else None,
            loading_ns=self._loading_ns,
            tokens_ns=self._tokens[1],
            now_ns=now_ns,
            heartbeat_ns=self.setup.heartbeat_ns,
        )
        return waits(self.requests.rows.values(), at)

    # Inputs

    def _on_record(self, record: Record, now: Now) -> None:
        """A round. Raises SchemaError, InvariantBroken: what was decided must not be skipped."""
        round_ = self._succession.read(record.offset, record.value)
        if round_ is None:
            self.requests.counts["rounds of an older orchestrator"] += 1
            return
        for decision in round_.decisions:
            obey = _DECISIONS.get(type(decision))
            if obey is not None and not self.finished:
                obey(self, decision, now)

    def _on_published(self, event: Published, now: Now) -> None:
        take_published(self.requests, event, now)
        if event.tag.startswith(PROGRESS_TAG):
            self._status_ns = min(self._status_ns, self._said_ns + PROGRESS_STATUS_NS)

    def _on_request_event(self, event: Any, now: Now) -> None:
        take(self.requests, event, now)

    def _on_loaded(self, event: WeightsLoaded, now: Now) -> None:
        if self.loading is None or event.version != self.loading.version:
            self.requests.counts["refused"] += 1
            return
        self.hosted, self.loading = self.loading, None
        if self.residents.several:
            self.residents.loaded(self.hosted)
        else:
            reloaded(self.requests, self.hosted, now)
        self._ready(event.load_ms, now)

    def _on_load_failed(self, event: LoadFailed, now: Now) -> None:
        self.loading = None
        self.error = f"worker {self.setup.worker} cannot host version {event.version}: "
        self.error += event.message
        self.error_here = event.here
        self._leave(self.error, now)

    def _on_stop_asked(self, event: StopAsked, now: Now) -> None:
        self._leave("its process was asked to stop", now)

    def _on_caught_up(self, event: CaughtUp, now: Now) -> None:
        """Nothing depends on it: what concerns this incarnation was decided after it joined."""

    # Decisions

    def _mine(self, decision: Assign | Cancel | Drain | Fence | Move | Place) -> bool:
        """Whether it is meant for this incarnation; a later one means that this is replaced."""
        if decision.worker != self.setup.worker:
            return False
        if decision.epoch > self.setup.epoch:
            self.outcome = "replaced"
        elif decision.epoch < self.setup.epoch:
            self.requests.counts["decisions for an earlier epoch"] += 1
        return decision.epoch == self.setup.epoch

    def _on_place(self, place: Place, now: Now) -> None:
        if place.worker != self.setup.worker:
            return
        mine = self._mine(place)
        if self.finished or (mine and (self._leaving or self._draining)):
            return  # `worker left` hands them back, with all others
        for request in place.requests():
            refusal = self._refusal(request)
            if refusal is None:
                self.requests.place(request, now)
            else:
                error, message, retryable = refusal
                self.requests.fail(request, now, error, message, retryable=retryable)

    def _refusal(self, place: PlacedRequest) -> tuple[str, str, bool] | None:
        """(error, message, retryable) of what cannot be taken."""
        setup, spec = self.setup, place.spec
        where = f"{place.trajectory} was placed on worker {setup.worker}"
        if place.epoch != setup.epoch:
            why = f"{where} under role epoch {place.epoch}, which ended: this is {setup.epoch}"
            return "EarlierEpoch", why, True
        if spec.dataset_digest != setup.digests[spec.purpose]:
            mine = setup.digests[spec.purpose][:12]
            why = f"{where} with data set {spec.dataset_digest[:12]}, which has {mine}"
            return "OtherDataset", why, False
        mixes = pin_of(place, setup) == ANY_VERSION and spec.version < self.target.version
        has = self.residents.has(spec.version, spec.digest)
        if not (mixes or has) and Hosted(spec.version, spec.digest) != self.target:
            why = f"{where} under version {spec.version} ({spec.digest[:12]}), "
            why += f"whose target is {self.target.version} ({self.target.digest[:12]})"
            return "OtherVersion", why, True
        if len(self.requests.rows) >= setup.requests_max:
            return "TooMany", f"{where}, which holds {setup.requests_max} requests already", True
        return None

    def _on_cancel(self, cancel: Cancel, now: Now) -> None:
        if self._mine(cancel):
            self.requests.cancel(cancel.trajectory, cancel.attempt)

    def _on_move(self, decision: Move, now: Now) -> None:
        if self._mine(decision):
            move(self.requests, decision.trajectory, decision.attempt, now)

    def _on_assign(self, assign: Assign, now: Now) -> None:
        if not self._mine(assign) or self._leaving or self._draining:
            return
        self.target = Hosted(assign.version, assign.digest)
        dropped = self.residents.drop(assign.drop)
        self.requests.hold_versions(now, *self._versions())
        if dropped:
            self.requests.out.effects.append(DropWeights(versions=dropped))
        if self.residents.has(assign.version, assign.digest):
            self.hosted = self.target
        if self.target == self.hosted and self.loading is None:
            self._ready(0.0, now)

    def _on_drain(self, drain: Drain, now: Now) -> None:
        if self._mine(drain):
            self._draining = self._draining or f"drained: {drain.reason}"

    def _on_fence(self, fence: Fence, now: Now) -> None:
        if self._mine(fence):
            self.outcome = "fenced"

    def _on_stop_run(self, stop: StopRun, now: Now) -> None:
        self.run_over = True
        self._leaving = self._leaving or f"the run stopped: {stop.reason}"
        self._left(now)

    # What follows

    def _go_on(self, now: Now) -> None:
        requests = self.requests
        requests.report(now)
        requests.write_progress()
        late = self._leaving and now.mono_ns >= self._leave_by_ns
        if late or ((self._leaving or self._draining) and not requests.rows):
            self._left(now)
            return
        if self.loading is None and not self._leaving:
            if self.residents.several:
                requests.fill(*self.residents.versions)
                busy = self.hosted == self.target
            else:
                busy = self.hosted == self.target or requests.generating(self.hosted.version) > 0
                if busy:
                    requests.fill(self.hosted.version)
            if not busy:
                self._load(now)
        if now.mono_ns >= self._status_ns:
            self._said_ns = now.mono_ns
            self._status_ns = now.mono_ns + self.setup.heartbeat_ns
            self._status(now)

    def _versions(self) -> list[int]:
        """Those that requests may wait for here."""
        others = self.residents.versions if self.residents.several else [self.hosted.version]
        return [*others, self.target.version]

    def _load(self, now: Now) -> None:
        self.loading, self._loading_ns = self.target, now.mono_ns
        effect = LoadWeights(
            version=self.target.version,
            digest=self.target.digest,
            keep=self.setup.interruptible,
        )
        self.requests.out.effects.append(effect)

    def _ready(self, load_ms: float, now: Now) -> None:
        """The hosted version may be the target, or one that was replaced while it was loaded."""
        hosted = self.hosted
        self.requests.hold_versions(now, *self._versions())
        record = WorkerReady(
            at_ns=now.wall_ns,
            worker=self.setup.worker,
            epoch=self.setup.epoch,
            version=hosted.version,
            digest=hosted.digest,
            load_ms=load_ms,
        )
        self._publish(self.setup.topics.control, record)

    def _leave(self, reason: str, now: Now) -> None:
        if self._leaving:
            return
        self._leaving = reason
        self._leave_by_ns = now.mono_ns + self.setup.stop_timeout_ns
        self.requests.leave()

    def _left(self, now: Now) -> None:
        requests = self.requests
        record = WorkerLeft(
            at_ns=now.wall_ns,
            worker=self.setup.worker,
            epoch=self.setup.epoch,
            reason=self._leaving or self._draining,
            progress={**requests.left, **requests.progress()},
        )
        self._publish(self.setup.topics.control, record)
        self.outcome = "failed" if self.error else "left"
        requests.drop_all()

    def _status(self, now: Now) -> None:
        requests = self.requests
        if requests.tokens_total != self._tokens[0] or not requests.in_phase(Phase.RUNNING):
            self._tokens = (requests.tokens_total, now.mono_ns)
        found = self.waits(now.mono_ns)
        status = WorkerStatus(
            at_ns=now.wall_ns,
            waits=self._waits.take(found, mono_ns=now.mono_ns, wall_ns=now.wall_ns),
            cost=self._cost(),
            worker=self.setup.worker,
            epoch=self.setup.epoch,
            version=self.hosted.version,
            active=requests.in_phase(Phase.RUNNING),
            waiting=requests.in_phase(*WAITING_PHASES),
            kv_used_tokens=self._kv_used(),
            tokens_total=requests.tokens_total,
            progress=requests.progress(),
            weights_at=weights_url(self.setup.transfers, self.hosted.digest),
        )
        self._publish(self.setup.topics.metrics, status)

    def _publish(self, topic: str, record: msgspec.Struct) -> None:
        append = Append(topic=topic, key=self.setup.worker.encode(), value=encode(record))
        self.requests.out.publish.append(Publish(record=append))


_INPUTS: Final[dict[type, Callable[[WorkerMachine, Any, Now], None]]] = {
    Record: WorkerMachine._on_record,
    Published: WorkerMachine._on_published,
    WeightsLoaded: WorkerMachine._on_loaded,
    LoadFailed: WorkerMachine._on_load_failed,
    StopAsked: WorkerMachine._on_stop_asked,
    CaughtUp: WorkerMachine._on_caught_up,
    **{kind: WorkerMachine._on_request_event for kind in REQUEST_EVENTS},
}

_DECISIONS: Final[dict[type, Callable[[WorkerMachine, Any, Now], None]]] = {
    Place: WorkerMachine._on_place,
    Cancel: WorkerMachine._on_cancel,
    Move: WorkerMachine._on_move,
    Assign: WorkerMachine._on_assign,
    Drain: WorkerMachine._on_drain,
    Fence: WorkerMachine._on_fence,
    StopRun: WorkerMachine._on_stop_run,
}
"""Every other decision is somebody else's."""
