"""The servers that tests of vLLM share: few run at once, and who was asked for lately goes on."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any, cast

import pytest

from dora_pipe.producers.engines.vllm.process import ServerProcess
from tests.support import vllm_servers
from tests.support.vllm_servers import SERVERS, running_server


class Started:
    """In place of a server: one of those that run until it is closed."""

    def __init__(self, running: set[int], number: int) -> None:
        self.number = number
        self._number, self._running = number, running
        running.add(number)

    def close(self) -> None:
        self._running.remove(self._number)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The `number` of those that run now; none starts where `SERVERS` run already."""
    found: set[int] = set()
    real = vllm_servers.start_server

    @wraps(real)
    def start(**which: Any) -> tuple[ServerProcess, Path]:
        assert len(found) < SERVERS
        return cast("ServerProcess", Started(found, which["number"])), Path("model")

    monkeypatch.setattr(vllm_servers, "_running", {})
    monkeypatch.setattr(vllm_servers, "start_server", start)
    return found


def test_server_that_was_asked_for_longest_ago_ends_before_one_too_many_starts(
    running: set[int],
) -> None:
    for number in range(SERVERS):
        running_server(number=number)
    running_server(number=0)
    running_server(number=SERVERS)
    assert running == {0, *range(2, SERVERS + 1)}


def test_server_that_runs_is_not_started_again_however_it_is_asked_for(running: set[int]) -> None:
    server, _ = running_server(number=0)
    assert running_server(number=0, kind="qwen2", tensor_parallel=1)[0] is server
    assert running_server(number=0, kind="qwen3_moe")[0] is not server
