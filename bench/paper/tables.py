"""Decides how the simulator's figures stand side by side: published, simulated, and the error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dora_pipe.bench.paper import closed_forms as closed
from dora_pipe.bench.paper import verl
from dora_pipe.bench.paper.lengths import EFFICIENCY, STEP_100, bubble, figures_of
from dora_pipe.bench.paper.orders import GPUS, ORDERS, order_rows, order_train_s, simulate_order
from dora_pipe.bench.paper.rows import (
    PARTS,
    PUBLISHED,
    SEEDS,
    STEPS,
    Published,
    Scenario,
    Seeds,
    elastic_rows,
    other_rows,
    overlap,
    parted_row,
    published_rows,
    simulate_seeds,
    sweep_rows,
)
from dora_pipe.bench.paper.scaling_model import (
    BLIND,
    FITTED,
    FITTED_TO,
    GPUS_PER_WORKER,
    GROUPS,
    MINUTE_S,
    SIBLINGS,
    TRAIN_SHARE,
    ScalingModel,
    fit,
    mean_rollouts,
    misfit,
    predicted,
    step_tokens,
)

Row = dict[str, Any]

SIZES = (64, 128)
"""GPUs of the published rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under a title, and what has to be said about them."""

    name: str
    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def columns(self) -> list[str]:
        """Of all rows, in order of appearance."""
        return list(dict.fromkeys(key for row in self.rows for key in row))


def error(found: float, wanted: float | None) -> str:
    """Simulated against published, as a signed share."""
    return "" if not wanted else f"{found / wanted - 1:+.1%}"


def plus_minus(seeds: Seeds, what: str, digits: int = 2) -> str:
    """Mean and half the spread over seeds."""
    return f"{seeds.mean(what):.{digits}f} ±{seeds.spread(what):.{digits}f}"


def histogram(shares: Mapping[int, float] | None) -> str:
    """Shares of staleness 0, 1, 2 ..."""
    if not shares:
        return ""
    return "/".join(
        f"{shares.get(key, 0.0):.2f}"[1 if shares.get(key, 0.0) < 0.995 else 0 :]
        for key in range(max(shares) + 1)
    )


def lengths_table() -> Table:
    """The two fits of response lengths."""
    wanted: dict[str, tuple[Any, ...]] = {
        "efficiency": (EFFICIENCY, 2400, 1000, 5700, 23_900, 0.006, None),
        "step 100": (STEP_100, 3536, None, None, None, None, 0.885),
    }
    rows: list[Row] = []
    for name, (lengths, mean, p50, p90, p99, capped, idle) in wanted.items():
        found = figures_of(lengths, size=SIBLINGS)
        measured = bubble(found, longest=lengths.cap)
        for what, one, other in (
            ("mean", found.mean, mean),
            ("p50", found.p50, p50),
            ("p90", found.p90, p90),
            ("p99", found.p99, p99),
            ("at the cap", found.capped, capped),
            ("bubble", measured, idle),
            ("E[longest of 16] / mean", found.tail, None),
        ):
            rows.append(
                {
                    "fit": name,
                    "figure": what,
                    "published": other,
                    "simulated": one,
                    "error": error(one, other),
                }
            )
    return Table(name="lengths", title="Response lengths: censored log-normal fits", rows=rows)


def law_table(law: ScalingModel = FITTED) -> Table:
    """What the law says about the numbers it was fitted to."""
    minutes = predicted(law, mean_rollouts(law))
    rows: list[Row] = [
        {
            "row": one.what,
            "gpus": one.gpus,
            "published": one.minutes,
            "law": found,
            "error": error(found, one.minutes),
        }
        for one, found in zip(FITTED_TO, minutes, strict=True)
    ]
    return Table(
        name="law",
        title="One law from GPUs to slots and speed, minutes",
        rows=rows,
        notes=(
            f"{law.slots_per_gpu} slots per GPU, tau {law.tau_s * 1e3:.1f} ms alone and "
            f"{law.tau_s * (1 + law.rise) * 1e3:.1f} ms in a full engine, "
            f"{GPUS_PER_WORKER} GPUs a worker; "
            f"training {law.train_fixed_s:.0f} s + {law.train_gpu_s:.0f} s / GPUs",
        ),
    )


SHARES_TRIED = (0.25, 0.375, 0.5, 0.625, 0.75)


def share_table(seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> Table:
    """The law fitted with other shares of GPUs that train, and DORA's rows under each."""
    rows: list[Row] = []
    for share in SHARES_TRIED:
        law = fit(train_share=share)
        found = {
            one.gpus: simulate_seeds(one, law=law, seeds=seeds, steps=steps).mean("step_min")
            for gpus in SIZES
            for one in published_rows(gpus)
            if one.name == "dora"
        }
        rms = math.sqrt(misfit(predicted(law, mean_rollouts(law))))
        row: Row = {
            "share": share,
            "slots/GPU": law.slots_per_gpu,
            "fitted rows, rms": f"{rms:.1%}",
        }
        for gpus, minutes in found.items():
            row[f"dora {gpus}"] = minutes
            row[f"error {gpus}"] = error(minutes, PUBLISHED["dora", gpus].step_min)
        rows.append(row)
    return Table(
        name="share",
        title="The share of GPUs that train, which is not published: a fit for each",
        rows=rows,
        notes=(
            f"{TRAIN_SHARE} was chosen, and only DORA's rows select it: its predictions are no "
            "test of the share",
        ),
    )


