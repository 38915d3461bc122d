"""The way of a version by stages: from the end of the optimizer's step to the first token that a
worker samples under it. It decides nothing.

Store, log, transfers and engine are production's; the worker is a process with a cache of its own.
What the orchestrator does between a commit and its decision is a thread that reads the one record
and appends the other. Weights are random, in bfloat16; from one version to the next two of a
hundred change, as they do at a small learning rate. On one machine a store in a directory is the
page cache, so the store and the link to the trainer give and take so many MB/s; `shared` is a
directory as it is, which trainer and worker both map.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from dora_pipe.bench.moves_engine import MODELS, open_engine
from dora_pipe.bench.moves_weights import RUN, WAIT_S, Metered, serve
from dora_pipe.bus.port import Append, TopicPartition, TopicSpec
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import ResourceError
from dora_pipe.producers.engines.port import EngineRequest, SamplingParams
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.wire import encode
from dora_pipe.store.arrow_files import open_files
from dora_pipe.store.files import Files
from dora_pipe.store.safetensors_file import TensorSource, write_tensors
from dora_pipe.store.store import PolicyStore
from dora_pipe.store.transfers.flight import FlightTransfers
from dora_pipe.store.transfers.peers import PeerWeights
from dora_pipe.store.transfers.port import Lost, Sink
from dora_pipe.store.verified import need_digest

MODEL: Final = "llama-25m"
CHANGED: Final = 0.02
COMMITS: Final = "bench.control"
DECISIONS: Final = "bench.decisions"
APART_S: Final = 0.3
"""Between two versions, as in any run: notes of files want to be older than their clock's tick."""
PROMPT: Final = (1, 2, 3, 4)
CONTEXT_TOKENS: Final = 64
OTHERS: Final = ("mb_s", "total_s")
_MODULE: Final = "dora_pipe.bench.version_way"


@dataclass(frozen=True, slots=True, kw_only=True)
class WayFigure:
    """Medians of the stages of one way, in seconds, one behind the other.

    `written_s`: written and hashed, beside each other. `stored_s`: durable in the store; of a patch
    with the comparison before it. `commit_s`: the commit is durable. `seen_s`: the worker has its
    decision. `fetched_s`: its file is on the worker's machine; `proved_s`: made of the patch where
    it is one, and compared with its digest; `loaded_s`: in the engine; `token_s`: the first token.
    """

    way: str
    stored_as: str
    megabytes: float
    mb_s: int
    written_s: float
    stored_s: float
    commit_s: float
    seen_s: float
    fetched_s: float
    proved_s: float
    loaded_s: float
    token_s: float
    total_s: float


STAGES: Final = tuple(
    one.name for one in fields(WayFigure) if one.name.endswith("_s") and one.name not in OTHERS
)
"""In their order."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told: its cache, the store (empty: the cache is it), peers, and the log."""

    root: str
    store: str
    peer: str
    mb_s: int
    log: str
    first: str
    """Digest of the version that it begins with."""
    patched: bool
    versions: int


