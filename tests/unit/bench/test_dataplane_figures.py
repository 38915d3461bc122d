"""The arithmetic of `bench dataplane`: what a figure means, on numbers that a reader can check."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bench.dataplane.figures import (
    LayerRound,
    Load,
    PlaneRound,
    cpu_us,
    delay_figure,
    delays_ms,
    latencies_ms,
    layer_figure,
    percentile,
    plane_figure,
    rate,
    split_figure,
    spread,
    stages_us,
)
from dora_pipe.bench.dataplane.process import Done

MS = 1_000_000


def published(*, records: int = 100, encode_s: float = 0.3, cpu_s: float = 0.5) -> Done:
    """A worker's half that began at 1 s; its trajectories finished at 0, 10, 20, ... ms."""
    return Done(
        records=records,
        bytes=records * 1000,
        start_ns=1000 * MS,
        end_ns=2000 * MS,
        cpu_s=cpu_s,
        stages={"encode": encode_s},
        moments={
            "finished": [10 * MS * number for number in range(records)],
            "begun": [10 * MS * number + MS // 2 for number in range(records)],
            "appended": [10 * MS * number + MS for number in range(records)],
            "acked": [10 * MS * number + 3 * MS for number in range(records)],
        },
    )


def assembled(*, records: int = 100, end_ms: int = 3000, took_ms: int = 5) -> Done:
    """A trainer's half; each batch was ready `took_ms` after its trajectory had finished."""
    return Done(
        records=records,
        bytes=records * 1000,
        start_ns=900 * MS,
        end_ns=end_ms * MS,
        cpu_s=0.4,
        stages={"decode": 0.2, "assembly": 0.1},
        moments={
            "polled": [(10 * number + took_ms - 1) * MS for number in range(records)],
            "batched": [(10 * number + took_ms) * MS for number in range(records)],
        },
    )


def round_of(*, end_ms: int = 3000, took_ms: int = 5, broker_s: float | None = 0.1) -> PlaneRound:
    return PlaneRound(
        full=Load(published=published(), assembled=assembled(end_ms=end_ms), broker_s=broker_s),
        light=Load(
            published=published(records=10),
            assembled=assembled(records=10, took_ms=took_ms),
            broker_s=broker_s,
        ),
    )


def alone(mb_per_s: float, *, cpu_us: float = 1.0) -> list[Done]:
    """One process that handled 100 records of 1000 bytes at this speed."""
    took_ns = round(0.1 / mb_per_s * 1e9)
    return [Done(records=100, bytes=100_000, start_ns=0, end_ns=took_ns, cpu_s=cpu_us / 1e4)]


def delayed(*delays_ms: float) -> list[Done]:
    """A writer of so many records behind a warm one, and their reader."""
    polled = [0, *(round(one * MS) + 1 for one in delays_ms)]
    begun = [0, *(1 for _ in delays_ms)]
    return [
        Done(records=1, bytes=10, start_ns=0, end_ns=1, cpu_s=0.1, moments={name: moments})
        for name, moments in (("begun", begun), ("polled", polled))
    ]


def test_a_rate_is_from_the_writers_start_to_the_readers_end() -> None:
    assert rate(published(), assembled()) == 50.0
    assert rate(published(), published()) == 100.0


def test_a_layers_ratio_is_the_median_of_the_repeats_and_not_of_the_sides() -> None:
    rounds: list[LayerRound] = [
        {"raw": alone(raw, cpu_us=raw), "bus": alone(bus)}
        for raw, bus in ((100, 90), (200, 160), (50, 50))
    ]
    figure = layer_figure("append", 256, rounds)
    assert (figure.raw_mb_per_s, figure.bus_mb_per_s) == pytest.approx((100.0, 90.0))
    assert figure.ratio == pytest.approx(0.9)
    assert figure.spread == "0.80-1.00"
    assert (figure.raw_cpu_us, figure.bus_cpu_us) == pytest.approx((100.0, 1.0))
    assert (figure.phase, figure.tokens, figure.bytes) == ("append", 256, 1000)


def test_cpu_time_per_record_adds_up_the_processes() -> None:
    assert cpu_us(published()) == pytest.approx(5000)
    assert cpu_us(published(), assembled(records=50)) == pytest.approx(5000 + 8000)


def test_a_planes_row_is_made_of_medians() -> None:
    rounds = [round_of(end_ms=end, took_ms=took) for end, took in ((3000, 5), (2000, 9), (5000, 6))]
    figure = plane_figure("kafka", 2048, rounds)
    assert figure.trajectories_per_s == 50.0
    assert figure.spread == "25-100"
    assert figure.mb_per_s == pytest.approx(0.05)
    assert (figure.p50_ms, figure.p50_spread, figure.p99_ms) == (6.0, "5.00-9.00", 6.0)
    assert figure.cpu_s_per_gb == pytest.approx((0.5 + 0.4 + 0.1) / 100_000 * 1e9)


def test_the_stages_of_a_trajectory_add_up_to_all_that_was_spent() -> None:
    stages = stages_us(round_of().full)
    assert stages == {
        "encode": pytest.approx(3000),
        "append": pytest.approx(2000),
        "broker": pytest.approx(1000),
        "fetch": pytest.approx(1000),
        "decode": pytest.approx(2000),
        "assembly": pytest.approx(1000),
    }
    assert sum(each for each in stages.values() if each) == pytest.approx(1.0 / 100 * 1e6)


def test_the_parts_of_the_latency_are_told_apart() -> None:
    figure = split_figure("sqlite", 256, [round_of(took_ms=5)])
    assert (figure.to_encode_ms, figure.to_append_ms) == (0.5, 0.5)
    assert (figure.to_fetch_ms, figure.to_batch_ms) == (3.0, 1.0)
    assert figure.ack_ms == 2.0, "beside the fetch"
    assert figure.light_cores == pytest.approx((0.5 + 0.4 + 0.1) / 2)
    assert figure.encode_us == pytest.approx(3000)


def test_what_a_broker_elsewhere_spends_is_not_made_up() -> None:
    rounds = [round_of(broker_s=None)]
    assert plane_figure("kafka", 256, rounds).cpu_s_per_gb is None
    split = split_figure("kafka", 256, rounds)
    assert (split.broker_us, split.light_cores) == (None, None)


def test_a_trajectory_that_never_came_is_no_latency_but_an_error() -> None:
    lost = replace(round_of().light, assembled=assembled(records=9))
    with pytest.raises(ValueError, match="shorter"):
        latencies_ms(lost)


@pytest.mark.parametrize(("percent", "expected"), [(1, 1.0), (50, 2.0), (75, 3.0), (99, 4.0)])
def test_percentiles_are_values_that_were_there(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50), percent=st.floats(0.1, 100))
def test_so_many_percent_do_not_exceed_a_percentile(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    at_most = sum(value <= found for value in values)
    assert found in values
    assert at_most >= percent / 100 * len(values) - 1e-9


def test_a_spread_names_both_ends() -> None:
    assert spread([2.0, 1.25, 3.0], digits=1) == "1.2-3.0"


def test_delay_of_a_record_is_from_its_append_to_its_poll_without_the_warm_ones() -> None:
    written, read = delayed(2.0, 4.0)
    assert delays_ms(written, read) == [2.0, 4.0]
    with pytest.raises(ValueError, match="shorter"):
        delays_ms(written, delayed(2.0)[1])


def test_delays_of_both_sides_stand_in_one_row() -> None:
    rounds: list[LayerRound] = [
        {"raw": delayed(4.0, 3.0, 9.0), "bus": delayed(middle - 1, middle, 7.0)}
        for middle in (2.0, 3.0, 2.5)
    ]
    row = delay_figure(256, 100.0, rounds)
    assert (row.raw_p50_ms, row.raw_p99_ms) == (4.0, 9.0)
    assert (row.bus_p50_ms, row.bus_spread, row.bus_p99_ms) == (2.5, "2.00-3.00", 7.0)
    assert row.bytes == 10
