"""Tests of a sleeping engine: memory and reload."""

from __future__ import annotations

import weakref
from pathlib import Path

from dora_pipe.producers.engines.engine import SLEEP
from dora_pipe.producers.engines.torch.engine import TorchEngine
from tests.support.engine_contract import requests, run
from tests.support.torch_engines import torch_subject


def test_weights_keys_and_kept_prefixes_are_gone_while_it_sleeps(tmp_path: Path) -> None:
    subject = torch_subject("qwen2", tmp_path)
    assert subject.keeping is not None
    engine = subject.keeping(slots=2, prefix_cache_ratio=2.0)
    assert isinstance(engine, TorchEngine) and engine._weights is not None
    all_requests = requests(subject, 2)
    run(engine, all_requests)
    held = [weakref.ref(entry) for entry in (engine._weights.embedding, engine._kv.storage)]
    assert all(storage() is not None for storage in held)
    engine.sleep()
    assert [storage() for storage in held] == [None, None]
    assert not engine._kept.tokens


def test_engine_with_adapters_does_not_sleep(tmp_path: Path) -> None:
    subject = torch_subject("qwen2", tmp_path)
    engine = TorchEngine.open(
        tmp_path / "seed0",
        slots=1,
        context_tokens=32,
        threads=1,
        lora_rank=2,
        max_resident_versions=2,
    )
    assert SLEEP not in engine.declares
    assert SLEEP in subject.open(slots=1).declares
