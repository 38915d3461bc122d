"""Decides how the figures of `dora-pipe sim scale` stand in tables; computes nothing new."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from dora_pipe.bench.paper.tables import Row, Table, histogram
from dora_pipe.bench.scale.cluster import ScaleCluster, ScaleRun
from dora_pipe.bench.scale.costs import (
    Failures,
    Flow,
    Hosting,
    Limit,
    Rates,
    brokers_of,
    failures_day,
    flows,
    hostings,
    limits,
    partitions_of,
    rates_of,
    restarts_of,
    stored_bytes_day,
)
from dora_pipe.bench.scale.measure import (
    Sizes,
    SnapshotFigure,
    Speeds,
    measure_sizes,
    measure_snapshot,
    measure_speeds,
    progress_bytes,
    with_routes,
)
from dora_pipe.bench.scale.size import (
    CATALOGUE_BYTES,
    CATALOGUE_S,
    DAY_S,
    LONGCAT,
    Size,
)

CHECKPOINTS: Final = (1024, 4096)
"""Other `workers.checkpoint_tokens` that are shown."""
WHOLES: Final = (1, 8, 64)
"""Other `policies.whole_every`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that the tables are made of; of several seeds, the last one's run is what is counted."""

    size: Size
    runs: Sequence[ScaleRun]
    sizes: Sizes
    speeds: Speeds
    snapshot: SnapshotFigure
    ways: Sequence[Hosting]

    @property
    def run(self) -> ScaleRun:
        """That is counted."""
        return self.runs[-1]

    @property
    def mean_tokens(self) -> int:
        """Sampled, of a trajectory."""
        return self.run.mean_tokens

    @property
    def routed(self) -> Sizes:
        """Of records with routes."""
        return with_routes(self.sizes, self.size.prompt_tokens + self.mean_tokens)

    @property
    def rates(self) -> Rates:
        """Of it."""
        return rates_of(self.run, self.sizes)

    @property
    def patched(self) -> Hosting:
        """The way that versions take in the run."""
        return next(one for one in self.ways if one.way == "patch, peers")

    @property
    def failures(self) -> Failures:
        """Of a day."""
        return failures_day(self.size, self.run)


def measure(size: Size, seeds: int, say: Callable[[str], None]) -> Found:
    """Measure this machine, play the run once a seed, and measure its state."""
    say("measuring records and versions")
    speeds = measure_speeds(size)
    ways = hostings(size, speeds)
    whole, patched = ways[1], ways[3]
    runs = []
    for seed in range(1, seeds + 1):
        say(f"playing {size.workers} workers, seed {seed} of {seeds}")
        cluster = ScaleCluster(size, seed=seed, load_s=patched.worker_s, restart_s=whole.worker_s)
        runs.append(cluster.measure())
    run = runs[-1]
    return Found(
        size=size,
        runs=runs,
        sizes=measure_sizes(size, run.mean_tokens),
        speeds=speeds,
        snapshot=measure_snapshot(run.state),
        ways=ways,
    )


def tables(found: Found) -> Iterator[Table]:
    """Every section."""
    yield run_table(found)
    yield planner_table(found)
    yield records_table(found)
    yield progress_table(found)
    yield brokers_table(found)
    yield versions_table(found)
    yield stored_table(found)
    yield restarts_table(found)
    yield limits_table(found)


def run_table(found: Found) -> Table:
    """What happened in each seed."""
    size = found.size
    return Table(
        name="run",
        title=f"The run: {size.workers} workers of {size.gpus_per_worker}, {size.requests}"
        f" requests, {size.slots} slots a worker, {size.per_step} groups of {size.group_size} a"
        " step",
        rows=[_run_row(seed, one, found.sizes) for seed, one in enumerate(found.runs, 1)],
        notes=(
            "planner, state and admission are production's; steps after the first commit",
            f"{found.run.losses.workers} workers and the trainer die in it, on purpose",
            f"a worker's accelerators have room for {size.contexts:.0f} contexts of"
            f" {size.max_tokens + size.prompt_tokens} tokens beside the weights",
        ),
    )


