"""Which requests a worker has: by key, by phase, queued by the version they need; and how one that
has no future here is dropped with all it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Final

from dora_pipe.bus.port import Append
from dora_pipe.core.runtime import Now, Outputs, Publish
from dora_pipe.producers.tasks.calls import EpisodeLost, Forget
from dora_pipe.producers.worker.effects import (
    CloseSession,
    DropKv,
    Effect,
    EngineCancel,
)
from dora_pipe.producers.worker.off_engine import OffEngine
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
from dora_pipe.schemas.control import (
    Control,
    LoggedEntry,
    RequestFailed,
    Resume,
    TrajectoriesLogged,
)
from dora_pipe.schemas.metrics import AskedCall
from dora_pipe.schemas.rounds import PlacedRequest
from dora_pipe.schemas.wire import encode

OFF_ENGINE: Final = frozenset(
    {Phase.PROMPTING, Phase.ENVIRONMENT, Phase.REWARDING, Phase.ENCODING, Phase.LOGGING}
)
"""Phases of a request that needs no slot: a task's process, the codec or the log has it. A session
needs none while no call of it does."""

REPORTED_MAX: Final = 1000
"""Trajectories that one control record reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCalls:
    """Calls that have no answer yet, as a status says them."""

    count: int
    oldest: tuple[AskedCall, ...]
    """The first first."""
    before: tuple[int, ...]
    """See `WorkerStatus.calls_before`."""


