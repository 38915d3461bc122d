"""A look without Arrow says what Arrow says, and refuses what it refuses, whatever the bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import fast_validate, trajectory
from dora_pipe.schemas.arrow_frame import decompress
from dora_pipe.schemas.contexts import Context
from dora_pipe.schemas.fast_validate import FastValidator
from dora_pipe.schemas.routes import Routes, none_of
from dora_pipe.schemas.trajectory import Described, Sampler, Segment, SegmentKind, Trajectory
from dora_pipe.schemas.trajectory_codec import TRAJECTORY as LAYOUT
from dora_pipe.schemas.trajectory_codec import (
    RecordLayout,
    decode_trajectory,
    encode_trajectory,
    view_trajectory,
)
from tests.golden.arrow_values import TRAJECTORY
from tests.golden.branched_values import BRANCHED_TRAJECTORY, CONTEXTS, branched
from tests.support.tiers import more

SAID = ("trajectory", "version", "digest", "reward", "segments", "meta", "length", "sampled")


def _trajectory(prompt: int, sampled: int, reward: float | None = 1.0) -> Trajectory:
    count = prompt + sampled
    logprobs = [None] * prompt + [-0.25 * (at % 7) for at in range(sampled)]
    of: Any = {"worker": "w0", "epoch": 7, "version": 3}
    return replace(
        TRAJECTORY,
        token_ids=list(range(count)),
        logprobs=logprobs,
        sampler_logprobs=logprobs,
        loss_mask=[0] * prompt + [1] * sampled,
        reward=reward,
        segments=[
            Segment(kind="prompt", start=0, end=prompt, turn=0, start_ns=1, end_ns=1),
            Segment(kind="model", start=prompt, end=count, turn=0, start_ns=1, end_ns=2, **of),
        ],
        meta=msgspec.structs.replace(
            TRAJECTORY.meta,
            prompt_tokens=prompt,
            reward_error=None if reward is not None else "it raised",
        ),
    )


def _outcome(read: Callable[[bytes], Described], value: bytes) -> Any:
    """What a reader says of a record, in a form that compares; or that it refuses it.

    Who looks at a record sees its arrays as who takes it whole.
    """
    try:
        found = read(value)
    except SchemaError:
        return "refused"
    validator = getattr(read, "__self__", None)
    if isinstance(validator, FastValidator):
        _same(validator.view(value), view_trajectory(value))
    said = {name: getattr(found, name) for name in SAID}
    if said["reward"] is not None and math.isnan(said["reward"]):
        said["reward"] = "nan"
    return said


def _same(one: Trajectory, other: Trajectory) -> None:
    for name in ("token_ids", "logprobs", "sampler_logprobs", "loss_mask"):
        these, those = np.asarray(getattr(one, name)), np.asarray(getattr(other, name))
        assert these.dtype == those.dtype, name
        assert these.tobytes() == those.tobytes(), name
    for name in ("segments", "meta", "trajectory", "routed_experts"):
        assert getattr(one, name) == getattr(other, name), name


@pytest.fixture
def no_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks Arrow fails."""

    def refuse(value: bytes) -> Trajectory:
        raise AssertionError("Arrow was asked")

    monkeypatch.setattr(fast_validate, "view_trajectory", refuse)


@pytest.mark.parametrize(
    ("prompt", "sampled"), [(0, 1), (3, 5), (8, 8), (5, 12), (64, 200), (9, 0)]
)
@pytest.mark.parametrize("reward", [0.5, None])
@pytest.mark.usefixtures("no_arrow")
def test_records_of_this_version_need_no_arrow(
    prompt: int, sampled: int, reward: float | None
) -> None:
    value, _ = encode_trajectory(_trajectory(prompt, sampled, reward))
    assert _outcome(FastValidator().look, value) == _outcome(decode_trajectory, value)


@pytest.mark.usefixtures("no_arrow")
def test_sampling_by_another_distribution_needs_no_arrow() -> None:
    plain = _trajectory(4, 9)
    other = [None if one is None else one - 0.5 for one in plain.logprobs]
    value, _ = encode_trajectory(replace(plain, sampler_logprobs=other))
    assert FastValidator().look(value).sampled == 9


