"""vLLM engines on tiny models, sharing few servers."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dora_pipe.config.workers import Vllm
from dora_pipe.core.errors import ResourceError
from dora_pipe.producers.engines.engine import Engine
from dora_pipe.producers.engines.vllm.core import (
    CPU_BUILD,
    ENVIRONMENT_DEFAULTS,
    version_of,
)
from dora_pipe.producers.engines.vllm.http import Address, call
from dora_pipe.producers.engines.vllm.process import START_S, ServerProcess
from dora_pipe.producers.engines.vllm.server import VllmEngine
from dora_pipe.producers.engines.vllm.wire import HEALTH
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support import models
from tests.support.device import COARSE, DEVICE, DTYPE, LORA_DTYPE, ON_GPU, ROUNDING, need_gpus
from tests.support.engine_contract import Decode, Subject
from tests.support.user_run import until

NOT_INSTALLED = "vllm is not installed: make test-vllm"
CONTEXT_TOKENS = 256
SETTINGS = Vllm(dtype=DTYPE)  # type: ignore[arg-type]
SLEEPS = not ON_GPU

BUILDERS: dict[str, Callable[..., Path]] = {
    "qwen2": partial(models.make_qwen2, scale=8.0),
    "tied": partial(models.make_qwen2, scale=2.0, tie_word_embeddings=True),
    "tied_llama": partial(
        models.make_llama_gqa, scale=2.0, hidden_size=192, tie_word_embeddings=True
    ),
    "padded": partial(models.make_qwen2, vocab_size=models.QWEN2_VOCABULARY + 28),
    "windows": partial(
        models.make_qwen2, use_sliding_window=True, sliding_window=32, max_window_layers=0
    ),
    "qwen3_moe": partial(models.make_qwen3_moe, scale=8.0, head_dim=32),
    "whole_experts": partial(
        models.make_qwen3_moe,
        scale=8.0,
        head_dim=32,
        moe_intermediate_size=64,
        norm_topk_prob=False,
    ),
    "glm4_moe": partial(models.make_glm4_moe, scale=8.0, head_dim=32),
}
"""Models that vLLM's kernels support. `padded` has embedding rows without a token. Other
mixtures have experts 48 wide, which the CPU kernels reject."""

SLOTS = 64
ADAPTERS = 3
"""Adapters at a time."""

SERVERS = 4
"""Concurrent servers: one of two ranks has 2.5 GB. No test needs more."""

_running: dict[tuple[tuple[str, Any], ...], tuple[ServerProcess, Path]] = {}
"""Servers by arguments, most recently used last."""


def need_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make test-gpu" if ON_GPU else NOT_INSTALLED)
    if bool(version_of(CPU_BUILD)) == ON_GPU:
        pytest.skip(f"this build of vllm is not for {DEVICE}")


def running_server(**which: Any) -> tuple[ServerProcess, Path]:
    """Return the shared server for these arguments and its model's folder. Starting takes 30 CPU
    seconds, so it runs until the tests end or `SERVERS` others replace it."""
    asked = signature(start_server).bind(**which)
    asked.apply_defaults()
    key = tuple(asked.arguments.items())
    result = _running.pop(key, None)
    if result is None:
        _end_beyond(SERVERS - 1)  # first: the new server needs the memory
        result = start_server(**which)
    _running[key] = result
    return result


def _end_beyond(count: int) -> None:
    while len(_running) > count:
        _running.pop(next(iter(_running)))[0].close()


atexit.register(_end_beyond, 0)


def start_server(
    lora_rank: int = 0,
    tensor_parallel_size: int = 1,
    kind: str = "qwen2",
    number: int = 0,
    pipeline_parallel_size: int = 1,
    kv_cache_gb: float = 0.0,
) -> tuple[ServerProcess, Path]:
    """Start a server; another `number` gives a separate one with an equal model."""
    folder = Path(tempfile.mkdtemp(prefix="dora-pipe-vllm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = BUILDERS[kind](folder / "seed0", 0)
    settings = replace(
        SETTINGS,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        kv_cache_gb=kv_cache_gb,
    )
    server = ServerProcess.start(
        model,
        replace(settings, dtype=LORA_DTYPE) if lora_rank else settings,
        slots=SLOTS,
        context_tokens=CONTEXT_TOKENS,
        threads=1,
        sleep=SLEEPS,
        lora_rank=lora_rank,
        max_resident_versions=ADAPTERS if lora_rank else 1,
    )
    return server, model


_STOCK = """
import asyncio, os, sys
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.launcher import create_server_socket
from vllm.utils.argparse_utils import FlexibleArgumentParser

