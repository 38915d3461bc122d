"""A version from the optimizer's step to N workers: saved, then read from the policy store by each,
or from peers first; with one thread that hashes, and with several. It decides nothing.

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from dora_pipe.bench.moves_child import HOST, TOKEN
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.errors import ResourceError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store import safetensors_file
from dora_pipe.store.arrow_files import open_files
from dora_pipe.store.files import Files, Listed
from dora_pipe.store.safetensors_file import (
    HASHERS_MAX,
    TensorSource,
    manifest_in_memory,
    write_tensors,
)
from dora_pipe.store.store import PolicyStore
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.flight import FlightTransfers, Identity
from dora_pipe.store.transfers.peers import PeerWeights
from dora_pipe.store.verified import need_digest

MEGABYTES: Final = 100
TENSORS: Final = 8
RUN: Final = "bench"
WAIT_S: Final = 120.0
CHUNK_BYTES: Final = 1 << 20
_MODULE: Final = "dora_pipe.bench.moves_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFigure:
    """One way to bring weights to so many workers at once.

    `store_mb_s` 0 is the directory as it is. `saved_s` is until they are written, hashed and
    durable; `last_s` until all of the workers have them, with their digest compared; `opened_s`
    until the last has compared it again, as whatever loads weights does; `total_s` all three.
    `store_mb` is what the store gave.

    Example: ``WeightsFigure(way="peers", hashers=4, workers=4, megabytes=100.0, store_mb_s=200,
    saved_s=0.2, last_s=0.9, median_s=0.8, opened_s=0.1, total_s=1.2, store_mb=0.0)``
    """

    way: str
    hashers: int
    workers: int
    megabytes: float
    store_mb_s: int
    saved_s: float
    last_s: float
    median_s: float
    opened_s: float
    total_s: float
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
    hashers: int
    has: str = ""
    """A version that it has already, of a run whose versions are patches."""


class Took(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says: how long, how much it read of the store, and where it serves them."""

    seconds: float
    store_bytes: int
    opened_s: float
    address: str


def bench_weights(
    folder: Path,
    workers: Sequence[int],
    *,
    store_mb_s: Sequence[int],
    megabytes: int = MEGABYTES,
    hashers: Sequence[int] = (1, HASHERS_MAX),
) -> Iterator[WeightsFigure]:
    """A figure for each number of workers, speed of the store, way, and number of threads that
    hash. Raises ResourceError."""
    store = folder / "store"
    trainer = PolicyStore(folder / "trainer", open_files(store.as_uri(), folder=RUN))
    tensors = _random_weights(megabytes)
    with ExitStack() as stack:
        served = serve(folder / "trainer", stack)
        for number, speed, threads in product(workers, store_mb_s, hashers):
            manifest, saved_s = _saved(trainer, tensors, threads)
            for way, peers in (("store", ()), ("peers", (served.address,))):
                tasks = [
                    Task(
                        root=str(folder / f"{way}-{threads}-{number}-{speed}-{one}"),
                        store=str(store),
                        digest=manifest.digest,
                        peers=peers,
                        store_mb_s=speed / number,
                        hashers=threads,
                    )
                    for one in range(number)
                ]
                yield _figure(tasks[0], way, speed, manifest, saved_s, run_all(tasks))


def _saved(
    trainer: PolicyStore, tensors: Sequence[TensorSource], threads: int
) -> tuple[Manifest, float]:
    """Publish weights that are nowhere yet; how long that took."""
    trainer.drop_weights(manifest_in_memory(tensors).digest)
    with _hashing(threads):
        began_s = time.perf_counter()
        manifest = trainer.publish_weights(lambda path: write_tensors(path, tensors))
        return manifest, time.perf_counter() - began_s


@contextmanager
def _hashing(threads: int) -> Iterator[None]:
    """As many threads hash."""
    before, safetensors_file.HASHERS_MAX = safetensors_file.HASHERS_MAX, threads
    try:
        yield
    finally:
        safetensors_file.HASHERS_MAX = before


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
        stored=lambda name: root / name,
    )
    stack.callback(transfers.close)
    return transfers


class Metered:
    """A store that gives so many MB/s, and counts what it gave."""

    def __init__(self, files: Files, mb_s: float) -> None:
        self._files = files
        self.mb_s = mb_s
        self.where = files.where
        self.bytes = 0

    def get(self, name: str, target: Path) -> bool:
        """See `Files`."""
        began_s = time.monotonic()
        found = self._files.get(name, target)
        size = target.stat().st_size if found else 0
        self.bytes += size
        if self.mb_s:
            time.sleep(max(0.0, began_s + size / (self.mb_s * 1e6) - time.monotonic()))
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


def _figure(
    task: Task, way: str, speed: int, manifest: Manifest, saved_s: float, took: Sequence[Took]
) -> WeightsFigure:
    last_s, opened_s = max(one.seconds for one in took), max(one.opened_s for one in took)
    return WeightsFigure(
        way=way,
        hashers=task.hashers,
        workers=len(took),
        megabytes=round(manifest.bytes / 1e6, 1),
        store_mb_s=speed,
        saved_s=round(saved_s, 3),
        last_s=round(last_s, 3),
        median_s=round(statistics.median(one.seconds for one in took), 3),
        opened_s=round(opened_s, 3),
        total_s=round(saved_s + last_s + opened_s, 3),
        store_mb=round(sum(one.store_bytes for one in took) / 1e6, 1),
    )


def _random_weights(megabytes: int) -> list[TensorSource]:
    chance = np.random.default_rng(1)
    size = megabytes * 1_000_000 // TENSORS // 4
    tensors = [chance.random(size, np.float32) for _ in range(TENSORS)]
    return [
        TensorSource(name=f"t{number}", dtype="F32", shape=(size,), data=one.tobytes)
        for number, one in enumerate(tensors)
    ]


def work(task: Task, ready: Callable[[], None]) -> Took:
    """Get the weights once. `ready` is called first and returns when all are to begin."""
    root = Path(task.root)
    with ExitStack() as stack:
        transfers = serve(root, stack)
        remote = Metered(open_files(Path(task.store).as_uri(), folder=RUN), task.store_mb_s)
        peers = PeerWeights(transfers, lambda name: list(task.peers))
        store = PolicyStore(
            root, remote, peers=peers if task.peers else None, patched=bool(task.has)
        )
        if task.has:
            fast = open_files(Path(task.store).as_uri(), folder=RUN)
            PolicyStore(root, fast, patched=True).weights(task.has)
        ready()
        with _hashing(task.hashers):
            began_s = time.perf_counter()
            path = store.weights(task.digest)
            fetched_s = time.perf_counter()
            need_digest(path, task.digest)
        return Took(
            seconds=fetched_s - began_s,
            store_bytes=remote.bytes,
            opened_s=time.perf_counter() - fetched_s,
            address=transfers.address,
        )


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