def ratio_rows(found: Mapping[tuple[str, int], float]) -> list[Row]:
    """DORA's step time against every other paradigm's, published and simulated.

    `found` has the simulated minutes by (row, GPUs). A ratio above 1: DORA is faster.
    """
    rows: list[Row] = []
    for other in ("sync", "one-step", "partial", "partial, surplus 1.5"):
        for gpus in SIZES:
            dora = PUBLISHED["dora", gpus].step_min
            row = PUBLISHED.get((other.partition(",")[0], gpus), Published())
            wanted = row.step_min / dora if row.step_min and dora else None
            simulated = found[other, gpus] / found["dora", gpus]
            rows.append(
                {
                    "dora against": other,
                    "gpus": gpus,
                    "published": wanted,
                    "simulated": simulated,
                    "error": error(simulated, wanted),
                }
            )
    return rows


def published_row(scenario: Scenario, found: Seeds, law: ScalingModel) -> Row:
    """Published and simulated side by side, and what the hardware allows."""
    wanted, limit = scenario.published, limit_min(scenario, law)
    shares = found.staleness()
    return {
        "row": scenario.name,
        "gpus": scenario.gpus,
        "part": scenario.part,
        "step": wanted.step_min,
        "step sim": plus_minus(found, "step_min"),
        "step err": error(found.mean("step_min"), wanted.step_min),
        "limit": limit,
        "above": error(found.mean("step_min"), limit),
        "exposed": wanted.exposed_min,
        "exposed sim": plus_minus(found, "exposed_min"),
        "exposed err": error(found.mean("exposed_min"), wanted.exposed_min),
        "tok/s": wanted.tokens_s,
        "tok/s sim": plus_minus(found, "tokens_s", 0),
        "tok/s err": error(found.mean("tokens_s"), wanted.tokens_s),
        "staleness": histogram(wanted.staleness),
        "staleness sim": histogram(shares),
        "overlap": overlap(shares, wanted.staleness) if wanted.staleness else None,
        "idle slots": 1 - found.mean("slots_used"),
    }


def ours_row(scenario: Scenario, found: Seeds, law: ScalingModel) -> Row:
    """A row that nobody published, against what the hardware allows."""
    limit = limit_min(scenario, law)
    return {
        "row": scenario.name,
        "gpus": scenario.gpus,
        "step": plus_minus(found, "step_min"),
        "limit": limit,
        "above": error(found.mean("step_min"), limit),
        "exposed": plus_minus(found, "exposed_min"),
        "tok/s": plus_minus(found, "tokens_s", 0),
        "staleness": histogram(found.staleness()),
        "mean": found.mean("staleness_mean"),
        "moves": f"{found.mean('moves_share'):.1%}",
        "loads": found.mean("loads_step"),
        "idle slots": 1 - found.mean("slots_used"),
    }


def limit_min(scenario: Scenario, law: ScalingModel, tokens: float | None = None) -> float:
    """max(T_train, tokens x tau / slots); both after each other where GPUs are shared.

    `tokens` of a step; those of the mean step by default.
    """
    tokens = step_tokens() if tokens is None else tokens
    rollout_s = law.rollout_limit_s(scenario.generating(law), tokens)
    train_s = law.trainer(scenario.training(law)).step_s(tokens=round(tokens))
    both = rollout_s + train_s if scenario.shared else max(rollout_s, train_s)
    return both / MINUTE_S


def published_tables(
    seeds: Sequence[int] = SEEDS, steps: int = STEPS, law: ScalingModel = FITTED
) -> Iterator[Table]:
    """The four published paradigms at both sizes, then DORA's step against the others'."""
    rows: list[Row] = []
    minutes: dict[tuple[str, int], float] = {}
    for gpus in SIZES:
        for one in published_rows(gpus):
            found = simulate_seeds(one, law=law, seeds=seeds, steps=steps)
            rows.append(published_row(one, found, law))
            minutes[one.name, gpus] = found.mean("step_min")
        for one in sweep_rows(gpus):
            if one.name == "partial, surplus 1.5":
                found = simulate_seeds(one, law=law, seeds=seeds, steps=steps)
                minutes[one.name, gpus] = found.mean("step_min")
    yield Table(
        name="dora",
        title="DORA's table: minutes per step, minutes in which nobody trains, tokens/s",
        rows=rows,
        notes=("fitted rows made the law; predicted rows did not enter it",),
    )
    yield Table(
        name="dora",
        title="DORA's step time against the others': above 1, DORA is faster",
        rows=ratio_rows(minutes),
    )


