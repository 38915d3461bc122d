"""What a request's record says of its cassette."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dora_pipe.producers.tasks.calls import EnvObserved, Rewarded
from dora_pipe.producers.worker.effects import AgentEnded
from dora_pipe.producers.worker.request import note_cassette
from dora_pipe.schemas.control import CassetteUse


def noted(*events: Any) -> CassetteUse | None:
    request: Any = SimpleNamespace(cassette=None, agent_cassette=None)
    for one in events:
        note_cassette({"g-1/1": request}, one)
    found: CassetteUse | None = request.cassette
    return found


def rewarded(use: CassetteUse | None) -> Rewarded:
    return Rewarded(request="g-1/1", reward=1.0, raw=None, parts={}, cassette=use)


def test_what_an_agent_has_asked_is_counted_beside_what_its_reward_has() -> None:
    agent = AgentEnded(
        request="g-1/1", text="x", cassette=CassetteUse(answers=3, asked=1, oldest_ns=7)
    )
    assert noted(agent, rewarded(CassetteUse(answers=1, oldest_ns=5))) == CassetteUse(
        answers=4, asked=1, oldest_ns=5
    )
    assert noted(agent, rewarded(CassetteUse())) == agent.cassette
    assert noted(agent, agent, rewarded(None)) == agent.cassette


def test_an_episode_says_all_that_it_has_asked_with_its_reward() -> None:
    use = CassetteUse(answers=1)
    step = EnvObserved(request="g-1/1", text="", done=True, tool="", ok=True, cassette=use)
    assert noted(step, rewarded(CassetteUse(answers=2))) == CassetteUse(answers=2)
