"""Versions that travel while they are written: what arrives, what is left, and what is believed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest

from dora_pipe.core.errors import NonFinite
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.files import LocalFiles
from dora_pipe.store.safetensors_file import TensorSource, read_manifest, write_tensors
from dora_pipe.store.store import PolicyStore
from dora_pipe.store.transfers import ahead as ours
from dora_pipe.store.transfers import flight
from dora_pipe.store.transfers.ahead import AHEAD, WeightsAhead
from dora_pipe.store.transfers.coming import Coming, Written, followed
from dora_pipe.store.transfers.peers import PeerWeights
from tests.support.transfers import nobody, served

WAIT_S = 20.0
TENSOR = 512 * 1024
TENSORS = 4


@dataclass
class Step:
    """Weights that are written tensor by tensor, each when `go` allows one more."""

    seed: int = 1
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    fails: bool = False

    def write(self, path: Path) -> Manifest:
        """As a learner's `save_weights`."""
        return write_tensors(path, [self._source(number) for number in range(TENSORS)])

    def _source(self, number: int) -> TensorSource:
        def data() -> bytes:
            assert self.go.acquire(timeout=WAIT_S)
            if self.fails and number == TENSORS - 1:
                raise NonFinite("a tensor that is infinite")
            return bytes([self.seed + number]) * TENSOR

        return TensorSource(name=f"t{number}", dtype="U8", shape=(TENSOR,), data=data)

    def allow(self, tensors: int = TENSORS) -> None:
        """Let so many more be written."""
        self.go.release(tensors)


class Counted(LocalFiles):
    """A store elsewhere, and what it gave."""

    given = 0

    def get(self, name: str, target: Path) -> bool:
        found = super().get(name, target)
        self.given += found
        return found

    def put(self, source: Path, name: str) -> None:
        """See `Files`; `source` stays where it is."""
        copy = source.with_name(f"{source.name}-copy")
        copy.write_bytes(source.read_bytes())
        super().put(copy, name)


@dataclass
class Machines:
    """A trainer's and a worker's, and a store that is neither's."""

    folder: Path
    trainer: PolicyStore
    worker: PolicyStore
    ahead: WeightsAhead
    files: Counted
    coming: Coming

    @property
    def here(self) -> list[str]:
        """What lies beside the worker's cache."""
        place = self.folder / "worker" / "policies" / AHEAD
        return sorted(one.name for one in place.glob("*") if one.name != ours.LOCK)

    def has(self, digest: str) -> bool:
        """Whether these weights, and nothing else, lie there."""
        return self.here == [f"{digest}.safetensors"]

    def part_bytes(self) -> int:
        part = self.folder / "worker" / "policies" / AHEAD / ours.PART
        return part.stat().st_size if part.exists() else 0

    @contextmanager
    def publishing(self, step: Step) -> Iterator[None]:
        """The trainer writes meanwhile."""
        errors: list[BaseException] = []

        def publish() -> None:
            try:
                self.trainer.publish_weights(partial(self.coming.write, step.write))
            except NonFinite as error:
                errors.append(error)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            yield
        finally:
            step.allow()
            thread.join(WAIT_S)
            assert not thread.is_alive() and bool(errors) == step.fails


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """As far apart as Flight needs to be used, on one machine."""
    coming, files = Coming(), Counted(tmp_path / "store")
    with (
        served(tmp_path / "trainer", coming=coming) as source,
        served(tmp_path / "worker") as target,
    ):
        root = tmp_path / "worker" / "policies"
        pulled = WeightsAhead(target, lambda: source.address, root / AHEAD)
        peers = PeerWeights(target, lambda name: [], pulled)
        yield Machines(
            folder=tmp_path,
            trainer=PolicyStore(tmp_path / "trainer" / "policies", files),
            worker=PolicyStore(root, files, peers=peers),
            ahead=pulled,
            files=files,
            coming=coming,
        )
        pulled.close()


def until(true: Callable[[], bool]) -> None:
    """Wait for something. Fails after a while."""
    until_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def name_of(step: Step, folder: Path) -> str:
    again = Step(seed=step.seed)
    again.allow()
    return again.write(folder / "again").digest


