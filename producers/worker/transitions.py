"""Transition table of a worker's requests: `(phase, event) -> handler`, per kind of request.

An event is its type, or the tag of an acknowledged record. Events without an entry are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from dora_pipe.core.pure.machine import Now, Published
from dora_pipe.producers.engines.engine import RequestFinished, TokensSampled
from dora_pipe.producers.tasks.calls import (
    AgentEnded,
    EnvObserved,
    EpisodeLost,
    PromptReady,
    Rewarded,
    TaskFailed,
)
from dora_pipe.producers.worker.effects import (
    CallAsked,
    DropKv,
    EngineExported,
    EngineStarted,
    KvFetched,
    KvPut,
    ProgressFetched,
    RequestEvent,
)
from dora_pipe.producers.worker.episodes import Episodes
from dora_pipe.producers.worker.request import GENERATING, Kind, Phase, RequestState
from dora_pipe.producers.worker.request_table import PROGRESS_TAG
from dora_pipe.producers.worker.requests import TRAJECTORY_TAG, Requests
from dora_pipe.producers.worker.sessions import Sessions

E = TypeVar("E", bound=RequestEvent | Published)

Table = dict[tuple[Phase, type | str], Callable[[RequestState, Any, Now], None]]
"""Handlers by phase and event; `on` checks that each takes its event."""

FINISHED: Final = (Phase.REWARDING, Phase.LOGGING)

BETWEEN: Final = (Phase.ENVIRONMENT, Phase.WAITING)
"""Phases of a replayable episode in which the last turn may not be durable."""


def on(
    event: type[E], handler: Callable[[RequestState, E, Now], None], *phases: Phase, tag: str = ""
) -> Table:
    """Return the transitions of an event, or of a record's acknowledgement (`tag`)."""
    return {(phase, tag or event): handler for phase in phases}


class Transitions:
    """Passes events of requests to the handlers of their kind."""

    def __init__(self, requests: Requests, episodes: Episodes, sessions: Sessions) -> None:
        self._requests = requests
        plain = plain_table(requests)
        self._tables: dict[Kind, Table] = {
            Kind.PLAIN: plain,
            Kind.REPLAYABLE: {**plain, **replayable_table(requests, episodes)},
            Kind.SESSION: {**plain, **session_table(sessions)},
            Kind.CALL: {**plain, **call_table(sessions)},
        }

    def handle(self, event: RequestEvent | Published, now: Now) -> None:
        """Handle an event of a request, or the acknowledgement of its record."""
        requests = self._requests
        name: type | str
        if isinstance(event, Published):
            key, name = event.tag[2:], event.tag[:2]
        else:
            key, name = event.request, type(event)
        request = requests.by_key.get(key)
        if request is None:
            requests.counts["ignored"] += 1
            if isinstance(event, KvPut) and event.blob is not None:
                requests.ask(DropKv(blob=event.blob))  # dropped during the handover
            return
        handler = self._tables[request.kind].get((request.phase, name))
        if handler is None:
            requests.counts["refused"] += 1
        else:
            handler(request, event, now)


def plain_table(requests: Requests) -> Table:
    """Return the transitions of a request; other kinds override some."""
    generating = (Phase.RUNNING, Phase.EXPORTING)
    leaving = (Phase.EXPORTING, Phase.RELEASING, Phase.LEAVING)
    durable = (Phase.RUNNING, *leaving, *FINISHED)
    return {
        **on(PromptReady, requests.prompted, Phase.PROMPTING),
        **on(TaskFailed, requests.prompt_failed, Phase.PROMPTING),
        **on(ProgressFetched, requests.resumed, Phase.RESUMING),
        **on(KvFetched, requests.kv_fetched, Phase.FETCHING),
        **on(EngineStarted, requests.started, Phase.WAITING),
        **on(TokensSampled, requests.sampled, *generating),
        **on(RequestFinished, requests.finished, *generating),
        **on(EnvObserved, requests.observed, Phase.ENVIRONMENT),
        **on(TaskFailed, requests.environment_failed, Phase.ENVIRONMENT),
        **on(EpisodeLost, requests.episode_lost, *GENERATING, Phase.REWARDING),
        **on(Rewarded, requests.rewarded, Phase.REWARDING),
        **on(TaskFailed, requests.reward_failed, Phase.REWARDING),
        **on(Published, requests.trajectory_published, Phase.LOGGING, tag=TRAJECTORY_TAG),
        **on(Published, requests.chunk_published, *durable, tag=PROGRESS_TAG),
        **on(EngineExported, requests.exported, Phase.EXPORTING),
        **on(KvPut, requests.kv_put, Phase.RELEASING),
    }


def replayable_table(requests: Requests, episodes: Episodes) -> Table:
    """Return the transitions of an episode that a fresh environment can replay."""
    return {
        **on(ProgressFetched, episodes.resumed, Phase.RESUMING),
        **on(EnvObserved, episodes.observed, Phase.ENVIRONMENT),
        **on(TaskFailed, episodes.environment_failed, Phase.ENVIRONMENT),
        **on(Published, requests.chunk_published, *BETWEEN, tag=PROGRESS_TAG),
    }


def session_table(sessions: Sessions) -> Table:
    return {
        **on(CallAsked, sessions.asked_too_late, *Phase),
        **on(CallAsked, sessions.asked, Phase.AGENT),
        **on(ProgressFetched, sessions.resumed, Phase.RESUMING),
        **on(AgentEnded, sessions.agent_ended, Phase.AGENT),
        **on(TaskFailed, sessions.agent_failed, Phase.AGENT),
    }


def call_table(sessions: Sessions) -> Table:
    """Return the transitions of a session's call to the model."""
    return {
        **on(RequestFinished, sessions.sampled, Phase.RUNNING),
        **on(Published, sessions.durable, Phase.ANSWERING, tag=PROGRESS_TAG),
    }