class RequestTable:
    """The requests of one incarnation; what becomes of them is decided in `requests`.

    They go into slots in the order in which they were placed; one between two turns goes first. The
    calls of a session are requests of their own, which end with it.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.out = Outputs()
        """Everything that is to happen outside."""
        self.counts: Counter[str] = Counter()
        self.versions: frozenset[int] = frozenset()
        """Versions that a request may (again) wait for here."""
        self.by_key: dict[str, RequestState] = {}
        self.now_ns = 0
        """Monotonic; of this turn."""
        self.turn = 0
        """Counts them."""
        self.ended = 0
        """Requests that were here and are not any more."""
        self.logged: dict[tuple[int, str], list[LoggedEntry]] = {}
        """Trajectories that have become durable and are not reported, by version and digest."""
        self._phases: Counter[Phase] = Counter()
        self._generating: Counter[int] = Counter()  # by pin
        self._waiting: dict[int, dict[str, None]] = {}  # by pin: keys in order
        self._returning: dict[int, dict[str, None]] = {}  # likewise, between two turns
        self._handed: dict[str, None] = {}  # to the engine, ahead of a slot
        self._calls = 0
        self.off_engine = OffEngine()

    def begin_turn(self, now_ns: int) -> Outputs:
        """From now on it is so late, and nothing is to happen outside yet."""
        self.now_ns, self.turn, self.out = now_ns, self.turn + 1, Outputs()
        return self.out

    def in_phase(self, *phases: Phase) -> int:
        return sum(self._phases[phase] for phase in phases)

    def generating(self, version: int) -> int:
        """Requests that need this version and no other, and still need it in the engine."""
        return self._generating[version]

    @property
    def placed(self) -> int:
        """Requests that decisions have placed here: all but calls of sessions."""
        return len(self.by_key) - self._calls

    @property
    def thinking(self) -> int:
        """Sessions none of whose calls needs the engine."""
        found = self.by_key.values()
        return sum(one.phase is Phase.AGENT and not self._on_engine(one) for one in found)

    def asked_calls(self, most: int) -> AskedCalls:
        """The calls that somebody waits for."""
        found = [
            (one.call.asked_ns, key, one.place.trajectory, one.call.number)
            for key, one in self.by_key.items()
            if one.call is not None and one.call.number is not None
        ]
        oldest = nsmallest(most, found)
        return AskedCalls(
            count=len(found),
            oldest=tuple(
                AskedCall(trajectory, number, asked_ns, str(self.by_key[key].phase))
                for asked_ns, key, trajectory, number in oldest
            ),
            before=self._before([key for _, key, _, _ in oldest]),
        )

    def _before(self, keys: Sequence[str]) -> tuple[int, ...]:
        """How many requests go into a slot before each of these; -1 for one that waits for none.
        Empty where that is so of all."""
        if all(self.by_key[key].phase is not Phase.WAITING for key in keys):
            return ()
        places = {key: place for place, key in enumerate(self._in_order())}
        return tuple(places.get(key, -1) for key in keys)

    def _in_order(self) -> Iterator[str]:
        """What waits for a slot, as it goes into one; see `next_waiting`."""
        yield from self._handed
        for queues in (self._returning, self._waiting):
            for pin in sorted(queues, key=lambda one: (one == ANY_VERSION, one)):
                yield from queues[pin]

    def progress(self) -> dict[str, Resume]:
        """Newest progress record of every open request that has one."""
        open_ = self.by_key.values()
        return {request.place.trajectory: request.resume for request in open_ if request.resume}

    @property
    def room(self) -> int:
        """Requests that the engine may be handed, for its slots and ahead of them."""
        size = self.setup.slots + self.setup.prefetch
        return size - self._phases[Phase.RUNNING] - len(self._handed)

    def all_generating(self) -> list[RequestState]:
        """Those that still need the engine; calls of sessions go with these."""
        found = self.by_key.values()
        return [one for one in found if one.phase in GENERATING and one.call is None]

    def ask(self, effect: Effect) -> None:
        """Ask a port for something."""
        self.out.effects.append(effect)

    def say(self, key: str, record: Control, *, tag: str = "") -> None:
        """Publish a fact; with a tag its acknowledgement comes back."""
        append = Append(topic=self.setup.topics.control, key=key.encode(), value=encode(record))
        self.out.publish.append(Publish(record=append, tag=tag))

    def report(self, now: Now) -> None:
        """Say in one record, per version, which trajectories have become durable."""
        for (version, digest), entries in self.logged.items():
            for start in range(0, len(entries), REPORTED_MAX):
                part = entries[start : start + REPORTED_MAX]
                record = TrajectoriesLogged(
                    at_ns=now.wall_ns,
                    worker=self.setup.worker,
                    epoch=self.setup.epoch,
                    version=version,
                    digest=digest,
                    trajectories=tuple(part),
                )
                self.say(self.setup.worker, record)
        self.logged.clear()

    @property
    def idle(self) -> bool:
        """Whether no request is here."""
        return not self.by_key

    def insert(self, request: RequestState) -> None:
        """One more request, or call."""
        self.by_key[request.key] = request
        self._calls += request.call is not None
        self._phases[request.phase] += 1
        self._generating[request.pin] += 1
        self._note_phase(request)

    def new_state(self, place: PlacedRequest, now: Now) -> RequestState | None:
        """A request's first state; None, and counted, where it was placed before."""
        if key_of(place.trajectory, place.attempt) in self.by_key:
            self.counts["placed twice"] += 1
            return None
        return state_of(place, self.setup, now)

    def enter(self, request: RequestState, phase: Phase) -> None:
        was = request.phase in GENERATING
        if was != (phase in GENERATING):
            self._count_generating(request, -1 if was else +1)
        self._phases[request.phase] -= 1
        self._phases[phase] += 1
        request.phase, request.since_ns = phase, self.now_ns
        self._note_phase(request)

    def enqueue(self, request: RequestState) -> None:
        """A request is ready for a slot."""
        call = request.call
        between = request.sequence.turns_taken if call is None else not call.first
        queues = self._returning if between else self._waiting
        queues.setdefault(request.pin, {})[request.key] = None

    def next_waiting(self, *versions: int) -> RequestState | None:
        """The request that goes next into an engine which has these versions; it stays queued."""
        # Those that need the version go first: the next one is not loaded before they end.
        pins = (*versions, ANY_VERSION)
        found = (of.get(pin) for of in (self._returning, self._waiting) for pin in pins)
        queue: dict[str, None] = next((one for one in found if one), {})
        if not versions or not queue:
            return None
        request = self.by_key[next(iter(queue))]
        return request if request.own.version <= versions[-1] else None

    def hand(self, request: RequestState) -> None:
        """From the queue to the engine, ahead of a slot."""
        self._dequeue(request)
        self._handed[request.key] = None

    def slot_taken(self, request: RequestState) -> None:
        self._handed.pop(request.key, None)

    # Dropping

    def cancel(self, trajectory: str, attempt: int) -> None:
        """Drop a request, unless it has finished already."""
        request = self.by_key.get(key_of(trajectory, attempt))
        if request is not None and request.phase in UNFINISHED:
            self.abandon(request)
        else:
            self.counts["cancelled too late"] += 1

    def hold_versions(self, now: Now, *versions: int) -> None:
        """From now on only requests of these versions wait here; the others are handed back."""
        self.versions = frozenset(versions)
        if self.versions.issuperset(self._generating.keys() - {ANY_VERSION}):
            return
        for request in self.all_generating():
            if not self.keeps(request):
                self.hand_back(request, now)

    def keeps(self, request: RequestState) -> bool:
        """Whether a request may (again) wait for its version here."""
        return bool(self.versions) if request.pin == ANY_VERSION else request.pin in self.versions

    def hand_back(self, request: RequestState, now: Now) -> None:
        """A request cannot have its version here any more: another worker may."""
        message = f"worker {self.setup.worker} has left version {request.place.spec.version}"
        self.fail(request.place, now, "Retargeted", message, retryable=True)
        self.abandon(request)

    def starts_again(
        self, request: RequestState, event: EpisodeLost, now: Now, allowed: bool
    ) -> bool:
        """Whether a request whose task process died goes on here, with another one, which it may
        do so often and no more (`allowed`); else it has been let go."""
        if not self.keeps(request):
            self.hand_back(request, now)
            return False
        if not allowed:
            self.give_up(request, now, "EpisodeLost", event.message, retryable=True)
        return allowed

    def give_up(
        self, request: RequestState, now: Now, error: str, message: str, *, retryable: bool
    ) -> None:
        """Report a request as failed and drop it."""
        self.fail(request.place, now, error, message, retryable=retryable)
        self.abandon(request)

    def fail(
        self, place: PlacedRequest, now: Now, error: str, message: str, *, retryable: bool
    ) -> None:
        """Report that a request ends here without a trajectory."""
        self.counts["failed"] += 1
        record = RequestFailed(
            at_ns=now.wall_ns,
            worker=self.setup.worker,
            epoch=self.setup.epoch,
            trajectory=place.trajectory,
            attempt=place.attempt,
            error=error,
            message=message,
            retryable=retryable,
        )
        self.say(place.trajectory, record)

    def abandon(self, request: RequestState) -> None:
        """Drop a request with all it holds."""
        self.drop_kv(request)
        self.let_go(request)

    def let_go(self, request: RequestState) -> None:
        """Have no more to do with a request; its KV cache may be somebody else's by now."""
        self.leave_engine(request)
        self.end_session(request)
        if request.episode or request.phase in (Phase.PROMPTING, Phase.REWARDING, Phase.AGENT):
            self.ask(Forget(request=request.key, source=request.source))
        self.gone(request)

    def end_session(self, request: RequestState) -> None:
        """A session that is open takes no more calls, and those that it has are dropped."""
        if request.session is None or request.phase is not Phase.AGENT:
            return
        self.close_session(request)
        for key in list(request.session.open.values()):
            call = self.by_key[key]
            self.leave_engine(call)
            self.gone(call)

    def close_session(self, request: RequestState) -> None:
        """The agent of a session may call no more."""
        self.ask(CloseSession(request=request.key, source=request.source))

    def leave_engine(self, request: RequestState) -> None:
        """Let go of the slot, or of the place in the queue."""
        if request.phase is Phase.RUNNING or request.key in self._handed:
            self.ask(EngineCancel(request=request.key))
        self._handed.pop(request.key, None)
        self._dequeue(request)

    def drop_kv(self, request: RequestState) -> None:
        """Nobody will go on from its KV cache any more."""
        if request.blob is not None:
            self.ask(DropKv(blob=request.blob))
        request.blob = request.kv = None

    def gone(self, request: RequestState) -> None:
        """A request that is in no queue any more has no business here."""
        if request.phase in GENERATING:
            self._count_generating(request, -1)
        self._phases[request.phase] -= 1
        self.off_engine.discard(request.key, self.now_ns)
        del self.by_key[request.key]
        if request.call is None:
            self.ended += 1
            return
        self._calls -= 1
        session = self.by_key[request.call.session]
        session.since_ns = self.now_ns
        if session.session is not None:
            del session.session.open[request.call.name]
        self._note_phase(session)

    def drop_all(self) -> None:
        """Forget everything; nothing more is asked of any port."""
        self.by_key.clear()
        self._phases.clear()
        self._generating.clear()
        self._waiting.clear()
        self._returning.clear()
        self._handed.clear()
        self.off_engine = OffEngine()
        self.logged.clear()
        self._calls = 0

    def _note_phase(self, request: RequestState) -> None:
        if request.call is not None:
            request = self.by_key[request.call.session]
        idle = request.phase is Phase.AGENT and not self._on_engine(request)
        if idle or request.phase in OFF_ENGINE:
            self.off_engine.add(request.key, self.now_ns)
        else:
            self.off_engine.discard(request.key, self.now_ns)

    def _on_engine(self, request: RequestState) -> bool:
        """Whether a call of a session has a slot or waits for one."""
        keys = request.session.open.values() if request.session is not None else ()
        return any(self.by_key[key].phase in GENERATING for key in keys)

    def _dequeue(self, request: RequestState) -> None:
        for queues in (self._returning, self._waiting):
            queue = queues.get(request.pin)
            if queue is not None:
                queue.pop(request.key, None)
                if not queue:
                    del queues[request.pin]

    def _count_generating(self, request: RequestState, one: int) -> None:
        self._generating[request.pin] += one
        if not self._generating[request.pin]:
            del self._generating[request.pin]
