"""Measures vLLM as a server behind the engine port, beside vLLM in process; decides nothing.

Both have the same random model and run the requests of `bench.engine` to their end. They take
turns, and the better turn of each counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dora_pipe.bench.engine import (
    REQUESTS_MIN,
    REQUESTS_PER_ROW,
    WARM_UP_REQUESTS,
    Spent,
    check_rows,
    demo_requests,
    measured,
    run_requests,
)
from dora_pipe.bench.engine_vllm_hosts import ServerHosts, VllmHosts
from dora_pipe.producers.engines.port import EngineRequest

TURNS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigure:
    """Sampled tokens per second by wall clock, and what a turn took of the CPU.

    `ratio` is the server's tokens per second over those of vLLM in process.

    Example: ``ServerFigure(rows=64, requests=512, tokens=8698, tokens_per_s=1628.0,
    vllm_tokens_per_s=4164.0, server_cpu_s=6.4, worker_cpu_s=0.5, vllm_cpu_s=2.1, ratio=0.39)``
    """

    rows: int
    requests: int
    tokens: int
    tokens_per_s: float
    vllm_tokens_per_s: float
    server_cpu_s: float
    worker_cpu_s: float
    vllm_cpu_s: float
    ratio: float


def bench_server(
    folder: Path,
    rows: Sequence[int],
    *,
    requests_per_row: int = REQUESTS_PER_ROW,
    turns: int = TURNS,
) -> list[ServerFigure]:
    """A figure for each number of rows. Needs vLLM. Raises ConfigError, UsageError."""
    check_rows(rows)
    for name in ("server", "process"):
        (folder / name).mkdir()
    with closing(ServerHosts(folder / "server", slots=max(rows))) as servers:
        here = VllmHosts(folder / "process")
        return [
            _figure(servers, here, count, max(REQUESTS_MIN, count * requests_per_row), turns)
            for count in rows
        ]


def _figure(
    servers: ServerHosts, here: VllmHosts, rows: int, count: int, turns: int
) -> ServerFigure:
    requests = demo_requests(count)
    served, local = servers.merged(rows), here.merged(rows)
    for engine in (served, local):
        run_requests(engine, requests[:WARM_UP_REQUESTS], rows)
    theirs, ours, server_cpu_s, tokens = [], [], [], 0
    for _ in range(turns):
        before_s = servers.server_cpu_s(served)
        tokens, spent = _turn(served, requests, rows)
        theirs.append(spent)
        server_cpu_s.append(servers.server_cpu_s(served) - before_s)
        made, spent = _turn(local, requests, rows)
        ours.append(spent)
        assert made == tokens, f"{tokens} tokens of the server, {made} in process"
    served.close()
    local.close()
    wall_s, vllm_wall_s = (min(one.wall_s for one in each) for each in (theirs, ours))
    return ServerFigure(
        rows=rows,
        requests=count,
        tokens=tokens,
        tokens_per_s=round(tokens / wall_s, 1),
        vllm_tokens_per_s=round(tokens / vllm_wall_s, 1),
        server_cpu_s=round(min(server_cpu_s), 2),
        worker_cpu_s=round(min(one.cpu_s for one in theirs), 2),
        vllm_cpu_s=round(min(one.cpu_s for one in ours), 2),
        ratio=round(vllm_wall_s / wall_s, 2),
    )


def _turn(engine: Any, requests: Sequence[EngineRequest], rows: int) -> tuple[int, Spent]:
    """Sampled tokens, and what that took of this process."""
    spent = Spent()
    with measured(spent):
        tokens = run_requests(engine, requests, rows)
    return tokens, spent