def _mixed(logprobs: list[float | None]) -> Trajectory:
    """Two model segments of two versions, and what a tool said between them."""
    spans = [("prompt", 0, 2, -1), ("model", 2, 5, 3), ("tool", 5, 9, -1), ("model", 9, 12, 4)]
    segments = [
        Segment(
            kind=cast("SegmentKind", kind),
            start=start,
            end=end,
            turn=place // 2,
            start_ns=place,
            end_ns=place + 1,
            worker="w\u00f6" if kind == "model" else "",
            epoch=7,
            version=version,
            tool="python" if kind == "tool" else "",
            ok=place % 2 == 0,
        )
        for place, (kind, start, end, version) in enumerate(spans)
    ]
    plain = _trajectory(2, 10)
    weights = (Sampler(version=4, digest="b2" * 32),)
    return replace(
        plain,
        segments=segments,
        logprobs=logprobs,
        sampler_logprobs=logprobs,
        loss_mask=[0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1],
        meta=msgspec.structs.replace(plain.meta, weights=weights, error="k\u00f6nnte"),
    )


@pytest.mark.parametrize("known", [0.0, -0.0, -1e-45, -3.4028234e38])
@pytest.mark.usefixtures("no_arrow")
def test_several_turns_of_several_versions_need_no_arrow(known: float) -> None:
    logprobs = [None, None, -1.0, known, -2.0, *[None] * 4, known, known, -0.5]
    value, _ = encode_trajectory(_mixed(logprobs))
    assert _outcome(FastValidator().look, value) == _outcome(decode_trajectory, value)


@pytest.mark.usefixtures("no_arrow")
def test_several_contexts_need_no_arrow() -> None:
    value, _ = encode_trajectory(BRANCHED_TRAJECTORY)
    assert _outcome(FastValidator().look, value) == _outcome(decode_trajectory, value)


