"""Frames survive being torn anywhere, and what is no frame is refused."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.config import model
from dora_pipe.producers.tasks import wire
from dora_pipe.producers.tasks.calls import MESSAGE_CHARS_MAX, one_line

FRAMES: list[wire.Frame] = [
    wire.Prompt(1, "train", 5),
    wire.Step(2, 1, 'text with "quotes" and ünïcode\n'),
    wire.Score(3, None, "eval", 0, "", ("a", "")),
    wire.End(1),
    wire.Setup(model.Task(kind="arithmetic", options={"count": 3}), 42),
]


def test_every_kind_of_frame_comes_back_equal() -> None:
    facts = wire.Facts(
        train_digest="a", train_rows=1, eval_digest="b", eval_rows=0, reward_digest=""
    )
    up: list[wire.Frame] = [
        wire.Hello(facts),
        wire.Refused("why", None, True),
        wire.Prompted(1, "text", False),
        wire.Observed(2, "", True, "tool", False),
        wire.Scored(3, -0.5, None, {"a": 1.0}),
        wire.Failed(4, "ValueError", "why"),
    ]
    assert {type(frame) for frame in FRAMES} == set(get_args(wire.Down))
    assert {type(frame) for frame in up} == set(get_args(wire.Up))
    for frames, decoder in ((FRAMES, wire.DOWN), (up, wire.UP)):
        buffer = bytearray(b"".join(wire.pack(frame) for frame in frames))
        assert [decoder.decode(body) for body in wire.unpack(buffer)] == frames
        assert not buffer


@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_frames_torn_anywhere_are_put_together_again(cuts: list[int]) -> None:
    data = b"".join(wire.pack(frame) for frame in FRAMES)
    buffer, found, at = bytearray(), [], 0
    for size in [*cuts, len(data)]:
        buffer += data[at : at + size]
        at += size
        found += [wire.DOWN.decode(body) for body in wire.unpack(buffer)]
    assert found == FRAMES


def test_length_that_no_frame_has_is_refused_in_both_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        list(wire.unpack(bytearray(b"\xff" * 8)))
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 50)
    with pytest.raises(ValueError, match="above the limit of 50"):
        wire.pack(wire.Step(1, 1, "x" * 60))


@given(text=st.text())
def test_one_line_is_one_short_line(text: str) -> None:
    line = one_line(text)
    assert len(line) <= MESSAGE_CHARS_MAX
    assert len(line.splitlines()) <= 1
    assert line.encode().decode() == line
