"""Episodes that survive: requests whose environment can be told again what the model has said.
Decides how such an episode goes on when its worker, its task process or its place is lost.

    another worker had it: PROMPTING -> RESUMING -> ENVIRONMENT (again and again) -> FETCHING -> ...
    its process has died:  any phase up to REWARDING -> PROMPTING -> ENVIRONMENT (again and again)

A fresh environment is told the turns that the model has said, one after the other, and must answer
each with the very tokens that stand in the sequence. Then the episode goes on where it was: in the
middle of a turn, or with a turn that nobody has answered yet. Its tokens are in the log (a record
at the end of every turn, and every `checkpoint_tokens` within one), so that nothing is sampled
twice that was recorded.

Rules:

1. The prompt and every answer are compared, by token ids, with what the model has seen. The first
   difference fails the request as `ReplayDiffers`: its trajectory would hold what its environment
   never said. The orchestrator forgets its progress, and it begins again from its prompt, under the
   same version, as one more of its attempts.
2. What was answered to the last turn, and nothing was sampled behind, is asked again and not
   compared: no token depends on it.
3. An episode may be told again so often (`RETELLINGS_MAX`): what has died is not its environment's
   fault, and only what starts again from its prompt counts as such (`EPISODE_RESTARTS_MAX`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from dora_pipe.core.runtime import Now, Published
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
"""Of `EpisodeProgress.finish`."""


TOLD_AGAIN: Final = "episodes told again"
"""What is counted of an episode that another environment takes up."""

RETELLINGS_MAX: Final = 16
"""Times a request's episode is told again here; then the request fails."""

BETWEEN: Final = (Phase.PROMPTING, Phase.ENVIRONMENT, Phase.WAITING)
"""Phases in which the last turn may not be durable yet."""


class Episodes:
    """All replayable episodes of one incarnation."""

    def __init__(self, requests: Requests) -> None:
        """`requests`: of which they are some."""
        self._requests = requests

    def handle(self, event: Any, now: Now) -> bool:
        """Take an event of such an episode; False for one that is no different for it."""
        request = self._requests.by_key.get(getattr(event, "request", ""))
        if request is None or not request.replayable:
            return False
        handler = _TRANSITIONS.get((request.phase, type(event)))
        return handler is not None and handler(self, request, event, now)

    def handle_published(self, event: Published, now: Now) -> bool:
        """Take the acknowledgement of a turn's record that comes behind the turn's end; False for
        any other."""
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
        """Another environment of an episode whose process has died."""
        if not request.sequence.sampled_tokens:
            return False
        self._replay(request, event.token_ids, now)
        return True

    def _resumed(self, request: RequestState, event: ProgressFetched, now: Now) -> bool:
        """A fresh environment of an episode that another worker has begun."""
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
        """Its process died: what was sampled stays, and another environment is told it."""
        requests, sequence = self._requests, request.sequence
        if sequence.in_stay:
            setup, version = requests.setup, request.hosted.version
            sequence.end_stay(now.wall_ns, worker=setup.worker, epoch=setup.epoch, version=version)
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
        """Tell a fresh environment, whose prompt this is, what the model has said."""
        sequence = request.sequence
        recorded = sequence.token_ids[: sequence.prompt_tokens].tolist()
        if recorded != list(prompt):
            self._differs(request, f"the prompt {_difference(prompt, recorded)}", now)
            return
        self._requests.counts[TOLD_AGAIN] += 1
        request.replay.extend(sequence.exchanges())
        self._tell(request, now)

    def _tell(self, request: RequestState, now: Now) -> None:
        """The next turn; behind the last one it goes on as it would have where it was."""
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
    """What of an answer is not as it was; empty where all is."""
    if list(event.token_ids) != recorded.answer:
        return _difference(event.token_ids, recorded.answer)
    if event.done:
        return "ends the episode, which went on"
    if (event.tool, event.ok) != (recorded.tool, recorded.ok):
        return f"is of {event.tool!r}, ok {event.ok}, and was of {recorded.tool!r}, {recorded.ok}"
    return ""


def _difference(now: Sequence[int], before: Sequence[int]) -> str:
    """Where two texts of token ids part."""
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
