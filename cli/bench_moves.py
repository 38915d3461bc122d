"""`bench moves`: moved requests beside prefilled ones, what moves cost a run, weights to many."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from dora_pipe.cli.look import JsonOption
from dora_pipe.cli.output import emit_rows
from dora_pipe.cli.rundir import RUNS, opened

WORKERS = (1, 4, 8)
STORE_MB_S = (0, 200)


def moves(
    model: Annotated[list[str] | None, typer.Option(help="demo or llama-25m.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Lengths of sequences; may be repeated.")
    ] = None,
    engine: Annotated[str, typer.Option(help="torch or vllm, in both processes.")] = "torch",
    run: Annotated[
        str, typer.Option(help="Say what moving cost this run instead, from its log.")
    ] = "",
    root: Annotated[Path, typer.Option(help="Where runs lie.")] = RUNS,
    weights: Annotated[
        bool, typer.Option("--weights", help="Bring weights to many workers instead.")
    ] = False,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="With --weights; may be repeated.")
    ] = None,
    store_mb_s: Annotated[
        list[int] | None,
        typer.Option(
            min=0, help="With --weights: a store of this speed; 0: this disk; may be repeated."
        ),
    ] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="With --weights.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """Time until a moved request has its next token, between two processes: with its KV cache by
    files and by Flight, and prefilled."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        if run:
            from dora_pipe.bench.moves_log import overhead_of

            with opened(run, root) as found:
                _emit([overhead_of(found.bus, found.topics)], as_json=as_json)
        elif weights:
            from dora_pipe.bench.moves_weights import bench_weights

            figures = bench_weights(
                Path(folder),
                workers or WORKERS,
                store_mb_s=STORE_MB_S if store_mb_s is None else store_mb_s,
                megabytes=megabytes,
            )
            _emit(list(figures), as_json=as_json)
        else:
            from dora_pipe.bench.moves import bench_moves

            models = model or ("llama-25m",)
            moved = bench_moves(Path(folder), models, tokens or (), engine=engine)
            _emit(list(moved), as_json=as_json)


def _emit(figures: Sequence[Any], *, as_json: bool) -> None:
    columns = [field.name for field in fields(figures[0])]
    emit_rows(columns, [asdict(figure) for figure in figures], as_json=as_json)
