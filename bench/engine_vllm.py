"""Measures vLLM behind the engine port, beside vLLM's own `generate`; decides nothing.

Both are vLLM engines of equal settings in one process, with the same random model, and run the same
requests to their end: prompts, lengths and seeds of `bench.engine`, log-probs asked for. `generate`
gets all requests at once and keeps `rows` of them in its batch, as vLLM's scheduler does; the port
refills a slot when it is free. They take turns, one of them first in every second; the better turn
of each counts for its speed, since on a machine that does other work too the worse says little.
`ratio` is the median of the turns' own: a machine that grows faster or slower changes both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from dora_pipe.bench.engine import (
    CONTEXT_TOKENS,
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
from dora_pipe.producers.engines.port import EngineRequest

TURNS: Final = 7
_SEED: Final = 20


def bench_vllm(
    folder: Path, rows: Sequence[int], *, requests_per_row: int = REQUESTS_PER_ROW
) -> list[EngineFigure]:
    """A figure for each number of rows. Needs vLLM. Raises ConfigError, UsageError."""
    check_rows(rows)
    from dora_pipe.producers.engines.vllm import core as vllm_core

    vllm_core.prepare(threads=1)
    model = write_model(folder / "model")
    return [_figure(model, count, max(REQUESTS_MIN, count * requests_per_row)) for count in rows]


def _figure(model: Path, rows: int, count: int) -> EngineFigure:
    from dora_pipe.producers.engines.vllm.engine import VllmEngine

    requests, warm_up = demo_requests(count), demo_requests(WARM_UP_REQUESTS, seed=0)
    engine = VllmEngine(model, slots=rows, context_tokens=CONTEXT_TOKENS, threads=1)
    generate, close = _generate(model, rows)
    own, theirs, tokens = [Spent() for _ in range(TURNS)], [Spent() for _ in range(TURNS)], 0
    run_requests(engine, warm_up, rows)
    generate(warm_up)
    halves: list[tuple[list[Spent], Callable[[], int]]] = [
        (own, lambda: run_requests(engine, requests, rows)),
        (theirs, lambda: generate(requests)),
    ]
    for turn in range(TURNS):
        for spent, half in halves:
            with measured(spent[turn]):
                made = half()
            tokens = tokens or made
            assert made == tokens, f"{made} tokens after {tokens}"
        halves.reverse()
    engine.close()
    close()
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
        ratio=round(median(two.cpu_s / one.cpu_s for one, two in zip(own, theirs, strict=True)), 2),
    )


def write_model(directory: Path) -> Path:
    """The demo's shapes with random weights, as a model directory."""
    import torch
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(_SEED)
    build: Any = Qwen2ForCausalLM
    config = demo_config(tie_word_embeddings=False, bos_token_id=1)
    build(config).float().save_pretrained(directory)
    return directory


def _generate(
    model: Path, rows: int
) -> tuple[Callable[[Sequence[EngineRequest]], int], Callable[[], None]]:
    """vLLM's `generate` with `rows` in its batch; it answers with the tokens it sampled."""
    from vllm import LLM, SamplingParams

    from dora_pipe.producers.engines.vllm import core as vllm_core

    settings = vllm_core.VllmSettings()
    arguments = vllm_core.arguments(model, settings, slots=rows, context_tokens=CONTEXT_TOKENS)
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