def test_first_tensors_come_before_the_last_are_written(machines: Machines) -> None:
    machines.ahead.start()
    step = Step()
    with machines.publishing(step):
        step.allow(2)
        until(lambda: machines.part_bytes() >= 2 * TENSOR)
        assert machines.part_bytes() < 3 * TENSOR
        step.allow(2)
        digest = name_of(step, machines.folder)
        until(partial(machines.has, digest))
    path = machines.worker.weights(digest)
    assert path.parent.name == "weights" and read_manifest(path).digest == digest
    assert machines.files.given == 0 and machines.here == []


def test_worker_that_wants_what_is_on_a_slow_way_waits_for_it(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = threading.Event()

    def slow(file: BinaryIO, size: int) -> Iterator[bytes]:
        for piece in followed(file, size):
            if first.is_set():
                time.sleep(0.5)
            first.set()
            yield piece

    monkeypatch.setattr(flight, "followed", slow)
    machines.ahead.start()
    step = Step()
    digest = name_of(step, machines.folder)
    real = machines.files.put

    def put(source: Path, name: str) -> None:
        assert machines.part_bytes() < TENSORS * TENSOR, "the last bytes are on their way"
        assert machines.worker.weights(digest).is_file()
        real(source, name)

    machines.files.put = put  # type: ignore[method-assign]
    with machines.publishing(step):
        step.allow(1)
        until(lambda: machines.part_bytes() > TENSOR)
    assert machines.files.given == 0


def test_publication_that_is_given_up_leaves_nothing(machines: Machines) -> None:
    machines.ahead.start()
    step = Step(fails=True)
    with machines.publishing(step):
        step.allow(TENSORS - 1)
        until(lambda: machines.part_bytes() > TENSOR)
    until(lambda: machines.here == [])
    assert not list((machines.folder / "worker" / "policies").glob("weights/*"))


def test_trainer_that_is_killed_in_the_middle_costs_its_worker_nothing(tmp_path: Path) -> None:
    coming = Coming()
    root = tmp_path / "worker" / "policies"
    with served(tmp_path / "worker") as target:
        with served(tmp_path / "trainer", coming=coming) as source:
            peer = source.address
            pulled = WeightsAhead(target, lambda: peer, root / AHEAD)
            pulled.start()
            path = tmp_path / "trainer" / "policies" / "weights" / ".tmp-1-1"
            path.parent.mkdir(parents=True)
            step = Step()
            step.allow(TENSORS - 1)
            digest = name_of(step, tmp_path)

            def publish() -> None:
                with suppress(FileNotFoundError):
                    coming.write(step.write, path)

            thread = threading.Thread(target=publish)
            thread.start()
            until(lambda: (root / AHEAD / ours.PART).exists())
            path.unlink()  # where it was when it died
            until(lambda: not (root / AHEAD / ours.PART).exists())
            step.allow(1)
            thread.join(WAIT_S)
        files = Counted(tmp_path / "store")
        again = Step()
        again.allow()
        PolicyStore(tmp_path / "other", files).publish_weights(again.write)
        worker = PolicyStore(root, files, peers=PeerWeights(target, lambda name: [], pulled))
        assert worker.weights(digest).is_file() and files.given == 1
        pulled.close()
        assert not pulled.take("weights/x.safetensors", tmp_path / "x")


def test_byte_that_is_damaged_on_its_way_is_found(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(file: BinaryIO, size: int) -> Iterator[bytes]:
        for piece in followed(file, size):
            yield piece[:-1] + bytes([piece[-1] ^ 1])

    monkeypatch.setattr(flight, "followed", damaged)
    machines.ahead.start()
    step = Step()
    digest = name_of(step, machines.folder)
    with machines.publishing(step):
        step.allow()
        until(lambda: bool(machines.here) and ours.PART not in machines.here)
    assert machines.here != [f"{digest}.safetensors"]
    assert read_manifest(machines.worker.weights(digest)).digest == digest
    assert machines.files.given == 1


def test_byte_that_is_damaged_where_it_lies_is_found(machines: Machines) -> None:
    machines.ahead.start()
    step = Step()
    digest = name_of(step, machines.folder)
    with machines.publishing(step):
        step.allow()
        until(partial(machines.has, digest))
    path = machines.folder / "worker" / "policies" / AHEAD / machines.here[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert read_manifest(machines.worker.weights(digest)).digest == digest
    assert machines.files.given == 1


def test_next_version_takes_the_place_of_one_that_nobody_wanted(machines: Machines) -> None:
    machines.ahead.start()
    for seed in (1, 2):
        step = Step(seed=seed)
        with machines.publishing(step):
            step.allow()
            digest = name_of(step, machines.folder)
            until(partial(machines.has, digest))
    machines.ahead.close()
    assert machines.here == []


def test_one_process_of_a_machine_pulls(machines: Machines) -> None:
    with served(machines.folder / "worker") as target:
        place = machines.folder / "worker" / "policies" / AHEAD
        second = WeightsAhead(target, machines.ahead._trainer, place)
        machines.ahead.start()
        second.start()
        step = Step()
        with machines.publishing(step):
            step.allow(2)
            until(lambda: machines.part_bytes() >= 2 * TENSOR)
            time.sleep(3 * ours.ASK_S)
            assert [machines.ahead._on_its_way, second._on_its_way].count(None) == 1
            step.allow(2)
            digest = name_of(step, machines.folder)
            until(partial(machines.has, digest))
        second.close()


def test_machine_without_room_pulls_nothing(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "ROOM_SHARE", 1 << 40)
    machines.ahead.start()
    step = Step()
    digest = name_of(step, machines.folder)
    with machines.publishing(step):
        step.allow()
        until(lambda: machines.ahead._seen != "")
    until(lambda: machines.ahead._on_its_way is None)
    assert machines.here == []
    assert machines.worker.weights(digest).is_file() and machines.files.given == 1


def test_trainer_that_writes_into_the_same_folder_is_left_alone(machines: Machines) -> None:
    root = machines.folder / "trainer" / "policies"
    with served(machines.folder / "trainer") as target:
        pulled = WeightsAhead(target, machines.ahead._trainer, root / AHEAD)
        pulled.start()
        step = Step()
        with machines.publishing(step):
            step.allow(1)
            until(lambda: pulled._seen != "")
        pulled.close()
    assert not (root / AHEAD).exists()


def test_trainer_that_does_not_answer_is_looked_for_seldom(tmp_path: Path) -> None:
    asked: list[float] = []

    def trainer() -> str:
        asked.append(time.monotonic())
        return nobody()

    with served(tmp_path / "worker") as target:
        pulled = WeightsAhead(target, trainer, tmp_path / AHEAD)
        pulled.start()
        until(lambda: bool(asked))
        pulled.close()
    assert len(asked) == 1 and not (tmp_path / AHEAD).exists()


def test_file_that_grows_no_more_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    with path.open("rb") as file:
        began_s = time.monotonic()
        assert b"".join(followed(file, 9, grows_s=0.05)) == b"12345"
        assert 0.05 <= time.monotonic() - began_s < WAIT_S


def test_only_what_is_written_now_is_opened(tmp_path: Path) -> None:
    coming = Coming()
    step = Step()
    step.allow()
    with pytest.raises(OSError, match="x"):
        coming.opened("x")
    path = tmp_path / ".tmp-1-2"

    def write(at: Path) -> Manifest:
        at.write_bytes(b"\x10\0\0")
        assert coming.written().name == "", "its header is not there yet"
        manifest = step.write(at)
        assert coming.written() == Written(name=at.name, bytes=at.stat().st_size)
        return manifest

    manifest = coming.write(write, path)
    whole = path.read_bytes()
    path.replace(tmp_path / f"{manifest.digest}.safetensors")
    assert coming.written().digest == manifest.digest
    file, size = coming.opened(path.name)
    with file:
        assert b"".join(followed(file, size)) == whole
