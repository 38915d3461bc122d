"""Replayable episodes: a fresh environment replays the model's turns after a loss.

    an earlier attempt had it: PROMPTING -> RESUMING -> ENVIRONMENT (repeated) -> FETCHING -> ...

The environment receives the recorded turns and must return the recorded tokens; the first
difference fails the request as `ReplayDiffers`, and it restarts from the prompt. An answer without
later sampled tokens is not compared. Recorded tokens are never sampled twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dora_pipe.core.pure.machine import Now
from dora_pipe.producers.tasks.calls import EnvObserved, TaskFailed
from dora_pipe.producers.worker.effects import ProgressFetched
from dora_pipe.producers.worker.request import RequestState
from dora_pipe.producers.worker.requests import Requests
from dora_pipe.producers.worker.sequence import Exchange
from dora_pipe.schemas.control import REPLAY_DIFFERS, FinishReason

FINISHES: Final[dict[str, FinishReason | None]] = {"": None, "stop": "stop", "length": "length"}


class Episodes:
    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def resumed(self, request: RequestState, event: ProgressFetched, now: Now) -> None:
        prompt = request.sequence.token_ids
        sequence = self._requests.recorded_sequence(request, event)
        if isinstance(sequence, str):
            self._requests.discard_progress(request)
            return
        request.continue_from(sequence, event.chunks)
        request.turn.finish = FINISHES.get(getattr(event.chunks[-1], "finish", ""))
        self._replay(request, prompt, now)

    # Its turns, told again

    def _replay(self, request: RequestState, prompt: Sequence[int], now: Now) -> None:
        sequence = request.sequence
        recorded = sequence.prompt.tolist()
        if recorded != list(prompt):
            self._differs(request, f"the prompt {_difference(prompt, recorded)}", now)
            return
        request.turn.replay.extend(sequence.exchanges())
        self._replay_next(request, now)

    def _replay_next(self, request: RequestState, now: Now) -> None:
        requests = self._requests
        if request.turn.replay:
            requests.counts["turns told again"] += 1
            requests.ask_environment(request, request.turn.replay[0].said, now)
            return
        finish = request.turn.finish or request.finish_of(requests.setup.context_tokens)
        if finish is None:
            requests.fetch_kv(request)
        elif finish == "stop":
            requests.ask_environment(request, request.sequence.answer(), now)
        else:
            requests.complete(request, finish, now)

    def observed(self, request: RequestState, event: EnvObserved, now: Now) -> None:
        if not request.turn.replay:
            self._requests.observed(request, event, now)
            return
        recorded = request.turn.replay.popleft()
        why = _answer_difference(event, recorded)
        if why:
            self._differs(request, f"the answer to turn {recorded.turn} {why}", now)
        else:
            self._replay_next(request, now)

    def environment_failed(self, request: RequestState, event: TaskFailed, now: Now) -> None:
        if not request.turn.replay:
            self._requests.environment_failed(request, event, now)
            return
        why = f"turn {request.turn.replay[0].turn} has no answer: {event.error}: {event.message}"
        self._differs(request, why, now)

    def _differs(self, request: RequestState, why: str, now: Now) -> None:
        self._requests.give_up(request, now, REPLAY_DIFFERS, why, retryable=True)


def _answer_difference(event: EnvObserved, recorded: Exchange) -> str:
    if list(event.token_ids) != recorded.answer:
        return _difference(event.token_ids, recorded.answer)
    if event.done:
        return "ends the episode, which continued"
    if (event.tool, event.ok) != (recorded.tool, recorded.ok):
        return f"is of {event.tool!r}, ok {event.ok}, and was of {recorded.tool!r}, {recorded.ok}"
    return ""


def _difference(now: Sequence[int], before: Sequence[int]) -> str:
    pairs = zip(now, before, strict=False)
    index = next((index for index, (new, old) in enumerate(pairs) if new != old), None)
    if index is None:
        return f"has {len(now)} tokens, and had {len(before)}"
    return f"has token {now[index]} at {index}, and had {before[index]}"
