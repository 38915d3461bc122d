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


def error(found: float, wanted: float | None) -> str:
    """Return the signed relative error."""
    return "" if not wanted else f"{found / wanted - 1:+.1%}"


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
    wanted: dict[str, tuple[Any, ...]] = {
        "efficiency": (EFFICIENCY, 2400, 1000, 5700, 23_900, 0.006, None),
        "step 100": (STEP_100, 3536, None, None, None, None, 0.885),
    }
    rows: list[Row] = []
    for name, (lengths, mean, p50, p90, p99, capped, idle) in wanted.items():
        found = figures_of(lengths, size=SAMPLES)
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


def ratio_rows(found: Mapping[tuple[str, int], float]) -> list[Row]:
    """Return step times relative to DORA's, from minutes by (row, GPUs)."""
    rows: list[Row] = []
    for other in ("sync", "one-step"):
        for gpus in SIZES:
            ours, theirs = PUBLISHED["dora", gpus].step_min, PUBLISHED[other, gpus].step_min
            wanted = theirs / ours if ours and theirs else None
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
    """Return published and simulated values."""
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
        for one in published_rows(gpus):
            found = simulate_seeds(one, law=law, seeds=seeds, steps=steps)
            rows.append(published_row(one, found, law))
            minutes[one.name, gpus] = found.mean("step_min")
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
    """Yield the requested sections."""
    made: dict[str, Callable[[], Iterable[Table]]] = {
        "lengths": lambda: [lengths_table()],
        "dora": lambda: published_tables(seeds, steps),
    }
    for name in sections:
        yield from made[name]()


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
