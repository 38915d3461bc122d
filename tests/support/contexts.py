"""Trajectories of several contexts: made from a seed, or cut out of those of one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from dora_pipe.consumers.learners.port import TrainBatch, TrainGroup
from dora_pipe.schemas.contexts import Context
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.trajectory import Segment, SegmentKind, Trajectory
from tests.support.batches import make_trajectory

Piece = tuple[SegmentKind, int]
"""A segment, and its tokens."""


def in_pieces(
    one: Trajectory, pieces: Sequence[Piece], contexts: tuple[Context, ...] = ()
) -> Trajectory:
    """The trajectory with other segments: log-probs of what is not sampled there are dropped."""
    tiles: list[Segment] = []
    for kind, size in pieces:
        at = tiles[-1].end if tiles else 0
        turn = sum(tile.kind == "model" for tile in tiles)
        made: dict[str, Any] = (
            {"worker": "w0", "epoch": 7, "version": one.version} if kind == "model" else {}
        )
        tile = Segment(kind=kind, start=at, end=at + size, turn=turn, start_ns=1, end_ns=2, **made)
        tiles.append(tile)
    mask = [int(tile.kind == "model") for tile in tiles for _ in range(tile.start, tile.end)]
    known = [value if value is not None else -4.5 for value in one.logprobs]
    logprobs = [value if of else None for value, of in zip(known, mask, strict=True)]
    return replace(
        one,
        loss_mask=mask,
        logprobs=logprobs,
        sampler_logprobs=logprobs,
        segments=tiles,
        meta=msgspec.structs.replace(one.meta, prompt_tokens=pieces[0][1], contexts=contexts),
    )


def tree(chance: random.Random, name: str, *, vocabulary: int = 90) -> Trajectory:
    """A prompt with two turns, a sub-agent of its own, a second answer to the prompt, and a
    compaction of that answer's context."""
    prompt, first, said, second = (chance.randint(2, 6) for _ in range(4))
    own, answer, other, kept, more, last = (chance.randint(2, 6) for _ in range(6))
    pieces: list[Piece] = [
        *(("prompt", prompt), ("model", first), ("environment", said), ("model", second)),
        *(("prompt", own), ("model", answer)),
        *(("prompt", 0), ("model", other)),
        *(("prompt", more), ("model", last)),
    ]
    starts, at = [], 0
    for kind, size in pieces:
        starts += [at] if kind == "prompt" else []
        at += size
    contexts = (
        Context(start=starts[1]),
        Context(start=starts[2], parent=0, shared=prompt),
        Context(start=starts[3], parent=2, shared=prompt + min(kept, other)),
    )
    one = make_trajectory(
        name,
        group_size=4,
        prompt=[],
        sampled=[chance.randrange(4, vocabulary) for _ in range(at)],
        logprobs=[-4.3 - chance.random() * 0.5 for _ in range(at)],
        reward=chance.random(),
    )
    return in_pieces(one, pieces, contexts)


def branched_batch(*, seed: int, groups: int = 3, siblings: int = 4) -> TrainBatch:
    """A batch of such trajectories."""
    chance = random.Random(seed)
    made = []
    for ordinal in range(groups):
        group = group_id("train", ordinal)
        names = [trajectory_id(group, sibling) for sibling in range(siblings)]
        trees = [tree(chance, name) for name in names]
        made.append(TrainGroup(group=group, version=0, trajectories=trees))
    return TrainBatch(step=0, groups=made)


def in_two_turns(batch: TrainBatch) -> TrainBatch:
    """The batch with an observation of two tokens in the middle of what was sampled; each
    trajectory is then as long as it was."""
    return _each(batch, _two_turns)


def cut_in_two(batch: TrainBatch) -> TrainBatch:
    """Trajectories of two turns, the second as a context that goes on where the first is: what is
    said is the same, token for token."""
    return _each(batch, _cut)


def _two_turns(one: Trajectory) -> Trajectory:
    prompt, size = one.meta.prompt_tokens, one.sampled - 2
    return in_pieces(
        one,
        [
            *(("prompt", prompt), ("model", size // 2)),
            *(("environment", 2), ("model", size - size // 2)),
        ],
    )


def _cut(one: Trajectory) -> Trajectory:
    first, model, said, second = one.segments
    opened = msgspec.structs.replace(said, kind="prompt", start=second.start, end=second.start)
    shared = Context(start=second.start, parent=0, shared=second.start)
    return replace(
        one,
        segments=[first, model, said, opened, second],
        meta=msgspec.structs.replace(one.meta, contexts=(shared,)),
    )


def _each(batch: TrainBatch, change: object) -> TrainBatch:
    assert callable(change)
    groups = [
        replace(group, trajectories=[change(one) for one in group.trajectories])
        for group in batch.groups
    ]
    return replace(batch, groups=groups)
