"""The torch engine for long: batch sizes up to 256, ten times as many requests."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from dora_pipe.bench.engine import demo_requests, run_requests
from dora_pipe.producers.engines.torch.engine import TorchEngine
from tests.support import engine_contract as contract
from tests.support.engine_contract import request, run
from tests.support.torch_engines import make, torch_subject

pytestmark = pytest.mark.slow

RSS_GROWTH_MAX = 1.05


@pytest.mark.pure
@pytest.mark.parametrize("kind", ["qwen2", "llama_gqa"])
def test_bits_hold_in_long_runs_of_many_requests(kind: str, tmp_path: Path) -> None:
    subject = torch_subject(kind, tmp_path)
    contract.check_batch_invariance(subject, count=200, max_tokens=150)
    contract.check_exact_prefill(subject, count=100, max_tokens=150)


@pytest.mark.pure
@pytest.mark.parametrize("kind", ["qwen2", "llama_gqa"])
def test_bits_hold_at_small_and_large_batch_sizes(kind: str, tmp_path: Path) -> None:
    engine = TorchEngine.open(make(kind, tmp_path), slots=256, context_tokens=128, threads=1)
    chance = np.random.default_rng(1)
    requests = [
        request(f"r{n}", chance.integers(0, 90, 1 + n % 70).tolist(), seed=n, max_tokens=6)
        for n in range(256)
    ]
    full = run(engine, requests)
    for rows in [*range(1, 36), *range(40, 256, 8)]:
        subset = [requests[n] for n in chance.permutation(256)[:rows]]
        results = run(engine, subset)
        assert results == {name: full[name] for name in results}, f"{rows} rows"


def test_memory_does_not_grow_with_the_number_of_requests(tmp_path: Path) -> None:
    engine = TorchEngine.open(make("qwen2", tmp_path), slots=64, context_tokens=256, threads=1)
    requests = demo_requests(400)
    for _ in range(2):
        run_requests(engine, requests, 64)
    before = rss_bytes()
    for _ in range(20):
        run_requests(engine, requests, 64)
    assert rss_bytes() <= before * RSS_GROWTH_MAX


def rss_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
