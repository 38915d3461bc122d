"""Measures, when an engine opens, what may be declared: decides `declares`.

That the bits of a row do not depend on its company is a property of the matrix products of this
machine's library for this model's shapes. It held wherever it was measured; where it does not, the
engine must not claim it. The probe runs an engine with the model's first layer (of a mixture, a
dense one and one with experts) and a part of its vocabulary: the shapes of the other layers are the
same, and the whole head is tried by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F

from dora_pipe.producers.engines.port import (
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
"""Prompt lengths on both sides of the places where rows change their pool."""
TOKENS = 12
CUT = 7
"""Where a request is interrupted."""
ALONE = 3
"""Requests that are run once more by themselves."""
HEAD_ROWS = (ROWS_MIN, ROWS_MIN + 1, 2 * ROWS_MIN + 3, 40)

Bits = dict[str, list[float]]
"""Tokens and log-probs of each request, one after the other."""


def small(weights: Weights) -> Weights:
    """The first layer of a model, of each kind that it has, with a part of its vocabulary."""
    size = min(weights.model.vocabulary, VOCABULARY_MAX)
    one = weights.of_each_kind()
    return replace(
        one,
        model=replace(one.model, vocabulary=size),
        embedding=one.embedding[:size],
        head=one.head[:size],
    )


def probe(weights: Weights, engine: Engine) -> frozenset[str]:
    """What holds here. `engine` has SLOTS, CONTEXT_TOKENS and the weights `small(weights)`."""
    size = min(weights.model.vocabulary, VOCABULARY_MAX)
    requests = [_request(number, length, size) for number, length in enumerate(PROMPTS)]
    together = _run(engine, requests)
    alone: Bits = {}
    for request in requests[:ALONE]:
        alone |= _run(engine, [request])
    same = all(together[name] == bits for name, bits in alone.items())
    if not (same and _head_is_invariant(weights)):
        return frozenset({COUNTER_SAMPLING})
    if not _goes_on(engine, requests, together):
        return frozenset({COUNTER_SAMPLING, BATCH_INVARIANT})
    return frozenset({COUNTER_SAMPLING, BATCH_INVARIANT, PREFILL_EXACT})


def _goes_on(engine: Engine, requests: list[EngineRequest], whole: Bits) -> bool:
    """Whether interrupted requests end with the bits they would have had."""
    resumed = [
        replace(
            request,
            token_ids=[*request.token_ids, *map(int, whole[request.request][: 2 * CUT : 2])],
            sampled=CUT,
        )
        for request in requests
    ]
    rests = _run(engine, resumed)
    return all(rest == whole[name][2 * CUT :] for name, rest in rests.items())


def _request(number: int, length: int, vocabulary: int) -> EngineRequest:
    return EngineRequest(
        request=f"probe-{number}",
        token_ids=[(7 * number + 3 * at) % vocabulary for at in range(length)],
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
                bits[event.request] = []  # weights that are not finite promise nothing
    return bits


def _head_is_invariant(weights: Weights) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(HEAD_ROWS), weights.model.hidden, generator=generator)
    with torch.inference_mode():
        whole = F.linear(rows, weights.head)
        return all(
            torch.equal(F.linear(rows[:count], weights.head), whole[:count]) for count in HEAD_ROWS
        )
