"""Tokens per second of the built-in engine and of transformers' `generate`.

Both run the arithmetic demo's requests (answers of 5 to 123 tokens) on one thread and a random
model. `generate` runs each batch of `rows` to its longest request, also sorted by length, its best
case; the engine refills slots. Only requested tokens count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from dora_pipe.bench.support import Spent, emit_figures, measured
from dora_pipe.cli.options import JsonOption
from dora_pipe.core.errors import UsageError
from dora_pipe.producers.engines.engine import EngineRequest, RequestFinished, SamplingParams
from dora_pipe.producers.engines.torch.causal_lm import CausalLM
from dora_pipe.producers.engines.torch.rope import Rope

MODEL = CausalLM(
    family="qwen2",
    vocabulary=96,
    hidden=128,
    intermediate=512,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=32,
    norm_eps=1e-6,
    rope=Rope(kind="default", theta=10000.0),
    tied=False,
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
"""Demo-like policy of 0.55 M parameters; keep it, so that figures stay comparable."""

ROWS = (1, 16, 64, 256)
CONTEXT_TOKENS = 256
PROMPT_TOKENS = 5
LENGTH_MU, LENGTH_SIGMA, LENGTH_UNITS_MAX = 1.2, 1.3, 60
REQUESTS_PER_ROW = 8
REQUESTS_MIN = 32
ROWS_MAX = 4096
WARM_UP_REQUESTS = 16
_SEED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigure:
    """Sampled tokens per second by wall clock and CPU time, for the engine and for `generate` on
    unsorted and sorted requests.

    `ratio` compares CPU figures. `computed` is the number of tokens `generate` computes per counted
    token.
    """

    rows: int
    requests: int
    tokens: int
    tokens_per_s: float
    cpu_tokens_per_s: float
    generate_tokens_per_s: float
    generate_cpu_tokens_per_s: float
    ratio: float
    computed: float
    sorted_generate_cpu_tokens_per_s: float
    sorted_ratio: float
    sorted_computed: float


def command(
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of the running batch; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure tokens per second of the torch engine and of transformers' `generate`, by rows."""
    emit_figures(bench_engine(rows or ROWS), as_json=as_json)


def bench_engine(
    rows: Sequence[int], *, requests_per_row: int = REQUESTS_PER_ROW
) -> list[EngineFigure]:
    """Return a figure per number of rows. Raises UsageError."""
    check_rows(rows)
    return [_figure(count, max(REQUESTS_MIN, count * requests_per_row)) for count in rows]


def check_rows(rows: Sequence[int]) -> None:
    """Raise UsageError for invalid rows."""
    for count in rows:
        if not 1 <= count <= ROWS_MAX:
            raise UsageError(f"{count} rows is not between 1 and {ROWS_MAX}")


def demo_requests(
    count: int, seed: int = _SEED, *, vocabulary: int = MODEL.vocabulary, scale: int = 1
) -> list[EngineRequest]:
    """Return demo-like requests with lengths forced by `max_tokens`, times `scale`."""
    chance = np.random.default_rng(seed)
    units = np.ceil(np.exp(chance.normal(LENGTH_MU, LENGTH_SIGMA, count)))
    lengths = scale * (2 * np.clip(units, 1, LENGTH_UNITS_MAX).astype(int) + 3)
    prompts = chance.integers(0, vocabulary, (count, scale * PROMPT_TOKENS))
    return [
        EngineRequest(
            request=f"r{number}",
            token_ids=prompts[number].tolist(),
            sampled=0,
            seed=number,
            params=SamplingParams(max_tokens=int(lengths[number])),
        )
        for number in range(count)
    ]


def run_requests(engine: Any, requests: Sequence[EngineRequest], rows: int) -> int:
    """Run all requests; return sampled tokens."""
    waiting = list(reversed(requests))
    tokens = 0
    while waiting or engine.active:
        while waiting and engine.active < rows:
            engine.add(waiting.pop())
        for event in engine.step():
            if not isinstance(event, RequestFinished):
                tokens += len(event.token_ids)
    return tokens


def computed_per_token(requests: Sequence[EngineRequest], rows: int) -> float:
    """Return tokens computed per requested token by batches of `rows`."""
    lengths = [request.params.max_tokens for request in requests]
    batches = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
    return sum(len(batch) * max(batch) for batch in batches) / sum(lengths)


def _figure(rows: int, count: int) -> EngineFigure:
    requests, warm_up = demo_requests(count), demo_requests(WARM_UP_REQUESTS, seed=0)
    by_length = sorted(requests, key=lambda request: request.params.max_tokens)
    engine = make_engine(rows)
    run_requests(engine, warm_up, rows)
    own, theirs, theirs_sorted = Spent(), Spent(), Spent()
    with measured(own):
        tokens = run_requests(engine, requests, rows)
    generate = _generate()
    generate(warm_up, rows)
    with measured(theirs):
        generate(requests, rows)
    with measured(theirs_sorted):
        generate(by_length, rows)
    return EngineFigure(
        rows=rows,
        requests=count,
        tokens=tokens,
        tokens_per_s=round(tokens / own.wall_s, 1),
        cpu_tokens_per_s=round(tokens / own.cpu_s, 1),
        generate_tokens_per_s=round(tokens / theirs.wall_s, 1),
        generate_cpu_tokens_per_s=round(tokens / theirs.cpu_s, 1),
        ratio=round(theirs.cpu_s / own.cpu_s, 2),
        computed=round(computed_per_token(requests, rows), 2),
        sorted_generate_cpu_tokens_per_s=round(tokens / theirs_sorted.cpu_s, 1),
        sorted_ratio=round(theirs_sorted.cpu_s / own.cpu_s, 2),
        sorted_computed=round(computed_per_token(by_length, rows), 2),
    )


def make_engine(rows: int, *, context_tokens: int = CONTEXT_TOKENS, **more: Any) -> Any:
    """Return the built-in engine with random weights."""
    import torch

    from dora_pipe.producers.engines.torch.engine import TorchEngine
    from dora_pipe.producers.engines.torch.model import fuse
    from dora_pipe.producers.engines.torch.weights import random_tensors

    torch.set_num_threads(1)
    weights = fuse(MODEL, random_tensors(MODEL, _SEED))
    return TorchEngine(MODEL, weights, slots=rows, context_tokens=context_tokens, **more)


def demo_config(*, context_tokens: int = CONTEXT_TOKENS, **more: Any) -> Any:
    """Return the demo's transformers configuration, without an end token."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=MODEL.vocabulary,
        hidden_size=MODEL.hidden,
        intermediate_size=MODEL.intermediate,
        num_hidden_layers=MODEL.layers,
        num_attention_heads=MODEL.heads,
        num_key_value_heads=MODEL.kv_heads,
        max_position_embeddings=context_tokens,
        pad_token_id=0,
        eos_token_id=None,
        **more,
    )


def _generate() -> Callable[[Sequence[EngineRequest], int], None]:
    import torch
    from transformers import Qwen2ForCausalLM

    build: Any = Qwen2ForCausalLM
    model = build(demo_config()).eval()

    def generate(requests: Sequence[EngineRequest], rows: int) -> None:
        for start in range(0, len(requests), rows):
            batch = requests[start : start + rows]
            prompts = torch.tensor([request.token_ids for request in batch])
            longest = max(request.params.max_tokens for request in batch)
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
            )

    return generate
