"""Measures vLLM behind the engine port, beside its own `generate` and as a server; decides nothing.

The port and `generate` are vLLM engines of equal settings in one process, with the same random
model, and run the same requests to their end: prompts, lengths and seeds of `bench.engine`,
log-probs asked for. `generate` gets all requests at once and keeps `rows` of them in its batch, as
vLLM's scheduler does; the port refills a slot when it is free. They take turns, one of them first
in every second; the better turn of each counts for its speed, since on a machine that does other
work too the worse says little. `ratio` is the median of the turns' own: a machine that grows faster
or slower changes both halves.

A server takes half a minute to start: there is one for each number of adapters, with as many slots
as the largest batch, and the engines of that number follow each other on it. It and vLLM in process
take turns too, and the better turn of each counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from dora_pipe.bench import qwen3
from dora_pipe.bench.dataplane.procfs import tree_cpu_s
from dora_pipe.bench.engine import (
    CONTEXT_TOKENS,
    MODEL,
    REQUESTS_MIN,
    REQUESTS_PER_ROW,
    WARM_UP_REQUESTS,
    EngineFigure,
    Spent,
    check_rows,
    demo_config,
    demo_requests,
    measured,
    run_requests,
)
from dora_pipe.bench.engine_lora import load_adapters
from dora_pipe.bench.qwen3 import SHAPES, vocabulary_of
from dora_pipe.core.errors import UsageError
from dora_pipe.producers.engines.port import EngineRequest
from dora_pipe.store.safetensors_file import read_manifest

SERVER_TURNS: Final = 4
_SEED: Final = 20
DEMO: Final = "demo"


def write_model(directory: Path, *, context_tokens: int = CONTEXT_TOKENS) -> Path:
    """The demo's shapes with random weights, as a model directory."""
    import torch
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(_SEED)
    build: Any = Qwen2ForCausalLM
    config = demo_config(context_tokens=context_tokens, tie_word_embeddings=False, bos_token_id=1)
    build(config).float().save_pretrained(directory)
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A model, how vLLM is to run it, and requests to it; by themselves the demo's."""

    write: Callable[[Path], Path] = write_model
    """Makes the model's directory."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of VllmSettings."""
    vocabulary: int = MODEL.vocabulary
    scale: int = 1
    """Tokens of requests and of a context are so many times the demo's."""
    requests_per_row: int = REQUESTS_PER_ROW
    turns: int = 7
    """Of each half."""
    ratio_of: Literal["cpu_s", "wall_s"] = "cpu_s"

    @property
    def context_tokens(self) -> int:
        """Of a request, at most."""
        return self.scale * CONTEXT_TOKENS

    def requests(self, count: int, **seed: int) -> list[EngineRequest]:
        return demo_requests(count, vocabulary=self.vocabulary, scale=self.scale, **seed)


def load_of(model: str) -> Load:
    """The demo's, or one of `qwen3.SHAPES` as a GPU is used: in bfloat16, with compiled graphs, and
    requests eight times as long. Raises UsageError for another."""
    if model == DEMO:
        return Load()
    if model not in SHAPES:
        known = ", ".join((DEMO, *SHAPES))
        raise UsageError(f"there is no model {model!r}", hint=f"there are: {known}")
    return Load(
        write=partial(qwen3.write_model, model=model),
        settings={"dtype": "bfloat16", "eager": False},
        vocabulary=vocabulary_of(model),
        scale=8,
        requests_per_row=REQUESTS_PER_ROW // 2,
        turns=3,
        ratio_of="wall_s",
    )


def bench_vllm(folder: Path, rows: Sequence[int], load: Load) -> Iterator[EngineFigure]:
    """A figure for each number of rows. Needs vLLM. Raises ConfigError, UsageError."""
    check_rows(rows)
    from dora_pipe.producers.engines.vllm import core as vllm_core

    vllm_core.prepare(threads=1)
    model = load.write(folder / "model")
    for count in rows:
        yield _figure(model, load, count, max(REQUESTS_MIN, count * load.requests_per_row))


def _figure(model: Path, load: Load, rows: int, count: int) -> EngineFigure:
    from dora_pipe.producers.engines.vllm.core import VllmSettings
    from dora_pipe.producers.engines.vllm.engine import VllmEngine

    requests, warm_up = load.requests(count), load.requests(WARM_UP_REQUESTS, seed=0)
    engine = VllmEngine(
        model,
        slots=rows,
        context_tokens=load.context_tokens,
        threads=1,
        settings=VllmSettings(**load.settings),
    )
    generate, close = _generate(model, load, rows)
    own, theirs = ([Spent() for _ in range(load.turns)] for _ in range(2))
    tokens = 0
    run_requests(engine, warm_up, rows)
    generate(warm_up)
    halves: list[tuple[list[Spent], Callable[[], int]]] = [
        (own, lambda: run_requests(engine, requests, rows)),
        (theirs, lambda: generate(requests)),
    ]
    for turn in range(load.turns):
        for spent, half in halves:
            with measured(spent[turn]):
                made = half()
            tokens = tokens or made
            assert made == tokens, f"{made} tokens after {tokens}"
        halves.reverse()
    engine.close()
    close()
    spent_s = attrgetter(load.ratio_of)
    own_cpu_s, theirs_cpu_s = (min(one.cpu_s for one in spent) for spent in (own, theirs))
    own_wall_s, theirs_wall_s = (min(one.wall_s for one in spent) for spent in (own, theirs))
    return EngineFigure(
        rows=rows,
        requests=count,
        tokens=tokens,
        tokens_per_s=round(tokens / own_wall_s, 1),
        cpu_tokens_per_s=round(tokens / own_cpu_s, 1),
        generate_tokens_per_s=round(tokens / theirs_wall_s, 1),
        generate_cpu_tokens_per_s=round(tokens / theirs_cpu_s, 1),
        ratio=round(
            median(spent_s(two) / spent_s(one) for one, two in zip(own, theirs, strict=True)), 2
        ),
    )


