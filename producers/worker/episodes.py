"""Replayable episodes: a fresh environment replays the model's turns after a loss.

    another worker had it: PROMPTING -> RESUMING -> ENVIRONMENT (repeated) -> FETCHING -> ...
    its process has died:  any phase up to REWARDING -> PROMPTING -> ENVIRONMENT (repeated)

The environment receives the recorded turns and must return the recorded tokens; the first
difference fails the request as `ReplayDiffers`, and it restarts from the prompt. An answer without
later sampled tokens is not compared. Recorded tokens are never sampled twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dora_pipe.core.pure.machine import Now
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EpisodeLost,
    PromptReady,
    TaskFailed,
)
from dora_pipe.producers.worker.effects import ProgressFetched
from dora_pipe.producers.worker.request import (
    Phase,
    RequestState,
)
from dora_pipe.producers.worker.requests import Requests
from dora_pipe.producers.worker.sequence import Exchange
from dora_pipe.schemas.control import REPLAY_DIFFERS, FinishReason

FINISHES: Final[dict[str, FinishReason | None]] = {"": None, "stop": "stop", "length": "length"}


EPISODES_REPLAYED: Final = "episodes told again"
"""Counter of replays."""

REPLAYS_MAX: Final = 16
"""Replays before the request fails."""


class Episodes:
    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    # From its prompt, or from its progress

    def prompted(self, request: RequestState, event: PromptReady, now: Now) -> None:
        if request.sequence.sampled_tokens:
            self._replay(request, event.token_ids, now)
        else:
            self._requests.prompted(request, event, now)

    def resumed(self, request: RequestState, event: ProgressFetched, now: Now) -> None:
        prompt = request.sequence.token_ids
        sequence = self._requests.recorded_sequence(request, event)
        if isinstance(sequence, str):
            self._requests.discard_progress(request)
            return
        request.continue_from(sequence, event.chunks)
        request.turn.finish = FINISHES.get(getattr(event.chunks[-1], "finish", ""))
        self._replay(request, prompt, now)

    def episode_lost(self, request: RequestState, event: EpisodeLost, now: Now) -> None:
        requests, sequence = self._requests, request.sequence
        if sequence.in_stay:
            setup, version = requests.setup, request.served.version
            sequence.end_stay(
                now.wall_ns, worker=setup.worker, incarnation=setup.incarnation, version=version
            )
        if not sequence.sampled_tokens and request.phase is not Phase.RESUMING:
            requests.episode_lost(request, event, now)
            return
        request.replays += 1
        if requests.starts_again(request, event, now, request.replays <= REPLAYS_MAX):
            requests.leave_engine(request)
            requests.drop_kv(request)
            request.turn.replay.clear()
            if sequence.cut():
                request.turn.finish = "stop"
            requests.ask_prompt(request)

    # Its turns, told again

    def _replay(self, request: RequestState, prompt: Sequence[int], now: Now) -> None:
        sequence = request.sequence
        recorded = sequence.prompt.tolist()
        if recorded != list(prompt):
            self._differs(request, f"the prompt {_difference(prompt, recorded)}", now)
            return
        self._requests.counts[EPISODES_REPLAYED] += 1
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
