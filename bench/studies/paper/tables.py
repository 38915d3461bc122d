"""`bench paper`: tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from dora_pipe.bench.studies.paper.lengths import EFFICIENCY, STEP_100, bubble, figures_of
from dora_pipe.bench.studies.paper.rows import (
    PUBLISHED,
    SEEDS,
    STEPS,
    Scenario,
    Seeds,
    overlap,
    published_rows,
    simulate_seeds,
)
from dora_pipe.bench.studies.paper.scaling_model import (
    FITTED,
    MINUTE_S,
    SAMPLES,
    ScalingModel,
    step_tokens,
)
from dora_pipe.cli.options import JsonOption
from dora_pipe.cli.output import emit_line, emit_rows
from dora_pipe.core.errors import UsageError

Row = dict[str, Any]

SIZES = (64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows with title and notes."""

    name: str
    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row))


def error(measured: float, expected: float | None) -> str:
    """Return the signed relative error."""
    return "" if not expected else f"{measured / expected - 1:+.1%}"


def plus_minus(seeds: Seeds, what: str, digits: int = 2) -> str:
    """Return mean and half the range."""
    return f"{seeds.mean(what):.{digits}f} ±{seeds.spread(what):.{digits}f}"


def histogram(shares: Mapping[int, float] | None) -> str:
    """Return shares of staleness 0, 1, ..."""
    if not shares:
        return ""
    return "/".join(
        f"{shares.get(key, 0.0):.2f}"[1 if shares.get(key, 0.0) < 0.995 else 0 :]
        for key in range(max(shares) + 1)
    )


def lengths_table() -> Table:
    published: dict[str, tuple[Any, ...]] = {
        "efficiency": (EFFICIENCY, 2400, 1000, 5700, 23_900, 0.006, None),
        "step 100": (STEP_100, 3536, None, None, None, None, 0.885),
    }
    rows: list[Row] = []
    for name, (lengths, mean, p50, p90, p99, capped, idle) in published.items():
        figures = figures_of(lengths, size=SAMPLES)
        measured = bubble(figures, longest=lengths.cap)
        for what, simulated, other in (
            ("mean", figures.mean, mean),
            ("p50", figures.p50, p50),
            ("p90", figures.p90, p90),
            ("p99", figures.p99, p99),
            ("at the cap", figures.capped, capped),
            ("bubble", measured, idle),
            ("E[longest of 16] / mean", figures.tail, None),
        ):
            rows.append(
                {
                    "fit": name,
                    "figure": what,
                    "published": other,
                    "simulated": simulated,
                    "error": error(simulated, other),
                }
            )
    return Table(name="lengths", title="Response lengths: censored log-normal fits", rows=rows)


def ratio_rows(minutes: Mapping[tuple[str, int], float]) -> list[Row]:
    """Return step times relative to DORA's, from minutes by (row, GPUs)."""
    rows: list[Row] = []
    for other in ("sync", "one-step"):
        for gpus in SIZES:
            ours, theirs = PUBLISHED["dora", gpus].step_min, PUBLISHED[other, gpus].step_min
            published = theirs / ours if ours and theirs else None
            simulated = minutes[other, gpus] / minutes["dora", gpus]
            rows.append(
                {
                    "dora against": other,
                    "gpus": gpus,
                    "published": published,
                    "simulated": simulated,
                    "error": error(simulated, published),
                }
            )
    return rows


def published_row(scenario: Scenario, seeds: Seeds, law: ScalingModel) -> Row:
    """Return published and simulated values."""
    published, limit = scenario.published, limit_min(scenario, law)
    shares = seeds.staleness()
    return {
        "row": scenario.name,
        "gpus": scenario.gpus,
        "part": scenario.part,
        "step": published.step_min,
        "step sim": plus_minus(seeds, "step_min"),
        "step err": error(seeds.mean("step_min"), published.step_min),
        "limit": limit,
        "above": error(seeds.mean("step_min"), limit),
        "exposed": published.exposed_min,
        "exposed sim": plus_minus(seeds, "exposed_min"),
        "exposed err": error(seeds.mean("exposed_min"), published.exposed_min),
        "tok/s": published.tokens_s,
        "tok/s sim": plus_minus(seeds, "tokens_s", 0),
        "tok/s err": error(seeds.mean("tokens_s"), published.tokens_s),
        "staleness": histogram(published.staleness),
        "staleness sim": histogram(shares),
        "overlap": overlap(shares, published.staleness) if published.staleness else None,
        "idle slots": 1 - seeds.mean("slots_used"),
    }


def limit_min(scenario: Scenario, law: ScalingModel, tokens: float | None = None) -> float:
    """Return max(T_train, tokens x tau / slots); the sum if GPUs are shared."""
    tokens = step_tokens() if tokens is None else tokens
    rollout_s = law.rollout_limit_s(scenario.generating(law), tokens)
    train_s = law.trainer(scenario.training(law)).step_s(tokens=round(tokens))
    both = rollout_s + train_s if scenario.shared else max(rollout_s, train_s)
    return both / MINUTE_S


def published_tables(
    seeds: Sequence[int] = SEEDS, steps: int = STEPS, law: ScalingModel = FITTED
) -> Iterator[Table]:
    """Yield both sizes, then relative step times."""
    rows: list[Row] = []
    minutes: dict[tuple[str, int], float] = {}
    for gpus in SIZES:
        for scenario in published_rows(gpus):
            simulated = simulate_seeds(scenario, law=law, seeds=seeds, steps=steps)
            rows.append(published_row(scenario, simulated, law))
            minutes[scenario.name, gpus] = simulated.mean("step_min")
    yield Table(
        name="dora",
        title="DORA's table: minutes per step, minutes without training, tokens/s",
        rows=rows,
        notes=("fitted rows determine the model; predicted rows do not",),
    )
    yield Table(
        name="dora",
        title="DORA's step time against the others': above 1, DORA is faster",
        rows=ratio_rows(minutes),
    )


SECTIONS = ("lengths", "dora")


def tables(sections: Sequence[str], *, seeds: Sequence[int], steps: int) -> Iterator[Table]:
    makers: dict[str, Callable[[], Iterable[Table]]] = {
        "lengths": lambda: [lengths_table()],
        "dora": lambda: published_tables(seeds, steps),
    }
    for name in sections:
        yield from makers[name]()


def command(
    section: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SECTIONS)}; default all.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Seeds per row.")] = 3,
    steps: Annotated[int, typer.Option(min=8, help="Steps per run.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Print published tables and the simulator's, with the error."""
    unknown = sorted(set(section or ()) - set(SECTIONS))
    if unknown:
        raise UsageError(f"no section {unknown[0]!r}", hint=f"one of {', '.join(SECTIONS)}")
    asked = [name for name in SECTIONS if not section or name in section]
    for table in tables(asked, seeds=range(1, seeds + 1), steps=steps):
        if as_json:
            emit_rows((), ({"section": table.name, **row} for row in table.rows), as_json=True)
            continue
        emit_line()
        emit_line(table.title)
        emit_rows(table.columns, table.rows, as_json=False)
        for note in table.notes:
            emit_line(f"  {note}")
