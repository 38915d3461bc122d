"""Runs of real processes whose requests move because a worker drains."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from pathlib import Path
from typing import TypeVar

from dora_pipe.bus.base import records_of
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.launch.run_dir import opened
from dora_pipe.schemas.control import Command, WorkerJoined
from dora_pipe.schemas.metrics import WorkerStatus, decode_metrics, merged
from dora_pipe.schemas.rounds import AnyDecision, Migrate, decode_round
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import encode
from tests.support.user_run import WAIT_S, facts, start, until

T = TypeVar("T")
DRAINED = "w1"
TOKENS = 480
LONG = (
    "run.steps=4",
    "workers.count=3",
    "workers.max_num_seqs=8",
    "workers.max_model_len=512",
    "workers.checkpoint_tokens=16",
    f"sampling.max_tokens={TOKENS}",
    "rollout.prompts_per_step=5",
    "staleness.max_staleness=0",  # one version at a time: other workers have slots
    "evaluation.prompts=0",
)
WORDS = [word for change in LONG for word in ("-o", change)]


def of(path: Path, kind: type[T]) -> list[T]:
    return [fact for fact in facts(path, "tiny") if isinstance(fact, kind)]


def moves(path: Path) -> list[Migrate]:
    with opened(str(path / "runs" / "tiny")) as run:
        tp = TopicPartition(run.topics.decisions, 0)
        rounds = [
            decode_round(record.value) for record in records_of(run.bus, {tp: run.bus.end(tp)})
        ]
    decisions: list[AnyDecision] = [decision for round_ in rounds for decision in round_.decisions]
    return [decision for decision in decisions if isinstance(decision, Migrate)]


def samples(path: Path) -> bool:
    """Report whether the worker has running requests with progress and half of their tokens
    left."""
    with opened(str(path / "runs" / "tiny")) as run:
        tp = TopicPartition(run.topics.metrics, 0)
        end = run.bus.end(tp)
        records = [decode_metrics(record.value) for record in records_of(run.bus, {tp: end})]
    texts = [
        record
        for record in records
        if isinstance(record, WorkerStatus) and record.worker == DRAINED
    ]
    last = reduce(merged, texts, None)
    if last is None or last.version < 1 or last.active < 2 or not last.progress:
        return False
    return max(entry.tokens for entry in last.progress.values()) <= TOKENS // 2


@contextmanager
def stopped(path: Path) -> Iterator[int]:
    pid = next(entry for entry in of(path, WorkerJoined) if entry.worker == DRAINED).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def asked_away(path: Path) -> set[str]:
    """Return its requests that the planner wants to move."""
    return {move.trajectory for move in moves(path) if move.worker == DRAINED}


@contextmanager
def run_until_it_samples(path: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    running = start(path, "run", "config.toml", *WORDS, *words)
    try:
        until(lambda: b"step    0 " in (path / "said").read_bytes())
        until(lambda: samples(path))
        yield running
    finally:
        running.terminate()
        running.wait(WAIT_S)


def drain(path: Path) -> None:
    command = Command(at_ns=0, user="u", verb="drain", args={"worker": DRAINED})
    with opened(str(path / "runs" / "tiny")) as run:
        run.bus.writer().append([Append(topic=run.topics.control, value=encode(command))])


def trajectories(path: Path) -> dict[str, Trajectory]:
    with opened(str(path / "runs" / "tiny")) as run:
        topic = run.topics.trajectories
        tps = [TopicPartition(topic, number) for number in range(run.bus.partitions(topic))]
        records = list(records_of(run.bus, {tp: run.bus.end(tp) for tp in tps}))
    trajectories = [decode_trajectory(record.value) for record in records]
    return {trajectory.trajectory: trajectory for trajectory in trajectories}
