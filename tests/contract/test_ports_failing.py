"""Every port, every effect, whatever raises: the machine hears of it, or the role ends.

An effect without its failure makes the first tests fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from dora_pipe.consumers.trainer.checks import Known
from dora_pipe.consumers.trainer.effects import (
    DropFiles,
    FetchBatch,
    PublishPolicy,
    Restore,
    TrainerEffect,
    TrainPart,
    TrainStep,
    WriteHistory,
)
from dora_pipe.consumers.trainer.ports import ThreadPort
from dora_pipe.core.errors import BusError, DoraError, InvariantBroken, PolicyError, ResourceError
from dora_pipe.core.loop.runtime import Meter
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.orchestrator.machine import TrimMetrics
from dora_pipe.orchestrator.process.snapshot_files import SnapshotPort
from dora_pipe.orchestrator.process.trim_port import TrimPort
from dora_pipe.orchestrator.snapshots import Body, WriteSnapshot
from dora_pipe.producers.engines.engine import EngineRequest, Kv, SamplingParams
from dora_pipe.producers.sessions.frames import Addresses
from dora_pipe.producers.tasks.calls import (
    AgentCall,
    EnvObserved,
    EnvStep,
    Forget,
    GroupCall,
    PromptCall,
    PromptReady,
    RewardCall,
    SampledTurns,
    TaskEffect,
    TaskFailed,
)
from dora_pipe.producers.worker.effects import (
    DropKv,
    DropWeights,
    EngineAdd,
    EngineCancel,
    EngineEffect,
    EngineExport,
    EngineExported,
    EngineFailed,
    EngineStarted,
    FetchGroup,
    FetchKv,
    FetchProgress,
    GroupFetched,
    HandoverEffect,
    KvFetched,
    KvPut,
    LoadFailed,
    LoadWeights,
    ProgressFetched,
    PutKv,
    RecordEffect,
    Sleep,
)
from dora_pipe.producers.worker.engine_port import EnginePort
from dora_pipe.producers.worker.kv_handover import KvLabel
from dora_pipe.producers.worker.ports import HandoverPort, RecordPort, TaskPort
from dora_pipe.schemas.control import Resume, TakenTrajectory
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.topics import Topics

LIMIT_S = 30.0
BLOB = Blob(sha256="a" * 64, bytes=5)
LABEL = KvLabel(trajectory="g0000000001-000", prefix="p")
TAKEN = TakenTrajectory(
    trajectory="g0000000001-000", attempt=1, incarnation=1, partition=0, offset=0, sha256="a" * 64
)
KV = Kv(tokens=1, layout="x", weights="b" * 64, array=np.zeros(1))
SAID = SampledTurns(answer=[1], turns=[[1]], before=[])
PLANTED = [
    RuntimeError("CUDA out of memory"),
    MemoryError(),
    OSError(5, "Input/output error"),
    SystemExit(3),
]


class Failing:
    slots, active, busy, kv_used_tokens, records, bytes, waits_for = 1, 0, False, 0, 0, 0, ()

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            raise self._error

        return call

    def poll(self) -> list[Any]:
        return []

    def close(self) -> None:
        """Closing works."""


def _request(name: str) -> EngineRequest:
    return EngineRequest(
        request=name, token_ids=[1], sampled=0, seed=1, params=SamplingParams(max_tokens=2)
    )


def _engine_port(error: BaseException, folder: Path) -> EnginePort:
    broken: Any = Failing(error)
    return EnginePort(broken, Path, clock=SystemClock())


def _task_port(error: BaseException, folder: Path) -> TaskPort:
    broken: Any = Failing(error)
    addresses = Addresses(host="localhost", port=1, secret=bytes(32))
    return TaskPort(broken, broken, addresses=addresses)


def _record_port(error: BaseException, folder: Path) -> RecordPort:
    broken: Any = Failing(error)
    return RecordPort(broken, Topics("r"), Meter(), clock=SystemClock())


def _handover_port(error: BaseException, folder: Path) -> HandoverPort:
    broken: Any = Failing(error)
    return HandoverPort(broken)


def _snapshot_port(error: BaseException, folder: Path) -> SnapshotPort:
    (folder / "file").write_text("")
    return SnapshotPort(folder / "file" / "below", "r")


def _trim_port(error: BaseException, folder: Path) -> TrimPort:
    def opened() -> Any:
        raise error

    return TrimPort(opened, sleep=lambda _: None)


def _thread_port(error: BaseException, folder: Path) -> ThreadPort:
    class Work(Failing):
        def idle(self) -> Iterator[Any]:
            return iter(())

        def gauges(self) -> Any:
            return None

    @contextmanager
    def opened() -> Iterator[Any]:
        yield Work(error)

    return ThreadPort(opened)


@dataclass(frozen=True)
class Case:
    effect: Any
    said: tuple[type, ...]


ENDS = (BaseException,)
KNOWN: Any = Known
EFFECTS: dict[type, Any] = {
    EnginePort: EngineEffect,
    TaskPort: TaskEffect,
    RecordPort: RecordEffect,
    HandoverPort: HandoverEffect,
    SnapshotPort: WriteSnapshot,
    TrimPort: TrimMetrics,
    ThreadPort: TrainerEffect,
}
PORTS: dict[type, tuple[Callable[[BaseException, Path], Any], list[Case]]] = {
    EnginePort: (
        _engine_port,
        [
            Case(EngineAdd(request=_request("a")), (EngineStarted, EngineFailed)),
            Case(EngineCancel(request="b"), (EngineFailed,)),
            Case(EngineExport(request="b"), (EngineExported, EngineFailed)),
            Case(DropWeights(versions=(1,)), (EngineFailed,)),
            Case(Sleep(), (EngineFailed,)),
            Case(LoadWeights(version=3, digest="a"), (LoadFailed,)),
        ],
    ),
    TaskPort: (
        _task_port,
        [
            Case(PromptCall(request="a", split="train", index=0), (TaskFailed,)),
            Case(EnvStep(request="a", token_ids=[1]), (TaskFailed,)),
            Case(
                RewardCall(request="a", split="train", index=0, sampled=SAID),
                (TaskFailed,),
            ),
            Case(GroupCall(request="a", split="train", index=0, sampled=(SAID,)), (TaskFailed,)),
            Case(AgentCall(request="a", split="train", index=0), (TaskFailed,)),
            Case(Forget(request="a"), ()),
        ],
    ),
    RecordPort: (
        _record_port,
        [
            Case(
                FetchProgress(request="a", resume=Resume(tokens=1, partition=0, offset=0)),
                (ProgressFetched,),
            ),
            Case(FetchGroup(request="a", trajectories=(TAKEN,)), (GroupFetched,)),
        ],
    ),
    HandoverPort: (
        _handover_port,
        [
            Case(PutKv(request="a", label=LABEL, kv=KV), (KvPut,)),
            Case(FetchKv(request="a", label=LABEL, blob=BLOB), (KvFetched,)),
            Case(DropKv(blob=BLOB), ()),
        ],
    ),
    SnapshotPort: (
        _snapshot_port,
        [Case(WriteSnapshot(offset=1, digest="", body=Body(head=b"")), ())],
    ),
    TrimPort: (_trim_port, [Case(TrimMetrics(topic="r.metrics", before_ns=0), ())]),
    ThreadPort: (
        _thread_port,
        [
            Case(Restore(step=0, notes=()), ENDS),
            Case(TrainPart(decision=KNOWN, known=KNOWN), ENDS),
            Case(FetchBatch(decision=KNOWN, known=KNOWN), ENDS),
            Case(TrainStep(step=0, attempt=0, settings=KNOWN), ENDS),
            Case(PublishPolicy(step=0, attempt=0, checkpoint=False), ENDS),
            Case(DropFiles(weights=(), optimizers=()), ()),
            Case(WriteHistory(content=b""), ()),
        ],
    ),
}


def _cases() -> list[Any]:
    return [
        pytest.param(make, case, id=f"{port.__name__}-{type(case.effect).__name__}")
        for port, (make, cases) in PORTS.items()
        for case in cases
    ]


@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.__name__)
def test_every_effect_of_a_port_has_its_failure(port: Any, tmp_path: Path) -> None:
    make, cases = PORTS[port]
    kinds = get_args(EFFECTS[port]) or (EFFECTS[port],)
    assert {type(case.effect) for case in cases} == set(kinds)
    created = make(RuntimeError(), tmp_path)
    created.close()


def _events(port: Any, expected: int) -> list[Any]:
    events: list[Any] = []
    until_s = time.monotonic() + (LIMIT_S if expected else 0.2)
    while time.monotonic() < until_s and (not expected or len(events) < expected):
        try:
            events += port.poll()
        except (OSError, RuntimeError, MemoryError, DoraError) as error:
            events.append(error)
        time.sleep(0.001)
    return events


@pytest.mark.parametrize("planted", PLANTED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("make", "case"), _cases())
def test_effect_that_raises_is_answered_in_bounded_time(
    make: Callable[[BaseException, Path], Any],
    case: Case,
    planted: BaseException,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = make(planted, tmp_path)
    port.start(case.effect)
    events = _events(port, len(case.said))
    assert len(events) == len(case.said), events
    assert all(isinstance(event, kind) for event, kind in zip(events, case.said, strict=True))
    assert type(case.effect).__name__ in caplog.text or "step of the engine" in caplog.text
    port.close()


@pytest.mark.parametrize(
    ("planted", "here"),
    [
        (RuntimeError("CUDA out of memory"), True),
        (MemoryError(), True),
        (OSError(5, "Input/output error"), True),
        (ResourceError("vLLM's server is gone"), True),
        (BusError("the log is not reachable"), True),
        (PolicyError("another digest"), False),
    ],
    ids=lambda exception: type(exception).__name__ if isinstance(exception, Exception) else "",
)
def test_failure_is_this_worker_s_unless_the_version_is_known_to_be_wrong(
    planted: Exception, here: bool, tmp_path: Path
) -> None:
    port = _engine_port(planted, tmp_path)
    port.start(LoadWeights(version=3, digest="a"))
    (event,) = _events(port, 1)
    assert (event.version, event.local) == (3, here)
    assert (str(planted) or "MemoryError") in event.message
    port.close()


@pytest.mark.parametrize("effect", [EngineExport(request="b"), LoadWeights(version=3, digest="a")])
def test_broken_promise_of_an_engine_ends_the_role(effect: Any, tmp_path: Path) -> None:
    port = _engine_port(InvariantBroken("sampled from other weights"), tmp_path)
    with pytest.raises(InvariantBroken):
        port.start(effect)
        for _ in range(1000):
            port.poll()
            time.sleep(0.001)
    port.close()


def test_engine_that_failed_is_not_touched_again(tmp_path: Path) -> None:
    port = _engine_port(RuntimeError("device-side assert"), tmp_path)
    port.start(EngineAdd(request=_request("a")))
    port.start(EngineAdd(request=_request("b")))
    _, event = _events(port, 2)
    assert event == EngineFailed(message="RuntimeError: device-side assert")
    port.start(EngineCancel(request="a"))
    port.start(DropWeights(versions=(1,)))
    port.start(EngineExport(request="a"))
    assert _events(port, 1) == [EngineExported(request="a", kv=None)]
    assert not port.busy and port.poll() == []
    port.close()


@pytest.mark.parametrize(
    "text",
    [
        PromptReady(request="a", text="x", episode=False),
        EnvObserved(request="a", text="x", done=False, tool="", ok=True),
    ],
)
def test_text_that_has_no_tokens_fails_its_request_alone(text: Any) -> None:
    class Pool(Failing):
        def poll(self) -> list[Any]:
            return [text, TaskFailed(request="b", error="E", message="m")]

        def start(self, effect: Any) -> None:
            forgotten.append(effect)

    forgotten: list[Any] = []
    broken: Any = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
    pool: Any = Pool(broken)
    port = TaskPort(pool, pool)
    first, second = port.poll()
    assert isinstance(first, TaskFailed)
    assert (first.request, first.error) == ("a", "UnicodeEncodeError")
    assert "surrogates not allowed" in first.message
    assert second.request == "b"
    assert forgotten == [Forget(request="a")]


def test_thread_whose_work_cannot_be_opened_ends_the_role() -> None:
    @contextmanager
    def opened() -> Iterator[Any]:
        raise BusError("no log there")
        yield

    port = ThreadPort(opened)
    (error,) = _events(port, 1)
    assert isinstance(error, BusError)
    port.close()
