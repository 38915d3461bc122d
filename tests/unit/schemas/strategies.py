"""Hypothesis strategies for valid records."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from dora_pipe.schemas import control, metrics, rounds
from dora_pipe.schemas.contexts import Call, Context, lengths
from dora_pipe.schemas.dead_letter import DeadLetter
from dora_pipe.schemas.identity import Purpose, group_id, trajectory_id
from dora_pipe.schemas.trajectory import (
    Meta,
    Progress,
    Sampler,
    Segment,
    SegmentKind,
    Times,
    Trajectory,
    TurnProgress,
)

INTEGERS = st.integers(-(2**63), 2**63 - 1)
WHOLE = st.integers(0, 2**62)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ASCII = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
HEX = st.binary(min_size=32, max_size=32).map(bytes.hex)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: INTEGERS,
    float: FLOATS,
    str: TEXT,
    bool: st.booleans(),
    type(None): st.none(),
    Any: JSON,
}


def struct(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    fields = {field.name: of_type(field.type) for field in msgspec.structs.fields(kind)}
    return st.fixed_dictionaries(fields).map(lambda values: kind(**values))


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return struct(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        return st.dictionaries(TEXT, of_type(parts[1]), max_size=3)
    if origin is tuple and parts[-1] is ...:
        return st.lists(of_type(parts[0]), max_size=3).map(tuple)
    if origin is types.UnionType:
        return st.one_of([of_type(part) for part in parts])
    return st.sampled_from(_words(kind))


def _words(literal: Any) -> tuple[str, ...]:
    assert typing.get_origin(literal) is typing.Literal, literal
    return typing.get_args(literal)


CONTROL = st.one_of([struct(kind) for kind in typing.get_args(control.AnyControl)])
METRICS = st.one_of([struct(kind) for kind in typing.get_args(metrics.AnyMetrics)])
ROUNDS = struct(rounds.Round)


@st.composite
def logprobs(draw: st.DrawFn, size: int) -> list[float]:
    number = st.floats(-3e38, 0.0) | st.floats(-20.0, 0.0)
    return draw(st.lists(number, min_size=size, max_size=size))


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    segments: list[Segment] = []
    position = 0
    for _ in range(draw(st.integers(0, 4))):
        end = position + draw(st.integers(0, 6))
        kind: Any = draw(st.sampled_from(_words(SegmentKind)))
        if kind == "prompt" and not end:  # It would open an empty context.
            kind = "tool"
        segments.append(
            Segment(
                kind=kind,
                start=position,
                end=end,
                turn=draw(st.integers(0, 9)),
                start_ns=draw(WHOLE),
                end_ns=draw(WHOLE),
                worker=draw(TEXT),
                incarnation=draw(st.integers(-1, 99)),
                version=draw(st.integers(-1, 99)),
                tool=draw(TEXT),
                ok=draw(st.booleans()),
            )
        )
        position = end
    return segments


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    tiles = draw(segments())
    mask = [int(tile.kind == "model") for tile in tiles for _ in range(tile.start, tile.end)]
    size = len(mask)
    own = _masked(draw(logprobs(size)), mask)
    sampler = own if draw(st.booleans()) else _masked(draw(logprobs(size)), mask)
    reward = draw(st.none() | FLOATS)
    meta = draw(metas(size, why=None if reward is not None else draw(TEXT)))
    version = draw(WHOLE)
    return Trajectory(
        trajectory=trajectory_id(meta.group, meta.sample),
        version=version,
        digest=draw(HEX),
        token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)),
        logprobs=own,
        sampler_logprobs=sampler,
        loss_mask=mask,
        reward=reward,
        segments=tiles,
        meta=msgspec.structs.replace(
            meta,
            weights=_weights(draw, tiles, version),
            contexts=_contexts(draw, tiles, size),
            calls=_calls(draw, tiles),
        ),
    )


def _contexts(draw: st.DrawFn, tiles: Sequence[Segment], size: int) -> tuple[Context, ...]:
    starts = [tile.start for tile in tiles if tile.kind == "prompt"][1:]
    contexts: list[Context] = []
    for start, end in pairwise([*starts, size]):
        before = lengths(contexts, start)  # of contexts that end where this one starts
        parent = draw(
            st.sampled_from([index for index, entry in enumerate(before) if entry] or [-1])
        )
        most = before[parent] if parent >= 0 else 0
        shared = draw(st.integers(1 if start == end else 0, most)) if most else 0
        contexts.append(Context(start=start, parent=parent if shared else -1, shared=shared))
    return tuple(contexts)


def _calls(draw: st.DrawFn, tiles: Sequence[Segment]) -> tuple[Call, ...]:
    models = [tile for tile in tiles if tile.kind == "model"]
    if draw(st.booleans()):
        return ()
    call = draw(struct(Call))
    return tuple(
        msgspec.structs.replace(call, start=model.start, end=model.end) for model in models
    )


def _weights(draw: st.DrawFn, tiles: Sequence[Segment], version: int) -> tuple[Sampler, ...]:
    rest = dict.fromkeys(tile.version for tile in tiles if tile.kind == "model")
    rest.pop(version, None)
    if draw(st.booleans()):
        return ()
    return tuple(Sampler(version=other, digest=draw(HEX)) for other in rest)


@st.composite
def metas(draw: st.DrawFn, size: int, why: str | None) -> Meta:
    purpose: Purpose = draw(st.sampled_from(_words(Purpose)))
    meta: Meta = draw(struct(Meta))
    return msgspec.structs.replace(
        meta,
        purpose=purpose,
        run=draw(ASCII),
        worker=draw(ASCII),
        group=group_id(purpose, draw(st.integers(0, 10**10 - 1))),
        sample=draw(st.integers(0, 999)),
        prompt_tokens=draw(st.integers(0, size)),
        reward_error=why,
        times=draw(struct(Times)),
    )


@st.composite
def progress(draw: st.DrawFn) -> Progress:
    given = draw(trajectories())
    return Progress(
        trajectory=given.trajectory,
        attempt=draw(st.integers(0, 2**31 - 1)),
        version=given.version,
        digest=given.digest,
        worker=given.meta.worker,
        incarnation=given.meta.incarnation,
        start=draw(st.integers(0, 2**31 - 1)),
        token_ids=given.token_ids,
        logprobs=given.logprobs,
        sampler_logprobs=given.sampler_logprobs,
        loss_mask=given.loss_mask,
        segments=given.segments,
        prefills=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=3))),
        previous=draw(st.integers(-1, 2**62)),
        started_ns=draw(WHOLE),
        finish=draw(st.sampled_from(["", "stop", "length"])),
    )


@st.composite
def turn_progress(draw: st.DrawFn) -> TurnProgress:
    size = draw(st.integers(0, 8))
    own = draw(logprobs(size))
    ids = st.integers(0, 2**31 - 1)
    return TurnProgress(
        trajectory=trajectory_id(group_id("train", draw(st.integers(0, 10**10 - 1))), 1),
        attempt=draw(ids),
        version=draw(WHOLE),
        digest=draw(HEX),
        worker=draw(TEXT),
        incarnation=draw(WHOLE),
        turn=draw(ids),
        context=draw(ids),
        parent=draw(st.integers(-1, 9)),
        shared=draw(ids),
        given_ids=draw(st.lists(ids, max_size=8)),
        token_ids=draw(st.lists(ids, min_size=size, max_size=size)),
        logprobs=own,
        sampler_logprobs=own if draw(st.booleans()) else draw(logprobs(size)),
        prefills=tuple(draw(st.lists(ids, max_size=3))),
        previous=draw(st.integers(-1, 2**62)),
        started_ns=draw(WHOLE),
        ended_ns=draw(WHOLE),
        call=draw(struct(Call)),
    )


DEAD_LETTERS = st.builds(
    DeadLetter,
    topic=TEXT,
    partition=WHOLE,
    offset=WHOLE,
    reason=TEXT,
    path=TEXT,
    at_ns=WHOLE,
    key=st.binary(max_size=9),
    value=st.none() | st.binary(max_size=99),
    headers=st.lists(st.tuples(TEXT, st.binary(max_size=9)), max_size=3).map(tuple),
)


def rounded(values: Sequence[float | None]) -> Any:
    return [None if value is None else float(np.float32(value)) for value in values]


def _masked(values: list[float], mask: list[int]) -> list[float | None]:
    assert not any(math.isnan(value) for value in values)
    return [value if bit else None for value, bit in zip(values, mask, strict=True)]
