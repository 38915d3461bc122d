"""Measure the capabilities of the torch engine.

The matrix library and the shapes determine whether a row's bits depend on its batch. The probe runs
one layer of each kind with a part of the vocabulary, and the full head separately.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F

from dora_pipe.producers.engines.engine import (
    BATCH_INVARIANT,
    COUNTER_SAMPLING,
    PREFILL_EXACT,
    Engine,
    EngineRequest,
    RequestFinished,
    SamplingParams,
    TokensSampled,
)
from dora_pipe.producers.engines.torch.experts import ROWS_MIN
from dora_pipe.producers.engines.torch.model import Weights

SLOTS = 16
CONTEXT_TOKENS = 96
VOCABULARY_MAX = 512
PROMPTS = (27, 1, 5, 31, 33, 60, 12, 63, 64, 70, 3, 40)
"""Prompt lengths on both sides of pool boundaries."""
TOKENS = 12
CUT = 7
ALONE = 3
HEAD_ROWS = (ROWS_MIN, ROWS_MIN + 1, 2 * ROWS_MIN + 3, 40)

Bits = dict[str, list[float]]
"""Alternating tokens and log-probs."""


def small(weights: Weights) -> Weights:
    """Return one layer of each kind with part of the vocabulary."""
    size = min(weights.model.vocabulary, VOCABULARY_MAX)
    reduced = weights.of_each_kind()
    return replace(
        reduced,
        model=replace(reduced.model, vocabulary=size),
        embedding=reduced.embedding[:size],
        head=reduced.head[:size],
    )


def probe(weights: Weights, engine: Engine) -> frozenset[str]:
    """Return valid capabilities; `engine` runs `small(weights)`."""
    size = min(weights.model.vocabulary, VOCABULARY_MAX)
    requests = [_request(number, length, size) for number, length in enumerate(PROMPTS)]
    together = _run(engine, requests)
    alone: Bits = {}
    for request in requests[:ALONE]:
        alone |= _run(engine, [request])
    same = all(together[name] == bits for name, bits in alone.items())
    if not (same and _head_is_invariant(weights)):
        return frozenset({COUNTER_SAMPLING})
    if not _resumes_equally(engine, requests, together):
        return frozenset({COUNTER_SAMPLING, BATCH_INVARIANT})
    return frozenset({COUNTER_SAMPLING, BATCH_INVARIANT, PREFILL_EXACT})


def _resumes_equally(engine: Engine, requests: list[EngineRequest], expected: Bits) -> bool:
    resumed = [
        replace(
            request,
            token_ids=[*request.token_ids, *map(int, expected[request.request][: 2 * CUT : 2])],
            sampled=CUT,
        )
        for request in requests
    ]
    rests = _run(engine, resumed)
    return all(rest == expected[name][2 * CUT :] for name, rest in rests.items())


def _request(number: int, length: int, vocabulary: int) -> EngineRequest:
    return EngineRequest(
        request=f"probe-{number}",
        token_ids=[(7 * number + 3 * index) % vocabulary for index in range(length)],
        sampled=0,
        seed=number,
        params=SamplingParams(max_tokens=TOKENS),
    )


def _run(engine: Engine, requests: Iterable[EngineRequest]) -> Bits:
    bits: Bits = {}
    for request in requests:
        engine.add(request)
    while engine.active:
        for event in engine.step():
            if isinstance(event, TokensSampled):
                pairs = zip(event.token_ids, event.logprobs, strict=True)
                bits[event.request] = [value for pair in pairs for value in pair]
            elif isinstance(event, RequestFinished) and event.reason == "error":
                bits[event.request] = []  # weights that are not finite
    return bits


def _head_is_invariant(weights: Weights) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(HEAD_ROWS), weights.model.hidden, generator=generator)
    with torch.inference_mode():
        batched = F.linear(rows, weights.head)
        return all(
            torch.equal(F.linear(rows[:count], weights.head), batched[:count])
            for count in HEAD_ROWS
        )
