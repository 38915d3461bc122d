"""Measures what a moved request costs with its KV cache, and without: prefilled; decides nothing.

One engine has a running request of so many tokens, another one takes it up, both on one thread in
this process; the cache goes through a file, as between workers. Both ways end with the next token,
so that a row says how much sooner it comes. Models are random: the demo's, and a Llama of 30 M
parameters with grouped-query attention. Every figure is the median of `REPEATS`, by wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from dora_pipe.bench.engine import MODEL
from dora_pipe.clock import SystemClock
from dora_pipe.errors import UsageError
from dora_pipe.producers.engines.causal_lm import CausalLM, Rope
from dora_pipe.producers.engines.port import EngineRequest, Exported, SamplingParams, TokensSampled
from dora_pipe.producers.handover import label_of
from dora_pipe.producers.handover_kv import KvHandover
from dora_pipe.transfers.files import MappedFiles
from dora_pipe.transfers.port import Lost

LLAMA_30M: Final = CausalLM(
    family="llama",
    vocabulary=8192,
    hidden=512,
    intermediate=1408,
    layers=8,
    heads=8,
    kv_heads=4,
    head_dim=64,
    norm_eps=1e-6,
    rope=Rope(kind="default", theta=10000.0),
    tied=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
"""28 M parameters."""

MODELS: Final = {"demo": MODEL, "llama-30m": LLAMA_30M}
TOKENS: Final = {"demo": (30, 120, 250), "llama-30m": (250, 500, 1000)}
REPEATS: Final = 5
RUNNING_TOKENS: Final = 8
"""What the request has sampled before it moves."""
TOKENS_MAX: Final = 16_384
SLOTS: Final = 4
_SEED: Final = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFigure:
    """One length of sequence. `moved_ms` = export + put + fetch + import.

    `import_ms` and `prefill_ms` end with the request's next token.

    Example: ``MoveFigure(model="llama-30m", tokens=1000, bytes=16_384_512, export_ms=4.1,
    put_ms=31.0, fetch_ms=12.2, import_ms=12.9, moved_ms=60.2, prefill_ms=700.0, ratio=11.6)``
    """

    model: str
    tokens: int
    bytes: int
    export_ms: float
    put_ms: float
    fetch_ms: float
    import_ms: float
    moved_ms: float
    prefill_ms: float
    ratio: float


def bench_move(folder: Path, models: Sequence[str]) -> Iterator[MoveFigure]:
    """A figure for each length; files go below `folder`. Needs torch. Raises UsageError."""
    for name in models:
        if name not in MODELS:
            raise UsageError(f"there is no model {name!r}", hint=f"there are: {', '.join(MODELS)}")
        yield from move_figures(folder, name, TOKENS[name])


def move_figures(
    folder: Path, model: str, lengths: Sequence[int], repeats: int = REPEATS
) -> Iterator[MoveFigure]:
    """A figure for each length of sequence. Raises UsageError."""
    if not all(RUNNING_TOKENS < tokens <= TOKENS_MAX for tokens in lengths):
        raise UsageError(f"a sequence has {RUNNING_TOKENS + 1} to {TOKENS_MAX} tokens")
    source, target = (_engine(MODELS[model], max(lengths) + 64) for _ in range(2))
    handover = KvHandover(MappedFiles(folder / "handover", clock=SystemClock()))
    for tokens in lengths:
        _round(source, target, handover, tokens)  # the first of its size takes its memory
        rounds = [_round(source, target, handover, tokens) for _ in range(repeats)]
        spent = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        moved_ms = sum(spent[f"{part}_ms"] for part in ("export", "put", "fetch", "import"))
        prefill_ms = spent["prefill_ms"]
        yield MoveFigure(
            model=model,
            tokens=tokens,
            bytes=int(spent.pop("bytes")),
            moved_ms=round(moved_ms, 2),
            ratio=round(prefill_ms / moved_ms, 2),
            **{key: round(value, 2) for key, value in spent.items()},
        )


def _round(source: Any, target: Any, handover: KvHandover, tokens: int) -> dict[str, float]:
    """One move of a request of so many tokens, and the same request taken up by prefill."""
    request = _running(source, tokens)
    spent: dict[str, float] = {}
    with _timed(spent, "export"):
        exported: Exported = source.export(request.request)
    assert exported.kv is not None and exported.sampled is not None
    sequence = [*request.token_ids, *exported.sampled.token_ids]
    again = replace(request, token_ids=sequence, sampled=len(exported.sampled.token_ids))
    label = label_of("bench", sequence)
    with _timed(spent, "put"):
        blob = handover.put(label, exported.kv)
    assert not isinstance(blob, Lost), blob
    with _timed(spent, "fetch"):
        kv = handover.fetch(label, blob)
    assert not isinstance(kv, Lost), kv
    with _timed(spent, "import"):
        moved = _next_token(target, replace(again, kv=kv))
    handover.drop(blob)
    with _timed(spent, "prefill"):
        prefilled = _next_token(target, again)
    assert moved == prefilled, "the cache is not that of the sequence"
    return {**spent, "bytes": blob.bytes}


def _running(engine: Any, tokens: int) -> EngineRequest:
    """A request that has come to so many tokens in all."""
    chance = np.random.default_rng(tokens)
    prompt = chance.integers(0, MODEL.vocabulary, tokens - RUNNING_TOKENS).tolist()
    request = EngineRequest(
        request="r",
        token_ids=prompt,
        sampled=0,
        seed=_SEED,
        params=SamplingParams(max_tokens=TOKENS_MAX),
    )
    engine.add(request)
    while engine.kv_used_tokens < tokens - 1:
        engine.step()
    return request


def _next_token(engine: Any, request: EngineRequest) -> tuple[int, float]:
    """Take a request up until it has its next token, and let it go."""
    engine.add(replace(request, emit_every=1))
    while True:
        for event in engine.step():
            assert isinstance(event, TokensSampled)
            engine.cancel(request.request)
            return event.token_ids[0], event.logprobs[0]


@contextmanager
def _timed(spent: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    spent[f"{name}_ms"] = (time.perf_counter() - start) * 1e3


def _engine(model: CausalLM, context_tokens: int) -> Any:
    import torch

    from dora_pipe.producers.engines.torch_engine import TorchEngine
    from dora_pipe.producers.engines.torch_model import fuse
    from dora_pipe.producers.engines.torch_weights import random_tensors

    torch.set_num_threads(1)
    weights = fuse(model, random_tensors(model, _SEED))
    return TorchEngine(model, weights, slots=SLOTS, context_tokens=context_tokens)
