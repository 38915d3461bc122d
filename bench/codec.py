"""Time and size of trajectory encodings.

Raw arrays are the lower bound: no names, ids, segments or checks.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import typer

from dora_pipe.bench.support import emit_figures
from dora_pipe.cli.options import JsonOption
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.trajectory import Meta, Segment, Times, Trajectory
from dora_pipe.schemas.trajectory_codec import encode_trajectory, view_trajectory

SECONDS_PER_FIGURE = 0.2
REPEATS_MAX = 1000
REPEATS_MIN = 5
TOKENS_MAX = 1_000_000
_VOCABULARY = 32_000
_PROMPT_SHARE = 4  # inverse share of prompt tokens
_SEED = 20
TOKENS = (30, 256, 2_048, 16_384)

Encoding = Literal["trajectory record", "JSON", "raw arrays"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecFigure:
    """Median cost of one encoding on one thread; only the trajectory record includes checks.

    Example: ``CodecFigure(way="trajectory record", tokens=30, encode_ms=0.27, decode_ms=0.2,
    bytes=1387, bytes_per_token=46.2)``
    """

    way: Encoding
    tokens: int
    encode_ms: float
    decode_ms: float
    bytes: int
    bytes_per_token: float


def command(
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens per trajectory; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure time and size of a trajectory record, JSON and raw arrays."""
    emit_figures(bench_codec(tokens or TOKENS), as_json=as_json)


def bench_codec(tokens: Sequence[int]) -> list[CodecFigure]:
    """Return figures of every encoding. Raises UsageError.

    Token ids have word-like frequencies; log-probs are random (fixed seed).
    """
    for size in tokens:
        if not 1 <= size <= TOKENS_MAX:
            raise UsageError(f"{size} tokens is not between 1 and {TOKENS_MAX}")
    return [figure for size in tokens for figure in _figures(sample_trajectory(size))]


def in_arrays(trajectory: Trajectory) -> Trajectory:
    """Return a copy with a worker's arrays."""
    logprobs, sampler_logprobs = (
        array("f", np.asarray(values, np.float32).tobytes())
        for values in (trajectory.logprobs, trajectory.sampler_logprobs)
    )
    return replace(
        trajectory,
        token_ids=array("i", trajectory.token_ids),
        logprobs=logprobs,
        sampler_logprobs=sampler_logprobs,
        loss_mask=bytearray(trajectory.loss_mask),
    )


def sample_trajectory(tokens: int) -> Trajectory:
    chance = np.random.default_rng(_SEED)
    prompt = tokens // _PROMPT_SHARE
    # Zipf-distributed tokens, mostly likely samples.
    ids = np.minimum(chance.zipf(1.3, tokens), _VOCABULARY - 1)
    drawn = (-chance.exponential(0.7, tokens - prompt)).astype(np.float32)
    logprobs = [*([None] * prompt), *drawn.tolist()]
    group = group_id("train", 42)
    return Trajectory(
        trajectory=trajectory_id(group, 3),
        version=3,
        digest="a1" * 32,
        token_ids=ids.tolist(),
        logprobs=logprobs,
        sampler_logprobs=logprobs,
        loss_mask=[0] * prompt + [1] * (tokens - prompt),
        reward=1.0,
        segments=_segments(prompt, tokens),
        meta=_meta(group, prompt),
    )


def _segments(prompt: int, tokens: int) -> list[Segment]:
    now = 1_790_000_000_000_000_000
    return [
        Segment(kind="prompt", start=0, end=prompt, turn=0, start_ns=now, end_ns=now),
        Segment(
            kind="model",
            start=prompt,
            end=tokens,
            turn=0,
            start_ns=now + 1,
            end_ns=now + 2,
            worker="w0",
            incarnation=7,
            version=3,
        ),
    ]


def _meta(group: str, prompt: int) -> Meta:
    now = 1_790_000_000_000_000_000
    return Meta(
        run="bench",
        schema_version=1,
        group=group,
        group_size=8,
        sample=3,
        attempt=1,
        purpose="train",
        deadline=5,
        dataset_digest="c3" * 32,
        index=17,
        data_epoch=0,
        seed=2**62 + 1,
        prompt_tokens=prompt,
        worker="w0",
        incarnation=7,
        finish="stop",
        times=Times(scheduled=now, started=now + 1, first_token=now + 2, finished=now + 3),
        prefills=(prompt,),
    )


def _figures(trajectory: Trajectory) -> list[CodecFigure]:
    plain = msgspec.to_builtins(trajectory)
    del plain["sampler_logprobs"]  # equal to the others; stored once
    own = in_arrays(trajectory)
    arrays = _arrays(trajectory)
    return [
        _figure(
            "trajectory record", trajectory, lambda: encode_trajectory(own)[0], view_trajectory
        ),
        _figure("JSON", trajectory, lambda: msgspec.json.encode(plain), msgspec.json.decode),
        _figure("raw arrays", trajectory, lambda: _join(arrays), _split),
    ]


def _figure(
    way: Encoding,
    trajectory: Trajectory,
    encode: Callable[[], bytes],
    decode: Callable[[bytes], Any],
) -> CodecFigure:
    value = encode()
    tokens = len(trajectory.token_ids)
    return CodecFigure(
        way=way,
        tokens=tokens,
        encode_ms=_median_ms(encode),
        decode_ms=_median_ms(lambda: decode(value)),
        bytes=len(value),
        bytes_per_token=len(value) / tokens,
    )


def _median_ms(work: Callable[[], Any]) -> float:
    work()
    took: list[float] = []
    while len(took) < REPEATS_MIN or (sum(took) < SECONDS_PER_FIGURE and len(took) < REPEATS_MAX):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e3


def _arrays(trajectory: Trajectory) -> tuple[np.ndarray[Any, Any], ...]:
    """Return token ids, log-probs and mask as arrays, without conversion cost."""
    return (
        np.asarray(trajectory.token_ids, np.int32),
        np.asarray(trajectory.logprobs, np.float32),
        np.asarray(trajectory.loss_mask, np.uint8),
    )


def _join(arrays: tuple[np.ndarray[Any, Any], ...]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def _split(data: bytes) -> tuple[np.ndarray[Any, Any], ...]:
    tokens = len(data) // 9  # 4 bytes of id, 4 of log-prob, 1 of mask
    return (
        np.frombuffer(data, np.int32, tokens),
        np.frombuffer(data, np.float32, tokens, 4 * tokens),
        np.frombuffer(data, np.uint8, tokens, 8 * tokens),
    )
