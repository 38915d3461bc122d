"""Time from the end of an optimizer step to the first token of its version.

Weights are random bfloat16; two of a hundred change per version. `copy_s` is a plain copy of the
same bytes.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import typer

from dora_pipe.bench.engine import MODEL
from dora_pipe.bench.support import Child, emit_figures, reply, scratch, task_of
from dora_pipe.cli.options import JsonOption
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.producers.engines.engine import EngineRequest, SamplingParams
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.arrow_files import open_files
from dora_pipe.store.safetensors_file import TensorSource, write_tensors
from dora_pipe.store.store import PolicyStore
from dora_pipe.store.transfers.flight import FlightTransfers, Identity
from dora_pipe.store.transfers.peers import PeerWeights
from dora_pipe.store.verified import need_digest

LLAMA_25M: Final = replace(
    MODEL,
    family="llama",
    vocabulary=4096,
    hidden=512,
    intermediate=1408,
    layers=8,
    heads=8,
    head_dim=64,
    tied=True,
    qkv_bias=False,
)
CHANGED: Final = 0.02
RUN: Final = "bench"
TOKEN: Final = b"both ends are on this machine"
HOST: Final = "127.0.0.1"
PROMPT: Final = (1, 2, 3, 4)
CONTEXT_TOKENS: Final = 64
MODULE: Final = "dora_pipe.bench.versions"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFigure:
    """Median duration of the stages, in seconds and in order.

    `stored_s`: written, hashed and durable; for a delta including the comparison. `fetched_s`: on
    the worker's machine, verified. `loaded_s`: in the engine. `token_s`: first token.
    """

    way: str
    stored_as: str
    megabytes: float
    stored_s: float
    fetched_s: float
    loaded_s: float
    token_s: float
    total_s: float
    copy_s: float
    s_per_gb: float


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Cache, store (empty if it is the cache), and peer of a worker."""

    root: str
    store: str
    peer: str
    with_deltas: bool


class Took(msgspec.Struct, frozen=True, kw_only=True):
    fetched_s: float
    loaded_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Way:
    """Way to transfer versions."""

    name: str
    with_deltas: bool

    @property
    def stored_as(self) -> str:
        """Return the usual stored form."""
        return "delta" if self.with_deltas else "whole"


WAYS: Final = tuple(
    Way(name, with_deltas) for name in ("shared", "store", "peer") for with_deltas in (False, True)
)


