"""The worker as a role: real task processes, tokenizer, SQLite log; a simulated engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.bus.memory import AppendFault, MemoryBus, MemoryLog, ScriptedFaults
from dora_pipe.bus.port import Append, Bus, TopicPartition, TopicSpec
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.config import model
from dora_pipe.errors import BusError, Fenced, PolicyError, TaskError
from dora_pipe.policies.model_dir import asset_files
from dora_pipe.policies.store import PolicyStore
from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.role import REJOINS_MAX, RUN_WAIT_S, Decode, run_worker
from dora_pipe.producers.tasks.arithmetic import WORDS, Arithmetic
from dora_pipe.producers.tasks.registry import dataset_digest, reward_digest
from dora_pipe.producers.tasks.vocabulary import write_word_tokenizer
from dora_pipe.schemas.control import (
    AnyControl,
    RunStarted,
    TrajectoryLogged,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
    decode_control,
)
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.rounds import AnyDecision, Assign, Fence, GroupSpec, Place, Round, StopRun
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import Unknown, encode
from tests.support.worker import PARTITIONS, TOPICS, VirtualClock, digest_of, spec_of

TURNS_MAX = 4_000
"""Turns of the loop before a script is said to hang."""

OPTIONS: dict[str, Any] = {"count": 16, "eval_count": 4}


def _task() -> Arithmetic:
    return Arithmetic(**OPTIONS)


@dataclass
class Run:
    """A run's log and store; a script decides while the worker runs."""

    bus: Bus
    store: PolicyStore
    assets_digest: str
    config: model.Config
    rounds: int = 0
    turns: int = 0
    engines: list[SimulatedEngine] = field(default_factory=list)

    def begin(self, **changes: Any) -> None:
        train, rows = dataset_digest(_task(), "train")
        evaluation, eval_rows = dataset_digest(_task(), "eval")
        record = RunStarted(
            at_ns=0,
            run="r",
            schema_version=1,
            config=msgspec.to_builtins(self.config),
            config_digest="",
            dataset_digest=train,
            dataset_rows=rows,
            eval_digest=evaluation,
            eval_rows=eval_rows,
            seed=1,
            policy=Manifest(digest=digest_of(0), bytes=0, tensors=()),
            assets_digest=self.assets_digest,
            planner="p",
            package="0",
        )
        self.append(TOPICS.control, msgspec.structs.replace(record, **changes))

    def append(self, topic: str, record: msgspec.Struct) -> int:
        return self.bus.writer().append([Append(topic=topic, value=encode(record))])[0]

    def decide(self, *decisions: AnyDecision) -> None:
        record = Round(
            ordinal=self.rounds, role_epoch=1, now_ns=0, control_next=0, decisions=decisions
        )
        self.rounds += 1
        self.append(TOPICS.decisions, record)

    def control(self) -> list[tuple[int, AnyControl | Unknown]]:
        tp = TopicPartition(TOPICS.control, 0)
        reader = self.bus.reader({tp: 0})
        records = []
        while reader.position(tp) < self.bus.end(tp):
            records += reader.poll(timeout_s=0.0)
        reader.close()
        return [(record.offset, decode_control(record.value)) for record in records]

    def joins(self) -> list[tuple[int, WorkerJoined]]:
        return [(at, one) for at, one in self.control() if isinstance(one, WorkerJoined)]

    def count(self, kind: type) -> int:
        return sum(isinstance(one, kind) for _, one in self.control())

    def assign(self, epoch: int) -> Assign:
        return Assign(reason="t", worker="w0", epoch=epoch, version=0, digest=digest_of(0))

    def place(self, epoch: int, ordinal: int = 0) -> Place:
        spec: GroupSpec = msgspec.structs.replace(
            spec_of(ordinal), dataset_digest=dataset_digest(_task(), "train")[0]
        )
        return Place(
            reason="t",
            spec=spec,
            trajectory=trajectory_id(spec.group, 0),
            sibling=0,
            attempt=1,
            worker="w0",
            epoch=epoch,
        )

    def work(self, script: Iterator[bool], **more: Any) -> None:
        """Be the worker; at every turn the script goes on, and ends it by giving True."""

        def stop() -> bool:
            self.turns += 1
            assert self.turns < TURNS_MAX, "the script hangs"
            return next(script, True)

        run_worker(
            self.bus,
            TOPICS,
            worker="w0",
            store=self.store,
            engine_factory=self.engine,
            stop=stop,
            **more,
        )

    def engine(self, *, assets: Path, config: model.Config, decode: Decode) -> Engine:
        engine = SimulatedEngine(
            slots=config.workers.slots,
            context_tokens=config.workers.context_tokens,
            decode=decode,
        )
        self.engines.append(engine)
        return engine


