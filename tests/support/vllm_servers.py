"""Opens the vllm-server engine on tiny models for tests: few servers, which all of them share."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.engines.vllm.process import ServerProcess
from dora_pipe.producers.engines.vllm.server import VllmServerEngine
from tests.support.device import LORA_DTYPE, need_gpus
from tests.support.engine_contract import Decode, Subject
from tests.support.vllm_engines import BUILDERS, CONTEXT_TOKENS, SETTINGS, stored_subject

SLOTS = 64
ADAPTERS = 3
"""At once, of a server that hosts some."""

SERVERS = 4
"""That run at once: one of two ranks has 2.5 GB. No test asks for more."""

_running: dict[tuple[tuple[str, Any], ...], tuple[ServerProcess, Path]] = {}
"""By what they were asked for; who was asked for last is last."""


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
) -> tuple[ServerProcess, Path]:
    """A server of so many ranks and groups of them, and its model's folder. Those of another
    `number` are others, of an equal model."""
    folder = Path(tempfile.mkdtemp(prefix="dora-pipe-vllm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = BUILDERS[kind](folder / "seed0", 0)
    settings = replace(
        SETTINGS, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel
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
) -> VllmServerEngine:
    """An engine of that server, without weights."""
    server, model = running_server(**which)
    return VllmServerEngine(
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
    if isinstance(engine, VllmServerEngine):  # another computes in its steps alone
        # Where it clears its caches, which it does unasked, all that runs is prefilled again.
        engine._server._call("POST", "/pause?mode=keep&clear_cache=false")


def _resume(engine: Engine) -> None:
    if isinstance(engine, VllmServerEngine):
        engine._server.resume()


@contextmanager
def server_subject(
    folder: Path, tensor_parallel: int = 1, kind: str = "qwen2", pipeline_parallel: int = 1
) -> Iterator[Subject]:
    """The vllm-server engine under contract, with two policies in a store of their own.

    Engines of one server must not run at the same time under other weights; no check does that.
    """
    which: dict[str, Any] = {
        "tensor_parallel": tensor_parallel,
        "kind": kind,
        "pipeline_parallel": pipeline_parallel,
    }
    need_gpus(tensor_parallel * pipeline_parallel)
    _, model = running_server(**which)
    directories = [model, BUILDERS[kind](folder / "seed1", 1)]
    shutil.copytree(model, folder / "seed0")
    opener = partial(open_shared, **which)
    with stored_subject("vllm-server", folder, directories, opener, ahead=True) as subject:
        yield subject


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
            VllmServerEngine(
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
