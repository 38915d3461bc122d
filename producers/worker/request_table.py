"""Open requests of a worker: by key, by phase, and queued by version."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from typing import Final, TypeVar

from dora_pipe.core.errors import DoraError, reason
from dora_pipe.core.pure.machine import Now, Outputs, Publish
from dora_pipe.core.pure.records import Append
from dora_pipe.producers.tasks.calls import Forget
from dora_pipe.producers.worker.effects import (
    CloseSession,
    DropKv,
    EngineCancel,
    WorkerEffect,
)
from dora_pipe.producers.worker.request import (
    ANY_VERSION,
    GENERATING,
    UNFINISHED,
    Phase,
    RequestState,
    WorkerSetup,
    key_of,
    state_of,
)
from dora_pipe.producers.worker.request_records import progress_of
from dora_pipe.producers.worker.status import OffEngine
from dora_pipe.schemas.control import (
    Control,
    LoggedEntry,
    RequestFailed,
    Resume,
    TrajectoriesLogged,
)
from dora_pipe.schemas.metrics import UnansweredCall
from dora_pipe.schemas.rounds import ScheduledRequest
from dora_pipe.schemas.trajectory_codec import AnyProgress, encode_any_progress
from dora_pipe.schemas.wire import encode

OFF_ENGINE: Final = frozenset({Phase.PROMPTING, Phase.ENVIRONMENT, Phase.REWARDING, Phase.LOGGING})
"""Phases without an engine slot. A session needs none while none of its calls does."""

REPORTED_MAX: Final = 1000

PROGRESS_TAG: Final = "p:"

UNENCODABLE: Final = (
    DoraError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors with which encoding refuses a record: its request fails, not the worker."""

LOG = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnansweredCalls:
    count: int
    oldest: tuple[UnansweredCall, ...]
    """Oldest first."""
    before: tuple[int, ...]
    """See `WorkerStatus.calls_before`."""


