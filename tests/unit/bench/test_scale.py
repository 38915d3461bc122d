"""What thousands of accelerators cost: what is calculated adds up and grows as it must, and the
modelled run loses what its failures cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dora_pipe.bench.scale.cluster import ScaleCluster, ScaleRun
from dora_pipe.bench.scale.command import size_of
from dora_pipe.bench.scale.costs import (
    Flow,
    Limit,
    brokers_of,
    busy_turns_s,
    failures_day,
    flows,
    hostings,
    limits,
    rates_of,
    stored_bytes_day,
)
from dora_pipe.bench.scale.measure import (
    Sizes,
    SnapshotFigure,
    Speeds,
    manifest_bytes,
    measure_snapshot,
    progress_bytes,
    route_bytes,
)
from dora_pipe.bench.scale.size import DAY_S, LONGCAT, REPLICATION, Size, manifest_tensors
from dora_pipe.cli.app import app
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.wire import RECORD_BYTES_MAX

SIZES = Sizes(
    trajectory=50_000,
    routes=400.0,
    progress=1400,
    statuses_s=1.4,
    status=600.0,
    manifest=6_000_000,
    empty_round=200,
    encode_s=1e-3,
    decode_s=5e-4,
)
SPEEDS = Speeds(hash_bytes_s=1.5e9, compare_bytes_s=1.2e9, apply_bytes_s=2e9, fold_s=2e-5)
SNAPSHOT = SnapshotFigure(bytes=500_000, read_s=0.01)
SMALL = Size(workers=6, requests=192, slots=8, max_tokens=4096, trainer_gpus=8, steps=3, failures=2)


@cache
def played(failures: int = 2) -> ScaleRun:
    size = replace(SMALL, failures=failures)
    return ScaleCluster(size, seed=1, load_s=5.0, restart_s=30.0).measure()


def test_the_mixture_has_the_parameters_that_are_published() -> None:
    assert LONGCAT.parameters == pytest.approx(560e9, rel=0.002)
    assert len(manifest_tensors()) == 28 * (3 * 512 + 28) + 3 - 28 * 2
    assert manifest_bytes() > 100 * len(manifest_tensors())


def test_routes_are_no_larger_than_numbers_and_no_smaller_than_what_they_say() -> None:
    chosen, every = LONGCAT.per_token, LONGCAT.experts + LONGCAT.idle_experts
    least = LONGCAT.layers * math.log2(math.comb(every, chosen)) / 8
    assert least < route_bytes(LONGCAT) < 1.01 * LONGCAT.route_bytes


def test_a_coarser_progress_record_is_larger_and_a_token_of_it_smaller() -> None:
    assert progress_bytes(128) < progress_bytes(1024) < 8 * progress_bytes(128)


def test_lost_workers_cost_requests_and_they_all_end() -> None:
    run, whole = played(), played(0)
    assert run.losses.workers == 2
    assert 0 < run.losses.requests <= 2 * (SMALL.slots + 16)
    assert run.losses.sampled_again < run.losses.requests * SMALL.checkpoint_tokens
    assert whole.losses.workers == whole.losses.requests == 0
    assert run.state.counters.rejected == whole.state.counters.rejected == 0
    assert [one.step for one in run.run.spans][:3] == [0, 1, 2]
    assert run.losses.trainer_s > 0


def test_requests_wait_for_their_tools_without_a_slot() -> None:
    slow = replace(SMALL, turn_tokens=256, answer_s=300.0, failures=0)
    quick = replace(slow, answer_s=0.001)
    found = [
        ScaleCluster(one, seed=1, load_s=5.0, restart_s=30.0).measure() for one in (slow, quick)
    ]
    assert found[0].observations > 0
    assert found[0].run.spans[-1].committed_s > 2 * found[1].run.spans[-1].committed_s
    assert found[0].run.slot_s == pytest.approx(found[1].run.slot_s, rel=0.5)


def test_what_is_counted_adds_up() -> None:
    run, size = played(), SMALL
    rates = rates_of(run, SIZES)
    manifests = run.control["step-committed"].records * SIZES.manifest
    assert rates.control_s * rates.control_bytes * run.seconds == pytest.approx(
        run.folded.bytes + manifests
    )
    every = flows(size, SIZES, rates)
    brokers = brokers_of(every)
    assert brokers.taken_bytes_s == pytest.approx(REPLICATION * sum(one.bytes_s for one in every))
    assert brokers.count >= REPLICATION
    assert run.tokens / run.trajectories == pytest.approx(run.mean_tokens, abs=1)


def test_twice_the_failures_lose_twice_the_requests() -> None:
    once = failures_day(SMALL, played())
    twice = failures_day(replace(SMALL, failures_gpu_day=2 * SMALL.failures_gpu_day), played())
    assert twice.requests == pytest.approx(2 * once.requests)
    assert twice.prefilled_again == pytest.approx(2 * once.prefilled_again)
    assert once.workers == pytest.approx(48 * 419 / 54 / 16_384)


@given(more=st.integers(2, 16))
def test_more_workers_wait_longer_for_a_version_and_a_patch_is_quicker_than_all(more: int) -> None:
    few, many = Size(workers=32), Size(workers=32 * more)
    for one, other in zip(hostings(few, SPEEDS), hostings(many, SPEEDS), strict=True):
        assert one.fetch_s <= other.fetch_s
        assert one.make_s == other.make_s
    whole, _, patch, _ = hostings(many, SPEEDS)
    assert patch.fetch_s < whole.fetch_s / 10
    assert patch.bytes / whole.bytes == pytest.approx(0.03 * 2.4 / 2)


@given(every=st.integers(2, 64), step_s=st.floats(1, 1e5))
def test_fewer_whole_versions_take_less_room(every: int, step_s: float) -> None:
    size = Size()
    stored = stored_bytes_day(size, step_s, every)
    assert stored < stored_bytes_day(size, step_s, 1)
    assert stored >= DAY_S / step_s * size.patch_bytes
    assert stored_bytes_day(size, step_s / 2, every) == pytest.approx(2 * stored)


@given(
    now=st.floats(1, 100),
    fixed=st.floats(0, 0.9),
    power=st.sampled_from([1.0, 2.0]),
    bound=st.floats(1, 1000),
)
def test_a_limit_is_reached_where_it_says(
    now: float, fixed: float, power: float, bound: float
) -> None:
    one = Limit(what="", now=now, bound=bound, fixed=fixed * now, power=power)
    workers = one.workers(100)
    if fixed * now >= bound:
        assert workers is None
    else:
        assert workers is not None
        grown = one.fixed + (now - one.fixed) * (workers / 100) ** power
        assert grown == pytest.approx(bound)
        assert (workers < 100) == (one.share > 1) or one.share == pytest.approx(1)


def test_limits_stand_nearest_first_and_a_commit_is_its_batch_and_its_names() -> None:
    run = played()
    rates = rates_of(run, SIZES)
    found = limits(SMALL, SIZES, rates, run, SNAPSHOT, hostings(SMALL, SPEEDS)[3])
    shares = [one.share for one in found]
    assert shares == sorted(shares, reverse=True)
    commit = next(one for one in found if one.what.startswith("a commit"))
    assert commit.bound == RECORD_BYTES_MAX / 1e6
    assert commit.now * 1e6 == pytest.approx(SIZES.manifest + run.control["step-committed"].largest)


@given(records_s=st.floats(0.01, 1e4), more=st.floats(1.1, 10))
def test_no_more_rounds_than_turns_of_the_bus_nor_than_records(
    records_s: float, more: float
) -> None:
    turns = busy_turns_s(records_s)
    assert 0 < turns <= min(10.0, records_s)
    assert busy_turns_s(more * records_s) >= turns


def test_a_flow_of_nothing_needs_three_brokers() -> None:
    assert brokers_of([Flow(topic="control", records_s=0.0, record_bytes=0.0)]).count == 3


def test_a_snapshot_holds_the_open_requests() -> None:
    assert measure_snapshot(played().state).bytes > 100 * len(played().state.requests) > 0


def test_quick_is_small_and_what_was_said_stays() -> None:
    assert size_of({"workers": 512}, quick=True).workers == 16
    assert size_of({"workers": 4, "slots": 8}, quick=True).workers == 4
    with pytest.raises(UsageError, match="in-flight-batches"):
        size_of({"in_flight_batches": 4.0}, quick=False)
    with pytest.raises(UsageError, match="--steps"):
        size_of({"steps": 0}, quick=False)


def test_the_command_prints_every_section() -> None:
    options = ["--quick", "--json", "--workers", "4", "--requests", "128", "--slots", "8"]
    result = CliRunner().invoke(app, ["sim", "scale", *options, "--max-tokens", "2048"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    sections = list(dict.fromkeys(one["section"] for one in rows))
    assert sections == [
        *("run", "planner", "records", "progress", "brokers", "versions", "stored"),
        *("restarts", "limits"),
    ]
    shares = [float(one["share"].rstrip("%")) for one in rows if one["section"] == "limits"]
    assert shares == sorted(shares, reverse=True)
