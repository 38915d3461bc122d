"""Replayable episodes: a fresh environment replays the model's turns after a loss.

    another worker had it: PROMPTING -> RESUMING -> ENVIRONMENT (repeated) -> FETCHING -> ...
    its process has died:  any phase up to REWARDING -> PROMPTING -> ENVIRONMENT (repeated)

The environment receives the recorded turns and must return the recorded tokens; the first
difference fails the request as `ReplayDiffers`, and it restarts from the prompt. An answer without
later sampled tokens is not compared. Recorded tokens are never sampled twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from dora_pipe.core.pure.machine import Now, Published
from dora_pipe.producers.tasks.calls import EpisodeLost, TaskFailed
from dora_pipe.producers.worker.effects import (
    EncodeFailed,
    EnvObserved,
    ProgressEncoded,
    ProgressFetched,
    PromptReady,
)
from dora_pipe.producers.worker.progress import PROGRESS_TAG
from dora_pipe.producers.worker.request import (
    Phase,
    RequestState,
)
from dora_pipe.producers.worker.requests import Requests
from dora_pipe.producers.worker.resume import sequence_of
from dora_pipe.producers.worker.sequence import Exchange
from dora_pipe.schemas.control import REPLAY_DIFFERS, FinishReason

FINISHES: Final[dict[str, FinishReason | None]] = {"": None, "stop": "stop", "length": "length"}


TOLD_AGAIN: Final = "episodes told again"
"""Counter of replays."""

RETELLINGS_MAX: Final = 16
"""Replays before the request fails."""

BETWEEN: Final = (Phase.PROMPTING, Phase.ENVIRONMENT, Phase.WAITING)
"""Phases in which the last turn may not be durable."""


class Episodes:
    """All replayable episodes of one incarnation."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def handle(self, event: Any, now: Now) -> bool:
        """Handle an event of a replayable episode; return False if `Requests` must handle it."""
        request = self._requests.by_key.get(getattr(event, "request", ""))
        if request is None or not request.replayable:
            return False
        handler = _TRANSITIONS.get((request.phase, type(event)))
        return handler is not None and handler(self, request, event, now)

    def handle_published(self, event: Published, now: Now) -> bool:
        """Handle the acknowledgement of a record after its turn's end; return False for any
        other."""
        request = self._requests.by_key.get(event.tag.removeprefix(PROGRESS_TAG))
        if request is None or not request.replayable or request.phase not in BETWEEN:
            return False
        self._requests.chunk_published(request, event, now)
        return True

    def _encoded(self, request: RequestState, event: ProgressEncoded, now: Now) -> bool:
        self._requests.append_progress(request, event, now)
        return True

    def _not_encoded(self, request: RequestState, event: EncodeFailed, now: Now) -> bool:
        self._requests.give_up(request, now, "SchemaError", event.message, retryable=False)
        return True

    # From its prompt, or from its progress

    def _prompted(self, request: RequestState, event: PromptReady, now: Now) -> bool:
        if not request.sequence.sampled_tokens:
            return False
        self._replay(request, event.token_ids, now)
        return True

    def _resumed(self, request: RequestState, event: ProgressFetched, now: Now) -> bool:
        requests = self._requests
        found = requests.progress_error(request, event) or sequence_of(event.chunks)
        if isinstance(found, str):
            requests.resume_without(request)
            return True
        prompt, request.sequence = request.sequence.token_ids, found
        request.continues(event.chunks)
        request.turn_finish = FINISHES.get(getattr(event.chunks[-1], "finish", ""))
        self._replay(request, prompt, now)
        return True

    def _lost(self, request: RequestState, event: EpisodeLost, now: Now) -> bool:
        requests, sequence = self._requests, request.sequence
        if sequence.in_stay:
            setup, version = requests.setup, request.served.version
            sequence.end_stay(
                now.wall_ns, worker=setup.worker, incarnation=setup.incarnation, version=version
            )
        if not sequence.sampled_tokens and request.phase is not Phase.RESUMING:
            return False
        request.retellings += 1
        if requests.starts_again(request, event, now, request.retellings <= RETELLINGS_MAX):
            requests.leave_engine(request)
            requests.drop_kv(request)
            request.replay.clear()
            if sequence.cut():
                request.turn_finish = "stop"
            requests.ask_prompt(request)
        return True

    # Its turns, told again

    def _replay(self, request: RequestState, prompt: Sequence[int], now: Now) -> None:
        sequence = request.sequence
        recorded = sequence.token_ids[: sequence.prompt_tokens].tolist()
        if recorded != list(prompt):
            self._differs(request, f"the prompt {_difference(prompt, recorded)}", now)
            return
        self._requests.counts[TOLD_AGAIN] += 1
        request.replay.extend(sequence.exchanges())
        self._tell(request, now)

    def _tell(self, request: RequestState, now: Now) -> None:
        requests = self._requests
        if request.replay:
            requests.counts["turns told again"] += 1
            requests.ask_environment(request, request.replay[0].said, now)
            return
        finish = request.turn_finish or request.finish_of(requests.setup.context_tokens)
        if finish is None:
            requests.fetch_kv(request)
        elif finish == "stop":
            requests.ask_environment(request, request.sequence.answer(), now)
        else:
            requests.complete(request, finish, now)

    def _observed(self, request: RequestState, event: EnvObserved, now: Now) -> bool:
        if not request.replay:
            return False
        recorded = request.replay.popleft()
        why = _answer_difference(event, recorded)
        if why:
            self._differs(request, f"the answer to turn {recorded.turn} {why}", now)
        else:
            self._tell(request, now)
        return True

    def _failed(self, request: RequestState, event: TaskFailed, now: Now) -> bool:
        if not request.replay:
            return False
        why = f"turn {request.replay[0].turn} has no answer: {event.error}: {event.message}"
        self._differs(request, why, now)
        return True

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
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        return f"has {len(now)} tokens, and had {len(before)}"
    return f"has token {now[at]} at {at}, and had {before[at]}"


Handler = Callable[[Episodes, RequestState, Any, Now], bool]

_TRANSITIONS: Final[dict[tuple[Phase, type], Handler]] = {
    (Phase.PROMPTING, PromptReady): Episodes._prompted,
    (Phase.RESUMING, ProgressFetched): Episodes._resumed,
    (Phase.ENVIRONMENT, EnvObserved): Episodes._observed,
    (Phase.ENVIRONMENT, TaskFailed): Episodes._failed,
    (Phase.PROMPTING, EpisodeLost): Episodes._lost,
    (Phase.RESUMING, EpisodeLost): Episodes._lost,
    (Phase.FETCHING, EpisodeLost): Episodes._lost,
    (Phase.WAITING, EpisodeLost): Episodes._lost,
    (Phase.RUNNING, EpisodeLost): Episodes._lost,
    (Phase.ENVIRONMENT, EpisodeLost): Episodes._lost,
    (Phase.REWARDING, EpisodeLost): Episodes._lost,
    **{(phase, ProgressEncoded): Episodes._encoded for phase in BETWEEN},
    **{(phase, EncodeFailed): Episodes._not_encoded for phase in BETWEEN},
}