def ours_table(
    name: str,
    title: str,
    seeds: Sequence[int] = SEEDS,
    steps: int = STEPS,
    law: ScalingModel = FITTED,
) -> Table:
    """Section `sweep` or `others`, at both sizes."""
    make = {"sweep": sweep_rows, "others": other_rows}[name]
    rows = [
        ours_row(one, simulate_seeds(one, law=law, seeds=seeds, steps=steps), law)
        for gpus in SIZES
        for one in make(gpus)
    ]
    return Table(name=name, title=title, rows=rows)


BLIND_SHARES = (0.5, 0.75)
"""Of the GPUs, which train; a share is ours to choose, so several are shown."""


def parts_table(
    seeds: Sequence[int] = SEEDS, steps: int = STEPS, law: ScalingModel = FITTED
) -> Table:
    """DORA with and without parts: on the law, and on one that no row of DORA's had a say in."""
    laws = [("law", law)]
    laws += [("blind", replace(BLIND, train_share=share)) for share in BLIND_SHARES]
    rows: list[Row] = []
    for gpus in SIZES:
        for name, one in laws:
            for parts in (1, PARTS):
                scenario = parted_row(gpus, parts)
                found = simulate_seeds(scenario, law=one, seeds=seeds, steps=steps)
                rows.append({"law": name, "share": one.train_share, "parts": parts})
                rows[-1] |= parts_row(scenario, found, one)
    return Table(
        name="parts",
        title="Parts of a batch, bound 2, C 2: minutes per step, against what the hardware allows",
        rows=rows,
        notes=(
            "blind: fitted to the synchronous and one-step rows with the share that these prefer, "
            f"{BLIND.train_share}; DORA then runs with the share named",
        ),
    )


def parts_row(scenario: Scenario, found: Seeds, law: ScalingModel) -> Row:
    """Step time beside the published one and beside the two sides of its limit."""
    wanted, limit = scenario.published.step_min, limit_min(scenario, law)
    train_min = law.train_s(scenario.training(law)) / MINUTE_S
    rollout_s = law.rollout_limit_s(scenario.generating(law), step_tokens())
    return {
        "gpus": scenario.gpus,
        "published": wanted,
        "step": plus_minus(found, "step_min"),
        "to published": error(found.mean("step_min"), wanted),
        "T_train": train_min,
        "T_rollout": rollout_s / MINUTE_S,
        "above": error(found.mean("step_min"), limit),
        "exposed": plus_minus(found, "exposed_min"),
        "staleness": histogram(found.staleness()),
        "idle slots": 1 - found.mean("slots_used"),
    }


ELASTIC_SHARES, ELASTIC_BATCHES = (0.5, 0.75), (2.0, 3.0)
"""Shares of the GPUs that train, and C."""


def elastic_table(
    seeds: Sequence[int] = SEEDS, steps: int = STEPS, law: ScalingModel = FITTED
) -> Table:
    """Workers that sleep while a step is computed, whose GPUs train then; at the smaller size."""
    rows: list[Row] = []
    for share in ELASTIC_SHARES:
        one = replace(law, train_share=share)
        for scenario in elastic_rows(SIZES[0], ELASTIC_BATCHES):
            found = simulate_seeds(scenario, law=one, seeds=seeds, steps=steps)
            standalone = sum(not worker.elastic for worker in scenario.workers(one))
            row = ours_row(scenario, found, one)
            kept = ("step", "exposed", "tok/s", "staleness", "moves", "loads", "idle slots")
            rows.append(
                {"row": scenario.name, "GPUs that train": scenario.training(one)}
                | {"standalone workers": standalone, "C": scenario.in_flight_batches}
                | {name: row[name] for name in kept}
            )
    return Table(
        name="elastic",
        title=f"Elastic workers, bound 2, {SIZES[0]} GPUs: minutes per step",
        rows=rows,
        notes=("elastic: the GPUs that train generate while no step is computed",),
    )


def order_table(
    seeds: Sequence[int] = SEEDS, steps: int = STEPS, law: ScalingModel = FITTED
) -> Table:
    """Likely long rows first: what that wins at most, minutes per step."""
    rows: list[Row] = []
    for one in order_rows():
        row: Row = {"row": one.name}
        for order in ORDERS:
            found = simulate_order(one, order, seeds=seeds, steps=steps, law=law)
            row[order] = found.mean("step_min")
            if order != "data":
                row[f"{order} to data"] = error(row[order], row["data"])
        rows.append(row | {"T_train": order_train_s(one, law) / MINUTE_S})
    return Table(
        name="order",
        title=f"Likely long rows first within a step, {GPUS} GPUs: minutes per step",
        rows=rows,
        notes=("prompts: the row's part of the length is known; oracle: every length is",),
    )


