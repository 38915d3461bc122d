"""The values whose bytes are Arrow or headers: trajectories, progress, a dead letter."""

from __future__ import annotations

import struct
from dataclasses import replace

import msgspec

from dora_pipe.schemas.dead_letter import DeadLetter
from dora_pipe.schemas.trajectory import (
    Headers,
    Meta,
    Sampler,
    Segment,
    Times,
    Trajectory,
)
from tests.golden.values import AT_NS, DATA_DIGEST, DIGEST, GROUP, OTHER_DIGEST, SHA256


def f32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


TRAJECTORY = Trajectory(
    trajectory=f"{GROUP}-003",
    version=3,
    digest=DIGEST,
    token_ids=[1, 501, 17, 90, 91, 2, 33, 34, 92, 2],
    logprobs=[None, None, None, f32(-0.1), f32(-1.7), f32(-2e-7), None, None, -0.0, -30.0],
    sampler_logprobs=[None, None, None, f32(-0.2), -1.5, 0.0, None, None, 0.0, -25.0],
    loss_mask=[0, 0, 0, 1, 1, 1, 0, 0, 1, 1],
    reward=0.75,
    segments=[
        Segment(kind="prompt", start=0, end=3, turn=0, start_ns=AT_NS, end_ns=AT_NS),
        Segment(
            kind="model",
            start=3,
            end=6,
            turn=0,
            start_ns=AT_NS + 1,
            end_ns=AT_NS + 2,
            worker="w0",
            incarnation=7,
            version=3,
        ),
        Segment(
            kind="tool",
            start=6,
            end=8,
            turn=0,
            start_ns=AT_NS + 3,
            end_ns=AT_NS + 4,
            tool="calculator",
            ok=False,
        ),
        Segment(
            kind="model",
            start=8,
            end=10,
            turn=1,
            start_ns=AT_NS + 5,
            end_ns=AT_NS + 6,
            worker="w0",
            incarnation=7,
            version=3,
        ),
    ],
    meta=Meta(
        run="demo",
        schema_version=1,
        group=GROUP,
        group_size=8,
        sample=3,
        attempt=2,
        purpose="train",
        deadline=5,
        dataset_digest=DATA_DIGEST,
        index=17,
        data_epoch=1,
        seed=2**62 + 3,
        prompt_tokens=3,
        worker="w0",
        incarnation=7,
        finish="environment",
        times=Times(
            scheduled=AT_NS,
            started=AT_NS + 1,
            first_token=AT_NS + 2,
            finished=AT_NS + 6,
            rewarded=AT_NS + 7,
        ),
        reward_raw=0.5,
        reward_parts={"correct": 0.5, "format": 0.25},
        prefills=(3, 8),
        migrations=1,
        extra={"note": "é", "list": [1, 2.5, None]},
    ),
)
"""Several turns, a temperature that is not 1, a valid reward."""

PLAIN_TRAJECTORY = Trajectory(
    trajectory="e0000000005-000",
    version=0,
    digest=OTHER_DIGEST,
    token_ids=[5, 6],
    logprobs=[None, f32(-0.3)],
    sampler_logprobs=[None, f32(-0.3)],
    loss_mask=[0, 1],
    reward=None,
    segments=[
        Segment(kind="prompt", start=0, end=1, turn=0, start_ns=1, end_ns=1),
        Segment(
            kind="model", start=1, end=2, turn=0, start_ns=2, end_ns=3, worker="w0", incarnation=7
        ),
    ],
    meta=Meta(
        run="demo",
        schema_version=1,
        group="e0000000005",
        group_size=1,
        sample=0,
        attempt=1,
        purpose="eval",
        deadline=-1,
        dataset_digest=DATA_DIGEST,
        index=5,
        data_epoch=0,
        seed=11,
        prompt_tokens=1,
        worker="w0",
        incarnation=7,
        finish="error",
        times=Times(scheduled=1),
        reward_error="TaskError: the reward took longer than 10 s",
        error="ResourceError: sequence is longer than a slot",
    ),
)
"""Sampled at temperature 1, evaluation, no valid reward: every column that can be null is."""

_PROMPT, _FIRST, *_ = TRAJECTORY.segments

MIXED_TRAJECTORY = replace(
    TRAJECTORY,
    token_ids=TRAJECTORY.token_ids[:6],
    logprobs=TRAJECTORY.logprobs[:6],
    sampler_logprobs=TRAJECTORY.sampler_logprobs[:6],
    loss_mask=TRAJECTORY.loss_mask[:6],
    segments=[
        _PROMPT,
        msgspec.structs.replace(_FIRST, end=4),
        msgspec.structs.replace(_FIRST, start=4, end=5, version=5),
        msgspec.structs.replace(_FIRST, start=5, worker="w1", incarnation=9, version=6),
    ],
    meta=msgspec.structs.replace(
        TRAJECTORY.meta,
        finish="stop",
        prefills=(3, 4, 5),
        weights=(Sampler(version=5, digest=OTHER_DIGEST), Sampler(version=6, digest=SHA256)),
    ),
)
"""Of a run with partial rollout: three versions, the last on another worker."""

HEADERS = Headers(
    run="demo",
    group=GROUP,
    trajectory=f"{GROUP}-003",
    attempt=2,
    version=3,
    deadline=5,
    digest=DIGEST,
    worker="w0",
    incarnation=7,
    tokens=10,
    sampled=5,
    reward=0.75,
    schema_version=1,
    sha256=SHA256,
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
)

DEAD_LETTER = DeadLetter(
    topic="demo.trajectories",
    partition=2,
    offset=91,
    reason="not a zstd frame: Zstd è says no",
    path="$.value",
    at_ns=AT_NS,
    key=b"\x00\xffkey",
    value=b"\xde\xad garbage",
    headers=(("run", b"demo"), ("broken", b"\xff\xfe")),
)
