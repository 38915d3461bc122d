"""Tests of snapshots: shorter restarts with the same state, else unused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dora_pipe.orchestrator.fold import fold_round
from dora_pipe.orchestrator.process.recovery import read_rounds, recover
from dora_pipe.orchestrator.process.snapshot_files import SnapshotPort, snapshots_in, write
from dora_pipe.orchestrator.snapshots import Body, WriteSnapshot, body_of
from dora_pipe.orchestrator.state import State
from tests.support import orchestrator_records as records
from tests.support.orchestrator_world import Chances, World


def world_of(seed: int = 5) -> World:
    world = World(
        seed=seed,
        config=records.make_config(run__steps=12, evaluation__prompts=2),
        workers={"w0": (3, 1), "w1": (2, 0)},
        chances=Chances(crash=0.04, failure=0.05, invalid=0.05, refusal=0.1),
    )
    world.run(seconds=3000)
    assert world.machine.state.done
    return world


def snapshot_at(world: World, folder: Path, rounds: int) -> WriteSnapshot:
    state = State()
    for logged_round in read_rounds(world.bus, world.topics):
        fold_round(state, logged_round.round, logged_round.folded())
        if state.rounds == rounds:
            effect = WriteSnapshot(
                offset=logged_round.offset, digest=state.digest(), body=body_of(state)
            )
            write(folder, world.topics.run, effect)
            return effect
    raise AssertionError(f"there are {state.rounds} rounds")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_orchestrator_that_begins_at_a_snapshot_equals_one_that_folds(
    tmp_path: Path, share: float
) -> None:
    world = world_of(seed=6)
    recovery = recover(world.bus, world.topics)
    snapshot_at(world, tmp_path, max(1, int(share * recovery.state.rounds)))
    actual_recovery = recover(world.bus, world.topics, tmp_path)
    assert actual_recovery.state.digest() == recovery.state.digest()
    assert actual_recovery.state.chain == recovery.state.chain
    assert actual_recovery.incarnation == recovery.incarnation
    assert actual_recovery.run_started == recovery.run_started


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-7],
    "empty": lambda data: b"",
    "a byte of the header": lambda data: data.replace(b'"offset":', b'"offzet":', 1),
    "a byte of the body": lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
    "other code": lambda data: data.replace(b'"source":"', b'"source":"0', 1),
    "other run": lambda data: data.replace(b'"run":"', b'"run":"x', 1),
    "other format": lambda data: data.replace(b'"format":2', b'"format":3', 1),
    "other digest": lambda data: data.replace(b'"digest":"', b'"digest":"0', 1),
    "other size": lambda data: data.replace(b'"body_bytes":', b'"body_bytes":1', 1),
    "huge": lambda data: data.replace(b'"body_bytes":', b'"body_bytes":9999999', 1),
    "garbage": lambda data: bytes(range(256)) * 8,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_doubtful_file_is_named_and_the_log_is_folded_from_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.INFO, "dora_pipe.orchestrator")
    world = world_of()
    snapshot_at(world, tmp_path, 70)
    (file,) = snapshots_in(tmp_path)
    before = file.read_bytes()
    file.write_bytes(DAMAGE[kind](before))
    assert file.read_bytes() != before
    recovery = recover(world.bus, world.topics, tmp_path)
    assert recovery.state.digest() == world.machine.state.digest()
    assert f"snapshot {file.name} skipped:" in caplog.text
    assert "folding the whole log" in caplog.text


def test_snapshot_that_says_another_round_of_the_log_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dora_pipe.orchestrator")
    world = world_of()
    earlier, later = (snapshot_at(world, tmp_path, rounds) for rounds in (50, 80))
    for old in snapshots_in(tmp_path):
        old.unlink()
    mixed = WriteSnapshot(offset=earlier.offset, digest=later.digest, body=later.body)
    write(tmp_path, world.topics.run, mixed)
    recovery = recover(world.bus, world.topics, tmp_path)
    assert recovery.state.digest() == world.machine.state.digest()
    assert "differs from the snapshot's round" in caplog.text


def test_slow_disk_leaves_snapshots_out_and_no_round_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    written: list[int] = []

    def slow(folder: Path, run: str, effect: WriteSnapshot) -> Path:
        begun.set()
        assert go.wait(30)
        written.append(effect.offset)
        return folder

    monkeypatch.setattr("dora_pipe.orchestrator.process.snapshot_files.write", slow)
    port = SnapshotPort(tmp_path, "r")
    port.start(WriteSnapshot(offset=1, digest="", body=Body(head=b"")))
    assert begun.wait(30)
    for offset in (2, 3, 4):
        port.start(WriteSnapshot(offset=offset, digest="", body=Body(head=b"")))
    assert port.poll() == [] and not port.busy
    go.set()
    port.close()
    port.close()
    assert written == [1, 2]


def test_disk_that_refuses_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    port = SnapshotPort(tmp_path / "file" / "below", "r")
    port.start(WriteSnapshot(offset=7, digest="", body=Body(head=b"")))
    port.close()
    assert "no snapshot at decisions offset 7" in caplog.text
