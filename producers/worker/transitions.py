"""Transition table of a worker's requests: `(phase, event) -> handler`, per kind of request.

An event is its type, or the tag of an acknowledged record. Events without an entry are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

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
from dora_pipe.producers.worker.request import Kind, Phase, RequestState
from dora_pipe.producers.worker.request_table import PROGRESS_TAG
from dora_pipe.producers.worker.requests import TRAJECTORY_TAG, Requests
from dora_pipe.producers.worker.sessions import Sessions

Handler = Callable[[RequestState, Any, Now], None]
Table = Mapping[tuple[Phase, type | str], Handler]

FINISHED: Final = (Phase.REWARDING, Phase.LOGGING)

BETWEEN: Final = (Phase.PROMPTING, Phase.ENVIRONMENT, Phase.WAITING)
"""Phases of a replayable episode in which the last turn may not be durable."""

REPLAYING: Final = (*BETWEEN, Phase.RESUMING, Phase.FETCHING, Phase.RUNNING, Phase.REWARDING)
"""Phases in which a replayable episode can lose its process."""


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
    return {
        (Phase.PROMPTING, PromptReady): requests.prompted,
        (Phase.PROMPTING, TaskFailed): requests.prompt_failed,
        (Phase.PROMPTING, EpisodeLost): requests.episode_lost,
        (Phase.RESUMING, ProgressFetched): requests.resumed,
        (Phase.FETCHING, KvFetched): requests.kv_fetched,
        (Phase.WAITING, EngineStarted): requests.started,
        (Phase.WAITING, EpisodeLost): requests.episode_lost,
        (Phase.RUNNING, TokensSampled): requests.sampled,
        (Phase.RUNNING, RequestFinished): requests.finished,
        (Phase.RUNNING, PROGRESS_TAG): requests.chunk_published,
        (Phase.RUNNING, EpisodeLost): requests.episode_lost,
        (Phase.ENVIRONMENT, EnvObserved): requests.observed,
        (Phase.ENVIRONMENT, TaskFailed): requests.environment_failed,
        (Phase.ENVIRONMENT, EpisodeLost): requests.episode_lost,
        (Phase.REWARDING, Rewarded): requests.rewarded,
        (Phase.REWARDING, TaskFailed): requests.reward_failed,
        (Phase.REWARDING, EpisodeLost): requests.episode_lost,
        (Phase.LOGGING, TRAJECTORY_TAG): requests.trajectory_published,
        (Phase.EXPORTING, TokensSampled): requests.sampled,
        (Phase.EXPORTING, RequestFinished): requests.finished,
        (Phase.EXPORTING, EngineExported): requests.exported,
        (Phase.EXPORTING, PROGRESS_TAG): requests.chunk_published,
        (Phase.RELEASING, KvPut): requests.kv_put,
        (Phase.RELEASING, PROGRESS_TAG): requests.chunk_published,
        (Phase.LEAVING, PROGRESS_TAG): requests.chunk_published,
        **{(phase, PROGRESS_TAG): requests.chunk_published for phase in FINISHED},
    }


def replayable_table(requests: Requests, episodes: Episodes) -> Table:
    """Return the transitions of an episode that a fresh environment can replay."""
    return {
        (Phase.PROMPTING, PromptReady): episodes.prompted,
        (Phase.RESUMING, ProgressFetched): episodes.resumed,
        (Phase.ENVIRONMENT, EnvObserved): episodes.observed,
        (Phase.ENVIRONMENT, TaskFailed): episodes.environment_failed,
        **{(phase, EpisodeLost): episodes.episode_lost for phase in REPLAYING},
        **{(phase, PROGRESS_TAG): requests.chunk_published for phase in BETWEEN},
    }


def session_table(sessions: Sessions) -> Table:
    return {
        **{(phase, CallAsked): sessions.asked_too_late for phase in Phase},
        (Phase.AGENT, CallAsked): sessions.asked,
        (Phase.RESUMING, ProgressFetched): sessions.resumed,
        (Phase.AGENT, AgentEnded): sessions.agent_ended,
        (Phase.AGENT, TaskFailed): sessions.agent_failed,
        (Phase.AGENT, EpisodeLost): sessions.agent_lost,
        (Phase.REWARDING, EpisodeLost): sessions.agent_lost,
    }


def call_table(sessions: Sessions) -> Table:
    """Return the transitions of a session's call to the model."""
    return {
        (Phase.RUNNING, RequestFinished): sessions.sampled,
        (Phase.ANSWERING, PROGRESS_TAG): sessions.durable,
    }
