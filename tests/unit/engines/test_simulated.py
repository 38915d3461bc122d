"""Tests of the simulated engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.simulated import (
    END_TOKEN,
    VOCABULARY,
    SimulatedEngine,
    long_tailed_length,
    mix64,
)
from tests.support.engine_contract import request, run
from tests.support.worker import VirtualClock


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    assert [mix64(0), mix64(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_lengths_have_the_tail_of_the_demo() -> None:
    lengths = np.array([long_tailed_length(seed, 0) for seed in range(20_000)])
    assert lengths.min() == 5 and lengths.max() == 123
    assert set(lengths % 2) == {1}
    assert np.median(lengths) == 11
    assert np.quantile(lengths, 0.99) == 123
    assert 17 < lengths.mean() < 20


def test_a_turn_ends_with_the_end_token_where_its_seed_says() -> None:
    engine = SimulatedEngine(slots=8, context_tokens=512)
    for seed in range(20):
        req = request("r", [5] * 3, seed=seed, max_tokens=400, stop_ids=(END_TOKEN,))
        result = run(engine, [req])["r"]
        assert result.reason == "stop"
        assert len(result.tokens) == long_tailed_length(seed, 0)
        assert result.tokens.index(END_TOKEN) == len(result.tokens) - 1
        assert max(result.tokens) < VOCABULARY


def test_the_second_turn_has_a_length_of_its_own() -> None:
    engine = SimulatedEngine(slots=1, context_tokens=512, lengths=lambda seed, turn: 4 + 3 * turn)
    first = run(engine, [request("r", [5], stop_ids=(END_TOKEN,))])["r"].tokens
    context = [5, *first, 60, 61, 62]  # answer of the environment
    second = run(engine, [request("r", context, sampled=4, stop_ids=(END_TOKEN,))])["r"].tokens
    assert (len(first), len(second)) == (4, 7)


def test_policies_are_told_apart_by_their_tokens(tmp_path: Path) -> None:
    engine = SimulatedEngine(slots=1, context_tokens=64, clock=VirtualClock())
    drawn = []
    for version, digest in enumerate(("a" * 64, "b" * 64, "a" * 64)):
        loaded = engine.load(tmp_path / "none", version=version, digest=digest)
        assert (loaded.version, loaded.digest, loaded.load_ms) == (version, digest, 0.0)
        drawn.append(run(engine, [request("r", [5], max_tokens=20)])["r"])
    assert drawn[0] == drawn[2] != drawn[1]


def test_what_is_no_policy_is_refused(tmp_path: Path) -> None:
    engine = SimulatedEngine(slots=1, context_tokens=64)
    for version, digest in ((-1, "a" * 64), (0, "")):
        with pytest.raises(PolicyError):
            engine.load(tmp_path, version=version, digest=digest)


def test_the_wall_clock_is_the_simulators() -> None:
    clock = VirtualClock(1234)
    engine = SimulatedEngine(slots=1, context_tokens=64, clock=clock)
    engine.add(request("r", [5], max_tokens=1))
    tokens, finished = engine.step()
    assert getattr(tokens, "first_token_ns", None) == clock.wall_ns()
    assert finished.__class__.__name__ == "RequestFinished"


def test_port_and_simulated_engine_need_no_torch() -> None:
    program = (
        "import sys, dora_pipe.producers.engines.engine, dora_pipe.producers.engines.simulated;"
        "import dora_pipe.producers.engines.torch.causal_lm, dora_pipe.bench.engine;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
