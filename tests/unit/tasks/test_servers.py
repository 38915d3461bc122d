"""A server that fails is left alone, each time for longer, until it answers."""

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.producers.tasks.calls import Rewarded, TaskFailed
from dora_pipe.producers.tasks.servers import PAUSE_MAX_S, Breaker, Servers

_NS = 1_000_000_000


def test_server_that_fails_is_asked_once_after_a_pause_that_grows() -> None:
    breaker = Breaker()
    assert (breaker.proven, breaker.allows(0)) == (True, True)
    for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert breaker.failed(0) == pause_s
        assert not breaker.allows(int(pause_s * _NS) - 1)
        assert breaker.allows(int(pause_s * _NS))
        assert not breaker.proven


def test_server_that_answers_is_like_new() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.failed(0)
    breaker.worked()
    assert breaker.proven
    assert breaker.failed(0) == 0.5


@given(st.lists(st.one_of(st.just("worked"), st.integers(0, 10**12)), max_size=30))
def test_nobody_is_left_alone_for_longer_than_the_bound(events: list[str | int]) -> None:
    breaker, now_ns = Breaker(), 0
    for event in events:
        if isinstance(event, int):
            now_ns += event
            assert 0 < breaker.failed(now_ns) <= PAUSE_MAX_S
        else:
            breaker.worked()
    assert breaker.allows(now_ns + int(PAUSE_MAX_S * _NS))


def test_processes_are_dealt_to_servers_and_one_that_failed_gets_one_to_see() -> None:
    servers = Servers(["a", "b"])
    used: list[str] = []
    for _ in range(4):
        used.append(servers.choose(used, 0) or "nowhere")
    assert sorted(used) == ["a", "a", "b", "b"]
    servers.failed("a", 0, "it died")
    assert servers.choose(["b", "b", "b"], 0) == "b"
    assert servers.choose(["b", "b", "b"], _NS) == "a"
    assert servers.choose(["a", "b"], _NS) == "b"  # one of `a` is there, and not proven
    servers.failed("b", _NS, "it died")
    assert servers.choose(["a"], _NS) is None
    assert servers.answered("a", Rewarded(request="r", reward=1.0, raw=None, parts={}))
    assert servers.choose(["a"], _NS) == "a"
    assert not servers.answered("b", TaskFailed(request="r", error="Retry", message=""))
    assert servers.answered("b", TaskFailed(request="r", error="ValueError", message=""))


def test_without_servers_processes_are_here() -> None:
    assert Servers([]).choose([], 0) == ""