def _run_row(seed: int, one: ScaleRun, sizes: Sizes) -> Row:
    rates, run = rates_of(one, sizes), one.run
    staleness: Counter[int] = Counter()
    for span in run.spans[1:]:
        staleness.update(dict(span.staleness))
    total = max(1, staleness.total())
    return {
        "seed": seed,
        "steps": len(run.spans) - 1,
        "step_s": round(rates.step_s, 1),
        "trajectories_s": round(rates.trajectories_s, 1),
        "tokens_s": round(rates.tokens_s),
        "staleness": histogram({key: staleness[key] / total for key in sorted(staleness)}),
        "slots_used": round(run.slot_s / run.slots / run.wall_s, 3),
        "moves_share": round(run.moves / max(1, run.requests), 4),
        "loads": run.loads,
    }


def planner_table(found: Found) -> Table:
    """What a round costs."""
    run = found.run
    ordered = sorted(run.rounds_ms)
    return Table(
        name="planner",
        title="A round: planned and sealed, CPU time of this machine, now",
        rows=[
            {
                "rounds": len(ordered),
                "p50_ms": round(statistics.median(ordered), 2),
                "p99_ms": round(ordered[len(ordered) * 99 // 100], 2),
                "worst_ms": round(ordered[-1], 1),
                "plan_cores": round(run.decide_s / run.seconds, 4),
                "seal_cores": round(run.seal_s / run.seconds, 4),
                "fold_us": round(1e6 * run.folded.cpu_s / run.folded.records, 1),
                "observations_s": round(run.observations / run.seconds, 1),
            }
        ],
        notes=("the state's digest, garbage and `waits` come on top: `dora-pipe bench plan`",),
    )


def records_table(found: Found) -> Table:
    """Topics, with and without routes."""
    size, rates = found.size, found.rates
    plain = flows(size, found.sizes, rates)
    routed = flows(size, found.routed, rates)[-1]
    rows = [_flow_row(one) for one in [*plain, replace(routed, topic="trajectories with routes")]]
    catalogue = rates.trajectories_s * DAY_S * CATALOGUE_BYTES / 1e9
    return Table(
        name="records",
        title="Records, by topic, before copies",
        rows=rows,
        notes=(
            f"a trajectory of {size.prompt_tokens + found.mean_tokens} tokens is encoded in"
            f" {1e3 * found.sizes.encode_s:.2f} ms and decoded in"
            f" {1e3 * found.sizes.decode_s:.2f} ms",
            f"routes are {LONGCAT.route_bytes} bytes a token, {found.sizes.routes:.0f} in a record:"
            " sampling.routes",
            f"the catalogue's file grows by {catalogue:.2f} GB a day, and whoever follows needs"
            f" {rates.trajectories_s * CATALOGUE_S:.3f} cores",
        ),
    )


def _flow_row(one: Flow) -> Row:
    return {
        "topic": one.topic,
        "records_s": round(one.records_s, 2),
        "bytes": round(one.record_bytes),
        "mb_s": round(one.bytes_s / 1e6, 3),
        "gb_day": round(one.bytes_s * DAY_S / 1e9, 1),
        "kept_days": one.keep_days,
        "readers": one.readers,
        "partitions": partitions_of(one),
    }


def progress_table(found: Found) -> Table:
    """What a finer progress costs, and what a coarser one."""
    size, lost = found.size, found.failures
    each = lost.requests / 2
    return Table(
        name="progress",
        title="Progress records by workers.checkpoint_tokens",
        rows=[
            {
                "checkpoint_tokens": tokens,
                "records_s": round(found.rates.tokens_s / tokens, 1),
                "mb_s": round(found.rates.tokens_s / tokens * progress_bytes(tokens) / 1e6, 3),
                "sampled_again_day": round(each * tokens),
                "of_all": f"{each * tokens / (found.rates.tokens_s * DAY_S):.1e}",
            }
            for tokens in (size.checkpoint_tokens, *CHECKPOINTS)
        ],
        notes=("half of the tokens between two records are lost with each request of a worker",),
    )


def brokers_table(found: Found) -> Table:
    """How many brokers, by what is written."""
    size, rates = found.size, found.rates
    rows = []
    for what, sizes in (
        ("as it is", found.sizes),
        ("with routes", found.routed),
    ):
        one = brokers_of(flows(size, sizes, rates))
        rows.append(
            {
                "records": what,
                "brokers": one.count,
                "taken_mb_s": round(one.taken_bytes_s / 1e6, 1),
                "given_mb_s": round(one.given_bytes_s / 1e6, 1),
                "kept_tb": round(one.kept_bytes / 1e12, 2),
            }
        )
    return Table(
        name="brokers",
        title="Brokers with replication 3: written with copies, read, kept after a week",
        rows=rows,
    )


def versions_table(found: Found) -> Table:
    """How a version comes to all workers."""
    return Table(
        name="versions",
        title="A version to all workers, seconds",
        rows=[
            {
                "way": one.way,
                "gb": round(one.bytes / 1e9, 1),
                "publish_s": round(one.publish_s, 1),
                "fetch_s": round(one.fetch_s, 1),
                "make_s": round(one.make_s, 1),
                "load_s": round(one.load_s, 1),
                "all_s": round(one.publish_s + one.worker_s, 1),
            }
            for one in found.ways
        ],
        notes=(
            f"one thread hashes {found.speeds.hash_bytes_s / 1e9:.2f} GB/s, compares"
            f" {found.speeds.compare_bytes_s / 1e9:.2f} and applies"
            f" {found.speeds.apply_bytes_s / 1e9:.2f}; {found.size.threads} do",
            "store.cache_gb must hold two versions:"
            f" {2 * found.size.whole_bytes / 1e9:.0f}; its default is 100",
        ),
    )


def stored_table(found: Found) -> Table:
    """What a day of versions takes."""
    size, step_s = found.size, found.rates.step_s
    every = sorted({*WHOLES, size.whole_every})
    return Table(
        name="stored",
        title="Versions of a day, all kept, by policies.whole_every",
        rows=[
            {
                "whole_every": one,
                "versions_day": round(DAY_S / step_s, 1),
                "tb_day": round(stored_bytes_day(size, step_s, one) / 1e12, 2),
                "make_behind": one - 1,
            }
            for one in every
        ],
        notes=(
            "make_behind: patches that a new worker applies behind the last whole one, at most",
        ),
    )


def restarts_table(found: Found) -> Table:
    """What failures cost a day."""
    size, lost = found.size, found.failures
    restarts = restarts_of(size, found.rates, found.speeds, found.snapshot, found.ways[1])
    rows = [
        {
            "role": "orchestrator",
            "away_s": round(restarts.orchestrator_read_s + restarts.orchestrator_fold_s, 2),
            "what": f"snapshot of {found.snapshot.bytes / 1e6:.1f} MB, read in"
            f" {restarts.orchestrator_read_s:.2f} s, then"
            f" {restarts.orchestrator_fold_s:.2f} s of folding",
        },
        {
            "role": "trainer",
            "times_day": round(lost.trainer, 2),
            "away_s": round(restarts.trainer_read_s + found.rates.step_s / 2, 1),
            "what": f"checkpoint in {restarts.trainer_read_s:.0f} s, and half a step again",
        },
        {
            "role": "worker",
            "times_day": round(lost.workers, 2),
            "away_s": round(restarts.worker_s, 1),
            "what": f"{lost.requests:.0f} requests a day go on elsewhere:"
            f" {lost.sampled_again:.0f} tokens sampled and {lost.prefilled_again:.0f} prefilled"
            " again",
        },
    ]
    return Table(name="restarts", title="Failures and restarts", rows=rows)


def limits_table(found: Found) -> Table:
    """What breaks first."""
    every = limits(found.size, found.sizes, found.rates, found.run, found.snapshot, found.patched)
    return Table(
        name="limits",
        title="Limits, nearest first; `workers`: where it is reached, with as many requests each",
        rows=[_limit_row(one, found.size.workers) for one in every],
    )


def _limit_row(one: Limit, workers: int) -> dict[str, Any]:
    at = one.workers(workers)
    return {
        "what": one.what,
        "now": round(one.now, 3),
        "bound": round(one.bound, 1),
        "unit": one.unit,
        "share": f"{one.share:.1%}",
        "workers": None if at is None else round(at),
        "mend": one.mend,
    }
