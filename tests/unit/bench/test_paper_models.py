"""The models of the published figures: lengths of responses, the law from GPUs to slots and speed,
and closed forms as oracles: no simulation beats a bound whose assumptions it meets."""

from __future__ import annotations

import math
from statistics import correlation

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.bench.paper import verl
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
from dora_pipe.bench.paper.lengths import EFFICIENCY, STEP_100, Lengths, bubble, figures_of
from dora_pipe.bench.paper.orders import ordered
from dora_pipe.bench.paper.scaling_model import (
    BLIND,
    FITTED,
    FITTED_TO,
    fit,
    mean_rollouts,
    misfit,
    predicted,
    rollout_units,
    step_tokens,
    training_law,
)
from dora_pipe.sim.modelled_worker import EngineRates, TrainerRates, WorkerSize
from dora_pipe.sim.paradigms import Pool, PoolPlan

TIMES = st.lists(st.floats(0.01, 100), min_size=1, max_size=60)


def test_a_length_is_a_function_of_seed_ordinal_and_sibling() -> None:
    forwards = [EFFICIENCY.draw(seed=3, ordinal=one, size=16) for one in range(20)]
    backwards = [EFFICIENCY.draw(seed=3, ordinal=one, size=16) for one in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert EFFICIENCY.draw(seed=4, ordinal=0, size=16) != forwards[0]


def test_no_length_leaves_its_bounds() -> None:
    lengths = Lengths(mu=2.0, sigma=3.0, cap=50)
    drawn = [one for group in range(200) for one in lengths.draw(seed=1, ordinal=group, size=8)]
    assert min(drawn) >= 1 and max(drawn) == 50


def test_the_efficiency_fit_has_the_published_quantiles() -> None:
    found = figures_of(EFFICIENCY, size=16)
    assert found.mean == pytest.approx(2400, rel=0.03)
    assert found.p50 == pytest.approx(1000, rel=0.03)
    assert found.p90 == pytest.approx(5700, rel=0.03)
    assert found.p99 == pytest.approx(23_900, rel=0.06)
    assert found.capped == pytest.approx(0.006, abs=0.001)


def test_step_100_has_the_published_mean_and_bubble() -> None:
    found = figures_of(STEP_100, size=16)
    assert found.mean == pytest.approx(3536, rel=0.03)
    assert bubble(found, longest=STEP_100.cap) == pytest.approx(0.885, abs=0.01)
    assert STEP_100.cap / found.p50 == pytest.approx(28, rel=0.05)


def test_siblings_resemble_each_other_as_much_as_rho_says() -> None:
    lengths = Lengths(mu=5.0, sigma=1.0, cap=10**9, rho=0.5)
    pairs = [lengths.draw(seed=2, ordinal=one, size=2) for one in range(4000)]
    logs = [(math.log(first), math.log(second)) for first, second in pairs]
    found = correlation([one[0] for one in logs], [one[1] for one in logs])
    assert found == pytest.approx(0.5, abs=0.04)


def test_the_tail_is_longest_over_mean() -> None:
    found = figures_of(Lengths(mu=3.0, sigma=0.0, cap=10**6), size=8, groups=10)
    assert found.tail == 1.0


# The law


def test_training_on_half_of_the_gpus_is_what_dora_took() -> None:
    fixed_s, gpu_s = training_law()
    assert (fixed_s + gpu_s / 32) / 60 == pytest.approx(14.67 - 1.80, rel=0.03)
    assert (fixed_s + gpu_s / 64) / 60 == pytest.approx(10.46 - 2.50, rel=0.03)


def test_nothing_of_a_predicted_row_enters_the_fit() -> None:
    assert {one.what.split()[0] for one in FITTED_TO} == {"sync", "one-step"}


def test_the_published_numbers_themselves_do_not_misfit() -> None:
    assert misfit([one.minutes for one in FITTED_TO]) == 0.0


@given(
    st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=4), min_size=1, max_size=20),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_a_rollout_lies_between_its_bounds(
    groups: list[list[int]], workers: int, slots: int
) -> None:
    """Never below the longest nor the total over all slots; never above Graham's bound."""
    found = rollout_units(groups, workers=workers, slots=slots, rise=0.0)
    total = sum(map(sum, groups))
    longest = max(map(max, groups))
    assert found >= max(longest, total / (workers * slots)) - 1e-6
    assert found <= total / (workers * slots) + longest + 1e-6


@pytest.mark.pure
@pytest.mark.slow
def test_the_fit_finds_the_law_again() -> None:
    assert fit() == FITTED


@pytest.mark.pure
@pytest.mark.slow
def test_the_fitted_rows_alone_prefer_a_quarter_of_the_gpus_for_training() -> None:
    """So the half that is taken is a choice, as bench/results/paper.md says."""
    quarter = fit(train_share=0.25)
    assert quarter == BLIND
    errors = [misfit(predicted(law, mean_rollouts(law))) for law in (quarter, FITTED)]
    assert errors[0] < errors[1] / 4


@pytest.mark.parametrize("gpus", [16, 32, 64])
def test_a_step_costs_the_trainer_what_the_law_says(gpus: int) -> None:
    rates = FITTED.trainer(gpus)
    assert rates.step_s(tokens=round(step_tokens())) == pytest.approx(FITTED.train_s(gpus))
    assert rates.fixed_s == FITTED.train_fixed_s


def test_a_block_has_the_same_rows_in_every_order_and_the_longest_first() -> None:
    data, oracle, prompts = (
        ordered(order, seed=3, block=32) for order in ("data", "oracle", "prompts")
    )
    for first in (0, 32):
        plain = [tuple(data(one)) for one in range(first, first + 32)]
        longest = [tuple(oracle(one)) for one in range(first, first + 32)]
        likely = [tuple(prompts(one)) for one in range(first, first + 32)]
        assert sorted(plain) == sorted(longest) == sorted(likely)
        assert [sum(one) for one in longest] == sorted(map(sum, plain), reverse=True)
        assert sum(map(sum, likely[:16])) > 2 * sum(map(sum, likely[16:]))


# verl's colocated rows


@pytest.mark.parametrize("half", [32, 64])
def test_a_half_takes_what_the_colocated_row_on_as_many_gpus_took(half: int) -> None:
    row = verl.COLOCATED[half]
    update_s = verl.trainer_of(half).step_s(tokens=round(step_tokens(verl.LENGTHS))) - row.rest
    assert update_s == pytest.approx(row.update)
    assert verl.engines_of(half).train_s(half) == pytest.approx(row.update + row.rest)
    assert 10 < row.rest < 12


@pytest.mark.pure
@pytest.mark.slow
def test_the_fit_finds_verls_engines_again() -> None:
    assert verl.fit_engines() == (verl.SLOTS_PER_GPU, verl.RISE)


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize("row", verl.STREAMED[:4], ids=lambda row: f"threshold {row.threshold}")
def test_verls_sweep_is_predicted_with_parts_and_not_without(row: verl.Streamed) -> None:
    assert verl.mean_step_s(row, seeds=[1], steps=12) == pytest.approx(row.step, rel=0.15)
    assert verl.mean_step_s(row, seeds=[1], steps=12, parts=1) > 1.15 * row.step


# Closed forms


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