def verl_table(seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> Table:
    """verl's fully asynchronous rows, predicted with parts and with whole batches; seconds."""
    rows: list[Row] = []
    for one in verl.STREAMED:
        found = verl.mean_step_s(one, seeds=seeds, steps=steps)
        whole = verl.mean_step_s(one, seeds=seeds, steps=steps, parts=1)
        limit = verl.limit_s(one)
        rows.append(
            {
                "gpus": one.gpus,
                "threshold": one.threshold,
                "published": one.step,
                f"{verl.PARTS} parts": found,
                "error": error(found, one.step),
                "limit": limit,
                "above": error(found, limit),
                "whole": whole,
                "whole err": error(whole, one.step),
            }
        )
    return Table(
        name="verl",
        title="verl's fully asynchronous trainer, by its threshold: seconds per step",
        rows=rows,
        notes=(
            "half of the GPUs generate, half train; each is what the colocated row on as many took",
            "on 32 GPUs updates are published with 314 s colocated and 157 s streamed: no law has "
            "both",
        ),
    )


def flash_table(seed: int = 1) -> Table:
    """ROLL Flash's bounds on generation, for the efficiency lengths, in mean generation times."""
    rows: list[Row] = []
    for workers in (64, 512, 2048, 8192):
        drawn = [
            one
            for ordinal in range(GROUPS)
            for one in EFFICIENCY.draw(seed=seed, ordinal=ordinal, size=SIBLINGS)
        ]
        mean, longest, count = sum(drawn) / len(drawn), float(max(drawn)), len(drawn)
        sync = closed.generate(drawn, workers)
        best = sum(drawn) / workers
        bound = closed.sync_bound(workers=workers, samples=count, mean=mean, longest=longest)
        rows.append(
            {
                "workers": workers,
                "samples": count,
                "sync": sync / mean,
                "bound": bound / mean,
                "kept": sync <= bound,
                "never stopping": best / mean,
                "speed-up": sync / best,
                "greatest": closed.speedup_bound(mean=mean, longest=longest),
            }
        )
    return Table(
        name="flash",
        title="ROLL Flash: a rollout against its bound, and what never stopping wins",
        rows=rows,
    )


def stream_table(seeds: Sequence[int] = SEEDS) -> Table:
    """Applied Compute: mean staleness predicted, measured, by the formula, and simulated."""
    rows: list[Row] = []
    for one in closed.STREAMS:
        found = [closed.simulate_stream(one, seed=seed) for seed in seeds]
        mean = sum(found) / len(found)
        rows.append(
            {
                "C": one.in_flight,
                "B": one.batch,
                "q": one.queue,
                "rho": one.rho,
                "M_tail": one.tail,
                "predicted": one.published,
                "measured": one.measured,
                "formula": one.closed_form,
                "simulated": f"{mean:.2f} ±{(max(found) - min(found)) / 2:.2f}",
                "to formula": error(mean, one.closed_form),
                "to measured": error(mean, one.measured),
            }
        )
    return Table(
        name="stream",
        title="Applied Compute: mean staleness of a stream",
        rows=rows,
        notes=(
            "for q = 1 and rho < 1 the published predictions are .14 and .36 below the published "
            "formula",
        ),
    )


SECTIONS = (
    "lengths",
    "law",
    "share",
    "dora",
    "parts",
    "elastic",
    "sweep",
    "others",
    "order",
    "verl",
    "flash",
    "stream",
)


def tables(
    sections: Sequence[str], *, seeds: Sequence[int], steps: int, law: ScalingModel = FITTED
) -> Iterator[Table]:
    """The sections asked for, one after the other."""
    made: dict[str, Callable[[], Iterable[Table]]] = {
        "lengths": lambda: [lengths_table()],
        "law": lambda: [law_table(law)],
        "share": lambda: [share_table(seeds, steps)],
        "dora": lambda: published_tables(seeds, steps, law),
        "parts": lambda: [parts_table(seeds, steps, law)],
        "elastic": lambda: [elastic_table(seeds, steps, law)],
        "sweep": lambda: [
            ours_table(
                "sweep", "The knob nobody publishes: batches in flight, bound 2", seeds, steps, law
            )
        ],
        "others": lambda: [
            ours_table("others", "What else the same hardware could do", seeds, steps, law)
        ],
        "order": lambda: [order_table(seeds, steps, law)],
        "verl": lambda: [verl_table(seeds, steps)],
        "flash": lambda: [flash_table()],
        "stream": lambda: [stream_table(seeds)],
    }
    for name in sections:
        yield from made[name]()