def _generate(
    model: Path, load: Load, rows: int
) -> tuple[Callable[[Sequence[EngineRequest]], int], Callable[[], None]]:
    """vLLM's `generate` with `rows` in its batch; it answers with the tokens it sampled."""
    from vllm import LLM, SamplingParams

    from dora_pipe.producers.engines.vllm import core as vllm_core

    arguments = vllm_core.arguments(
        model,
        vllm_core.VllmSettings(**load.settings),
        slots=rows,
        context_tokens=load.context_tokens,
    )
    llm = LLM(**{**arguments, "load_format": "auto"})

    def generate(requests: Sequence[EngineRequest]) -> int:
        outputs = llm.generate(
            [{"prompt_token_ids": list(one.token_ids)} for one in requests],
            [
                SamplingParams(
                    temperature=1.0,
                    seed=one.seed,
                    max_tokens=one.params.max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=0,
                )
                for one in requests
            ],
            use_tqdm=False,
        )
        return sum(len(one.outputs[0].token_ids) for one in outputs)

    return generate, llm.llm_engine.engine_core.shutdown


# Engines for `engine_lora`, in process and as servers, on the same random weights


class _OnFiles:
    """What both have in common: a model directory, and the digest of its weights."""

    def __init__(self, folder: Path) -> None:
        """`folder` is there. Needs vLLM. Raises ConfigError without it."""
        from dora_pipe.producers.engines.torch.weights import weight_files
        from dora_pipe.producers.engines.vllm import core as vllm_core

        vllm_core.prepare(threads=1)
        self._model = write_model(folder / "model")
        (self._weights,) = weight_files(self._model)
        self._digest = read_manifest(self._weights).digest

    def merged(self, rows: int) -> Any:
        """See Hosts."""
        engine = self._open(rows, lora_rank=0, versions_resident=1)
        engine.load(self._weights, version=0, digest=self._digest)
        return engine

    def hosting(self, rows: int, resident: int, rank: int) -> Any:
        """See Hosts."""
        engine = self._open(rows, lora_rank=rank, versions_resident=resident)
        engine.load(self._weights, version=0, digest=self._digest)
        engine.drop(0)
        load_adapters(engine, resident, rank, base=self._digest)
        return engine

    def _open(self, rows: int, *, lora_rank: int, versions_resident: int) -> Any:
        raise NotImplementedError


class VllmHosts(_OnFiles):
    """vLLM in this process."""

    def server_cpu_s(self, engine: Any) -> float:
        """There are none."""
        return 0.0

    def _open(self, rows: int, *, lora_rank: int, versions_resident: int) -> Any:
        from dora_pipe.producers.engines.vllm.engine import VllmEngine

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what vLLM imports
            return VllmEngine(
                self._model,
                slots=rows,
                context_tokens=CONTEXT_TOKENS,
                threads=1,
                lora_rank=lora_rank,
                versions_resident=versions_resident,
            )


class ServerHosts(_OnFiles):
    """vLLM as servers, until `close`."""

    def __init__(self, folder: Path, *, slots: int) -> None:
        """`slots` is the largest number of rows that is asked for."""
        super().__init__(folder)
        self._slots = slots
        self._servers: dict[tuple[int, int], Any] = {}
        self._of: dict[int, Any] = {}
        """The server of an engine, by its id()."""

    def server_cpu_s(self, engine: Any) -> float:
        """See Hosts."""
        return tree_cpu_s(self._of[id(engine)].pid)

    def _open(self, rows: int, *, lora_rank: int, versions_resident: int) -> Any:
        from dora_pipe.producers.engines.vllm.core import VllmSettings
        from dora_pipe.producers.engines.vllm.process import ServerProcess
        from dora_pipe.producers.engines.vllm.server import VllmServerEngine

        sizes: dict[str, Any] = {"lora_rank": lora_rank, "versions_resident": versions_resident}
        kind = (lora_rank, versions_resident)
        if kind not in self._servers:
            self._servers[kind] = ServerProcess.start(
                self._model,
                VllmSettings(),
                slots=self._slots,
                context_tokens=CONTEXT_TOKENS,
                threads=1,
                **sizes,
            )
        server = self._servers[kind]
        engine = VllmServerEngine(
            self._model, slots=rows, context_tokens=CONTEXT_TOKENS, address=server.address, **sizes
        )
        self._of[id(engine)] = server
        return engine

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.close()


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
    turns: int = SERVER_TURNS,
) -> list[ServerFigure]:
    """A figure for each number of rows. Needs vLLM. Raises ConfigError, UsageError."""
    check_rows(rows)
    for name in ("server", "process"):
        (folder / name).mkdir()
    with closing(ServerHosts(folder / "server", slots=max(rows))) as servers:
        here = VllmHosts(folder / "process")
        return [
            _server_figure(servers, here, count, max(REQUESTS_MIN, count * requests_per_row), turns)
            for count in rows
        ]


def _server_figure(
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