asked = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[2:])
socket = create_server_socket(("127.0.0.1", 0), reuse_port=False)
os.write(int(sys.argv[1]), f"{socket.getsockname()[1]} ".encode())
asyncio.run(run_server_worker("", socket, asked))
"""


@contextmanager
def stock_server(model: Path) -> Iterator[Address]:
    """Run `vllm serve` with its default endpoints and a free port."""
    report, theirs = os.pipe()
    words = ["--model", str(model), "--dtype", DTYPE, "--max-model-len", str(CONTEXT_TOKENS)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _STOCK, str(theirs), *words, "--api-key=key", "--enforce-eager"],
        env=os.environ | ENVIRONMENT_DEFAULTS | settings,
        pass_fds=[theirs],
        start_new_session=True,
    )
    os.close(theirs)
    try:
        address = Address(host="127.0.0.1", port=int(os.read(report, 64)), key="key")
        until(lambda: process.poll() is not None or _healthy(address), START_S)
        yield address
    finally:
        os.close(report)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(address: Address) -> bool:
    with suppress(ResourceError):
        call(address, "GET", HEALTH)
        return True
    return False


def family(server: int) -> list[int]:
    """Return a server's processes, including engine core and ranks of its session."""
    results = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # already ended
            if (path / "stat").read_text().rpartition(")")[2].split()[3] == str(server):
                results.append(int(path.name))
    return results


def open_shared(
    *,
    slots: int,
    context_tokens: int,
    decode: Decode | None = None,
    routes: bool = False,
    **which: Any,
) -> VllmEngine:
    server, model = running_server(**which)
    return VllmEngine(
        model,
        slots=slots,
        context_tokens=context_tokens,
        address=server.address,
        settings=SETTINGS,
        sleep=SLEEPS,
        decode=decode,
        routes=routes,
    )


@contextmanager
def held(*engines: Engine) -> Iterator[None]:
    """Pause servers in the block: running requests keep their state, new ones wait. Use `go` to
    step."""
    for engine in engines:
        _hold(engine)
    try:
        yield
    finally:
        for engine in engines:
            _resume(engine)


@contextmanager
def go(engine: Engine) -> Iterator[None]:
    _resume(engine)
    try:
        yield
    finally:
        _hold(engine)


def _hold(engine: Engine) -> None:
    if isinstance(engine, VllmEngine):  # others compute only in their steps
        # If it clears its caches unasked, all running requests are prefilled again.
        engine._server._call("POST", "/pause?mode=keep&clear_cache=false")


def _resume(engine: Engine) -> None:
    if isinstance(engine, VllmEngine):
        engine._server.resume()


@contextmanager
def server_subject(folder: Path, kind: str = "qwen2", **which: Any) -> Iterator[Subject]:
    """Yield the vLLM engine under contract with two policies. Engines of one server must not run
    under different weights at the same time."""
    need_gpus(which.get("tensor_parallel_size", 1) * which.get("pipeline_parallel_size", 1))
    _, model = running_server(kind=kind, **which)
    directories = [model, BUILDERS[kind](folder / "seed1", 1)]
    shutil.copytree(model, folder / "seed0")
    store = PolicyStore(folder / "policies")
    manifests = [import_model(store, directory)[0] for directory in directories]
    first, second = ((store.weights_path(m.digest), m.digest) for m in manifests)
    opened: list[Engine] = []

    def open_engine(
        *, slots: int, context_tokens: int = CONTEXT_TOKENS, decode: Decode | None = None
    ) -> Engine:
        engine = open_shared(
            slots=slots, context_tokens=context_tokens, decode=decode, kind=kind, **which
        )
        engine.load(first[0], version=0, digest=first[1])
        opened.append(engine)
        return engine

    yield Subject(
        name="vllm",
        open=open_engine,
        vocabulary=models.QWEN2_VOCABULARY,
        policies=(first, second),
        rounding=ROUNDING,
        coarse=COARSE,
        ahead=True,
    )
    for engine in opened:
        engine.close()


@contextmanager
def server_opener(lora_rank: int) -> Iterator[Callable[..., Engine]]:
    """Yield an opener of engines for adapters; each takes the server over from the last one."""
    server, model = running_server(lora_rank=lora_rank)
    opened: list[Engine] = []

    def open_engine(*, slots: int, most: int) -> Engine:
        for engine in opened:
            engine.close()
        del opened[:]
        opened.append(
            VllmEngine(
                model,
                slots=slots,
                context_tokens=CONTEXT_TOKENS,
                address=server.address,
                lora_rank=lora_rank,
                max_resident_versions=most,
            )
        )
        return opened[0]

    yield open_engine
    for engine in opened:
        engine.close()
