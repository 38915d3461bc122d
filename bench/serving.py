"""Sampled tokens per second of a vLLM worker, and of `vllm serve` driven directly.

A run evaluates its start policy on one worker. `vllm serve` then completes the same prompts over
/v1/completions with log-probs, as many at a time, to the lengths that the worker sampled. Each
starts its own server. Times are from the first request to the last answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx2
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer

from dora_pipe.bench.support import emit_figures, scratch
from dora_pipe.cli.options import JsonOption
from dora_pipe.core.errors import ResourceError
from dora_pipe.producers.engines.vllm.core import CPU_BUILD, ENVIRONMENT_DEFAULTS, version_of

PROMPTS: Final = 256
"""Rows of the task's evaluation."""

CONTEXT_TOKENS: Final = 256
START_S: Final = 300.0
COMMAND_S: Final = 3600.0
ANSWERS_S: Final = 3600.0
POLL_S: Final = 0.5
SERVE: Final = "vllm.entrypoints.openai.api_server"
"""Module of `vllm serve`; the command itself fails in the build for CPUs."""

THREADS: Final = {"OMP_NUM_THREADS": "1"}
CPU_ENVIRONMENT: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Prompts with the number of tokens to sample for each, in the order of their start."""

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    seconds: float
    """Time the worker needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFigure:
    rows: int
    requests: int
    tokens: int
    worker_tokens_per_s: float
    direct_tokens_per_s: float
    ratio: float


def command(
    rows: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 256,
    samples: Annotated[int, typer.Option(min=1, help="Trajectories of each of 256 prompts.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions, alternating.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Measure tokens per second of a vLLM worker and of `vllm serve` alone."""
    with scratch() as folder:
        _run("init", str(folder / "run"), "--engine", "vllm")
        emit_figures(
            [_measured(folder / "run", rows, samples, repeat) for repeat in range(repeats)],
            as_json=as_json,
        )


def _measured(folder: Path, rows: int, samples: int, repeat: int) -> ServingFigure:
    work = _worker(folder, f"run{repeat}", rows, samples)
    with _vllm_serve(folder / "model", rows) as socket:
        direct_s = asyncio.run(_complete(socket, work, rows))
    tokens = sum(work.lengths)
    return ServingFigure(
        rows=rows,
        requests=len(work.lengths),
        tokens=tokens,
        worker_tokens_per_s=tokens / work.seconds,
        direct_tokens_per_s=tokens / direct_s,
        ratio=direct_s / work.seconds,
    )


def _worker(folder: Path, name: str, rows: int, samples: int) -> Work:
    settings = {
        "run.name": name,
        "run.steps": 1,
        "evaluation.prompts": PROMPTS,
        "evaluation.group_size": samples,
        "rollout.prompts_per_step": 1,
        "rollout.group_size": 2,
        "rollout.filter_zero_advantage": "false",
        "workers.count": 1,
        "workers.max_num_seqs": rows,
        "workers.max_model_len": CONTEXT_TOKENS,
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    runs = ("--runs", str(folder / "runs"))
    _run("run", str(folder / "config.toml"), *options, *runs)
    file = folder / f"{name}.parquet"
    _run("export", "parquet", name, str(file), *runs)
    table = pq.read_table(
        file,
        columns=["prompt_tokens", "sampled", "token_ids", "scheduled_ns", "finished_ns"],
        filters=(pc.field("purpose") == "eval") & (pc.field("version") == 0),
    ).sort_by("scheduled_ns")
    columns: dict[str, list[Any]] = table.to_pydict()
    prompts = zip(columns["token_ids"], columns["prompt_tokens"], strict=True)
    return Work(
        prompts=[tokens[:count] for tokens, count in prompts],
        lengths=columns["sampled"],
        seconds=(max(columns["finished_ns"]) - min(columns["scheduled_ns"])) / 1e9,
    )


def _run(*words: str) -> None:
    program = str(Path(sys.executable).with_name("dora-pipe"))
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, check=False, timeout=COMMAND_S
    )
    if done.returncode:
        raise ResourceError(f"dora-pipe {words[0]} failed: {done.stderr.strip()[-500:]}")


@contextmanager
def _vllm_serve(model: Path, rows: int) -> Iterator[Path]:
    """Run `vllm serve` on a Unix socket, and yield its path once it answers."""
    socket = model.parent / "vllm.socket"
    words = [sys.executable, "-m", SERVE, "--model", str(model), "--uds", str(socket)]
    words += ["--max-num-seqs", str(rows), "--max-model-len", str(CONTEXT_TOKENS)]
    words += ["--dtype", "float32", "--enforce-eager", "--generation-config", "vllm"]
    words += ["--disable-uvicorn-access-log", "--served-model-name", "policy"]
    cpu = CPU_ENVIRONMENT if version_of(CPU_BUILD) else {}
    environment = os.environ | ENVIRONMENT_DEFAULTS | THREADS | cpu
    with (model.parent / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        _wait_until_healthy(process, socket)
        yield socket
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        socket.unlink(missing_ok=True)


def _wait_until_healthy(process: subprocess.Popen[bytes], socket: Path) -> None:
    until_s = time.monotonic() + START_S
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(socket))) as client:
        while time.monotonic() < until_s and process.poll() is None:
            with suppress(httpx2.TransportError):
                if client.get("http://vllm/health").is_success:
                    return
            time.sleep(POLL_S)
    log = socket.with_name("vllm.log").read_text().strip()
    raise ResourceError(f"vllm serve did not start: {log[-500:]}")


async def _complete(socket: Path, work: Work, rows: int) -> float:
    """Complete all prompts, `rows` at a time; return the seconds."""
    transport = httpx2.AsyncHTTPTransport(
        uds=str(socket), limits=httpx2.Limits(max_connections=rows)
    )
    async with httpx2.AsyncClient(transport=transport, timeout=ANSWERS_S) as client:

        async def complete(prompt: Sequence[int], length: int) -> None:
            body = {"model": "policy", "prompt": prompt, "max_tokens": length, "logprobs": 0}
            body |= {"ignore_eos": True}
            answer = await client.post("http://vllm/v1/completions", json=body)
            answer.raise_for_status()

        began_s = time.monotonic()
        await asyncio.gather(*map(complete, work.prompts, work.lengths))
        return time.monotonic() - began_s
