"""Trajectories with several contexts: random ones, or split single-context ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.consumers.learners.learner import TrainBatch, TrainGroup
from dora_pipe.producers.engines.engine import (
    Engine,
    EngineRequest,
    RequestFinished,
    SamplingParams,
    TokensSampled,
)
from dora_pipe.schemas.contexts import Call, Context, prompt_digest
from dora_pipe.schemas.identity import call_seed, group_id, trajectory_id
from dora_pipe.schemas.trajectory import Segment, SegmentKind, Trajectory
from tests.support.batches import make_trajectory

Piece = tuple[SegmentKind, int]
"""Segment kind and tokens."""


def in_pieces(
    trajectory: Trajectory, pieces: Sequence[Piece], contexts: tuple[Context, ...] = ()
) -> Trajectory:
    tiles: list[Segment] = []
    for kind, size in pieces:
        position = tiles[-1].end if tiles else 0
        turn = sum(tile.kind == "model" for tile in tiles)
        created: dict[str, Any] = (
            {"worker": "w0", "incarnation": 7, "version": trajectory.version}
            if kind == "model"
            else {}
        )
        tile = Segment(
            kind=kind,
            start=position,
            end=position + size,
            turn=turn,
            start_ns=1,
            end_ns=2,
            **created,
        )
        tiles.append(tile)
    mask = [int(tile.kind == "model") for tile in tiles for _ in range(tile.start, tile.end)]
    values = [value if value is not None else -4.5 for value in trajectory.logprobs]
    logprobs = [value if of else None for value, of in zip(values, mask, strict=True)]
    return replace(
        trajectory,
        loss_mask=mask,
        logprobs=logprobs,
        sampler_logprobs=logprobs,
        segments=tiles,
        meta=msgspec.structs.replace(
            trajectory.meta, prompt_tokens=pieces[0][1], contexts=contexts
        ),
    )


def tree(chance: random.Random, name: str, *, vocabulary: int = 90) -> Trajectory:
    """Two turns, a sub-agent, a second answer to the prompt, and its compaction."""
    prompt, first, text, second = (chance.randint(2, 6) for _ in range(4))
    own, answer, other, kept, more, last = (chance.randint(2, 6) for _ in range(6))
    pieces: list[Piece] = [
        *(("prompt", prompt), ("model", first), ("environment", text), ("model", second)),
        *(("prompt", own), ("model", answer)),
        *(("prompt", 0), ("model", other)),
        *(("prompt", more), ("model", last)),
    ]
    starts, index = [], 0
    for kind, size in pieces:
        starts += [index] if kind == "prompt" else []
        index += size
    contexts = (
        Context(start=starts[1]),
        Context(start=starts[2], parent=0, shared=prompt),
        Context(start=starts[3], parent=2, shared=prompt + min(kept, other)),
    )
    trajectory = make_trajectory(
        name,
        group_size=4,
        prompt=[],
        sampled=[chance.randrange(4, vocabulary) for _ in range(index)],
        logprobs=[-4.3 - chance.random() * 0.5 for _ in range(index)],
        reward=chance.random(),
    )
    return in_pieces(trajectory, pieces, contexts)


def branched_batch(*, seed: int, groups: int = 3, samples: int = 4) -> TrainBatch:
    chance = random.Random(seed)
    created = []
    for ordinal in range(groups):
        group = group_id("train", ordinal)
        names = [trajectory_id(group, sample) for sample in range(samples)]
        trees = [tree(chance, name) for name in names]
        created.append(TrainGroup(group=group, version=0, trajectories=trees))
    return TrainBatch(step=0, groups=created)


def in_two_turns(batch: TrainBatch) -> TrainBatch:
    """Insert an observation of two tokens; the length stays."""
    return _each(batch, _two_turns)


def cut_in_two(batch: TrainBatch) -> TrainBatch:
    """Split trajectories into two turns, the second in a new context, with equal tokens."""
    return _each(batch, _cut)


def _two_turns(trajectory: Trajectory) -> Trajectory:
    prompt, size = trajectory.meta.prompt_tokens, trajectory.sampled - 2
    return in_pieces(
        trajectory,
        [
            *(("prompt", prompt), ("model", size // 2)),
            *(("environment", 2), ("model", size - size // 2)),
        ],
    )


def _cut(trajectory: Trajectory) -> Trajectory:
    first, model, text, second = trajectory.segments
    opened = msgspec.structs.replace(text, kind="prompt", start=second.start, end=second.start)
    shared = Context(start=second.start, parent=0, shared=second.start)
    return replace(
        trajectory,
        segments=[first, model, text, opened, second],
        meta=msgspec.structs.replace(trajectory.meta, contexts=(shared,)),
    )


def _each(batch: TrainBatch, change: object) -> TrainBatch:
    assert callable(change)
    groups = [
        replace(group, trajectories=[change(trajectory) for trajectory in group.trajectories])
        for group in batch.groups
    ]
    return replace(batch, groups=groups)


@dataclass(slots=True)
class _Own:
    context: Context
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    sampler: list[float | None] = field(default_factory=list)
    tiles: list[tuple[SegmentKind, int]] = field(default_factory=list)
    calls: list[tuple[int, int, Call]] = field(default_factory=list)
    """Start, end and call."""
    prefills: list[int] = field(default_factory=list)

    def give(self, kind: SegmentKind, ids: Sequence[int]) -> None:
        self.ids += ids
        self.logprobs += [None] * len(ids)
        self.sampler += [None] * len(ids)
        self.tiles.append((kind, len(ids)))


class Served:
    """Agent trajectory whose calls an engine with the version's weights samples.

    Example: ``served = Served(one, engine, params); served.call(); served.trajectory()``.
    """

    def __init__(self, trajectory: Trajectory, engine: Engine, params: SamplingParams) -> None:
        self._found, self._engine, self._params = trajectory, engine, params
        self._own = [_Own(Context(start=0))]
        self._asked: Counter[str] = Counter()
        self._own[0].give("prompt", list(trajectory.token_ids[: trajectory.meta.prompt_tokens]))
        self._clock = 0

    def open(self, ids: Sequence[int], *, parent: int = -1, shared: int = 0) -> int:
        self._own.append(_Own(Context(start=0, parent=parent, shared=shared)))
        self._own[-1].give("prompt", ids)
        return len(self._own) - 1

    def sequence(self, number: int) -> list[int]:
        own = self._own[number]
        before = (
            self.sequence(own.context.parent)[: own.context.shared] if own.context.shared else []
        )
        return [*before, *own.ids]

    def call(
        self, number: int = 0, given: Sequence[int] = (), *, most: int = 40, moves_at: int = 0
    ) -> None:
        """Sample a call; it moves elsewhere after some tokens."""
        own = self._own[number]
        if given:
            own.give("environment", given)
        prompt = self.sequence(number)
        digest = prompt_digest(prompt)
        occurrence, self._asked[digest] = self._asked[digest], self._asked[digest] + 1
        seed = call_seed(self._found.meta.seed, digest, occurrence)
        start, finish = len(own.ids), "length"
        for stay in (moves_at, most) if moves_at else (most,):
            own.prefills.append(len(own.ids))
            sampled = len(own.ids) - start
            finish = self._stay(own, prompt, seed, sampled, stay)
        self._clock += 1
        call = Call(
            start=0,
            end=0,
            seed=seed,
            occurrence=occurrence,
            finish=finish,  # type: ignore[arg-type]
            asked_ns=self._clock,
            answered_ns=self._clock + 1,
            api="chat",
        )
        own.calls.append((start, len(own.ids), call))

    def _stay(self, own: _Own, prompt: list[int], seed: int, sampled: int, until: int) -> str:
        engine = self._engine
        request = EngineRequest(
            request="call",
            token_ids=[*prompt, *own.ids[len(own.ids) - sampled :]] if sampled else prompt,
            sampled=sampled,
            seed=seed,
            params=replace(self._params, max_tokens=until),
        )
        engine.add(request)
        while True:
            for event in engine.step():
                if isinstance(event, TokensSampled):
                    own.ids += event.token_ids
                    own.logprobs += event.logprobs
                    own.sampler += event.sampler_logprobs
                    own.tiles.append(("model", len(event.token_ids)))
                elif isinstance(event, RequestFinished):
                    return event.reason

    def trajectory(self) -> Trajectory:
        trajectory, index = self._found, 0
        segments: list[Segment] = []
        calls: list[Call] = []
        prefills: list[int] = []
        contexts: list[Context] = []
        sampler = {"worker": trajectory.meta.worker, "incarnation": trajectory.meta.incarnation}
        for number, own in enumerate(self._own):
            if number:
                contexts.append(msgspec.structs.replace(own.context, start=index))
            prefills += [index + prefill for prefill in own.prefills]
            calls += [
                msgspec.structs.replace(call, start=index + start, end=index + end)
                for start, end, call in own.calls
            ]
            turns = {start: turn for turn, (start, _, _) in enumerate(own.calls)}
            here = turn = 0
            for kind, size in own.tiles:
                turn = turns.get(here, turn)
                of: dict[str, Any] = (
                    dict(sampler, version=trajectory.version) if kind == "model" else {}
                )
                start, end = index + here, index + here + size
                segments.append(
                    Segment(kind=kind, start=start, end=end, turn=turn, start_ns=1, end_ns=2, **of)
                )
                here += size
            index += here
        calls.sort(key=lambda row: row.answered_ns)
        return replace(
            trajectory,
            token_ids=[token for own in self._own for token in own.ids],
            logprobs=[logprob for own in self._own for logprob in own.logprobs],
            sampler_logprobs=[entry for own in self._own for entry in own.sampler],
            loss_mask=[int(logprob is not None) for own in self._own for logprob in own.logprobs],
            segments=segments,
            meta=msgspec.structs.replace(
                trajectory.meta,
                finish=calls[-1].finish,
                prefills=tuple(prefills),
                contexts=tuple(contexts),
                calls=tuple(calls),
            ),
        )


def served_agent(
    trajectory: Trajectory, engine: Engine, params: SamplingParams, weights: Path = Path()
) -> Trajectory:
    """Two turns (the second one moves), a sub-agent, a second answer to the prompt, and its
    compaction."""
    engine.load(weights, version=trajectory.version, digest=trajectory.digest)
    served = Served(trajectory, engine, params)
    prompt = len(served.sequence(0))
    served.call(most=9)
    served.call(given=[7, 8, 9], moves_at=2)
    searcher = served.open([11, 12, 13, 14])
    served.call(searcher, most=6)
    again = served.open([], parent=0, shared=prompt)
    served.call(again)
    shorter = served.open([21, 22], parent=again, shared=prompt + 2)
    served.call(shorter)
    served.call(searcher, given=[15], most=5)
    engine.drop(trajectory.version)
    return served.trajectory()
