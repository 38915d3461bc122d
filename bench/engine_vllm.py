"""vLLM behind the engine port beside its own `generate`.

Both are vLLM engines of equal settings in one process with the same random model, and run the same
requests: prompts, lengths and seeds of `bench.engine`, with log-probs. They take turns; the better
turn of each counts for its speed, and `ratio` is the median of the turns' own ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from dora_pipe.bench import qwen3
from dora_pipe.bench.engine import (
    CONTEXT_TOKENS,
    DEMO,
    MODEL,
    REQUESTS_MIN,
    REQUESTS_PER_ROW,
    WARM_UP_REQUESTS,
    EngineFigure,
    check_rows,
    demo_config,
    demo_requests,
    run_requests,
)
from dora_pipe.bench.qwen3 import SHAPES, vocabulary_of
from dora_pipe.bench.support import Spent, measured
from dora_pipe.core.errors import UsageError
from dora_pipe.producers.engines.port import EngineRequest

_SEED: Final = 20


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
