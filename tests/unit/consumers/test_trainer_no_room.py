"""Tests of a full policy store: reported, waited for, bounded, nothing committed.

The file system below the store rejects uploads of one kind until space is freed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from dora_pipe.core.errors import NoRoom
from dora_pipe.core.loop.retry import DELIVERY_TIMEOUT_S, ROOM_PAUSE_S
from dora_pipe.store.arrow_files import ArrowFiles
from dora_pipe.store.files import Files, LocalFiles
from dora_pipe.store.store import PolicyStore
from tests.support.trainer_stage import StagedTrainer, TrainerStage, digests, train

KINDS = ("weights", "contributions", "optimizer")
OVER_S = 5.0


class FullFiles:
    def __init__(self, inner: Files, kind: str) -> None:
        self._inner = inner
        self._kind = kind
        self.full = False
        self.tries = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, source: Path, name: str) -> None:
        if self.full and name.startswith(self._kind):
            self.tries += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._inner.put(source, name)


class FullSystem:
    type_name = "s3"

    def __init__(self, inner: fs.FileSystem, kind: str, refusal: OSError) -> None:
        self._inner = inner
        self._kind = kind
        self._refusal = refusal
        self.full = False
        self.tries = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open_output_stream(self, path: str) -> Any:
        if self.full and f"/{self._kind}/" in path:
            self.tries += 1
            raise self._refusal
        return self._inner.open_output_stream(path)


def _on_this_disk(stage: TrainerStage, kind: str) -> FullFiles:
    files = FullFiles(LocalFiles(stage.store.root), kind)
    stage.store._files = files
    return files


def _elsewhere(refusal: OSError) -> Callable[[TrainerStage, str], FullSystem]:
    def place(stage: TrainerStage, kind: str) -> FullSystem:
        there = stage.store.root.parent / "elsewhere"
        for folder in KINDS:
            (there / folder).mkdir(parents=True)
        for file in (stage.store.root / "weights").iterdir():
            (there / "weights" / file.name).write_bytes(file.read_bytes())
        system = FullSystem(fs.LocalFileSystem(), kind, refusal)
        remote = ArrowFiles(system, str(there), where="s3://bucket/run", clock=stage.clock)
        stage.store = PolicyStore(stage.store.root, remote, clock=stage.clock)
        return system

    return place


PLACES: dict[str, Callable[[TrainerStage, str], Any]] = {
    "this disk": _on_this_disk,
    "a mounted disk": _elsewhere(OSError(errno.ENOSPC, "Error writing bytes to file")),
    "a quota": _elsewhere(OSError(errno.EDQUOT, "Disk quota exceeded")),
    "an object store": _elsewhere(
        OSError(
            "When completing multiple part upload for key 'k' in bucket 'bucket': AWS Error "
            "UNKNOWN (HTTP status 507) during CompleteMultipartUpload operation: Unable to parse "
            "ExceptionName: XMinioStorageFull Message: Storage backend has reached its minimum "
            "free drive threshold."
        )
    ),
}


@pytest.fixture(params=PLACES)
def fill_disk(request: pytest.FixtureRequest) -> Callable[[TrainerStage, str], Any]:
    return PLACES[request.param]


@pytest.fixture
def stage(tmp_path: Path) -> TrainerStage:
    stage = TrainerStage(tmp_path / "stage")
    stage.start_run()
    return stage


def _waiting(stage: TrainerStage, trainer: StagedTrainer, seconds: float) -> None:
    until_ns = stage.clock.ns + int(seconds * 1e9)
    while stage.clock.ns < until_ns:
        trainer.tick()


@pytest.mark.parametrize("kind", KINDS)
def test_trainer_waits_for_room_says_so_and_goes_on_as_if_there_had_always_been_some(
    stage: TrainerStage,
    fill_disk: Callable[[TrainerStage, str], Any],
    kind: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = TrainerStage(tmp_path / "other")
    other.start_run()
    train(other, other.trainer(checkpoint_every=1), *range(3))
    full = fill_disk(stage, kind)
    trainer = stage.trainer(checkpoint_every=1)
    train(stage, trainer, 0)
    full.full = True
    stage.commits()
    stage.take_new(1)
    _waiting(stage, trainer, DELIVERY_TIMEOUT_S / 2)
    assert [commit.step for commit in stage.commits()] == [0], "nothing is committed"
    assert 10 < full.tries <= DELIVERY_TIMEOUT_S / 2 / ROOM_PAUSE_S + 1
    messages = [message for message in caplog.messages if "trying again for 120 s" in message]
    assert len(messages) == 1 and "no space left for a policy in" in messages[0], caplog.messages
    (wait,) = stage.statuses()[-1].waits
    assert wait.name == "room" and wait.blocking
    assert wait.description.startswith("policy of step 1: no space left for a policy in ")
    full.full = False
    trainer.train_to(2)
    assert any("space is available again" in message for message in caplog.messages)
    train(stage, trainer, 2)
    assert digests(stage) == digests(other)
    assert not any(wait.name == "room" for wait in stage.statuses()[-1].waits)


def test_trainer_ends_with_one_line_when_nobody_makes_room(
    stage: TrainerStage, fill_disk: Callable[[TrainerStage, str], Any]
) -> None:
    full = fill_disk(stage, "weights")
    trainer = stage.trainer()
    train(stage, trainer, 0)
    full.full = True
    stage.commits()
    stage.take_new(1)
    began_ns = stage.clock.ns
    with pytest.raises(
        NoRoom, match=r"no space left for a policy in .*, with no success for 120 s"
    ) as no:
        _waiting(stage, trainer, DELIVERY_TIMEOUT_S + OVER_S)
    assert "\n" not in no.value.message
    assert "--resume" in (no.value.hint or "")
    assert stage.clock.ns - began_ns >= DELIVERY_TIMEOUT_S * 1e9
    trainer.close()
    assert [commit.step for commit in stage.commits()] == [0]
    full.full = False
    again = stage.trainer()
    again.train_to(2)
    assert [commit.step for commit in stage.commits()] == [0, 1]


def test_restored_trainer_without_room_for_its_weights_waits_too(stage: TrainerStage) -> None:
    train(stage, stage.trainer(), 0)
    (commit,) = stage.commits()
    stage.store.drop_weights(commit.digest_after)
    full = _on_this_disk(stage, "weights")
    full.full = True
    trainer = stage.trainer()
    _waiting(stage, trainer, 10 * ROOM_PAUSE_S)
    assert trainer.machine.phase == "restoring" and full.tries > 5
    (wait,) = stage.statuses()[-1].waits
    assert "no space left for a policy in" in wait.description
    full.full = False
    trainer.until(lambda: trainer.idle)
    assert stage.store.has_weights(commit.digest_after)
