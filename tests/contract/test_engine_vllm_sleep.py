"""Tests of vLLM's sleep mode (`make test-vllm`, `make test-gpu`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from dora_pipe.producers.engines.engine import SLEEP, Engine
from dora_pipe.producers.engines.vllm.server import VllmEngine
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support import models
from tests.support.device import COARSE, ON_GPU, ROUNDING
from tests.support.engine_contract import Subject, assert_all_alike, requests, run
from tests.support.vllm_servers import BUILDERS, CONTEXT_TOKENS, SETTINGS, need_vllm

KV_GB = 0.5
"""Of the KV cache, so that a GPU shows that it is gone."""

SLEEPING = replace(SETTINGS, kv_cache_gb=KV_GB)


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Engine, Subject]]:
    need_vllm()
    store = PolicyStore(folder / "policies")
    directories = [BUILDERS["qwen2"](folder / f"seed{seed}", seed) for seed in (0, 1)]
    manifests = [import_model(store, directory)[0] for directory in directories]
    first, second = (
        (store.weights_path(manifest.digest), manifest.digest) for manifest in manifests
    )
    engine = VllmEngine(
        directories[0], settings=SLEEPING, sleep=True, slots=4, context_tokens=CONTEXT_TOKENS
    )
    engine.load(first[0], version=0, digest=first[1])
    try:
        yield (
            engine,
            Subject(
                name=engine.name,
                open=lambda **_: engine,
                vocabulary=models.QWEN2_VOCABULARY,
                policies=(first, second),
                rounding=ROUNDING,
                coarse=COARSE,
            ),
        )
    finally:
        engine.close()


def free_gb() -> float:
    import torch

    return float(torch.cuda.mem_get_info()[0]) / 2**30


def test_engine_sleeps_and_wakes_with_the_version_it_is_given(tmp_path: Path) -> None:
    with opened(tmp_path) as (engine, subject):
        assert SLEEP in engine.declares
        (first, digest), (second, second_digest) = subject.policies
        all_requests = requests(subject, 4)
        before = run(engine, all_requests)
        engine.add(all_requests[0])
        with pytest.raises(ValueError, match="active"):
            engine.sleep()
        engine.cancel(all_requests[0].request)
        free = free_gb() if ON_GPU else 0.0
        assert engine.sleep().version == -1
        if ON_GPU:
            assert free_gb() - free > KV_GB
        with pytest.raises(ValueError, match="no weights"):
            engine.add(all_requests[0])
        engine.load(second, version=1, digest=second_digest)
        assert run(engine, all_requests) != before
        engine.sleep()
        engine.load(first, version=2, digest=digest)
        assert_all_alike(subject, run(engine, all_requests), before)
