"""`dora-pipe bench ...`: measure this machine, side by side in one run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from dora_pipe.cli.output import emit_rows, say
from dora_pipe.cli.roles import need_engines

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]

VLLM_ROWS = (1, 16, 64)
RESIDENT_ROWS = (1, 16, 64)
RECORD_BYTES = (2_000, 65_536, 1_048_576)
ARCHIVED_BYTES = (1_000, 4_000, 64_000)
TOKENS = (30, 256, 2_048, 16_384)
RESTART = (20_000, 100_000)
PLAN_WORKERS = (250, 500, 1_000, 2_000, 4_000, 10_000)


def engine(
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of the running batch; may be repeated.")
    ] = None,
    engine: Annotated[str, typer.Option(help="torch, vllm or vllm-server.")] = "torch",
    resident: Annotated[
        list[int] | None,
        typer.Option(
            help="With so many LoRA versions resident, beside merged weights; may be repeated."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second of an engine by rows, beside `generate`: that of transformers for the own
    engine, vLLM's for vLLM; and of vLLM as a server, beside vLLM in process."""
    need_engines([engine])
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        if resident:
            found = _resident(engine, Path(folder), rows or RESIDENT_ROWS, resident)
        else:
            found = _beside_generate(engine, Path(folder), rows)
        _emit(found, as_json=as_json)


def _resident(engine: str, folder: Path, rows: Sequence[int], resident: Sequence[int]) -> list[Any]:
    from dora_pipe.bench.engine_lora import TorchHosts, bench_resident

    if engine == "torch":
        return [*bench_resident(rows, resident, hosts=TorchHosts())]
    from dora_pipe.bench.engine_vllm_hosts import ServerHosts, VllmHosts

    if engine == "vllm":
        return [*bench_resident(rows, resident, hosts=VllmHosts(folder))]
    with closing(ServerHosts(folder, slots=max(rows))) as hosts:
        return [*bench_resident(rows, resident, hosts=hosts)]


def _beside_generate(engine: str, folder: Path, rows: Sequence[int] | None) -> list[Any]:
    if engine == "vllm":
        from dora_pipe.bench.engine_vllm import bench_vllm

        return [*bench_vllm(folder, rows or VLLM_ROWS)]
    if engine == "vllm-server":
        from dora_pipe.bench.engine_server import bench_server

        return [*bench_server(folder, rows or VLLM_ROWS)]
    from dora_pipe.bench.engine import bench_engine

    return [*bench_engine(rows or (1, 16, 64, 256))]


def bus(
    url: Annotated[
        list[str] | None, typer.Option(help="A log to measure beside memory and SQLite.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Per phase.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Records and bytes per second of every bus."""
    from dora_pipe.bench.bus import bench_bus

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        urls = ["memory:", f"sqlite:{folder}/bench.sqlite", *(url or ())]
        _emit(bench_bus(urls, record_bytes=RECORD_BYTES, seconds=seconds), as_json=as_json)


def dataplane(
    bus: Annotated[
        str, typer.Option(help="kafka://HOST:PORT[,..]; without it SQLite and a pipe alone.")
    ] = "",
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens per trajectory; may be repeated.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Per phase.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Medians over so many.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Trajectories from a worker's hands into a trainer's batch, by every log beside a pipe."""
    from dora_pipe.bench.dataplane.measure import TOKENS as LENGTHS
    from dora_pipe.bench.dataplane.measure import Setup, bench_dataplane

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        setup = Setup(
            kafka=bus,
            tokens=tokens or LENGTHS,
            seconds=seconds,
            repeats=repeats,
            folder=Path(folder),
        )
        measured = bench_dataplane(setup, say)
    for figures in (measured.layers, measured.delays, measured.planes, measured.splits):
        if figures:
            _emit(figures, as_json=as_json)


def archive(
    megabytes: Annotated[int, typer.Option(min=1, help="Of values, per size of record.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """How fast a log is archived and an archive read, beside reading SQLite."""
    from dora_pipe.bench.archive import bench_archive

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        figures = bench_archive(
            Path(folder), record_bytes=ARCHIVED_BYTES, total_bytes=megabytes * 1_000_000
        )
        _emit(figures, as_json=as_json)


def codec(
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens per trajectory; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time and size of an encoded trajectory, beside pickle and raw arrays."""
    from dora_pipe.bench.codec import bench_codec

    _emit(bench_codec(tokens or TOKENS), as_json=as_json)


def plan(
    workers: Annotated[
        list[int] | None, typer.Option(help="Sizes to measure; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Cost of one round of the planner by the number of workers, and how it grows."""
    from dora_pipe.bench.plan import bench_plan, growth_of

    figures = bench_plan(workers or PLAN_WORKERS)
    _emit(figures, as_json=as_json)
    growth = growth_of(figures)
    if growth:
        _emit(growth, as_json=as_json)


def restart(
    trajectories: Annotated[
        list[int] | None,
        typer.Option(help="Lengths of the logs to start at the end of; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time of an orchestrator's restart: the whole log folded, and from its newest snapshot."""
    from dora_pipe.bench.restart import bench_restart

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        _emit(list(bench_restart(Path(folder), trajectories or [*RESTART])), as_json=as_json)


def _emit(figures: Sequence[Any], *, as_json: bool) -> None:
    columns = [field.name for field in fields(figures[0])]
    emit_rows(columns, [asdict(figure) for figure in figures], as_json=as_json)
