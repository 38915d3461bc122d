"""Tests of vLLM with several versions of a LoRA policy (`make test-vllm`)."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.core.errors import InvariantBroken, PolicyError
from dora_pipe.producers.engines.engine import EngineRequest
from dora_pipe.producers.engines.vllm.client import VllmServerClient
from dora_pipe.producers.engines.vllm.core import BLOCK_TOKENS
from dora_pipe.producers.engines.vllm.lora import FOLDER_PREFIX
from dora_pipe.store.adapters import read_adapter, write_merged, write_peft
from dora_pipe.store.model_dir import write_model_dir
from tests.support.adapters import RANK, make_lora, publish, random_adapter
from tests.support.adapters import Lora as Published
from tests.support.device import DEVICE, LORA_DTYPE, MODEL_DISTANCE
from tests.support.engine_contract import Result, request, run
from tests.support.engine_prefixes import since
from tests.support.torch_engines import logprob_distance, make
from tests.support.vllm_servers import need_vllm, running_server, server_opener

DISTANCE_MAX = MODEL_DISTANCE[LORA_DTYPE]
"""Of log-probs from those of transformers on the merged weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    policies: list[tuple[Path, str]]
    merged: list[Path]
    open: Callable[..., Any]

    def serving(self, *versions: int, most: int = 3) -> Any:
        engine = self.open(slots=8, most=most)
        self.load(engine, 0)
        engine.drop(0)
        for version in versions:
            self.load(engine, version)
        return engine

    def load(self, engine: Any, version: int, *, policy: int | None = None) -> None:
        path, digest = self.policies[version if policy is None else policy]
        engine.load(path, version=version, digest=digest)

    def assert_is(self, policy: int, request: EngineRequest, result: Result) -> None:
        distances = [logprob_distance(each, request, result) for each in self.merged]
        if LORA_DTYPE == "bfloat16":  # errors grow with the prompt: the others are further by far
            own = distances.pop(policy)
            assert 2 * own < min(distances), (own, distances)
            return
        for other, distance in enumerate(distances):
            assert (distance < DISTANCE_MAX) == (other == policy), (other, distance)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lora]:
    need_vllm()
    folder = tmp_path_factory.mktemp("vllm_lora")
    created, merged = published(folder)
    with server_opener(RANK) as open_engine:
        yield Lora(policies=list(created.policies), merged=merged, open=open_engine)


def published(folder: Path) -> tuple[Published, list[Path]]:
    directory = make("qwen2", folder / "model")
    lora = make_lora(directory, folder / "policies", adapters=2)
    (base, digest), merged = lora.policies[0], [directory]
    narrow = publish(lora.store, random_adapter(base, digest, seed=2, dtype="bfloat16"))
    last = lora.store.weights_path(narrow.digest), narrow.digest
    lora = replace(lora, policies=[*lora.policies, last])
    for number, (path, digest) in enumerate(lora.policies[1:]):
        adapter = read_adapter(path, digest=digest)
        merged.append(folder / f"merged{number}")
        write_model_dir(merged[-1], directory, partial(write_merged, base, adapter))
    return lora, merged


def under(version: int, *, tokens: tuple[int, ...] = (5, 6, 7), length: int = 24) -> EngineRequest:
    return replace(request(f"r{version}", tokens, max_tokens=length), version=version)


def test_rows_of_the_base_meet_no_adapter_that_is_or_was_beside_them(lora: Lora) -> None:
    engine = lora.serving(1, 2, 3)  # every place of vLLM's has an adapter
    run(engine, [under(version) for version in (1, 2, 3)])
    for removed in (3, 2, 1):
        engine.drop(removed)
        lora.load(engine, 0)
        expected = [under(version) for version in range(4) if version != removed]
        results = run(engine, expected)
        for req in expected:
            lora.assert_is(req.version, req, results[req.request])
        engine.drop(0)
        lora.load(engine, removed)


