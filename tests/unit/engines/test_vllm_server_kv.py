"""Tests of KV caches of a fake server with two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dora_pipe.core.errors import ResourceError
from dora_pipe.producers.engines.engine import KV_EXPORT, EngineRequest, Exported, RequestFinished
from dora_pipe.producers.engines.vllm import kv_remote
from dora_pipe.producers.engines.vllm.http import Address
from dora_pipe.producers.engines.vllm.kv_files import MARK, CacheFacts
from dora_pipe.producers.engines.vllm.server import VllmEngine
from tests.support.engine_contract import request
from tests.support.fake_vllm_server import FakeVllm

HELD_SEED = 3
"""Its stream pauses after eleven tokens until released."""

Open = Callable[[], VllmEngine]


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    fake = FakeVllm()
    fake.hold_after = {HELD_SEED: 11}
    yield fake
    fake.release.set()
    fake.close()


@pytest.fixture
def opens(server: FakeVllm, tmp_path: Path) -> Iterator[Open]:
    (tmp_path / "a").write_text("a" * 64)
    opened: list[VllmEngine] = []

    def open_engine() -> VllmEngine:
        address = Address.of(server.url, server.key)
        opened.append(VllmEngine(tmp_path, slots=4, context_tokens=256, address=address))
        opened[-1].load(tmp_path / "a", version=0, digest="a" * 64)
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


def files(engine: VllmEngine) -> set[str]:
    return {path.name for path in engine._caches._folder.iterdir()} - {MARK}


def running(engine: VllmEngine, name: str = "r") -> EngineRequest:
    req = request(name, [5, 6, 7], seed=HELD_SEED, max_tokens=40)
    engine.add(req)
    for _ in range(6):
        engine.step()
    return req


def after(request: EngineRequest, exported: Exported | None) -> EngineRequest:
    assert exported is not None and exported.sampled is not None
    tokens = [*request.token_ids, *exported.sampled.token_ids]
    return replace(
        request, token_ids=tokens, sampled=len(exported.sampled.token_ids), kv=exported.kv
    )


def test_cache_leaves_with_the_heads_of_every_rank_and_no_file_is_left(opens: Open) -> None:
    engine = opens()
    assert KV_EXPORT in engine.declares
    request = running(engine)
    export = engine.export("r")
    assert export is not None and export.kv is not None and engine.active == 0
    assert (export.kv.tokens, export.kv.layout, export.kv.weights) == (8, "fake", "a" * 64)
    array = export.kv.array
    assert array.shape == (1, 2, 8, 2, 1) and len(request.token_ids) + 6 == 9
    assert not np.array_equal(array[..., 0, :], array[..., 1, :]) and array.all()
    assert files(engine) == set()


def test_cache_that_arrives_lies_in_a_file_until_the_first_word(
    server: FakeVllm, opens: Open
) -> None:
    source, target = opens(), opens()
    rest = after(running(source), source.export("r"))
    server.begin.clear()
    assert target.kv_error(rest) is None
    target.add(replace(rest, emit_every=1))
    (name,) = files(target)
    server.begin.set()
    while not target.step():
        pass
    assert [file.name for file in server.kv_files] == [name] and files(target) == set()
    body = server.bodies[-1]
    assert body["cache_salt"] == body["request_id"] == name.removesuffix(".npy")


def test_cache_that_nobody_has_read_goes_on_as_it_came(server: FakeVllm, opens: Open) -> None:
    source, target = opens(), opens()
    rest = after(running(source), source.export("r"))
    server.begin.clear()
    asked = server.doors.count("/collective_rpc")
    target.add(rest)
    export = target.export("r")
    assert export is not None and export.sampled is None and export.kv == rest.kv
    assert server.doors.count("/collective_rpc") == asked
    server.begin.set()


def test_request_that_has_ended_in_the_server_is_not_given_out(
    server: FakeVllm, opens: Open
) -> None:
    engine = opens()
    running(engine)
    server.forgets_kv = True
    assert engine.export("r") is None and engine.active == 1 and files(engine) == set()
    server.release.set()
    events = [event for _ in range(40) for event in engine.step()]
    assert isinstance(events[-1], RequestFinished) and events[-1].reason == "length"


def test_request_without_a_token_of_its_own_has_no_cache_and_nobody_is_asked(
    server: FakeVllm, opens: Open
) -> None:
    engine = opens()
    server.begin.clear()
    asked = server.doors.count("/collective_rpc")
    engine.add(request("r", [5, 6, 7]))
    export = engine.export("r")
    assert export is not None and (export.sampled, export.kv) == (None, None)
    assert server.doors.count("/collective_rpc") == asked
    server.begin.set()


def test_files_of_requests_that_left_without_a_word_are_few(
    server: FakeVllm, opens: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_remote, "ENDED_EARLY_MAX", 2)
    source, target = opens(), opens()
    rest = after(running(source), source.export("r"))
    server.begin.clear()
    for number in range(5):
        target.add(replace(rest, request=f"r{number}"))
        target.cancel(f"r{number}")
    assert len(files(target)) == 2
    folder = target._caches._folder
    server.begin.set()
    target.close()
    assert not folder.exists()


def test_server_that_does_not_see_the_folder_or_has_another_kind_of_cache_exports_nothing(
    server: FakeVllm, opens: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opens()
    rest = after(running(source), source.export("r"))
    monkeypatch.setattr("tests.support.fake_vllm_server.is_seen", lambda *_: False)
    other = opens()
    monkeypatch.undo()
    server.kv = CacheFacts()
    windows = opens()
    for engine in (other, windows):
        assert KV_EXPORT not in engine.declares
        assert engine.kv_error(rest) == "another layout"
        running(engine, "own")
        export = engine.export("own")
        assert export is not None and export.sampled is not None and export.kv is None


def test_cache_for_which_the_disk_has_no_room_is_named(
    opens: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = opens(), opens()
    rest = after(running(source), source.export("r"))
    monkeypatch.setattr("dora_pipe.producers.engines.vllm.kv_remote.SPARE_BYTES", 1 << 62)
    assert target.kv_error(rest) == "not enough disk space for it"
    assert target.active == 0


def test_folder_that_is_gone_ends_the_worker_in_one_line(opens: Open) -> None:
    engine = opens()
    running(engine)
    engine._caches.close()
    with pytest.raises(ResourceError, match=r"a KV cache for vLLM's server: FileNotFoundError"):
        engine.export("r")
