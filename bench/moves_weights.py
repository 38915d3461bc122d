"""Weights to N workers: each reads the policy store, or asks its peers first; decides nothing.

One process per worker, each with a cache of its own, as on machines of their own; all begin at the
same moment. The peer is the trainer, as after a commit, when nobody else has the weights. On one
machine a store in a directory is the page cache, faster than any network, so a store of a given
speed is modelled beside it: its readers share so many MB/s evenly. What a store has to give
(`store_mb`) is the same on any machine.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from dora_pipe.bench.moves_child import HOST, TOKEN
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.errors import ResourceError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.arrow_files import open_files
from dora_pipe.store.files import Files, Listed
from dora_pipe.store.safetensors_file import TensorSource, write_tensors
from dora_pipe.store.store import PolicyStore
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.flight import FlightTransfers, Identity
from dora_pipe.store.transfers.peers import PeerWeights

MEGABYTES: Final = 100
TENSORS: Final = 8
RUN: Final = "bench"
WAIT_S: Final = 120.0
CHUNK_BYTES: Final = 1 << 20
_MODULE: Final = "dora_pipe.bench.moves_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFigure:
    """One way to bring weights to so many workers at once.

    `store_mb_s` 0 is the directory as it is. `last_s` is when all of them have the weights, with
    their digest compared; `store_mb` is what the store gave.

    Example: ``WeightsFigure(way="peers", workers=4, megabytes=100.0, store_mb_s=200, last_s=0.9,
    median_s=0.8, store_mb=0.0)``
    """

    way: str
    workers: int
    megabytes: float
    store_mb_s: int
    last_s: float
    median_s: float
    store_mb: float


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told."""

    root: str
    store: str
    digest: str
    peers: tuple[str, ...]
    """Empty: it asks none."""
    store_mb_s: float
    """Of this reader; 0: as fast as it goes."""


class Took(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says: how long, how much it read of the store, and where it serves them."""

    seconds: float
    store_bytes: int
    address: str


def bench_weights(
    folder: Path,
    workers: Sequence[int],
    *,
    store_mb_s: Sequence[int],
    megabytes: int = MEGABYTES,
) -> Iterator[WeightsFigure]:
    """A figure for each number of workers, speed of the store, and way. Raises ResourceError."""
    store = folder / "store"
    trainer = PolicyStore(folder / "trainer", open_files(store.as_uri(), folder=RUN))
    manifest = trainer.publish_weights(lambda path: _random_weights(path, megabytes))
    with ExitStack() as stack:
        served = serve(folder / "trainer", stack)
        for number in workers:
            for speed in store_mb_s:
                for way, peers in (("store", ()), ("peers", (served.address,))):
                    tasks = [
                        Task(
                            root=str(folder / f"{way}-{number}-{speed}-{one}"),
                            store=str(store),
                            digest=manifest.digest,
                            peers=peers,
                            store_mb_s=speed / number,
                        )
                        for one in range(number)
                    ]
                    yield _figure(way, speed, manifest, run_all(tasks))


def run_all(tasks: Sequence[Task]) -> list[Took]:
    """Every task in a process of its own, all begun at the same moment."""
    children = [
        subprocess.Popen(
            [sys.executable, "-m", _MODULE, msgspec.json.encode(task).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for task in tasks
    ]
    try:
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                raise ResourceError("a process of the bench has ended", hint="it said why above")
        took = []
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        for child in children:
            assert child.stdout is not None
            took.append(msgspec.json.decode(child.stdout.readline(), type=Took))
        return took
    finally:
        for child in children:
            child.communicate(timeout=WAIT_S)


def serve(root: Path, stack: ExitStack) -> FlightTransfers:
    """A process that serves the weights below `root`."""
    transfers = FlightTransfers(
        MappedFiles(root / "handover", clock=SystemClock()),
        Identity(token=TOKEN, run=RUN, host=HOST),
        weights=lambda name: root / "weights" / name,
    )
    stack.callback(transfers.close)
    return transfers


class Metered:
    """A store that gives so many MB/s, and counts what it gave."""

    def __init__(self, files: Files, mb_s: float) -> None:
        self._files = files
        self._mb_s = mb_s
        self.where = files.where
        self.bytes = 0

    def get(self, name: str, target: Path) -> bool:
        """See `Files`."""
        began_s = time.monotonic()
        found = self._files.get(name, target)
        size = target.stat().st_size if found else 0
        self.bytes += size
        if self._mb_s:
            time.sleep(max(0.0, began_s + size / (self._mb_s * 1e6) - time.monotonic()))
        return found

    def put(self, source: Path, name: str) -> None:
        """See `Files`."""
        self._files.put(source, name)

    def exists(self, name: str) -> bool:
        """See `Files`."""
        return self._files.exists(name)

    def delete(self, name: str) -> bool:
        """See `Files`."""
        return self._files.delete(name)

    def listed(self, folder: str) -> list[Listed]:
        """See `Files`."""
        return self._files.listed(folder)


def _figure(way: str, speed: int, manifest: Manifest, took: Sequence[Took]) -> WeightsFigure:
    return WeightsFigure(
        way=way,
        workers=len(took),
        megabytes=round(manifest.bytes / 1e6, 1),
        store_mb_s=speed,
        last_s=round(max(one.seconds for one in took), 3),
        median_s=round(statistics.median(one.seconds for one in took), 3),
        store_mb=round(sum(one.store_bytes for one in took) / 1e6, 1),
    )


def _random_weights(path: Path, megabytes: int) -> Manifest:
    chance = np.random.default_rng(1)
    size = megabytes * 1_000_000 // TENSORS // 4
    tensors = [chance.random(size, np.float32) for _ in range(TENSORS)]
    sources = [
        TensorSource(name=f"t{number}", dtype="F32", shape=(size,), data=one.tobytes)
        for number, one in enumerate(tensors)
    ]
    return write_tensors(path, sources)


def work(task: Task, ready: Callable[[], None]) -> Took:
    """Get the weights once. `ready` is called first and returns when all are to begin."""
    root = Path(task.root)
    with ExitStack() as stack:
        transfers = serve(root, stack)
        remote = Metered(open_files(Path(task.store).as_uri(), folder=RUN), task.store_mb_s)
        peers = PeerWeights(transfers, lambda name: list(task.peers))
        store = PolicyStore(root, remote, peers=peers if task.peers else None)
        ready()
        began_s = time.perf_counter()
        store.weights(task.digest)
        seconds = time.perf_counter() - began_s
        return Took(seconds=seconds, store_bytes=remote.bytes, address=transfers.address)


def main() -> None:
    """One worker: says when it is ready, begins when it is told to."""

    def ready() -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()

    took = work(msgspec.json.decode(sys.argv[1], type=Task), ready)
    sys.stdout.write(msgspec.json.encode(took).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
