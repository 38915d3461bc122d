"""Torch engine on tiny models, and reference values of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dora_pipe.producers.engines.engine import Engine, EngineRequest
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support import models
from tests.support.engine_contract import Decode, Result, Subject

# Tied heads widen logits: the last token is the likeliest.
SCALES = {"llama_gqa": 2.0} | dict.fromkeys(("qwen2", "qwen3_moe", "glm4_moe", "grouped"), 8.0)
"""Scales that make a random model's distribution far from uniform."""


BUILDERS: dict[str, Callable[..., Path]] = {
    "qwen2": models.make_qwen2,
    "llama_gqa": models.make_llama_gqa,
    "qwen3_moe": models.make_qwen3_moe,
    "glm4_moe": models.make_glm4_moe,
    "grouped": models.make_grouped,
}


def make(kind: str, directory: Path, seed: int = 0, **changes: Any) -> Path:
    return BUILDERS[kind](directory, seed, scale=SCALES[kind], **changes)


def torch_subject(kind: str, folder: Path, **changes: Any) -> Subject:
    """Return the torch engine under contract, with two policies in its own store."""
    directories = [make(kind, folder / f"seed{seed}", seed, **changes) for seed in (0, 1)]
    store = PolicyStore(folder / "policies")
    manifests = [import_model(store, directory)[0] for directory in directories]
    first, second = ((store.weights_path(m.digest), m.digest) for m in manifests)

    def open_engine(
        *,
        slots: int,
        context_tokens: int = 256,
        decode: Decode | None = None,
        prefix_cache_ratio: float = 0.0,
    ) -> Engine:
        engine = TorchEngine.open(
            directories[0],
            slots=slots,
            context_tokens=context_tokens,
            threads=1,
            decode=decode,
            prefix_cache_ratio=prefix_cache_ratio,
        )
        engine.load(first[0], version=0, digest=first[1])
        return engine

    vocabulary = models.LLAMA_VOCABULARY if kind == "llama_gqa" else models.QWEN2_VOCABULARY
    return Subject(
        name=kind,
        open=open_engine,
        vocabulary=vocabulary,
        policies=(first, second),
        keeping=partial(open_engine, prefix_cache_ratio=1.0),
    )


def reference_logits(directory: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits of a sequence, float64 [tokens, vocabulary]."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits.double()


def logprob_distance(
    directory: Path, asked: EngineRequest | Sequence[int], result: Result
) -> float:
    """Return the largest distance from transformers' log-probs at `logprob_temperature` (1 for
    prompts)."""
    prompt, temperature = asked, 1.0
    if isinstance(asked, EngineRequest):
        prompt, temperature = asked.token_ids, asked.params.logprob_temperature
    assert not isinstance(prompt, EngineRequest)
    tokens = [*prompt, *result.tokens]
    logprobs = torch.log_softmax(reference_logits(directory, tokens) / temperature, -1)
    chosen = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
    return float((chosen - torch.tensor(result.logprobs).double()).abs().max())


def greedy_tokens(directory: Path, prompt: Sequence[int], count: int) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    output = model.generate(
        torch.tensor([list(prompt)]),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