def _config(**workers: Any) -> model.Config:
    return model.Config(
        run=model.Run(name="r", steps=1),
        model=model.Model(path="nowhere"),
        task=model.Task(kind="arithmetic", options=dict(OPTIONS)),
        workers=model.Workers(slots=4, prefetch=2, context_tokens=256, **workers),
        timing=model.Timing(heartbeat_s=0.05),
    )


def _topics(bus: Bus) -> None:
    partitions = {TOPICS.trajectories: PARTITIONS, TOPICS.progress: PARTITIONS}
    bus.create([TopicSpec(name=name, partitions=partitions.get(name, 1)) for name in TOPICS.all()])


def _made(bus: Bus, path: Path) -> Run:
    _topics(bus)
    model_dir = path / "model"
    write_word_tokenizer(model_dir, WORDS)
    (model_dir / "config.json").write_text("{}")
    store = PolicyStore(path / "policies")
    return Run(
        bus=bus,
        store=store,
        assets_digest=store.publish_assets(asset_files(model_dir)),
        config=_config(),
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    bus = SqliteBus(tmp_path / "log.sqlite")
    yield _made(bus, tmp_path)
    bus.close()


def _until(done: Callable[[], bool]) -> Iterator[bool]:
    while not done():
        yield False


def test_worker_joins_serves_and_leaves_when_the_run_ends(run: Run) -> None:
    def script() -> Iterator[bool]:
        yield False
        run.begin()
        yield from _until(lambda: len(run.joins()) == 1)
        epoch, _ = run.joins()[0]
        run.decide(run.assign(epoch), run.place(epoch))
        yield from _until(lambda: run.count(TrajectoryLogged) == 1)
        run.decide(StopRun(reason="done"))
        while True:
            yield False

    run.work(script())
    kinds = [type(one) for _, one in run.control()]
    assert kinds == [RunStarted, WorkerJoined, WorkerReady, TrajectoryLogged, WorkerLeft]
    epoch, joined = run.joins()[0]
    assert (joined.worker, joined.slots, joined.prefetch, joined.kv_tokens) == ("w0", 4, 2, 1024)
    assert joined.engine == "simulated" and "batch_invariant" in joined.declares
    assert joined.assets_digest == run.assets_digest
    assert joined.reward_digest == reward_digest(_task())
    logged = next(one for _, one in run.control() if isinstance(one, TrajectoryLogged))
    assert logged.epoch == epoch and logged.valid
    tp = TopicPartition(TOPICS.trajectories, logged.partition)
    (record,) = run.bus.reader({tp: 0}).poll(timeout_s=0.0)
    trajectory = decode_trajectory(record.value)
    assert trajectory.token_ids[0] == 1  # the tokenizer's <bos>
    assert trajectory.meta.prompt_tokens > 2


def test_fenced_worker_joins_again_under_a_new_epoch_and_serves(run: Run) -> None:
    run.begin()

    def script() -> Iterator[bool]:
        yield from _until(lambda: len(run.joins()) == 1)
        run.decide(Fence(reason="lease", worker="w0", epoch=run.joins()[0][0]))
        yield from _until(lambda: len(run.joins()) == 2)
        epoch, _ = run.joins()[1]
        run.decide(run.assign(epoch), run.place(epoch))
        yield from _until(lambda: run.count(TrajectoryLogged) == 1)
        while True:
            yield True

    run.work(script())
    (first, one), (second, two) = run.joins()
    assert one.instance != two.instance
    logged = next(one for _, one in run.control() if isinstance(one, TrajectoryLogged))
    assert logged.epoch == second != first
    assert len(run.engines) == 2
    left = [one for _, one in run.control() if isinstance(one, WorkerLeft)]
    assert [one.epoch for one in left] == [second]


def test_fenced_worker_whose_name_was_taken_ends_instead(run: Run) -> None:
    run.begin()

    def script() -> Iterator[bool]:
        yield from _until(lambda: len(run.joins()) == 1)
        epoch, joined = run.joins()[0]
        other = msgspec.structs.replace(joined, instance="other", host="elsewhere", pid=7)
        run.append(TOPICS.control, other)
        run.decide(Fence(reason="lease", worker="w0", epoch=epoch))
        while True:
            yield False

    with pytest.raises(Fenced, match=r"another process \(elsewhere, pid 7\) joined as worker w0"):
        run.work(script())
    assert len(run.joins()) == 2


def test_worker_that_is_fenced_again_and_again_gives_up(run: Run) -> None:
    run.begin()

    def script() -> Iterator[bool]:
        for number in range(REJOINS_MAX + 1):
            yield from _until(lambda: len(run.joins()) == number + 1)  # noqa: B023
            run.decide(Fence(reason="lease", worker="w0", epoch=run.joins()[-1][0]))
        while True:
            yield False

    with pytest.raises(Fenced, match=f"fenced {REJOINS_MAX + 1} times"):
        run.work(script())


def test_worker_with_other_data_does_not_join(run: Run) -> None:
    run.begin(dataset_digest="0" * 64)
    with pytest.raises(TaskError, match="data set here is another one"):
        run.work(_until(lambda: False))
    assert run.joins() == []


def test_worker_with_other_evaluation_data_does_not_join(run: Run) -> None:
    run.begin(eval_digest="0" * 64)
    with pytest.raises(TaskError, match="evaluation data here is another one"):
        run.work(_until(lambda: False))


def test_worker_without_the_runs_tokenizer_does_not_join(run: Run) -> None:
    run.begin(assets_digest="0" * 64)
    with pytest.raises(PolicyError, match="no config and tokenizer files"):
        run.work(_until(lambda: False))


def test_worker_with_a_changed_tokenizer_does_not_join(run: Run) -> None:
    run.begin()
    file = run.store.assets_path(run.assets_digest) / "tokenizer_config.json"
    file.write_text(file.read_text().replace("<eos>", "<bos>"))
    with pytest.raises(PolicyError, match="were changed"):
        run.work(_until(lambda: False))


def test_worker_that_cannot_load_its_version_leaves_with_the_reason(run: Run) -> None:
    run.begin()

    def script() -> Iterator[bool]:
        yield from _until(lambda: len(run.joins()) == 1)
        assign = msgspec.structs.replace(run.assign(run.joins()[0][0]), digest="")
        run.decide(assign)
        while True:
            yield False

    with pytest.raises(PolicyError, match="cannot host version 0"):
        run.work(script())
    left = [one for _, one in run.control() if isinstance(one, WorkerLeft)]
    assert len(left) == 1 and "cannot host version 0" in left[0].reason


def test_free_keys_come_from_this_machine_and_the_others_from_the_log(run: Run) -> None:
    run.begin()
    mine = msgspec.structs.replace(
        run.config,
        workers=model.Workers(slots=7, context_tokens=128),
        task=model.Task(kind="no-such-task", processes=1),
    )

    def script() -> Iterator[bool]:
        yield from _until(lambda: len(run.joins()) == 1)
        while True:
            yield True

    run.work(script(), config=mine)
    _, joined = run.joins()[0]
    assert (joined.slots, joined.kv_tokens) == (7, 7 * 128)


def test_worker_asked_to_stop_before_its_run_starts_ends_without_a_trace(run: Run) -> None:
    run.work(iter([False, True]))
    assert run.control() == []


def test_run_that_does_not_start_is_given_up_with_a_hint(tmp_path: Path) -> None:
    run = _made(MemoryBus(MemoryLog()), tmp_path)
    clock = VirtualClock()
    with pytest.raises(BusError, match="run r did not start") as caught:
        run.work(_until(lambda: False), clock=clock)
    assert caught.value.hint is not None
    assert clock.ns >= RUN_WAIT_S * 1e9


@pytest.mark.parametrize("lands", [0, 1])
def test_unknown_outcome_of_joining_is_looked_up_in_the_log(tmp_path: Path, lands: int) -> None:
    log = MemoryLog()
    run = _made(MemoryBus(log), tmp_path)
    run.begin()
    faults = ScriptedFaults(appends={0: AppendFault(kind="unknown", lands=lands)})
    witness, run.bus = run.bus, MemoryBus(log, faults=faults)

    def script() -> Iterator[bool]:
        yield from _until(lambda: len(run.joins()) >= 1)
        while True:
            yield True

    run.work(script())
    run.bus = witness
    assert len(run.joins()) == 1
    left = [one for _, one in run.control() if isinstance(one, WorkerLeft)]
    assert [one.epoch for one in left] == [run.joins()[0][0]]
