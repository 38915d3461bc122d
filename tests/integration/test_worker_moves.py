"""Requests that change their worker while they run: two workers, one log, a place between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dora_pipe.producers.engines.engine import Kv
from dora_pipe.producers.worker.kv_handover import (
    Handover,
    KvHandover,
    KvLabel,
    MemoryHandover,
    NoHandover,
)
from dora_pipe.schemas.control import RequestReleased, TrajectoryLogged, WorkerLeft
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import Drain, ScheduledRequest
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.transfers import Lost
from tests.support.worker import TICK_NS, VirtualClock, Worker, World

NAME = "g0000000000-000"
LENGTH = 200


def alone(length: int = LENGTH) -> list[int]:
    world = World(lengths=lambda seed, turn: length)
    worker = world.start(max_tokens=1000)
    world.decide(world.place(worker, 0))
    world.until_idle(worker)
    return list(world.trajectories()[NAME].token_ids)


def running(
    world: World, tokens: int, *, worker: str = "a", **changes: int
) -> tuple[Worker, ScheduledRequest]:
    source = world.start(worker=worker, max_tokens=1000, **changes)
    request = world.place(source, 0)
    world.decide(request)
    world.until(source, lambda: source.engine.kv_used_tokens == 3 + tokens)
    return source, request


def release(world: World, source: Worker, request: ScheduledRequest, to: Worker) -> RequestReleased:
    world.decide(world.move(request, to))
    before = len(world.facts(RequestReleased))
    world.until(source, lambda: len(world.facts(RequestReleased)) > before)
    return world.facts(RequestReleased)[-1]


def taken_up(world: World, to: Worker, released: RequestReleased) -> ScheduledRequest:
    request = world.place(
        to, 0, attempt=released.attempt + 1, resume=released.resume, kv=released.kv
    )
    world.decide(request)
    return request


Make = Callable[[Path], Handover]
PLACES: dict[str, Make] = {
    "memory": lambda path: MemoryHandover(),
    "files": lambda path: KvHandover(MappedFiles(path / "handover", clock=VirtualClock())),
    "nowhere": lambda path: NoHandover(),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("tokens", [1, 16, 90])
def test_moved_request_has_the_tokens_it_would_have_had(
    where: str, tokens: int, tmp_path: Path
) -> None:
    world = World(lengths=lambda seed, turn: LENGTH, handover=PLACES[where](tmp_path))
    source, request = running(world, tokens)
    target = world.start(worker="b", max_tokens=1000)
    released = release(world, source, request, target)
    assert released.resume is not None and released.resume.tokens >= tokens
    assert (released.kv is None) == (where == "nowhere")
    assert source.engine.active == 0 and not source.machine.requests.by_key
    assert 0 < released.left_ns <= released.at_ns
    taken_up(world, target, released)
    world.until_idle(target)
    (logged,) = world.facts(TrajectoryLogged)
    trajectory = world.trajectory(logged)
    assert list(trajectory.token_ids) == alone()
    model = [segment for segment in trajectory.segments if segment.kind == "model"]
    assert [(entry.worker, entry.end) for entry in model] == [
        ("a", 3 + released.resume.tokens),
        ("b", 3 + LENGTH),
    ]
    moved = where != "nowhere"
    assert trajectory.meta.migrations == moved
    assert trajectory.meta.prefills == ((3,) if moved else (3, 3 + released.resume.tokens))
    assert (trajectory.meta.worker, trajectory.meta.incarnation) == ("b", target.setup.incarnation)
    assert target.counts["KV caches imported"] == moved
    assert _remaining_files(world.handover, tmp_path) == []
    world.handover.clear()


def _remaining_files(handover: Handover, path: Path) -> list[str]:
    if isinstance(handover, MemoryHandover):
        return list(handover.kept)
    return [path.name for path in path.rglob("*") if path.is_file()]


def test_cache_that_was_damaged_on_its_way_costs_a_prefill_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "handover"
    world = World(
        lengths=lambda seed, turn: LENGTH,
        handover=KvHandover(MappedFiles(folder, clock=VirtualClock())),
    )
    source, request = running(world, 50)
    target = world.start(worker="b", max_tokens=1000)
    released = release(world, source, request, target)
    (file,) = folder.iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    taken_up(world, target, released)
    world.until_idle(target)
    trajectory = world.trajectories()[NAME]
    assert list(trajectory.token_ids) == alone()
    assert len(trajectory.meta.prefills) == 2 and trajectory.meta.migrations == 0
    assert target.counts["KV cache not fetched: another digest"] == 1


def test_cache_of_another_request_is_not_taken() -> None:
    world = World(lengths=lambda seed, turn: LENGTH)
    source = world.start(worker="a", max_tokens=1000)
    places = [world.place(source, number) for number in (0, 2)]
    world.decide(*places)
    world.until(source, lambda: source.engine.kv_used_tokens > 100)
    target = world.start(worker="b", max_tokens=1000)
    world.decide(*(world.move(request, target) for request in places))
    world.until(source, lambda: len(world.facts(RequestReleased)) == 2)
    first, second = world.facts(RequestReleased)
    world.decide(world.place(target, 0, attempt=2, resume=first.resume, kv=second.kv))
    world.until_idle(target)
    assert target.counts["KV cache not fetched: another request"] == 1
    assert list(world.trajectories()[NAME].token_ids) == alone()


@pytest.mark.parametrize("tokens", range(12, 24))
def test_request_ends_once_whenever_the_move_comes(tokens: int) -> None:
    world = World(lengths=lambda seed, turn: 20)
    source = world.start(worker="a")
    target = world.start(worker="b")
    request = world.place(source, 0)
    world.decide(request)
    world.ticks(source, tokens)
    world.decide(world.move(request, target))
    world.until_idle(source)
    ended = len(world.facts(TrajectoryLogged)) + len(world.facts(RequestReleased))
    assert ended == 1


def test_move_for_another_incarnation_or_attempt_is_not_obeyed() -> None:
    world = World(lengths=lambda seed, turn: LENGTH)
    source, _ = running(world, 20)
    target = world.start(worker="b")
    late = world.place(source, 0, attempt=2)
    world.decide(world.move(late, target))
    world.ticks(source, 4)
    assert source.engine.active == 1 and source.counts["moved too late"] == 1
    assert world.facts(RequestReleased) == []


class SlowHandover(MemoryHandover):
    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        assert self.go.wait(60)
        return super().put(label, kv)


def test_request_is_released_when_its_cache_is_safe() -> None:
    handover = SlowHandover()
    world = World(lengths=lambda seed, turn: LENGTH, handover=handover, handover_thread=True)
    source, request = running(world, 30)
    world.decide(world.move(request, world.start(worker="b")))
    world.ticks(source, 50)
    assert world.facts(RequestReleased) == []
    handover.go.set()
    while not world.facts(RequestReleased):
        world.ticks(source, 1)
    assert world.facts(RequestReleased)[0].kv is not None


def test_cancelled_request_leaves_no_cache_behind() -> None:
    world = World(lengths=lambda seed, turn: LENGTH)
    source, request = running(world, 40)
    full = world.start(worker="b", slots=1, max_tokens=1000)
    world.decide(world.place(full, 8))
    world.ticks(full, 5)
    request = taken_up(world, full, release(world, source, request, full))
    world.ticks(full, 5)
    world.decide(world.cancel(request))
    world.ticks(full, 5)
    assert not _remaining_files(world.handover, Path())


def test_drained_worker_lets_its_requests_go_and_leaves() -> None:
    world = World(lengths=lambda seed, turn: LENGTH)
    source, request = running(world, 30)
    target = world.start(worker="b", max_tokens=1000)
    world.decide(
        Drain(reason="t", worker="a", incarnation=source.setup.incarnation),
        world.move(request, target),
    )
    world.until(source, lambda: source.machine.finished)
    (released,), (remaining,) = world.facts(RequestReleased), world.facts(WorkerLeft)
    assert (source.machine.outcome, remaining.progress) == ("left", {})
    taken_up(world, target, released)
    world.until_idle(target)
    assert list(world.trajectories()[NAME].token_ids) == alone()
    assert target.counts["KV caches imported"] == 1


def test_worker_asked_to_stop_in_the_middle_of_a_move_completes_it() -> None:
    world = World(lengths=lambda seed, turn: LENGTH)
    source, request = running(world, 30)
    world.decide(world.move(request, world.start(worker="b")))
    world.ticks(source, 1)
    world.stop(source)
    kinds = [type(event) for event in world.control()]
    assert kinds.index(RequestReleased) < kinds.index(WorkerLeft)
    assert world.facts(WorkerLeft)[0].progress == {}


def test_source_that_dies_after_the_move_leaves_its_progress_record() -> None:
    world = World(lengths=lambda seed, turn: LENGTH)
    source, request = running(world, 60, checkpoint_tokens=16, heartbeat_ns=TICK_NS)
    resume = source.machine.requests.progress()[NAME]
    target = world.start(worker="b", max_tokens=1000)
    world.decide(world.move(request, target))  # there is no reader
    world.decide(world.place(target, 0, attempt=2, resume=resume))
    world.until_idle(target)
    trajectory = world.trajectories()[NAME]
    assert list(trajectory.token_ids) == alone()
    assert trajectory.meta.prefills == (3, 3 + resume.tokens)
