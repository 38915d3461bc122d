"""The requests of a worker: what may be done with one, and what must be kept in step with it.

Which event leads to what stands in `transitions`; this file keeps the queues and counters that
belong to the phases. Everything that is to happen outside is put into `out`.

Rules:

1. A request enters a slot in the order in which it was placed; one between two turns goes first.
2. Of an attempt at most one trajectory is handed to the log. From REWARDING on it counts as
   finished and a cancellation comes too late: it is logged, and the fold decides.
3. Progress records of a request form a chain, so at most one is under way; the offset of the last
   acknowledged one is its `Resume`.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from dora_pipe.bus.port import Append
from dora_pipe.producers.effects import (
    DropKv,
    EncodeProgress,
    EncodeTrajectory,
    EngineAdd,
    EngineCancel,
    Score,
)
from dora_pipe.producers.rows import (
    ANY_VERSION,
    GENERATING,
    NOTHING,
    UNFINISHED,
    Phase,
    Row,
    WorkerSetup,
    engine_request_of,
    key_of,
    logged_of,
    progress_of,
    row_of,
    trajectory_of,
)
from dora_pipe.producers.tasks.calls import Forget, PromptCall
from dora_pipe.runtime import Now, Outputs, Publish
from dora_pipe.schemas.control import (
    Control,
    FinishReason,
    LoggedEntry,
    RequestFailed,
    Resume,
    TrajectoriesLogged,
)
from dora_pipe.schemas.rounds import PlacedRequest
from dora_pipe.schemas.wire import encode

EMIT_EVERY_TOKENS: Final = 32
"""The engine reports a single-turn request's tokens at least so often: what has not been reported
is lost when the worker stops."""

REPORTED_MAX: Final = 1000
"""Trajectories that one control record reports."""


class Requests:
    """All requests of one incarnation."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.out = Outputs()
        self.rows: dict[str, Row] = {}
        self.counts: Counter[str] = Counter()
        self.hosted = NOTHING
        """What the engine has; the machine says so."""
        self.versions: frozenset[int] = frozenset()
        """Versions that a request may (again) wait for here."""
        self.tokens_total = 0
        self.now_ns = 0
        """Monotonic; of this turn."""
        self.left: dict[str, Resume] = {}
        """Progress of requests that were put down because the worker leaves."""
        self._logged: dict[tuple[int, str], list[LoggedEntry]] = {}
        self._phases: Counter[Phase] = Counter()
        self._generating: Counter[int] = Counter()
        self._waiting: dict[int, dict[str, None]] = {}  # by pin: keys in order
        self._returning: dict[str, None] = {}
        self._handed: dict[str, None] = {}  # to the engine, ahead of a slot
        self._grown: dict[str, None] = {}

    # What the machine asks

    def in_phase(self, *phases: Phase) -> int:
        """How many requests are in one of these phases."""
        return sum(self._phases[phase] for phase in phases)

    def generating(self, version: int) -> int:
        """Requests that need this version and no other, and still need it in the engine."""
        return self._generating[version]

    def progress(self) -> dict[str, Resume]:
        """Newest progress record of every open request that has one."""
        return {row.place.trajectory: row.resume for row in self.rows.values() if row.resume}

    # What the machine orders

    def place(self, place: PlacedRequest, now: Now) -> None:
        """Take a request; the same placement twice is one.

        Its prompt is asked for at once, not when a slot is free: a refill must not wait for it.
        """
        key = key_of(place.trajectory, place.attempt)
        if key in self.rows:
            self.counts["placed twice"] += 1
            return
        self.rows[key] = row = row_of(place, self.setup, now)
        self._phases[row.phase] += 1
        self._generating[row.pin] += 1
        self.ask_prompt(row)

    def cancel(self, trajectory: str, attempt: int) -> None:
        """Drop a request, unless it has finished already."""
        row = self.rows.get(key_of(trajectory, attempt))
        if row is not None and row.phase in UNFINISHED:
            self.abandon(row)
        else:
            self.counts["cancelled too late"] += 1

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

    def fill(self, *versions: int) -> None:
        """Hand waiting requests to the engine, which has these versions: for its slots, and ahead.

        Its port refills a slot between two steps, without a turn of the loop.
        """
        room = self.setup.slots + self.setup.prefetch
        room -= self._phases[Phase.RUNNING] + len(self._handed)
        while room > 0:
            # Those that need the version go first: the next one is not loaded before they end.
            waiting = (self._waiting.get(one) for one in (*versions, ANY_VERSION))
            queue = self._returning or next((one for one in waiting if one), {})
            if not versions or not queue or self.rows[next(iter(queue))].own.version > versions[-1]:
                return
            self._hand(self.rows[next(iter(queue))])
            room -= 1

    def hold_versions(self, now: Now, *versions: int) -> None:
        """From now on only requests of these versions wait here; the others are handed back."""
        self.versions = frozenset(versions)
        if self.versions.issuperset(self._generating.keys() - {ANY_VERSION}):
            return
        for row in self._generating_rows():
            if not self.keeps(row):
                self.hand_back(row, now)

    def keeps(self, row: Row) -> bool:
        """Whether a request may (again) wait for its version here."""
        return bool(self.versions) if row.pin == ANY_VERSION else row.pin in self.versions

    def write_progress(self) -> None:
        """Start a progress record of every request that has sampled enough since the last one."""
        for key in self._grown:
            row = self.rows.get(key)
            if row is not None and row.phase is Phase.RUNNING:
                self._chunk(row, self.setup.checkpoint_tokens)
        self._grown.clear()

    def report(self, now: Now) -> None:
        """Say in one record, per version, which trajectories have become durable."""
        for (version, digest), entries in self._logged.items():
            for start in range(0, len(entries), REPORTED_MAX):
                record = TrajectoriesLogged(
                    at_ns=now.wall_ns,
                    worker=self.setup.worker,
                    epoch=self.setup.epoch,
                    version=version,
                    digest=digest,
                    trajectories=tuple(entries[start : start + REPORTED_MAX]),
                )
                self.say(self.setup.worker, record)
        self._logged.clear()

    def leave(self) -> None:
        """Put down what is not finished, running requests with a last progress record."""
        self.versions = frozenset()
        for row in self._generating_rows():
            if row.phase is not Phase.RUNNING or row.episode:
                self._put_down(row)
            else:
                self.out.effects.append(EngineCancel(request=row.key))
                self.enter(row, Phase.LEAVING)
                self.last_chunk(row)

    def drop_all(self) -> None:
        """Forget everything; nothing more is asked of any port."""
        self.rows.clear()
        self._phases.clear()
        self._generating.clear()
        self._waiting.clear()
        self._returning.clear()
        self._handed.clear()
        self._grown.clear()
        self._logged.clear()

    def say(self, key: str, record: Control) -> None:
        """Publish a fact."""
        topic = self.setup.topics.control
        append = Append(topic=topic, key=key.encode(), value=encode(record))
        self.out.publish.append(Publish(record=append))

    # Steps of a request; `transitions` says when

    def enter(self, row: Row, phase: Phase) -> None:
        """Take a request to a phase."""
        was = row.phase in GENERATING
        if was != (phase in GENERATING):
            self._count_generating(row, -1 if was else +1)
        self._phases[row.phase] -= 1
        self._phases[phase] += 1
        row.phase, row.since_ns = phase, self.now_ns

    def ask_prompt(self, row: Row) -> None:
        """A request needs its prompt (again)."""
        spec = row.place.spec
        call = PromptCall(request=row.key, split=spec.purpose, index=spec.index)
        self.out.effects.append(call)

    def wait(self, row: Row) -> None:
        """A request is ready for a slot."""
        self.enter(row, Phase.WAITING)
        if row.sequence.turns_taken:
            self._returning[row.key] = None
        else:
            self._waiting.setdefault(row.pin, {})[row.key] = None

    def run(self, row: Row, at_ns: int, *, imported: bool = False) -> None:
        """A request has its slot."""
        self._handed.pop(row.key, None)
        self.enter(row, Phase.RUNNING)
        row.under(self.hosted)
        row.sequence.start_stay(at_ns, imported=imported)
        row.started_ns = row.started_ns or at_ns

    def ended(self, row: Row, finish: FinishReason, now: Now) -> None:
        """The sequence is complete: ask for its reward."""
        row.finish, row.finished_ns = finish, now.wall_ns
        self.enter(row, Phase.REWARDING)
        spec, sequence = row.place.spec, row.sequence
        self.out.effects.append(
            Score(
                request=row.key,
                split=spec.purpose,
                index=spec.index,
                answer=sequence.answer(),
                turns=sequence.turns(),
            )
        )

    def broken(self, row: Row, error: str, now: Now) -> None:
        """The sequence ended in an error: logged as invalid, without asking for a reward."""
        row.finish, row.finished_ns, row.error = "error", now.wall_ns, error
        row.reward_error = f"not scored: {error}"
        if row.episode:
            self.out.effects.append(Forget(request=row.key))
        self.encode(row)

    def encode(self, row: Row) -> None:
        """All is known: make the record."""
        self.enter(row, Phase.ENCODING)
        trajectory = trajectory_of(row, self.setup)
        self.out.effects.append(EncodeTrajectory(request=row.key, trajectory=trajectory))

    def logged(self, row: Row, offset: int) -> None:
        """Its trajectory is durable: to be reported, and done with."""
        self.counts["logged"] += 1
        spec = row.place.spec
        entries = self._logged.setdefault((spec.version, spec.digest), [])
        entries.append(logged_of(row, offset=offset))
        self.gone(row)

    def grown(self, row: Row) -> None:
        """A request may have enough for a progress record."""
        self._grown[row.key] = None

    def last_chunk(self, row: Row) -> None:
        """A leaving request is put down as soon as all it has sampled is durable."""
        if self.all_durable(row):
            self._put_down(row)

    def all_durable(self, row: Row) -> bool:
        """Whether its progress records hold all that was sampled; if not, the last is begun."""
        return not self._chunk(row, 1) and not row.chunk_open

    def start_again(self, row: Row) -> None:
        """From the prompt on, under the same version and seed."""
        self.let_go(row)
        row.restarts += 1
        row.start_over()
        self.enter(row, Phase.PROMPTING)
        self.ask_prompt(row)

    def give_up(self, row: Row, now: Now, error: str, message: str, *, retryable: bool) -> None:
        """Report a request as failed and drop it."""
        self.fail(row.place, now, error, message, retryable=retryable)
        self.abandon(row)

    def hand_back(self, row: Row, now: Now) -> None:
        """A request cannot have its version here any more: somebody else may."""
        message = f"worker {self.setup.worker} has left version {row.place.spec.version}"
        self.give_up(row, now, "Retargeted", message, retryable=True)

    def abandon(self, row: Row) -> None:
        """Drop a request with all it holds."""
        self.let_go(row)
        self.drop_kv(row)
        if row.episode or row.phase in (Phase.PROMPTING, Phase.REWARDING):
            self.out.effects.append(Forget(request=row.key))
        self.gone(row)

    def drop_kv(self, row: Row) -> None:
        """Nobody will go on from its KV cache any more."""
        if row.blob is not None:
            self.out.effects.append(DropKv(blob=row.blob))
        row.blob = row.kv = None

    def gone(self, row: Row) -> None:
        """A request has no more business here."""
        if row.phase in GENERATING:
            self._count_generating(row, -1)
        self._phases[row.phase] -= 1
        self._grown.pop(row.key, None)
        del self.rows[row.key]

    def _hand(self, row: Row) -> None:
        """Hand a request to the engine."""
        self._unlist(row)
        self._handed[row.key] = None
        emit_every = min(self.setup.checkpoint_tokens, EMIT_EVERY_TOKENS)
        self.out.effects.append(EngineAdd(request=engine_request_of(row, emit_every)))

    def _chunk(self, row: Row, tokens_min: int) -> bool:
        """Start a progress record if none is under way and there is enough to write."""
        if row.chunk_open or row.sequence.sampled_tokens - row.chunk_end < tokens_min:
            return False
        progress = progress_of(row, self.setup)
        row.chunk_open = True
        row.chunk_end += len(progress.token_ids)
        self.out.effects.append(EncodeProgress(request=row.key, progress=progress))
        return True

    def _put_down(self, row: Row) -> None:
        if row.resume is not None:
            self.left[row.place.trajectory] = row.resume
        self.abandon(row)

    def let_go(self, row: Row) -> None:
        """Let go of the slot, or of the place in the queue."""
        if row.phase is Phase.RUNNING or row.key in self._handed:
            self.out.effects.append(EngineCancel(request=row.key))
        self._handed.pop(row.key, None)
        self._unlist(row)

    def _unlist(self, row: Row) -> None:
        self._returning.pop(row.key, None)
        waiting = self._waiting.get(row.pin)
        if waiting is not None:
            waiting.pop(row.key, None)
            if not waiting:
                del self._waiting[row.pin]

    def _count_generating(self, row: Row, one: int) -> None:
        self._generating[row.pin] += one
        if not self._generating[row.pin]:
            del self._generating[row.pin]

    def _generating_rows(self) -> list[Row]:
        return [row for row in self.rows.values() if row.phase in GENERATING]
