"""vLLM's prefix cache in process, against a stand-in that forgets nothing by itself: no block of
another version can be hit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dora_pipe.producers.engines.port import PromptTokens
from dora_pipe.producers.engines.vllm.base import VllmEngineBase
from dora_pipe.producers.engines.vllm.core import VllmSettings
from dora_pipe.producers.engines.vllm.engine import VllmEngine
from dora_pipe.producers.engines.vllm.lora import LoraVersion, LoraVersions
from tests.support.engine_contract import request

PROMPT = [5, 6, 7]


@dataclass
class Core:
    """As vLLM's engine: a request's blocks are cached under its salt, and found by it."""

    weights: str = ""
    cached: dict[str, set[str]] = field(default_factory=dict)
    """Which weights have computed what is cached, by salt."""
    hits: list[set[str]] = field(default_factory=list)
    """Of each request, the weights that have computed what it found."""
    resets: int = 0

    @property
    def input_processor(self) -> Core:
        return self

    @property
    def engine_core(self) -> Core:
        return self

    def process_inputs(self, stay: str, prompt: dict[str, Any], params: Any, **more: Any) -> Any:
        return SimpleNamespace(salt=prompt["cache_salt"], lora=more["lora_request"])

    def add_request(self, asked: Any) -> None:
        self.hits.append(set(self.cached.get(asked.salt, set())))
        self.cached.setdefault(asked.salt, set()).add(f"{self.weights}{asked.lora or ''}")

    def abort_requests(self, stays: Sequence[str]) -> None:
        pass

    def collective_rpc(self, method: str, kwargs: Any = None) -> None:
        if kwargs is not None:
            (self.weights,) = kwargs["update_info"]["tensors"]

    def set_weight_version(self, label: str) -> None:
        pass

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)


def _engine(core: Core, versions: LoraVersions) -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine.device = "cpu"
    VllmEngineBase.__init__(
        engine,
        slots=8,
        context_tokens=64,
        vocabulary=100,
        decode=None,
        clock=None,
        versions=versions,
        settings=VllmSettings(),
    )
    engine._core, engine._tasks = core, ()
    return engine


def _load(engine: VllmEngine, version: int, name: str) -> None:
    engine._replaced({name: None}, None, version, name * 64, 0)  # type: ignore[arg-type]


def test_request_finds_only_what_its_own_version_has_computed() -> None:
    core = Core()
    engine = _engine(core, LoraVersions())
    for version, name in enumerate("abca"):
        _load(engine, version, name)
        engine.add(request(f"{version}-0", PROMPT))
        engine.add(request(f"{version}-1", PROMPT))
        assert core.hits[-2:] == [set(), {name}]
    assert core.resets == 4


def test_running_requests_that_go_on_under_new_weights_find_nothing() -> None:
    core = Core()
    engine = _engine(core, LoraVersions())
    _load(engine, 0, "a")
    engine.add(request("r", PROMPT))
    for row in engine._rows.values():
        engine._interrupt(row)
    _load(engine, 1, "b")
    for row in engine._rows.values():
        engine._go_on(row)
    assert core.hits == [set(), set()]


def test_what_vllm_says_of_a_prefill_is_counted_once() -> None:
    engine = _engine(Core(), LoraVersions())
    _load(engine, 0, "a")
    engine.add(request("r", PROMPT))
    (row,) = engine._rows.values()
    said = SimpleNamespace(num_computed_tokens=5, num_local_cached_tokens=64)
    for prefilled in (said, None):
        logprobs = SimpleNamespace(logprobs=np.full((1, 1), -0.5))
        engine._advance(
            row,
            SimpleNamespace(
                new_token_ids=[7],
                new_logprobs=logprobs,
                finish_reason=None,
                prefill_stats=prefilled,
            ),
        )
    assert engine.prompt_tokens == PromptTokens(computed=5, reused=64)


class _Host:
    """Has adapters by name."""

    def put(self, path: Any, name: str, *, digest: str, base: str) -> LoraVersion:
        return LoraVersion(digest=digest, number=int(name[0]) + 1, name=name, adapter=name)

    def remove(self, version: LoraVersion) -> None:
        pass


def test_adapters_beside_each_other_find_what_each_has_computed(tmp_path: Any) -> None:
    core = Core()
    versions = LoraVersions(_Host(), most=3)
    engine = _engine(core, versions)
    engine._replaced({"base": None}, tmp_path, 0, "a" * 64, 0)
    versions.add(tmp_path, version=1, digest="b" * 64)
    for number in range(4):
        engine.add(_under(number, version=number % 2))
    first, second = core.hits[2:]
    assert core.hits[:2] == [set(), set()]
    assert len(first) == len(second) == 1 and first != second


def _under(number: int, *, version: int) -> Any:
    return replace(request(f"r{number}", PROMPT), version=version)
