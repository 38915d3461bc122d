"""`dora-pipe bench ...`: measure this machine, side by side in one run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dora_pipe.cli.output import emit_rows

VLLM_ROWS = (1, 16, 64)
RESIDENT_ROWS = (1, 16, 64)
RECORD_BYTES = (2_000, 65_536, 1_048_576)
AUDITED_TOKENS = (2_048, 16_384)
WEIGHTS_WORKERS = (1, 4, 8)
STORE_MB_S = (0, 200)
ARCHIVED_BYTES = (1_000, 4_000, 64_000)
TOKENS = (30, 256, 2_048, 16_384)
RESTART = (20_000, 100_000)
TURN_WORKERS = (512,)
TURN_SLOTS = 200
PLAN_WORKERS = (250, 500, 1_000, 2_000, 4_000, 10_000)


def resident_figures(
    engine: str, folder: Path, rows: Sequence[int], resident: Sequence[int]
) -> list[Any]:
    """An engine with so many versions resident."""
    from dora_pipe.bench.engine_lora import TorchHosts, bench_resident

    if engine == "torch":
        return [*bench_resident(rows, resident, hosts=TorchHosts())]
    from dora_pipe.bench.engine_vllm_hosts import ServerHosts, VllmHosts

    if engine == "vllm":
        return [*bench_resident(rows, resident, hosts=VllmHosts(folder))]
    with closing(ServerHosts(folder, slots=max(rows))) as hosts:
        return [*bench_resident(rows, resident, hosts=hosts)]


def beside_generate(engine: str, folder: Path, rows: Sequence[int] | None) -> list[Any]:
    """An engine beside `generate`."""
    if engine == "vllm":
        from dora_pipe.bench.engine_vllm import bench_vllm

        return [*bench_vllm(folder, rows or VLLM_ROWS)]
    if engine == "vllm-server":
        from dora_pipe.bench.engine_server import bench_server

        return [*bench_server(folder, rows or VLLM_ROWS)]
    from dora_pipe.bench.engine import bench_engine

    return [*bench_engine(rows or (1, 16, 64, 256))]


def emit_figures(figures: Sequence[Any], *, as_json: bool) -> None:
    """Dataclasses of one kind as a table, or as JSON."""
    columns = [field.name for field in fields(figures[0])]
    emit_rows(columns, [asdict(figure) for figure in figures], as_json=as_json)
