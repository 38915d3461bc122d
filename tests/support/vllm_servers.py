"""Opens the vLLM engine on tiny models for tests: few servers, which all of them share."""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.engines.vllm.core import CPU_BUILD, VllmSettings, version_of
from dora_pipe.producers.engines.vllm.process import ServerProcess
from dora_pipe.producers.engines.vllm.server import VllmEngine
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support import models
from tests.support.device import (
    COARSE,
    DEVICE,
    DTYPE,
    LORA_DTYPE,
    ON_GPU,
    ROUNDING,
    need_gpus,
)
from tests.support.engine_contract import Decode, Subject

NOT_INSTALLED = "vllm is not installed: make test-vllm"
CONTEXT_TOKENS = 256
SETTINGS = VllmSettings(dtype=DTYPE, sleep=not ON_GPU)  # type: ignore[arg-type]

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
"""Models of heads that vLLM has kernels for. `padded` has embedding rows without a token. The other
mixtures' experts are 48 wide, which is no multiple of what its kernels on a CPU want."""

SLOTS = 64
ADAPTERS = 3
"""At once, of a server that hosts some."""

SERVERS = 4
"""That run at once: one of two ranks has 2.5 GB. No test asks for more."""

_running: dict[tuple[tuple[str, Any], ...], tuple[ServerProcess, Path]] = {}
"""By what they were asked for; who was asked for last is last."""


def need_vllm() -> None:
    """Skip where vLLM is not installed, or its build is for another device."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make test-gpu" if ON_GPU else NOT_INSTALLED)
    if bool(version_of(CPU_BUILD)) == ON_GPU:
        pytest.skip(f"this build of vllm is not for {DEVICE}")


def running_server(**which: Any) -> tuple[ServerProcess, Path]:
    """The server that `start_server` starts for these, and the folder of the model that it has.

    Starting one takes half a minute of CPU: it runs until the tests end, or until `SERVERS` others
    were asked for since. Engines that want less take a part of it.
    """
    asked = signature(start_server).bind(**which)
    asked.apply_defaults()
    key = tuple(asked.arguments.items())
    found = _running.pop(key, None)
    if found is None:
        _end_beyond(SERVERS - 1)  # first: while it starts it has its memory already
        found = start_server(**which)
    _running[key] = found
    return found


def _end_beyond(count: int) -> None:
    """End those that were asked for longest ago."""
    while len(_running) > count:
        _running.pop(next(iter(_running)))[0].close()


atexit.register(_end_beyond, 0)


def start_server(
    lora_rank: int = 0,
    tensor_parallel: int = 1,
    kind: str = "qwen2",
    number: int = 0,
    pipeline_parallel: int = 1,
    kv_gb: float = 0.0,
) -> tuple[ServerProcess, Path]:
    """A server of so many ranks and groups of them, and its model's folder. Those of another
    `number` are others, of an equal model."""
    folder = Path(tempfile.mkdtemp(prefix="dora-pipe-vllm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = BUILDERS[kind](folder / "seed0", 0)
    settings = replace(
        SETTINGS,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        kv_gb=kv_gb,
    )
    server = ServerProcess.start(
        model,
        replace(settings, dtype=LORA_DTYPE) if lora_rank else settings,  # type: ignore[arg-type]
        slots=SLOTS,
        context_tokens=CONTEXT_TOKENS,
        threads=1,
        lora_rank=lora_rank,
        versions_resident=ADAPTERS if lora_rank else 1,
    )
    return server, model


def family(server: int) -> list[int]:
    """The processes that a server is: of its session are its engine core and its ranks, too."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if (one / "stat").read_text().rpartition(")")[2].split()[3] == str(server):
                found.append(int(one.name))
    return found


def open_shared(
    *,
    slots: int,
    context_tokens: int,
    decode: Decode | None = None,
    routes: bool = False,
    **which: Any,
) -> VllmEngine:
    """An engine of that server, without weights."""
    server, model = running_server(**which)
    return VllmEngine(
        model,
        slots=slots,
        context_tokens=context_tokens,
        address=server.address,
        settings=SETTINGS,
        decode=decode,
        routes=routes,
    )


@contextmanager
def held(*engines: Engine) -> Iterator[None]:
    """Servers that compute nothing meanwhile, so that nothing ends in them that its worker has yet
    to see: what runs there keeps its place, what is added waits. Who steps lets them `go`."""
    for engine in engines:
        _hold(engine)
    try:
        yield
    finally:
        for engine in engines:
            _resume(engine)


@contextmanager
def go(engine: Engine) -> Iterator[None]:
    """Its server, which is held, computes meanwhile."""
    _resume(engine)
    try:
        yield
    finally:
        _hold(engine)


def _hold(engine: Engine) -> None:
    if isinstance(engine, VllmEngine):  # another computes in its steps alone
        # Where it clears its caches, which it does unasked, all that runs is prefilled again.
        engine._server._call("POST", "/pause?mode=keep&clear_cache=false")


def _resume(engine: Engine) -> None:
    if isinstance(engine, VllmEngine):
        engine._server.resume()


@contextmanager
def server_subject(folder: Path, kind: str = "qwen2", **which: Any) -> Iterator[Subject]:
    """The vLLM engine under contract, with two policies in a store of their own.

    Engines of one server must not run at the same time under other weights; no check does that.
    """
    need_gpus(which.get("tensor_parallel", 1) * which.get("pipeline_parallel", 1))
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
    """Opens engines for adapters, each of which takes the one server from the one before it."""
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
                versions_resident=most,
            )
        )
        return opened[0]

    yield open_engine
    for engine in opened:
        engine.close()
