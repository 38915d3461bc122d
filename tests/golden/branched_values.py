"""A trajectory of several contexts, as an agent's calls leave it."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from dora_pipe.schemas.contexts import Call, Context
from dora_pipe.schemas.trajectory import (
    Progress,
    Segment,
    SegmentKind,
    Trajectory,
    TurnProgress,
)
from tests.golden.arrow_values import PLAIN_TRAJECTORY, f32
from tests.golden.values import AT_NS, DIGEST, GROUP

PIECES: list[tuple[SegmentKind, int]] = [
    ("prompt", 3),
    ("model", 2),
    ("environment", 1),
    ("model", 2),
    ("prompt", 2),  # context 1: of its own
    ("model", 2),
    ("prompt", 0),  # context 2: the first 3 tokens of context 0
    ("model", 1),
    ("prompt", 1),  # context 3: context 2 and one more
    ("model", 2),
]
CONTEXTS = (
    Context(start=8),
    Context(start=12, parent=0, shared=3),
    Context(start=13, parent=2, shared=4),
)


def branched(contexts: tuple[Context, ...] = CONTEXTS, calls: tuple[Call, ...] = ()) -> Trajectory:
    tiles: list[Segment] = []
    for kind, size in PIECES:
        position = tiles[-1].end if tiles else 0
        tiles.append(
            Segment(
                kind=kind,
                start=position,
                end=position + size,
                turn=0,
                start_ns=0,
                end_ns=1,
                version=3,
            )
        )
    mask = [int(tile.kind == "model") for tile in tiles for _ in range(tile.start, tile.end)]
    logprobs = [-0.5 - index if bit else None for index, bit in enumerate(mask)]
    return replace(
        PLAIN_TRAJECTORY,
        version=3,
        token_ids=list(range(len(mask))),
        logprobs=logprobs,
        sampler_logprobs=logprobs,
        loss_mask=mask,
        segments=tiles,
        meta=msgspec.structs.replace(
            PLAIN_TRAJECTORY.meta, prompt_tokens=3, weights=(), contexts=contexts, calls=calls
        ),
    )


CALL = Call(
    start=3,
    end=5,
    seed=77,
    occurrence=1,
    finish="length",
    asked_ns=1,
    answered_ns=2,
    api="chat",
    caller="planner",
    ignored_settings={"temperature": 0.5},
)
BRANCHED_TRAJECTORY = branched(calls=(CALL,))
STOPPED_TRAJECTORY = branched(
    calls=(msgspec.structs.replace(CALL, finish="stop", stop=("END", "\n"), stop_ids=(4,)),)
)

TURN_PROGRESS = TurnProgress(
    trajectory=f"{GROUP}-002",
    attempt=2,
    version=3,
    digest=DIGEST,
    worker="w1",
    incarnation=9,
    turn=4,
    context=1,
    parent=0,
    shared=3,
    given_ids=[5, 6],
    token_ids=[7, 8, 9],
    logprobs=[f32(-0.1), -0.5, -2.0],
    sampler_logprobs=[f32(-0.2), -0.25, -1.0],
    prefills=(5,),
    previous=15,
    started_ns=AT_NS,
    ended_ns=AT_NS + 1,
    call=msgspec.structs.replace(CALL, start=5, end=8),
)

PROGRESS = Progress(
    trajectory=f"{GROUP}-002",
    attempt=2,
    version=3,
    digest=DIGEST,
    worker="w1",
    incarnation=9,
    start=40,
    token_ids=[5, 6, 7, 8, 9],
    logprobs=[None, None, -0.25, -1.5, -0.5],
    sampler_logprobs=[None, None, -0.25, -1.5, -0.5],
    loss_mask=[0, 0, 1, 1, 1],
    segments=[
        Segment(
            kind="tool", start=0, end=2, turn=1, start_ns=5, end_ns=6, tool="calculator", ok=False
        ),
        Segment(
            kind="model",
            start=2,
            end=5,
            turn=2,
            start_ns=7,
            end_ns=8,
            worker="w1",
            incarnation=9,
            version=3,
        ),
    ],
    prefills=(3, 42),
    previous=15,
    started_ns=AT_NS,
    finish="stop",
)
