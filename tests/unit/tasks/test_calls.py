"""Tests of frames: torn and invalid ones."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.config import model
from dora_pipe.producers.tasks import calls
from dora_pipe.producers.tasks.calls import (
    MESSAGE_CHARS_MAX,
    Abandon,
    Call,
    CallAnswer,
    EndEpisode,
    EnvObserved,
    EnvStep,
    Exhausted,
    GroupCall,
    GroupRewarded,
    Hello,
    PipeFrame,
    Progress,
    PromptCall,
    PromptReady,
    Refused,
    RewardCall,
    Rewarded,
    Setup,
    StillOpening,
    TaskFacts,
    TaskFailed,
    message_line,
    pack,
    unpack,
)
from dora_pipe.producers.tasks.task import Completion, Turn

COMPLETION = Completion(text="a", turns=["a", ""], messages=[])
DOWN: list[PipeFrame] = [
    Call(1, None, PromptCall(request="a", split="train", index=5)),
    Call(2, 1, EnvStep(request="a", turn=Turn(text='text with "quotes" and ünïcode\n'))),
    Call(3, None, RewardCall(request="b", split="eval", index=0, completion=COMPLETION)),
    Call(
        4,
        None,
        GroupCall(
            request="c",
            split="train",
            index=1,
            completions=(
                COMPLETION,
                Completion(text="b", turns=["b"], messages=[Turn(text="b").message()]),
            ),
        ),
    ),
    Call(
        5,
        None,
        calls.AgentCall(
            request="d", split="train", index=0, base_url="http://127.0.0.1/v1", api_key="key"
        ),
    ),
    EndEpisode(1),
    Abandon(3),
    Setup(model.Task(kind="arithmetic", options={"count": 3}), 42),
]
FACTS = TaskFacts(train_digest="a", train_rows=1, eval_digest="b", eval_rows=0, reward_digest="")
UP: list[PipeFrame] = [
    StillOpening(),
    Hello(FACTS),
    Refused("why", None, True),
    CallAnswer(1, PromptReady(request="a", text="text", episode=False)),
    CallAnswer(2, EnvObserved(request="a", text="", done=True, tool="tool", ok=False)),
    CallAnswer(3, Rewarded(request="a", reward=-0.5, raw=None, parts={"a": 1.0})),
    CallAnswer(6, GroupRewarded(request="c", rewards=(1.0, 0.5), parts=({}, {"a": 0.5}))),
    CallAnswer(7, calls.AgentEnded(request="d", text="done")),
    CallAnswer(8, calls.EpisodeLost(request="a", message="Retry: no room")),
    Progress(5, "waiting"),
    Exhausted("its threads hang"),
    CallAnswer(4, TaskFailed(request="a", error="ValueError", message="why")),
]


def test_every_kind_of_frame_comes_back_equal() -> None:
    assert {type(frame) for frame in DOWN} == set(get_args(calls.Down))
    assert {type(frame) for frame in UP} == set(get_args(calls.Up))
    asked = {type(frame.call) for frame in DOWN if isinstance(frame, Call)}
    answered = {type(frame.event) for frame in UP if isinstance(frame, CallAnswer)}
    assert asked == set(get_args(calls.TaskCall))
    assert answered == {*get_args(calls.Answered), calls.EpisodeLost}
    for frames, decoder in ((DOWN, calls.DOWN), (UP, calls.UP)):
        buffer = bytearray(b"".join(pack(frame) for frame in frames))
        assert [decoder.decode(body) for body in unpack(buffer)] == frames
        assert not buffer


@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_frames_torn_anywhere_are_put_together_again(cuts: list[int]) -> None:
    data = b"".join(pack(frame) for frame in DOWN)
    buffer, result, index = bytearray(), [], 0
    for size in [*cuts, len(data)]:
        buffer += data[index : index + size]
        index += size
        result += [calls.DOWN.decode(body) for body in unpack(buffer)]
    assert result == DOWN


def test_length_that_no_frame_has_is_refused_in_both_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        list(unpack(bytearray(b"\xff" * 8)))
    monkeypatch.setattr(calls, "FRAME_BYTES_MAX", 50)
    with pytest.raises(ValueError, match="above the limit of 50"):
        pack(Call(1, 1, EnvStep(request="a", turn=Turn(text="x" * 60))))


@given(text=st.text())
def test_a_message_is_one_short_line(text: str) -> None:
    line = message_line(text)
    assert len(line) <= MESSAGE_CHARS_MAX
    assert len(line.splitlines()) <= 1
    assert line.encode().decode() == line
