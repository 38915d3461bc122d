"""Tests of versions of a LoRA policy in a fake server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from dora_pipe.core.errors import ConfigError, InvariantBroken, PolicyError, ResourceError
from dora_pipe.producers.engines.engine import COUNTER_SAMPLING, KV_EXPORT, LORA, EngineRequest
from dora_pipe.producers.engines.vllm import versions as vllm_versions
from dora_pipe.producers.engines.vllm.http import Address
from dora_pipe.producers.engines.vllm.server import VllmEngine
from dora_pipe.store.safetensors_file import TensorSource, write_tensors
from tests.support.adapters import RANK, adapter_sources, random_adapter
from tests.support.engine_contract import request, run
from tests.support.fake_vllm_server import GUARD_S, FakeVllm

LAYER = "model.layers.0.self_attn.q_proj.weight"
LOAD = ["/collective_rpc", "/v1/load_lora_adapter", "/collective_rpc"]
DROP = ["/v1/unload_lora_adapter", "/collective_rpc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    server: FakeVllm
    policies: list[tuple[Path, str]]

    def open(self, *, slots: int = 4, most: int = 3, rank: int = RANK) -> VllmEngine:
        return VllmEngine(
            Path("model"),
            slots=slots,
            context_tokens=64,
            address=Address.of(self.server.url, self.server.key),
            lora_rank=rank,
            max_resident_versions=most,
        )

    def load(self, engine: VllmEngine, version: int, policy: int | None = None) -> None:
        path, digest = self.policies[version if policy is None else policy]
        engine.load(path, version=version, digest=digest)

    def serving(self, *versions: int, most: int = 3) -> VllmEngine:
        engine = self.open(most=most)
        for version in versions:
            self.load(engine, version)
        return engine

    def name(self, version: int) -> str:
        return f"{version}:{self.policies[version][1][:16]}"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    zeros = np.zeros((8, 6), np.float32)
    base = write_tensors(
        tmp_path / "base", [TensorSource(name=LAYER, dtype="F32", shape=(8, 6), data=zeros.tobytes)]
    )
    policies = [(tmp_path / "base", base.digest)]
    for seed in (1, 2, 3):
        adapter = random_adapter(tmp_path / "base", base.digest, seed=seed)
        path = tmp_path / f"adapter{seed}"
        policies.append((path, write_tensors(path, adapter_sources(adapter)).digest))
    server = FakeVllm()
    server.facts |= {"lora_rank": 8, "max_resident_versions": 3}
    yield Served(server=server, policies=policies)
    server.close()


def under(version: int, **settings: object) -> EngineRequest:
    new_request = request(f"r{version}", [5, 6], **settings)  # type: ignore[arg-type]
    return replace(new_request, version=version)


def test_every_version_is_an_adapter_and_a_stream_names_its_own(served: Served) -> None:
    engine = served.serving(0, 1, 2)
    assert engine.declares == {COUNTER_SAMPLING, LORA, KV_EXPORT}
    assert engine.max_resident_versions == 3
    results = run(engine, [under(version, max_tokens=20) for version in (0, 1, 2)])
    assert len({tuple(result.tokens) for result in results.values()}) == 3
    bodies = served.server.last_bodies(3)
    assert [body["model"] for body in bodies] == [served.name(version) for version in range(3)]
    label = "0:" + served.policies[0][1][:16]
    assert [body["cache_salt"] for body in bodies] == [
        f"{label}+{body['model']}" for body in bodies
    ]


def test_adapter_is_loaded_and_dropped_beside_running_requests(served: Served) -> None:
    engine = served.serving(0, 1)
    server = served.server
    full = run(engine, [under(1, seed=9, max_tokens=30)])["r1"]
    server.hold_after = {9: 9}
    engine.add(under(1, seed=9, max_tokens=30))
    events = engine.step()
    del server.doors[:]
    served.load(engine, 2)
    assert server.doors == LOAD
    engine.drop(0)
    assert server.doors == [*LOAD, *DROP]
    assert server.served == set(server.named.values()) == {2, 3}
    server.release.set()
    while engine.active:
        events += engine.step()
    assert run(engine, [under(1, seed=9, max_tokens=30)])["r1"] == full


def test_tokens_of_another_adapter_break_the_promise(served: Served) -> None:
    engine = served.serving(0, 1)
    served.server.trouble = {7: "other adapter"}
    engine.add(under(1, seed=7))
    with pytest.raises(InvariantBroken, match=r"r1: vLLM sampled .* adapter 2\)"):
        while engine.active:
            engine.step()


def test_adapter_that_the_server_has_lost_breaks_the_promise(served: Served) -> None:
    engine = served.serving(0, 1)
    del served.server.named[served.name(1)]
    engine.add(under(1))
    with pytest.raises(InvariantBroken, match=r"lost an adapter.*does not exist") as raised:
        while engine.active:
            engine.step()
    assert raised.value.hint is not None and "no other worker" in raised.value.hint
    engine.cancel("r1")
    with pytest.raises(InvariantBroken, match=r"lost an adapter.*cannot be found"):
        engine.drop(1)


def test_adapter_that_somebody_else_loads_meanwhile_is_noticed(served: Served) -> None:
    engine = served.serving(0)
    write = served.server.rpc

    def crowded(body: dict[str, object]) -> dict[str, object]:
        result = write(body)
        if body["method"] == "dora_write":
            served.server.served.add(77)
        return result

    served.server.rpc = crowded  # type: ignore[method-assign]
    with pytest.raises(InvariantBroken, match=r"adapters \[2, 77\] in place of one"):
        served.load(engine, 1)


def test_refused_adapter_leaves_what_was_there(served: Served) -> None:
    engine = served.serving(0, most=1)
    del served.server.doors[:]
    with pytest.raises(PolicyError, match="has the digest"):
        engine.load(served.policies[1][0], version=1, digest="ab" * 32)
    assert served.server.doors == LOAD[:1]
    served.server.refusal = "no\nsuch adapter"
    with pytest.raises(PolicyError, match="vLLM cannot load this adapter: no such adapter"):
        served.load(engine, 1)
    assert served.server.served == {1}
    assert run(engine, [under(0, max_tokens=3)])["r0"].tokens


def let_go_unheard(served: Served) -> VllmEngine:
    engine = served.serving(0, 1)
    served.server.begin.clear()
    served.server.hold_after = {7: 1}
    engine.add(under(1, max_tokens=30))
    engine.cancel("r1")
    assert served.server.asked.acquire(timeout=GUARD_S)
    return engine


def test_request_that_is_let_go_before_it_is_known_is_aborted_again(served: Served) -> None:
    engine, server = let_go_unheard(served), served.server
    started = threading.Timer(0.1, server.begin.set)
    started.start()
    engine.drop(1)
    started.join()
    attempt = f"generate-tokens-{server.bodies[-1]['request_id']}"
    assert server.aborted == [attempt, attempt]
    assert server.served == {1}


def test_request_that_is_let_go_unheard_is_listened_to_by_steps_and_no_longer(
    served: Served,
) -> None:
    engine, server = let_go_unheard(served), served.server
    server.begin.set()
    assert any(engine.step() or server.asked.acquire(timeout=0.01) for _ in range(1000))
    engine.close()


def test_adapter_of_a_request_that_stays_unheard_is_not_dropped(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_versions, "FIRST_WORD_S", 0.1)
    engine = served.serving(0, 1)
    served.server.begin.clear()
    engine.add(under(1, max_tokens=30))
    engine.cancel("r1")
    with pytest.raises(ResourceError, match="sent no data"):
        engine.drop(1)
    assert served.server.served == {1, 2}
    engine.close()


def test_what_another_worker_left_there_is_gone(served: Served) -> None:
    served.serving(0, 1, 2)
    engine = served.open()
    assert (served.server.named, served.server.served) == ({}, set())
    served.load(engine, 0)
    served.load(engine, 1)
    assert run(engine, [under(1, max_tokens=3)])["r1"].tokens


@pytest.mark.parametrize(
    ("facts", "rank", "most", "text", "hint"),
    [
        ({"lora_rank": 0}, RANK, 2, "hosts no adapters, the worker needs rank 4, 2", "--lora-rank"),
        ({}, 16, 3, "adapters of rank 8, 3 at once, the worker needs rank 16", "--lora-rank 16"),
        ({}, RANK, 4, "needs rank 4, 4 at once", "--max-resident-versions 4"),
        ({}, 0, 1, "the run has none", "without --lora-rank"),
    ],
)
def test_server_with_other_room_is_refused_with_what_it_lacks(
    served: Served, facts: dict[str, int], rank: int, most: int, text: str, hint: str
) -> None:
    served.server.facts |= facts
    with pytest.raises(ConfigError, match=text) as raised:
        served.open(rank=rank, most=most)
    assert raised.value.hint is not None and hint in raised.value.hint


def test_weights_do_not_change_under_running_rows(served: Served) -> None:
    engine = served.serving(0, 1)
    path, digest = served.policies[2]
    with pytest.raises(ValueError, match="several versions resident"):
        engine.reload_keeping(path, version=2, digest=digest)
    engine.add(under(1))
    other = path.parent / "other"
    ones = np.ones((8, 6), np.float32)
    tensors = write_tensors(
        other, [TensorSource(name=LAYER, dtype="F32", shape=(8, 6), data=ones.tobytes)]
    )
    with pytest.raises(ValueError, match="rows are active"):
        engine.load(other, version=4, digest=tensors.digest)
    engine.cancel("r1")
    engine.load(other, version=4, digest=tensors.digest)
    assert len(served.server.served) == 1
    with pytest.raises(ValueError, match="version 1 is not resident"):
        engine.add(under(1))