@pytest.mark.parametrize(
    "contexts",
    [
        (),
        CONTEXTS[:2],
        (CONTEXTS[0], Context(start=12, parent=2, shared=3), CONTEXTS[2]),
        (CONTEXTS[0], Context(start=12, parent=0, shared=9), CONTEXTS[2]),
        (Context(start=8, parent=0, shared=8), *CONTEXTS[1:]),
        (Context(start=8, parent=0, shared=2**40), *CONTEXTS[1:]),
        (Context(start=8, parent=-2, shared=1), *CONTEXTS[1:]),
    ],
)
def test_contexts_are_refused_by_both_or_by_neither(
    contexts: tuple[Context, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as unchecked:
        unchecked.setattr(trajectory, "check_contexts", lambda *_: None)
        value, _ = encode_trajectory(branched(contexts))
    assert _outcome(FastValidator().look, value) == _outcome(decode_trajectory, value)
    refused = _outcome(decode_trajectory, value) == "refused"
    assert refused == (contexts[:1] != (Context(start=8, parent=0, shared=8),))


@pytest.mark.parametrize("wrong", [1e-45, math.inf, -math.inf, math.nan, -math.nan, 3.0])
@pytest.mark.parametrize("place", [2, 4, 9, 11])
def test_log_prob_that_is_none_is_refused_wherever_it_stands(wrong: float, place: int) -> None:
    """Arrow's bytes are changed, since no writer would write them."""
    logprobs = [None, None, -1.0, -1.0, -1.0, *[None] * 4, -1.0, -1.0, -1.0]
    raw = decompress(encode_trajectory(_mixed(logprobs))[0])
    at = raw.index(struct.pack("<3f", -1.0, -1.0, -1.0)) + 4 * (place - 2)
    assert raw[at : at + 4] == struct.pack("<f", -1.0)
    changed = raw[:at] + struct.pack("<f", wrong) + raw[at + 4 :]
    value = zstandard.ZstdCompressor(level=1).compress(changed)
    assert _outcome(FastValidator().look, value) == _outcome(view_trajectory, value) == "refused"


def test_texts_that_are_remembered_are_bounded_and_told_apart() -> None:
    validator = FastValidator()
    validator._texts.update({(bytes([at % 256, at // 256]), b""): () for at in range(5000)})
    value, _ = encode_trajectory(_trajectory(3, 5))
    assert _outcome(validator.look, value) == _outcome(decode_trajectory, value)
    assert 1 <= len(validator._texts) <= 3


def test_view_is_what_decoding_says_with_arrays() -> None:
    value, _ = encode_trajectory(_trajectory(4, 9))
    seen, read = view_trajectory(value), decode_trajectory(value)
    assert _outcome(view_trajectory, value) == _outcome(decode_trajectory, value)
    assert isinstance(seen.logprobs, np.ndarray)
    known = [None if math.isnan(one) else one for one in seen.logprobs.tolist()]
    assert known == list(read.logprobs)
    assert seen.sampled == 9


def test_more_than_255_sampled_tokens_of_a_byte_array_are_counted() -> None:
    mask: Any = np.ones(300, np.uint8)
    found = replace(_trajectory(0, 300), loss_mask=mask)
    assert found.sampled == 300


def _changed(raw: bytes, every: int, layout: RecordLayout[Trajectory]) -> Iterator[bytes]:
    """One of so many bytes behind the schema, changed in several ways; and cut there."""
    for at in range(len(layout.head), len(raw), every):
        for value in {0, 1, 0x7F, 0xFF, raw[at] ^ 1, raw[at] ^ 0x80} - {raw[at]}:
            yield raw[:at] + bytes([value]) + raw[at + 1 :]
        yield raw[:at]


def _routed(prompt: int, sampled: int, reward: float | None = 1.0) -> Trajectory:
    choices = np.arange(4, dtype=np.uint8).reshape(1, 2, 2).repeat(prompt + sampled, axis=0)
    choices[0] = none_of(4)
    return replace(_trajectory(prompt, sampled, reward), routed_experts=Routes.of(choices, 4))


@pytest.mark.usefixtures("no_arrow")
def test_records_with_routes_need_no_arrow_and_their_routes_are_not_copied() -> None:
    one = _routed(3, 20_000)
    value, _ = encode_trajectory(one)
    found = FastValidator().view(value)
    _same(found, view_trajectory(value))
    assert _outcome(FastValidator().look, value) == _outcome(decode_trajectory, value)
    assert found.routed_experts is not None
    assert isinstance(found.routed_experts.data, memoryview)


@pytest.mark.parametrize(
    ("at", "entry"), [(7, [1, 1, 0, 1]), (8, [0, 4, 0, 1]), (9, [255] * 4), (0, [0, 255, 0, 1])]
)
def test_routes_that_cannot_be_are_refused_where_arrow_refuses_them(
    at: int, entry: list[int]
) -> None:
    one = _routed(3, 6)
    assert one.routed_experts is not None
    raw = decompress(encode_trajectory(one)[0])
    start = raw.rindex(one.routed_experts.data)
    place = start + 4 * at if at < 9 else start + 4 * 8
    changed = raw[:place] + bytes(entry) + raw[place + 4 :]
    value = zstandard.ZstdCompressor(level=1).compress(changed)
    with pytest.raises(SchemaError) as arrow:
        view_trajectory(value)
    with pytest.raises(SchemaError) as caught:
        FastValidator().view(value)
    assert (caught.value.path, caught.value.message) == (arrow.value.path, arrow.value.message)
    assert "routed_experts" in caught.value.path


@pytest.mark.parametrize("every", [5, *more([1])])
@pytest.mark.parametrize("given_", [_trajectory(3, 6, 0.5), _trajectory(3, 6, None), _routed(3, 6)])
def test_whatever_is_done_to_a_byte_a_look_says_what_arrow_says(
    given_: Trajectory, every: int
) -> None:
    value, _ = encode_trajectory(given_)
    press, validator, refused = zstandard.ZstdCompressor(level=1), FastValidator(), 0
    for raw in _changed(decompress(value), every, LAYOUT.for_record(given_)):
        frame = press.compress(raw)
        expected = _outcome(view_trajectory, frame)
        assert _outcome(validator.look, frame) == expected
        refused += expected == "refused"
    assert refused > 1000 / every


@given(st.data(), st.booleans())
def test_whatever_is_done_to_several_bytes_a_look_says_what_arrow_says(
    data: st.DataObject, routed: bool
) -> None:
    value, _ = encode_trajectory((_routed if routed else _trajectory)(2, 3))
    raw = bytearray(decompress(value))
    head = (LAYOUT.routed if routed else LAYOUT).head
    places = st.integers(len(head), len(raw) - 1)
    for at in data.draw(st.lists(places, min_size=1, max_size=6)):
        raw[at] = data.draw(st.integers(0, 255))
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(raw))
    assert _outcome(FastValidator().look, frame) == _outcome(view_trajectory, frame)


@pytest.mark.parametrize("value", [b"", b"no frame", zstandard.compress(b"no stream")])
def test_what_is_no_record_is_refused(value: bytes) -> None:
    with pytest.raises(SchemaError):
        FastValidator().look(value)
