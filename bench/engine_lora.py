"""Measures an engine with adapters resident, beside merged weights; decides nothing.

The requests are those of `bench.engine`. They run to their end on merged weights, and with 1, 2 or
more versions of a LoRA policy resident, to which requests go in turn: so a full batch has rows of
every version. All linear layers are adapted. The engines take turns, and the best turn of each
counts: on a machine that does other work too, the others say little.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from dora_pipe.bench.engine import (
    MODEL,
    REQUESTS_MIN,
    REQUESTS_PER_ROW,
    WARM_UP_REQUESTS,
    Spent,
    check_rows,
    demo_requests,
    make_engine,
    measured,
    run_requests,
)
from dora_pipe.config.model import LINEAR_LAYERS
from dora_pipe.core.errors import UsageError
from dora_pipe.producers.engines.port import EngineRequest
from dora_pipe.store.adapters import Adapter, adapter_sources
from dora_pipe.store.safetensors_file import write_tensors

RANK: Final = 16
RESIDENT_MAX: Final = 64
TURNS: Final = 5
_BASE: Final = "00" * 32
"""Stands for the digest of weights that no file has."""
_SIZE: Final = 0.02
"""Standard deviation of the adapters' numbers; speed does not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentFigure:
    """Sampled tokens per second with so many versions resident, and on merged weights.

    `ratio` is that of the CPU figures: below 1 adapters are slower.

    Example: ``ResidentFigure(rows=64, resident=4, rank=16, requests=512, tokens=8463,
    tokens_per_s=11000.0, cpu_tokens_per_s=11000.0, merged_tokens_per_s=20000.0,
    merged_cpu_tokens_per_s=20000.0, ratio=0.55)``
    """

    rows: int
    resident: int
    rank: int
    requests: int
    tokens: int
    tokens_per_s: float
    cpu_tokens_per_s: float
    merged_tokens_per_s: float
    merged_cpu_tokens_per_s: float
    ratio: float


class Hosts(Protocol):
    """Opens engines of one kind, all of them on the same random weights of `MODEL`."""

    def merged(self, rows: int) -> Any:
        """One on these weights, of so many slots."""

    def hosting(self, rows: int, resident: int, rank: int) -> Any:
        """One with versions 1, 2, ... of a policy resident, each a random adapter."""

    def server_cpu_s(self, engine: Any) -> float:
        """CPU seconds that other processes have spent for an engine so far."""


class TorchHosts:
    """The own engine."""

    def merged(self, rows: int) -> Any:
        """See Hosts."""
        return make_engine(rows)

    def hosting(self, rows: int, resident: int, rank: int) -> Any:
        """See Hosts."""
        engine = make_engine(rows, digest=_BASE, lora_rank=rank, versions_resident=resident)
        load_adapters(engine, resident, rank, base=_BASE)
        return engine

    def server_cpu_s(self, engine: Any) -> float:
        """There are none."""
        return 0.0


def bench_resident(
    rows: Sequence[int],
    resident: Sequence[int],
    *,
    hosts: Hosts | None = None,
    rank: int = RANK,
    requests_per_row: int = REQUESTS_PER_ROW,
    turns: int = TURNS,
) -> list[ResidentFigure]:
    """A figure for each number of rows and of versions; of the own engine without `hosts`.

    Needs torch. Raises UsageError.
    """
    check_rows(rows)
    for count in resident:
        if not 1 <= count <= RESIDENT_MAX:
            raise UsageError(f"{count} versions is not between 1 and {RESIDENT_MAX}")
    found = []
    for count in rows:
        requests = demo_requests(max(REQUESTS_MIN, count * requests_per_row))
        found += _figures(hosts or TorchHosts(), count, resident, rank, requests, turns)
    return found


def under_versions(requests: Sequence[EngineRequest], resident: int) -> list[EngineRequest]:
    """The same requests, in turn under versions 1, 2, ... ``resident``."""
    return [replace(one, version=1 + at % resident) for at, one in enumerate(requests)]


def _figures(
    hosts: Hosts,
    rows: int,
    resident: Sequence[int],
    rank: int,
    requests: Sequence[EngineRequest],
    turns: int,
) -> list[ResidentFigure]:
    engines = [hosts.merged(rows)] + [hosts.hosting(rows, count, rank) for count in resident]
    works = [requests] + [under_versions(requests, count) for count in resident]
    spent: list[list[Spent]] = [[] for _ in engines]
    tokens = 0
    for engine, work in zip(engines, works, strict=True):
        run_requests(engine, work[:WARM_UP_REQUESTS], rows)
    for _ in range(turns):
        for engine, work, seconds in zip(engines, works, spent, strict=True):
            seconds.append(Spent())
            before_s = hosts.server_cpu_s(engine)
            with measured(seconds[-1]):
                tokens = run_requests(engine, work, rows)
            seconds[-1].cpu_s += hosts.server_cpu_s(engine) - before_s
    for engine in engines:
        engine.close()
    merged, *others = [min(each, key=lambda one: one.cpu_s) for each in spent]
    return [
        ResidentFigure(
            rows=rows,
            resident=count,
            rank=rank,
            requests=len(requests),
            tokens=tokens,
            tokens_per_s=round(tokens / own.wall_s, 1),
            cpu_tokens_per_s=round(tokens / own.cpu_s, 1),
            merged_tokens_per_s=round(tokens / merged.wall_s, 1),
            merged_cpu_tokens_per_s=round(tokens / merged.cpu_s, 1),
            ratio=round(merged.cpu_s / own.cpu_s, 2),
        )
        for count, own in zip(resident, others, strict=True)
    ]


def load_adapters(engine: Any, resident: int, rank: int, *, base: str) -> None:
    """Make versions 1, 2, ... of a policy on these weights resident, each a random adapter."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for version in range(1, resident + 1):
            path = Path(folder) / f"{version}.safetensors"
            adapter = _adapter(rank, base=base, seed=version)
            manifest = write_tensors(path, adapter_sources(adapter))
            engine.load(path, version=version, digest=manifest.digest)


def _adapter(rank: int, *, base: str, seed: int) -> Adapter:
    chance = np.random.default_rng(seed)

    def drawn(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (chance.standard_normal(shape) * _SIZE).astype(np.float32)

    layers = {name.removesuffix(".weight"): shape for name, shape in MODEL.tensors().items()}
    pairs = {
        layer: (drawn(rank, shape[1]), drawn(shape[0], rank))
        for layer, shape in layers.items()
        if layer.rpartition(".")[2] in LINEAR_LAYERS
    }
    return Adapter(base=base, scale=1.0, pairs=pairs)
