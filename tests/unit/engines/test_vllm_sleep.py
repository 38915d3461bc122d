"""Tests of vLLM's sleep: requests to the server, CPU error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.core.errors import ConfigError, PolicyError
from dora_pipe.producers.engines.engine import SLEEP
from dora_pipe.producers.engines.vllm.http import Address
from dora_pipe.producers.engines.vllm.server import NO_ALLOCATOR, VllmEngine
from tests.support.engine_contract import request, run
from tests.support.fake_vllm_server import FakeVllm


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    fake = FakeVllm()
    yield fake
    fake.close()


def opened(server: FakeVllm, folder: Path, *, sleep: bool = True) -> VllmEngine:
    (folder / "a").write_text("a" * 64)
    address = Address.of(server.url, server.key)
    return VllmEngine(folder, slots=2, context_tokens=64, address=address, sleep=sleep)


def test_server_lets_go_of_all_and_takes_weights_before_it_takes_room_for_caches(
    server: FakeVllm, tmp_path: Path
) -> None:
    engine = opened(server, tmp_path)
    assert SLEEP in engine.declares
    engine.load(tmp_path / "a", version=0, digest="a" * 64)
    engine.sleep()
    assert server.asleep == {"weights", "kv_cache"}
    with pytest.raises(ValueError, match="no weights"):
        engine.add(request("r", [5]))
    server.doors.clear()
    engine.load(tmp_path / "a", version=1, digest="a" * 64)
    order = [door.partition("?")[0] for door in server.doors if "wake" in door or "update" in door]
    assert order == [
        "/wake_up",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/wake_up",
    ]
    assert [door for door in server.doors if "wake" in door] == [
        "/wake_up?tags=weights",
        "/wake_up?tags=kv_cache",
    ]
    assert server.asleep == set() and run(engine, [request("r", [5])])
    engine.close()


def test_refused_weights_leave_it_asleep(server: FakeVllm, tmp_path: Path) -> None:
    engine = opened(server, tmp_path)
    engine.sleep()
    with pytest.raises(PolicyError):
        engine.load(tmp_path / "a", version=1, digest="b" * 64)
    assert server.asleep == {"weights", "kv_cache"}
    engine.load(tmp_path / "a", version=1, digest="a" * 64)
    assert server.asleep == set()
    engine.close()


def test_server_that_was_started_without_sleep_is_refused_where_its_worker_is_colocated(
    server: FakeVllm, tmp_path: Path
) -> None:
    server.facts["sleeps"] = False
    with pytest.raises(ConfigError, match="cannot release its memory") as refused:
        opened(server, tmp_path)
    assert refused.value.hint is not None and "--sleep" in refused.value.hint
    plain = opened(server, tmp_path, sleep=False)
    assert SLEEP not in plain.declares
    with pytest.raises(ValueError, match="cannot sleep"):
        plain.sleep()
    plain.close()


def test_vllm_on_a_cpu_sleeps_without_letting_go_and_says_so(
    server: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.facts.update({"device": "cpu", "sleeps": False})
    with caplog.at_level(logging.WARNING):
        engine = opened(server, tmp_path)
    assert [record.getMessage() for record in caplog.records] == [f"vllm on a CPU: {NO_ALLOCATOR}"]
    engine.load(tmp_path / "a", version=0, digest="a" * 64)
    server.doors.clear()
    assert engine.sleep().version == -1
    with pytest.raises(ValueError, match="no weights"):
        engine.add(request("r", [5]))
    engine.load(tmp_path / "a", version=1, digest="a" * 64)
    assert run(engine, [request("r", [5])])
    assert not any("sleep" in door or "wake" in door for door in server.doors)
    engine.close()
