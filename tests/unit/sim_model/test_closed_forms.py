"""Published closed forms as oracles: no simulation beats a bound whose assumptions it meets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.bench.paper.closed_forms import (
    STREAMS,
    Stream,
    completion_bound,
    generate,
    lengths_with_tail,
    simulate_stream,
    speedup_bound,
    sync_bound,
)
from dora_pipe.bench.paper.lengths import Lengths, figures_of
from dora_pipe.sim.modelled_worker import EngineRates, TrainerRates, WorkerSize
from dora_pipe.sim.paradigms import Pool, PoolPlan

TIMES = st.lists(st.floats(0.01, 100), min_size=1, max_size=60)


@given(TIMES, st.integers(1, 30))
def test_a_synchronous_rollout_takes_no_longer_than_its_bound(
    times: list[float], workers: int
) -> None:
    mean, longest = sum(times) / len(times), max(times)
    bound = sync_bound(workers=workers, samples=len(times), mean=mean, longest=longest)
    assert generate(times, workers) <= bound * (1 + 1e-9)


@given(TIMES, st.integers(1, 30))
def test_never_stopping_wins_no_more_than_the_greatest_speed_up(
    times: list[float], workers: int
) -> None:
    """Against workers that are never idle, the best that any asynchrony can do."""
    mean, longest = sum(times) / len(times), max(times)
    workers = min(workers, len(times))
    won = generate(times, workers) / (sum(times) / workers)
    assert won <= speedup_bound(mean=mean, longest=longest) * (1 + 1e-9)


@given(TIMES)
def test_as_many_workers_as_samples_take_as_long_as_the_longest(times: list[float]) -> None:
    assert generate(times, len(times)) == max(times)


def step_s(alpha: int, *, seed: int, samples: int = 32, slots: int = 16) -> tuple[float, float]:
    """Time of a step that generates only, and its bound; samples by themselves, one per slot."""
    lengths = Lengths(mu=3.0, sigma=1.2, cap=500, rho=0.0)
    tau_s, steps = 0.1, 40
    run = Pool(
        PoolPlan(
            workers=[WorkerSize(name="w", slots=slots, prefetch=0)],
            rates=EngineRates(tau_s=tau_s, load_s=0.0),
            trainer=TrainerRates(fixed_s=1e-6),
            lengths=lambda ordinal: lengths.draw(seed=seed, ordinal=ordinal, size=1),
            group_size=1,
            per_step=samples,
            steps=steps,
            in_flight=samples * (alpha + 1),
            unit="sample",
            interrupt=False,
        )
    ).run()
    drawn = [
        lengths.draw(seed=seed, ordinal=one, size=1)[0] * tau_s for one in range(samples * steps)
    ]
    bound = samples * completion_bound(
        workers=slots,
        in_flight=samples * (alpha + 1),
        mean=sum(drawn) / len(drawn),
        longest=max(drawn),
    )
    return run.wall_s / steps, bound


@settings(max_examples=10)
@given(st.integers(0, 3), st.integers(0, 1000))
def test_an_asynchronous_step_takes_no_longer_than_its_bound(alpha: int, seed: int) -> None:
    found, bound = step_s(alpha, seed=seed)
    assert found <= bound * 1.001


def test_more_asynchrony_is_never_slower_here() -> None:
    found = [step_s(alpha, seed=5)[0] for alpha in range(4)]
    assert found == sorted(found, reverse=True)


def test_lengths_have_the_tail_that_was_asked_for() -> None:
    assert figures_of(lengths_with_tail(1.42, 8), size=8).tail == pytest.approx(1.42, rel=0.01)


@pytest.mark.parametrize("row", STREAMS, ids=lambda row: f"rho {row.rho}")
def test_a_stream_is_as_stale_as_the_formula_says(row: Stream) -> None:
    found = simulate_stream(row, seed=1)
    assert found == pytest.approx(row.closed_form, rel=0.03)
    assert found == pytest.approx(row.measured, rel=0.11)