class RequestTable:
    """Requests of one incarnation.

    Slots follow the order of placement, with requests between two turns first. Calls of a session
    are separate requests.
    """

    def __init__(self, setup: WorkerSetup, codec: AbstractContextManager[object]) -> None:
        self.setup = setup
        self.codec = codec
        """Meters the time of encoding."""
        self.grown: dict[str, None] = {}
        self.out: Outputs[WorkerEffect] = Outputs()
        self.counts: Counter[str] = Counter()
        self.versions: frozenset[int] = frozenset()
        self.by_key: dict[str, RequestState] = {}
        self.now = Now(mono_ns=0, wall_ns=0)
        self.logged: dict[tuple[int, str], list[LoggedEntry]] = {}
        self._phases: Counter[Phase] = Counter()
        self._generating: Counter[int] = Counter()  # by pin
        self._waiting: dict[int, dict[str, None]] = {}  # by pin: keys in order
        self._returning: dict[int, dict[str, None]] = {}  # same, between two turns
        self._handed: dict[str, None] = {}  # sent to the engine, without a slot yet
        self._calls = 0
        self.off_engine = OffEngine()

    def begin_turn(self, now: Now) -> Outputs[WorkerEffect]:
        self.now, self.out = now, Outputs()
        return self.out

    def in_phase(self, *phases: Phase) -> int:
        return sum(self._phases[phase] for phase in phases)

    def generating(self, version: int) -> int:
        return self._generating[version]

    @property
    def placed(self) -> int:
        return len(self.by_key) - self._calls

    @property
    def thinking_sessions(self) -> int:
        requests = self.by_key.values()
        return sum(
            request.phase is Phase.AGENT and not self._on_engine(request) for request in requests
        )

    def unanswered_calls(self, most: int) -> UnansweredCalls:
        unanswered = [
            (request.call.asked_ns, key, request.place.trajectory, request.call.number)
            for key, request in self.by_key.items()
            if request.call is not None
        ]
        oldest = nsmallest(most, unanswered)
        return UnansweredCalls(
            count=len(unanswered),
            oldest=tuple(
                UnansweredCall(trajectory, number, asked_ns, str(self.by_key[key].phase))
                for asked_ns, key, trajectory, number in oldest
            ),
            before=self._before([key for _, key, _, _ in oldest]),
        )

    def _before(self, keys: Sequence[str]) -> tuple[int, ...]:
        """Return the number of requests queued before each; -1 if not queued, empty if none is."""
        if all(self.by_key[key].phase is not Phase.WAITING for key in keys):
            return ()
        positions = {key: position for position, key in enumerate(self._in_order())}
        return tuple(positions.get(key, -1) for key in keys)

    def _in_order(self) -> Iterator[str]:
        yield from self._handed
        for queues in (self._returning, self._waiting):
            for pin in sorted(queues, key=lambda version: (version == ANY_VERSION, version)):
                yield from queues[pin]

    def progress(self) -> dict[str, Resume]:
        requests = self.by_key.values()
        resumes = {request.place.trajectory: request.chain.resume for request in requests}
        return {trajectory: resume for trajectory, resume in resumes.items() if resume}

    @property
    def room(self) -> int:
        size = self.setup.slots + self.setup.prefetch
        return size - self._phases[Phase.RUNNING] - len(self._handed)

    def all_generating(self) -> list[RequestState]:
        requests = self.by_key.values()
        return [
            request for request in requests if request.phase in GENERATING and request.call is None
        ]

    def ask(self, effect: WorkerEffect) -> None:
        self.out.effects.append(effect)

    def publish_control(self, key: str, record: Control) -> None:
        append = Append(topic=self.setup.topics.control, key=key.encode(), value=encode(record))
        self.out.publish.append(Publish(record=append))

    def report(self, now: Now) -> None:
        for (version, digest), entries in self.logged.items():
            for start in range(0, len(entries), REPORTED_MAX):
                part = entries[start : start + REPORTED_MAX]
                record = TrajectoriesLogged(
                    at_ns=now.wall_ns,
                    worker=self.setup.worker,
                    incarnation=self.setup.incarnation,
                    version=version,
                    digest=digest,
                    trajectories=tuple(part),
                )
                self.publish_control(self.setup.worker, record)
        self.logged.clear()

    @property
    def idle(self) -> bool:
        return not self.by_key

    def insert(self, request: RequestState) -> None:
        self.by_key[request.key] = request
        self._calls += request.call is not None
        self._phases[request.phase] += 1
        self._generating[request.pin] += 1
        self._note_phase(request)

    def new_state(self, scheduled: ScheduledRequest, now: Now) -> RequestState | None:
        """Return the initial state; None if the request was placed before."""
        if key_of(scheduled.trajectory, scheduled.attempt) in self.by_key:
            self.counts["placed twice"] += 1
            return None
        return state_of(scheduled, self.setup, now)

    def enter(self, request: RequestState, phase: Phase) -> None:
        was = request.phase in GENERATING
        if was != (phase in GENERATING):
            self._count_generating(request, -1 if was else +1)
        self._phases[request.phase] -= 1
        self._phases[phase] += 1
        request.phase, request.since_ns = phase, self.now.mono_ns
        self._note_phase(request)

    def enqueue(self, request: RequestState) -> None:
        call = request.call
        between = request.sequence.turns_taken if call is None else not call.first
        queues = self._returning if between else self._waiting
        queues.setdefault(request.pin, {})[request.key] = None

    def next_waiting(self, *versions: int) -> RequestState | None:
        """Return the next request without removing it from its queue."""
        # Pinned requests first: the next version loads after them.
        pins = (*versions, ANY_VERSION)
        waiting = (of.get(pin) for of in (self._returning, self._waiting) for pin in pins)
        queue: dict[str, None] = next((candidate for candidate in waiting if candidate), {})
        if not versions or not queue:
            return None
        request = self.by_key[next(iter(queue))]
        return request if request.own.version <= versions[-1] else None

    def hand(self, request: RequestState) -> None:
        self._dequeue(request)
        self._handed[request.key] = None

    def slot_taken(self, request: RequestState) -> None:
        self._handed.pop(request.key, None)

    # Progress records

    def write_progress(self) -> None:
        """Start progress records of requests with enough new tokens."""
        for key in self.grown:
            request = self.by_key.get(key)
            if request is not None and request.phase is Phase.RUNNING:
                self.begin_chunk(request, self.setup.checkpoint_tokens)
        self.grown.clear()

    def begin_chunk(self, request: RequestState, tokens_min: int) -> bool:
        """Start a progress record unless one is open or tokens are too few."""
        unwritten = request.sequence.sampled_tokens - request.chain.end
        if request.chain.open or unwritten < tokens_min or not request.recorded:
            return False
        progress = progress_of(request, self.setup)
        request.chain.end += sum(progress.loss_mask)
        request.chain.open = True
        self.append_progress(request, progress, request)
        return True

    def all_durable(self, request: RequestState) -> bool:
        """Return whether progress records cover all sampled tokens; if not, start the last one."""
        return not self.begin_chunk(request, 1) and not request.chain.open

    def append_progress(
        self, request: RequestState, progress: AnyProgress, owner: RequestState
    ) -> None:
        """Log a record of `request`; one that breaks its schema fails `owner`."""
        value = self.encoded(owner, partial(encode_any_progress, progress))
        if value is None:
            return
        append = Append(
            topic=self.setup.topics.progress,
            partition=request.place.spec.partition,
            key=request.place.trajectory.encode(),
            value=value,
        )
        self.out.publish.append(Publish(record=append, tag=PROGRESS_TAG + request.key))

    def encoded(self, owner: RequestState, encode: Callable[[], T]) -> T | None:
        """Return a record's encoding; if it is refused, fail `owner` alone and return None."""
        try:
            with self.codec:
                return encode()
        except UNENCODABLE as error:
            LOG.warning("encoding a record of %s failed", owner.key, exc_info=error)
            self.give_up(owner, self.now, "SchemaError", reason(error), retryable=False)
            return None

    # Dropping

    def cancel(self, trajectory: str, attempt: int) -> None:
        request = self.by_key.get(key_of(trajectory, attempt))
        if request is not None and request.phase in UNFINISHED:
            self.abandon(request)
        else:
            self.counts["cancelled too late"] += 1

    def hold_versions(self, now: Now, *versions: int) -> None:
        self.versions = frozenset(versions)
        if self.versions.issuperset(self._generating.keys() - {ANY_VERSION}):
            return
        for request in self.all_generating():
            if not self.keeps(request):
                self.hand_back(request, now)

    def keeps(self, request: RequestState) -> bool:
        return bool(self.versions) if request.pin == ANY_VERSION else request.pin in self.versions

    def hand_back(self, request: RequestState, now: Now) -> None:
        """Fail a request whose version is gone; another worker may take it."""
        message = f"worker {self.setup.worker} has left version {request.place.spec.version}"
        self.fail(request.place, now, "Retargeted", message, retryable=True)
        self.abandon(request)

    def give_up(
        self, request: RequestState, now: Now, error: str, message: str, *, retryable: bool
    ) -> None:
        self.fail(request.place, now, error, message, retryable=retryable)
        self.abandon(request)

    def fail(
        self, scheduled: ScheduledRequest, now: Now, error: str, message: str, *, retryable: bool
    ) -> None:
        self.counts["failed"] += 1
        record = RequestFailed(
            at_ns=now.wall_ns,
            worker=self.setup.worker,
            incarnation=self.setup.incarnation,
            trajectory=scheduled.trajectory,
            attempt=scheduled.attempt,
            error=error,
            message=message,
            retryable=retryable,
        )
        self.publish_control(scheduled.trajectory, record)

    def abandon(self, request: RequestState) -> None:
        self.drop_kv(request)
        self.release(request)

    def release(self, request: RequestState) -> None:
        """Drop a request, except its KV cache, which may have another owner."""
        self.leave_engine(request)
        self.end_session(request)
        if request.episode or request.phase in (Phase.PROMPTING, Phase.REWARDING, Phase.AGENT):
            self.ask(Forget(request=request.key, source=request.source))
        self.remove(request)

    def end_session(self, request: RequestState) -> None:
        if request.session is None or request.phase is not Phase.AGENT:
            return
        self.close_session(request)
        for key in list(request.session.open.values()):
            call = self.by_key[key]
            self.leave_engine(call)
            self.remove(call)

    def close_session(self, request: RequestState) -> None:
        self.ask(CloseSession(request=request.key, source=request.source))

    def leave_engine(self, request: RequestState) -> None:
        if request.phase is Phase.RUNNING or request.key in self._handed:
            self.ask(EngineCancel(request=request.key))
        self._handed.pop(request.key, None)
        self._dequeue(request)

    def drop_kv(self, request: RequestState) -> None:
        if request.cache.blob is not None:
            self.ask(DropKv(blob=request.cache.blob))
        request.cache.blob = request.cache.kv = None

    def remove(self, request: RequestState) -> None:
        if request.phase in GENERATING:
            self._count_generating(request, -1)
        self._phases[request.phase] -= 1
        self.off_engine.discard(request.key, self.now.mono_ns)
        del self.by_key[request.key]
        if request.call is None:
            return
        self._calls -= 1
        session = self.by_key[request.call.session]
        session.since_ns = self.now.mono_ns
        if session.session is not None:
            del session.session.open[request.call.name]
        self._note_phase(session)

    def drop_all(self) -> None:
        self.by_key.clear()
        self._phases.clear()
        self._generating.clear()
        self._waiting.clear()
        self._returning.clear()
        self._handed.clear()
        self.off_engine = OffEngine()
        self.logged.clear()
        self.grown.clear()
        self._calls = 0

    def _note_phase(self, request: RequestState) -> None:
        if request.call is not None:
            request = self.by_key[request.call.session]
        idle = request.phase is Phase.AGENT and not self._on_engine(request)
        if idle or request.phase in OFF_ENGINE:
            self.off_engine.add(request.key, self.now.mono_ns)
        else:
            self.off_engine.discard(request.key, self.now.mono_ns)

    def _on_engine(self, request: RequestState) -> bool:
        keys = request.session.open.values() if request.session is not None else ()
        return any(self.by_key[key].phase in GENERATING for key in keys)

    def _dequeue(self, request: RequestState) -> None:
        for queues in (self._returning, self._waiting):
            queue = queues.get(request.pin)
            if queue is not None:
                queue.pop(request.key, None)
                if not queue:
                    del queues[request.pin]

    def _count_generating(self, request: RequestState, change: int) -> None:
        self._generating[request.pin] += change
        if not self._generating[request.pin]:
            del self._generating[request.pin]
