"""Trainer's half of a phase, with production code.

Batches are derived from record headers instead of decisions.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from dora_pipe.bench.dataplane.process import SILENT_S, WARM, Assemble, Done, Inside
from dora_pipe.bench.dataplane.source import DEADLINE, DIGESTS, number_of, run_started
from dora_pipe.bus.base import BusWrapper, ReaderWrapper
from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.config.model import Bus as Section
from dora_pipe.consumers.learners.learner import Learner
from dora_pipe.consumers.trainer.checks import Known
from dora_pipe.consumers.trainer.effect_handlers import EffectHandlers, HandlersSetup
from dora_pipe.consumers.trainer.effects import BatchFetched, FetchBatch
from dora_pipe.core.errors import BusError, InvariantBroken
from dora_pipe.core.loop.runtime import Meter
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.schemas.control import TakenGroup, TakenTrajectory
from dora_pipe.schemas.rounds import TakeBatch
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.log_location import LogLocation
from dora_pipe.store.store import PolicyStore

POLL_S: Final = 0.05


class _Noted(BusWrapper):
    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.records: list[Record] = []

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        return _NotedReader(self.inner.reader(positions), self.records)


class _NotedReader(ReaderWrapper):
    def __init__(self, inner: Reader, notes: list[Record]) -> None:
        super().__init__(inner)
        self._notes = notes

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        records = super().poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)
        self._notes += records
        return records


class Assembler:
    def __init__(self, task: Assemble, bus: Bus, folder: Path) -> None:
        self._task = task
        self._noted = _Noted(bus)
        topics = Topics(task.run)
        self._work = EffectHandlers(
            HandlersSetup(topics=topics, started=run_started(task.run), starts={}),
            bus=self._noted,
            store=PolicyStore(folder),
            make_learner=_nobody,
            clock=SystemClock(),
            meter=Meter(),
        )
        self._step = 0
        self._heard_s = time.monotonic()
        self.forget()

    def forget(self) -> None:
        self.records = self.bytes = 0
        self.own_s = 0.0
        self.batched_ns: dict[int, int] = {}

    @property
    def come(self) -> int:
        return self.records + len(self._noted.records)

    def read(self) -> None:
        """Read, or wait briefly."""
        moved = self._work.reader.read_ahead(timeout_s=POLL_S)
        now_s = time.monotonic()
        if moved:
            self._heard_s = now_s
        elif now_s - self._heard_s > SILENT_S:
            raise BusError(f"no trajectory came for {SILENT_S:.0f} s")

    def take_all(self, *, rest: bool) -> None:
        """Assemble full batches; with `rest` a smaller last one."""
        notes = self._noted.records
        size = self._task.batch or len(notes)
        while notes and (len(notes) >= size or rest):
            taken, notes[:size] = notes[:size], []
            self._take(taken)

    def close(self) -> None:
        self._work.close()

    def _take(self, records: Sequence[Record]) -> None:
        start_s = time.thread_time()
        effect = _decided(records, self._step, self._task.run)
        self.own_s += time.thread_time() - start_s
        events = list(self._work.run(effect))
        now_ns = time.monotonic_ns()
        start_s = time.thread_time()
        fetched = events[-1]
        if not isinstance(fetched, BatchFetched) or fetched.offenders or len(events) > 1:
            raise InvariantBroken(f"a batch of the benchmark was rejected: {events[-1]}")
        self._count(effect, now_ns)
        self.bytes += sum(len(record.value) for record in records)
        self.own_s += time.thread_time() - start_s

    def _count(self, effect: FetchBatch, now_ns: int) -> None:
        self._step += 1
        for group in effect.decision.groups:
            for trajectory in group.trajectories:
                self.batched_ns[number_of(trajectory.trajectory)] = now_ns
                self.records += 1


def assemble(task: Assemble, inside: Inside) -> Done:
    """Assemble until the total is reached, without warm-up."""
    section = Section(url=task.address)
    log = LogLocation(run="", url=task.address, bus=section, blobs=task.blobs)
    with tempfile.TemporaryDirectory() as folder, closing(log.open()) as bus:
        assembler = Assembler(task, bus, Path(folder))
        while assembler.records < WARM:
            assembler.read()
            assembler.take_all(rest=True)
        assembler.forget()
        start_ns, start_s = inside.ready(listens=True), time.process_time()
        while inside.total is None or assembler.records < inside.total:
            assembler.read()
            assembler.take_all(rest=assembler.come == inside.total)
        done = Done(
            records=assembler.records,
            bytes=assembler.bytes,
            start_ns=start_ns,
            end_ns=max(assembler.batched_ns.values(), default=start_ns),
            cpu_s=time.process_time() - start_s - assembler.own_s,
            moments=[moment for _, moment in sorted(assembler.batched_ns.items())],
        )
        assembler.close()
    return done


def _decided(records: Sequence[Record], step: int, run: str) -> FetchBatch:
    groups: dict[str, list[TakenTrajectory]] = {}
    versions: dict[str, int] = {}
    for record in records:
        headers = dict(record.headers)
        group = headers["group"].decode()
        versions[group] = int(headers["version"])
        groups.setdefault(group, []).append(
            TakenTrajectory(
                trajectory=headers["trajectory"].decode(),
                attempt=int(headers["attempt"]),
                incarnation=int(headers["incarnation"]),
                partition=record.partition,
                offset=record.offset,
                sha256=headers["sha256"].decode(),
            )
        )
    decision = TakeBatch(
        reason="bench",
        step=step,
        attempt=1,
        groups=tuple(
            TakenGroup(
                group=group,
                version=versions[group],
                deadline=DEADLINE,
                trajectories=tuple(trajectories),
            )
            for group, trajectories in groups.items()
        ),
        settings={},
    )
    batch_state = Known(run=run, next_step=step, digests=DIGESTS, partial_rollout=False, trained={})
    return FetchBatch(decision=decision, known=batch_state)


def _nobody() -> Learner:
    raise AssertionError("the bench trains nothing")
