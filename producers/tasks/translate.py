"""How calls become frames and answers become events; decides nothing."""

from __future__ import annotations

from dora_pipe.producers.tasks import wire
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    TaskCall,
    TaskEvent,
    TaskFailed,
)


def frame_of(number: int, call: TaskCall, episode: int | None) -> bytes:
    """The packed frame of a call. Raises ValueError for one that cannot travel."""
    match call:
        case PromptCall():
            return wire.pack(wire.Prompt(number, call.split, call.index))
        case EnvStep():
            if episode is None:
                raise ValueError("the request has no episode")
            return wire.pack(wire.Step(number, episode, call.text))
        case RewardCall():
            turns = tuple(call.turns)
            return wire.pack(wire.Score(number, episode, call.split, call.index, call.text, turns))


def event_of(request: str, answer: wire.Answer) -> TaskEvent:
    """The event that an answer is for the request it belongs to."""
    match answer:
        case wire.Prompted():
            return PromptReady(request=request, text=answer.text, episode=answer.episode)
        case wire.Observed():
            return EnvObserved(
                request=request,
                text=answer.text,
                done=answer.done,
                tool=answer.tool,
                ok=answer.ok,
            )
        case wire.Scored():
            return Rewarded(
                request=request, reward=answer.reward, raw=answer.raw, parts=answer.parts
            )
        case wire.Failed():
            return TaskFailed(request=request, error=answer.error, message=answer.message)


def how_it_ended(status: int) -> str:
    """``how_it_ended(-9) == "its process was killed by signal 9"``."""
    if status < 0:
        return f"its process was killed by signal {-status}"
    return f"its process ended with status {status}"
