"""Samples the prompts of an evaluation again under any version, with the seeds that they had.

A recorded trajectory of the evaluation gives prompt, row, seed and sampling; what comes out is a
trajectory of one turn, to be scored as a recorded one is (`audit.rescore`). Equal weights give
equal answers, and two versions draw the same random streams, so that rows of both are pairs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.producers.engines.port import (
    Engine,
    EngineRequest,
    RequestFinished,
    SamplingParams,
    TokensSampled,
)
from dora_pipe.schemas.identity import derive_seed
from dora_pipe.schemas.trajectory import Segment, Trajectory

STEPS_MAX: Final = 10_000_000
"""Engine steps for all answers of one version; beyond that it does not end by itself."""


def draws(rows: Sequence[Trajectory], first: int, last: int) -> list[Trajectory]:
    """Draws `first` .. `last - 1`: every row once with its recorded seed, then again with others.

    Example: of 256 rows draw 300 is row 44 with the seed of its second draw.
    """
    return [_drawn(rows[at % len(rows)], at // len(rows)) for at in range(first, last)]


def _drawn(row: Trajectory, again: int) -> Trajectory:
    if not again:
        return row
    seed = derive_seed("draw", row.meta.seed, again)
    return replace(row, meta=msgspec.structs.replace(row.meta, seed=seed))


def sample_again(
    engine: Engine,
    wanted: Iterable[Trajectory],
    params: Mapping[str, SamplingParams],
    *,
    version: int = -1,
) -> Iterator[Trajectory]:
    """Answers to the prompts of `wanted`, by the weights that the engine has; in the order of
    `wanted`. `params` are by source. Raises InvariantBroken where the engine gives one up."""
    rows = list(wanted)
    waiting = deque((str(at), one) for at, one in enumerate(rows))
    sampled: dict[str, list[int]] = {}
    done: dict[str, Trajectory] = {}
    given = 0
    for _ in range(STEPS_MAX):
        while waiting and engine.active < engine.slots:
            name, row = waiting.popleft()
            sampled[name] = []
            engine.add(_request(name, row, params[row.meta.source], version))
        for event in engine.step():
            if isinstance(event, TokensSampled):
                sampled[event.request].extend(event.token_ids)
            elif isinstance(event, RequestFinished):
                row = rows[int(event.request)]
                done[event.request] = answered(row, sampled.pop(event.request), event)
        while str(given) in done:
            yield done.pop(str(given))
            given += 1
        if given == len(rows):
            return
    raise InvariantBroken(f"the engine does not end after {STEPS_MAX} steps")


def _request(name: str, row: Trajectory, params: SamplingParams, version: int) -> EngineRequest:
    return EngineRequest(
        request=name,
        token_ids=list(row.token_ids[: row.meta.prompt_tokens]),
        sampled=0,
        seed=row.meta.seed,
        params=params,
        version=version,
    )


def answered(row: Trajectory, tokens: Sequence[int], event: RequestFinished) -> Trajectory:
    """The row with another answer, not scored yet. Raises InvariantBroken."""
    if event.reason == "error":
        raise InvariantBroken(f"{row.trajectory}: the engine gave up: {event.error}")
    prompt = row.meta.prompt_tokens
    size = prompt + len(tokens)
    unscored = [None] * size
    at_ns = row.meta.times.placed
    segments = (
        Segment(kind="prompt", start=0, end=prompt, turn=0, start_ns=at_ns, end_ns=at_ns),
        Segment(kind="model", start=prompt, end=size, turn=0, start_ns=at_ns, end_ns=at_ns),
    )
    return replace(
        row,
        token_ids=[*row.token_ids[:prompt], *tokens],
        logprobs=unscored,
        sampler_logprobs=unscored,
        loss_mask=[0] * prompt + [1] * len(tokens),
        reward=None,
        segments=segments,
        meta=msgspec.structs.replace(row.meta, finish=event.reason, prefills=(prompt,)),
    )
