"""Tests of backoff from failing task servers."""

import itertools

from dora_pipe.producers.tasks.calls import EpisodeLost, PromptReady, Rewarded, TaskFailed
from dora_pipe.producers.tasks.servers import Breaker, Places, is_working

_NS = 1_000_000_000


def places_of(*urls: str) -> Places:
    return Places(urls, "games", itertools.count(17).__next__)


def test_server_that_fails_is_asked_once_after_a_pause_that_grows() -> None:
    breaker = Breaker()
    assert (breaker.proven, breaker.allows(0)) == (True, True)
    for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert breaker.failed(0) == pause_s
        assert not breaker.allows(int(pause_s * _NS) - 1)
        assert breaker.allows(int(pause_s * _NS))
        assert not breaker.proven


def test_processes_are_dealt_to_servers_and_one_that_failed_gets_one_to_see() -> None:
    places = places_of("a", "b")
    used: list[str] = []
    for _ in range(4):
        used.append(places.choose(used, 0) or "nowhere")
    assert sorted(used) == ["a", "a", "b", "b"]
    places.failed("a", 0, "it died")
    assert places.choose(["b", "b", "b"], 0) == "b"
    assert places.choose(["b", "b", "b"], _NS) == "a"
    assert places.choose(["a", "b"], _NS) == "b"  # `a` has recovered but is unproven
    places.failed("b", _NS, "it died")
    assert places.choose(["a"], _NS) is None
    places.breakers["a"].worked()
    assert places.choose(["a"], _NS) == "a"


def test_the_beginning_of_an_episode_shows_nothing_and_an_error_of_the_code_that_it_runs() -> None:
    assert is_working(Rewarded(request="r", reward=1.0, raw=None, parts={}))
    assert is_working(TaskFailed(request="r", error="ValueError", message=""))
    assert is_working(TaskFailed(request="r", error="Retry", message="")) is False
    assert is_working(EpisodeLost(request="r", message="")) is False
    assert is_working(PromptReady(request="r", text="go", episode=True)) is None
    assert is_working(PromptReady(request="r", text="go", episode=False))