class Stamps(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of a version, by the clock that all processes of a machine share."""

    seen_s: float
    fetching_s: float
    """Spent on what came from elsewhere."""
    proved_s: float
    loaded_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Way:
    """How versions go: `peers` before the store; most as patches or not."""

    name: str
    elsewhere: bool
    peers: bool = False
    patched: bool = False


WAYS: Final = (
    Way("shared", elsewhere=False),
    Way("shared", elsewhere=False, patched=True),
    Way("store", elsewhere=True),
    Way("store", elsewhere=True, patched=True),
    Way("peer", elsewhere=True, peers=True),
    Way("peer", elsewhere=True, peers=True, patched=True),
)


def bench_way(
    folder: Path, *, versions: int, mb_s: int, ways: Sequence[Way] = WAYS
) -> Iterator[WayFigure]:
    """A figure for each way. Raises ResourceError."""
    for number, way in enumerate(ways):
        yield _measured(folder / f"{number}-{way.name}", way, versions, mb_s)


def _measured(folder: Path, way: Way, versions: int, mb_s: int) -> WayFigure:
    trainer = _Trainer(folder, way, mb_s)
    log = folder / "log.sqlite"
    folder.mkdir()
    with ExitStack() as stack:
        bus = stack.enter_context(closing(SqliteBus(log)))
        bus.create([TopicSpec(name=COMMITS), TopicSpec(name=DECISIONS)])
        writer = stack.enter_context(closing(bus.writer()))
        place = Place(
            root=str(folder / "worker" if way.elsewhere else trainer.store.root),
            store=str(folder / "store") if way.elsewhere else "",
            peer=serve(trainer.store.root, stack).address if way.peers else "",
            mb_s=mb_s,
            log=str(log),
            first=trainer.publish().manifest.digest,
            patched=way.patched,
            versions=versions,
        )
        stamps = stack.enter_context(_worker(place))
        threading.Thread(target=_decide, args=(log, versions), daemon=True).start()
        found = []
        for _ in range(versions):
            time.sleep(APART_S)
            trainer.step()
            published = trainer.publish()
            writer.append([Append(topic=COMMITS, value=encode(published.manifest))])
            committed_s = time.monotonic()
            found.append(stages_of(published, committed_s, next(stamps)))
    medians = {
        stage: round(statistics.median(one), 3)
        for stage, one in zip(STAGES, zip(*found, strict=True), strict=True)
    }
    return WayFigure(
        way=way.name,
        stored_as="patch" if way.patched else "whole",
        megabytes=round(published.manifest.bytes / 1e6, 1),
        mb_s=mb_s if way.elsewhere else 0,
        total_s=round(statistics.median(map(sum, found)), 3),
        **medians,
    )


@dataclass(frozen=True, slots=True)
class Published:
    """A version, and when each stage of it was over."""

    manifest: Manifest
    began_s: float
    written_s: float
    stored_s: float


class _Link(Metered):
    """A store that takes as slowly as it gives."""

    def put(self, source: Path, name: str) -> None:
        """See `Files`."""
        with paced(source.stat().st_size, self.mb_s):
            super().put(source, name)


class _Trainer:
    """Publishes versions whose weights lie in memory, as after a step."""

    def __init__(self, folder: Path, way: Way, mb_s: int) -> None:
        there = _Link(open_files((folder / "store").as_uri(), folder=RUN), mb_s)
        remote = there if way.elsewhere else None
        self.store = PolicyStore(folder / "trainer", remote, patched=way.patched)
        self._patched = way.patched
        self._before = ""
        self._chance = np.random.default_rng(1)
        self._bits = {
            name: self._chance.integers(0x3C00, 0x3D00, shape, np.uint16)
            for name, shape in MODELS[MODEL].tensors().items()
        }

    def step(self) -> None:
        """Change some of the weights by their last bit."""
        for bits in self._bits.values():
            bits ^= self._chance.random(bits.shape, np.float32) < CHANGED

    def publish(self) -> Published:
        """Publish the weights as they are; the first version whole."""
        sources = [
            TensorSource(name=name, dtype="BF16", shape=bits.shape, data=bits.tobytes)
            for name, bits in self._bits.items()
        ]
        written_s, began_s = 0.0, time.monotonic()

        def write(path: Path) -> Manifest:
            nonlocal written_s
            manifest = write_tensors(path, sources)
            written_s = time.monotonic()
            return manifest

        before = self._before if self._patched else ""
        found = self.store.publish_version(write, before=before, whole=not before)
        self._before = found.manifest.digest
        return Published(found.manifest, began_s, written_s, time.monotonic())


def stages_of(one: Published, committed_s: float, then: Stamps) -> tuple[float, ...]:
    """How long each stage took, in the order of `WayFigure`."""
    written = (one.began_s, one.written_s, one.stored_s, committed_s, then.seen_s)
    had = (then.seen_s + then.fetching_s, then.proved_s, then.loaded_s, then.token_s)
    ends = written + had
    return tuple(end - start for start, end in itertools.pairwise(ends))


def _decide(log: Path, versions: int) -> None:
    """For every commit append what lets a worker have its version."""
    with closing(SqliteBus(log)) as bus, closing(bus.writer()) as writer:
        for value in _records(bus, COMMITS, versions):
            digest = msgspec.json.decode(value, type=Manifest).digest
            writer.append([Append(topic=DECISIONS, value=digest.encode())])


def _records(bus: SqliteBus, topic: str, count: int) -> Iterator[bytes]:
    """The next so many of a topic, from its beginning. Raises ResourceError."""
    with closing(bus.reader({TopicPartition(topic, 0): 0})) as reader:
        for _ in range(count):
            records = reader.poll(timeout_s=WAIT_S, records_max=1)
            if not records:
                raise ResourceError(f"nothing comes in {topic}")
            yield records[0].value


@contextmanager
def _worker(place: Place) -> Iterator[Iterator[Stamps]]:
    """A worker's process that is ready; what it says of each version. Raises ResourceError."""
    words = [sys.executable, "-m", _MODULE, msgspec.json.encode(place).decode()]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lines = iter(child.stdout.readline, "")

    def said() -> Iterator[Stamps]:
        for line in lines:
            yield msgspec.json.decode(line, type=Stamps)
        raise ResourceError("a process of the bench has ended", hint="it said why above")

    try:
        if next(lines, "") != "ready\n":
            raise ResourceError("a process of the bench has ended", hint="it said why above")
        yield said()
    finally:
        child.kill()
        child.communicate()


@contextmanager
def paced(size: int, mb_s: float) -> Iterator[None]:
    """What takes so many bytes takes as long as a link of this speed, or its own time."""
    until_s = time.monotonic() + size / (mb_s * 1e6)
    yield
    time.sleep(max(0.0, until_s - time.monotonic()))


@dataclass(slots=True)
class _Fetching:
    """How long came from elsewhere what came."""

    spent_s: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """One file."""
        began_s = time.monotonic()
        yield
        self.spent_s += time.monotonic() - began_s


class _TimedStore(Metered):
    """A store whose time is counted."""

    def __init__(self, files: Files, mb_s: float, fetching: _Fetching) -> None:
        super().__init__(files, mb_s)
        self._fetching = fetching

    def get(self, name: str, target: Path) -> bool:
        """See `Files`."""
        with self._fetching.timed():
            return super().get(name, target)


class _TimedPeers:
    """Peers behind a link of this speed, whose time is counted."""

    def __init__(self, source: FlightTransfers, mb_s: float, fetching: _Fetching) -> None:
        self._source, self._mb_s, self._fetching = source, mb_s, fetching

    def copy(self, peer: str, name: str, target: Sink) -> Lost | None:
        """See `PeerFiles`."""
        with self._fetching.timed():
            return self._source.copy(peer, name, PacedFile(target, self._mb_s))


class PacedFile:
    """Takes bytes as a link of so many MB/s gives them; whoever sends has to wait."""

    def __init__(self, target: Sink, mb_s: float) -> None:
        self._target, self._mb_s = target, mb_s

    def write(self, data: Any) -> int:
        """See `Sink`."""
        with paced(len(data), self._mb_s):
            return self._target.write(data)


def work(place: Place, say: Callable[[str], None]) -> None:
    """Have every version that is decided, as soon as it is."""
    fetching = _Fetching()
    with ExitStack() as stack:
        store = _store(place, fetching, stack)
        engine = open_engine("torch", MODEL, Path(), CONTEXT_TOKENS)
        engine.load(store.weights(place.first), version=0, digest=place.first)
        _token(engine)
        bus = stack.enter_context(closing(SqliteBus(Path(place.log))))
        say("ready")
        for version, value in enumerate(_records(bus, DECISIONS, place.versions), start=1):
            seen_s, digest, fetching.spent_s = time.monotonic(), value.decode(), 0.0
            path = store.weights(digest)
            need_digest(path, digest)
            proved_s = time.monotonic()
            engine.load(path, version=version, digest=digest)
            loaded_s = time.monotonic()
            _token(engine)
            stamps = Stamps(
                seen_s=seen_s,
                fetching_s=fetching.spent_s,
                proved_s=proved_s,
                loaded_s=loaded_s,
                token_s=time.monotonic(),
            )
            say(msgspec.json.encode(stamps).decode())


def _store(place: Place, fetching: _Fetching, stack: ExitStack) -> PolicyStore:
    if not place.store:
        return PolicyStore(Path(place.root))
    remote = open_files(Path(place.store).as_uri(), folder=RUN)
    # The first version comes as fast as it goes.
    PolicyStore(Path(place.root), remote).weights(place.first)
    timed = _TimedStore(remote, place.mb_s, fetching)
    peers = None
    if place.peer:
        source = _TimedPeers(serve(Path(place.root), stack), place.mb_s, fetching)
        peers = PeerWeights(source, lambda _: [place.peer])
    return PolicyStore(Path(place.root), timed, patched=place.patched, peers=peers)


def _token(engine: Any) -> None:
    """Sample one."""
    params = SamplingParams(max_tokens=1)
    engine.add(EngineRequest(request="r", token_ids=PROMPT, sampled=0, seed=1, params=params))
    while engine.active:
        engine.step()


def main() -> None:
    """One worker."""

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    work(msgspec.json.decode(sys.argv[1], type=Place), say)


if __name__ == "__main__":
    main()