def test_prompts_that_are_cached_under_one_version_are_not_used_by_another(lora: Lora) -> None:
    prompt = tuple(5 + token % 90 for token in range(150))
    engine = lora.serving(0, 1, 2)

    def reused(policy: int, version: int) -> int:
        before, request = engine.prompt_tokens, under(version, tokens=prompt)
        lora.assert_is(policy, request, run(engine, [request])[request.request])
        spent = since(engine, before)
        assert spent.computed + spent.reused == len(prompt)
        return spent.reused

    block = BLOCK_TOKENS[DEVICE]
    full = len(prompt) // block * block
    assert [reused(version, version) for version in (0, 1, 2)] == [0] * 3
    assert [reused(version, version) for version in (0, 1, 2)] == [full] * 3, "each its own"
    engine.drop(2)
    lora.load(engine, 2, policy=3)
    assert reused(3, 2) == 0


def test_other_base_takes_all_versions_away_and_only_while_nothing_runs(
    lora: Lora, tmp_path: Path
) -> None:
    other = make_lora(make("qwen2", tmp_path / "m", seed=1), tmp_path / "p", adapters=1)
    engine = lora.serving(0, 1)
    engine.add(under(1))
    path, digest = other.policies[0]
    with pytest.raises(ValueError, match="rows are active"):
        engine.load(path, version=0, digest=digest)
    engine.cancel("r1")
    engine.load(path, version=0, digest=digest)
    with pytest.raises(ValueError, match="version 1 is not resident"):
        engine.add(under(1))
    with pytest.raises(PolicyError, match="has the base weights"):
        lora.load(engine, 1)
    entry = under(0)
    assert logprob_distance(tmp_path / "m", entry, run(engine, [entry])["r0"]) < DISTANCE_MAX
    engine.drop(0)


def test_adapter_that_vllm_computes_otherwise_breaks_the_promise(lora: Lora) -> None:
    engine = lora.serving(0, 1)
    engine.add(under(1))
    (row,) = engine._rows.values()
    row.adapter = engine._versions.of(under(0)).number
    with pytest.raises(InvariantBroken, match="from other weights or another adapter"):
        while engine.active:
            engine.step()
    engine.cancel("r1")


def adapters() -> list[str]:
    return sorted(VllmServerClient(running_server(lora_rank=RANK)[0].address, None).adapters())


def test_adapter_that_a_server_has_loaded_lies_nowhere_and_a_dropped_one_is_forgotten(
    lora: Lora,
) -> None:
    lying = set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))
    engine = lora.serving(0, 1, 2)
    assert set(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*")) <= lying
    names = [f"{version}:{digest[:16]}" for version, (_, digest) in enumerate(lora.policies)]
    assert adapters() == names[:3]
    engine.drop(1)
    engine.drop(0)
    assert adapters() == names[2:3]
    assert len(engine._server.rpc("dora_drop_all")["numbers"]) == 1


def test_adapter_that_a_servers_vllm_refuses_is_one_line_and_changes_nothing(
    lora: Lora, tmp_path: Path
) -> None:
    engine = lora.serving(1)
    path, digest = lora.policies[2]
    wide = read_adapter(path, digest=digest)
    pairs = {name: (a.repeat(4, 0), b.repeat(4, 1)) for name, (a, b) in wide.pairs.items()}
    write_peft(tmp_path / "wide", replace(wide, pairs=pairs))
    rpc = engine._server.rpc

    def other_folder(method: str, *words: str) -> dict[str, object]:
        answer: dict[str, object] = rpc(method, *words)
        return {"folder": str(tmp_path / "wide")} if method == "dora_write" else answer

    engine._server.rpc = other_folder
    with pytest.raises(PolicyError, match=r"vLLM cannot load this adapter: .*rank"):
        lora.load(engine, 2)
    engine._server.rpc = rpc
    request = under(1)
    lora.assert_is(1, request, run(engine, [request])[request.request])


def test_server_outlives_requests_that_are_let_go_as_their_version_is_dropped(lora: Lora) -> None:
    engine, chance = lora.serving(0, 1, 2), random.Random(5)
    for turn in range(40):
        removed = 1 + turn % 2
        for number in range(6):
            req = request(f"{turn}-{number}", [5, 6, 7, number], max_tokens=40)
            engine.add(replace(req, version=removed if number % 2 else 0))
        for _ in range(chance.randrange(3)):
            engine.step()
        for number in range(6):
            engine.cancel(f"{turn}-{number}")
        engine.drop(removed)
        lora.load(engine, removed)
    req = under(2)
    lora.assert_is(2, req, run(engine, [req])[req.request])
