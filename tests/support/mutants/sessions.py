"""Mutants of agent sessions on a worker; see `rules`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dora_pipe.core.pure.machine import Now, Published
from dora_pipe.producers.worker import sessions
from dora_pipe.producers.worker.episodes import Episodes
from dora_pipe.producers.worker.request import Phase, RequestState, Served
from dora_pipe.producers.worker.request_table import RequestTable
from dora_pipe.producers.worker.requests import Requests
from dora_pipe.producers.worker.session import CallPlace, ContextTree
from dora_pipe.producers.worker.sessions import Sessions

if TYPE_CHECKING:
    from tests.support.mutants.rules import Patches


def _answered_early(patches: Patches) -> None:
    right = Sessions._log

    def log(self: Sessions, request: RequestState) -> None:
        right(self, request)
        session = sessions._session(request)
        if session.logging is not None:
            call = self._requests.by_key[session.open[session.sampled[0]]]
            published = Published(tag="", topic="", partition=call.place.spec.partition, offset=0)
            self.durable(call, published, self._requests.now)

    patches.put(Sessions, "_log", log)


def _calls_of_the_newest(patches: Patches) -> None:
    right = Requests.fill

    def fill(self: Requests, *versions: int) -> None:
        for state in self.by_key.values():
            if state.call is not None and state.phase is Phase.WAITING and versions:
                state.served = Served(versions[-1], state.served.digest)
        right(self, *versions)

    patches.put(Requests, "fill", fill)


def _shared_twice(patches: Patches) -> None:
    right = ContextTree.place

    def place(self: ContextTree, prompt: Sequence[int]) -> CallPlace:
        answer = right(self, prompt)
        return CallPlace(answer.context, -1, 0, list(prompt)) if answer.shared else answer

    patches.put(ContextTree, "place", place)


def _unasked_kept(patches: Patches) -> None:
    right = Sessions._close

    def make(self: Sessions, request: RequestState) -> None:
        session = sessions._session(request)
        session.used.update(range(len(session.tree.turns)))
        right(self, request)

    patches.put(Sessions, "_close", make)


def _calls_stay(patches: Patches) -> None:
    def end_session(self: RequestTable, request: RequestState) -> None:
        if request.session is not None and request.phase is Phase.AGENT:
            self.close_session(request)

    patches.put(RequestTable, "end_session", end_session)


def _thinking_holds(patches: Patches) -> None:
    patches.put(RequestTable, "_on_engine", lambda self, request: True)


def _told_otherwise(patches: Patches) -> None:
    right = Episodes._replay_next

    def tell(self: Episodes, request: RequestState, now: Now) -> None:
        if request.turn.replay:
            text = request.turn.replay[0].said
            self._requests.ask_environment(request, [*text[1:], *text[:1]], now)
        else:
            right(self, request, now)

    patches.put(Episodes, "_replay_next", tell)


OF_EPISODES: Final = (
    (
        "told-otherwise",
        "an environment that begins again is told another turn than was sampled",
        _told_otherwise,
    ),
)
"""Like `OF_SESSIONS`, for episodes that continue in another environment."""

OF_SESSIONS: Final = (
    ("answered-early", "an answer leaves before its record is in the log", _answered_early),
    ("calls-of-the-newest", "calls are sampled by the newest version here", _calls_of_the_newest),
    ("shared-twice", "what contexts share stands in the record twice", _shared_twice),
    ("unasked-kept", "recorded calls that nobody asks again are trained", _unasked_kept),
    ("calls-stay", "a session that moves leaves its open calls where it was", _calls_stay),
    ("thinking-holds", "an agent that thinks holds a slot's place", _thinking_holds),
)
"""(name, description, patch)."""