def command(
    steps: Annotated[int, typer.Option(min=1, help="Versions of each way.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Measure seconds from the end of a step to the first token sampled under its version: with
    a shared folder, a remote store and a peer; full files and deltas."""
    with scratch() as folder:
        emit_figures(bench_versions(folder, steps), as_json=as_json)


def bench_versions(
    folder: Path, versions: int, ways: Sequence[Way] = WAYS
) -> Iterator[VersionFigure]:
    """Yield a figure per way. Raises ResourceError, PolicyError."""
    for number, way in enumerate(ways):
        yield _figure(folder / f"{number}-{way.name}", way, versions)


def _figure(folder: Path, way: Way, versions: int) -> VersionFigure:
    trainer = _Trainer(folder, way)
    shared = way.name == "shared"
    rows, copies = [], []
    with ExitStack() as stack:
        peer = _serve(trainer.store.root, stack).address if way.name == "peer" else ""
        setup = Place(
            root=str(trainer.store.root if shared else folder / "worker"),
            store="" if shared else str(folder / "store"),
            peer=peer,
            with_deltas=way.with_deltas,
        )
        child = stack.enter_context(Child(MODULE, setup))
        child.tell(trainer.publish().digest)
        child.answer(Took)
        for _ in range(versions):
            trainer.step()
            start_s = time.monotonic()
            manifest = trainer.publish()
            stored_s = time.monotonic() - start_s
            child.tell(manifest.digest)
            took = child.answer(Took)
            rows.append((stored_s, took.fetched_s, took.loaded_s, took.token_s))
            copies.append(_copied(trainer.store.weights(manifest.digest), folder / "copy"))
    medians = [round(statistics.median(column), 4) for column in zip(*rows, strict=True)]
    total_s = statistics.median(map(sum, rows))
    return VersionFigure(
        way=way.name,
        stored_as=way.stored_as,
        megabytes=round(manifest.bytes / 1e6, 1),
        stored_s=medians[0],
        fetched_s=medians[1],
        loaded_s=medians[2],
        token_s=medians[3],
        total_s=round(total_s, 4),
        copy_s=round(statistics.median(copies), 4),
        s_per_gb=round(total_s / manifest.bytes * 1e9, 2),
    )


class _Trainer:
    def __init__(self, folder: Path, way: Way) -> None:
        remote = (
            None if way.name == "shared" else open_files((folder / "store").as_uri(), folder=RUN)
        )
        self.store = PolicyStore(folder / "trainer", remote, with_deltas=way.with_deltas)
        self._with_deltas = way.with_deltas
        self._before = ""
        self._chance = np.random.default_rng(1)
        self._bits = {
            name: self._chance.integers(0x3C00, 0x3D00, shape, np.uint16)
            for name, shape in LLAMA_25M.tensors().items()
        }

    def step(self) -> None:
        for bits in self._bits.values():
            bits ^= self._chance.random(bits.shape, np.float32) < CHANGED

    def publish(self) -> Manifest:
        """Publish; the first version in full."""
        sources = [
            TensorSource(name=name, dtype="BF16", shape=bits.shape, data=bits.tobytes)
            for name, bits in self._bits.items()
        ]
        before = self._before if self._with_deltas else ""
        published = self.store.publish_version(
            lambda path: write_tensors(path, sources), before=before, whole=not before
        )
        self._before = published.manifest.digest
        return published.manifest


def _copied(source: Path, target: Path) -> float:
    start_s = time.monotonic()
    shutil.copyfile(source, target)
    return time.monotonic() - start_s


def _serve(root: Path, stack: ExitStack) -> FlightTransfers:
    transfers = FlightTransfers(
        root / "handover",
        Identity(token=TOKEN, run=RUN, host=HOST),
        stored=lambda name: root / name,
        clock=SystemClock(),
    )
    stack.callback(transfers.close)
    return transfers


def work(setup: Place) -> None:
    """Load each version from stdin, and sample a token."""
    with ExitStack() as stack:
        store, engine = _store(setup, stack), _engine()
        for version, line in enumerate(sys.stdin):
            digest, start_s = line.strip(), time.monotonic()
            path = store.weights(digest)
            need_digest(path, digest)
            fetched_s = time.monotonic()
            engine.load(path, version=version, digest=digest)
            loaded_s = time.monotonic()
            params = SamplingParams(max_tokens=1)
            engine.add(
                EngineRequest(request="r", token_ids=PROMPT, sampled=0, seed=1, params=params)
            )
            while engine.active:
                engine.step()
            token_s = time.monotonic() - loaded_s
            reply(
                Took(fetched_s=fetched_s - start_s, loaded_s=loaded_s - fetched_s, token_s=token_s)
            )


def _store(setup: Place, stack: ExitStack) -> PolicyStore:
    if not setup.store:
        return PolicyStore(Path(setup.root))
    root, peers = Path(setup.root), None
    if setup.peer:
        peers = PeerWeights(_serve(root, stack).copy, lambda _: [setup.peer])
    remote = open_files(Path(setup.store).as_uri(), folder=RUN)
    return PolicyStore(root, remote, with_deltas=setup.with_deltas, peers=peers)


def _engine() -> Any:
    import torch

    from dora_pipe.producers.engines.torch.engine import TorchEngine
    from dora_pipe.producers.engines.torch.model import fuse
    from dora_pipe.producers.engines.torch.weights import random_tensors

    torch.set_num_threads(1)
    weights = fuse(LLAMA_25M, random_tensors(LLAMA_25M, 1))
    return TorchEngine(LLAMA_25M, weights, slots=2, context_tokens=CONTEXT_TOKENS)


if __name__ == "__main__":
    work(task_of(Place))
