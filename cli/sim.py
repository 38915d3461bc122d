"""`python -m sim`: runs in virtual time under faults drawn from a seed."""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
import typer

import dora_pipe
from dora_pipe.cli.lazy import lazy_app
from dora_pipe.cli.options import JsonOption
from dora_pipe.cli.output import emit_json, emit_pairs, emit_table
from dora_pipe.core.console import say
from dora_pipe.core.errors import InvariantBroken, UsageError
from dora_pipe.sim.faults import FAULTS
from dora_pipe.sim.scenario import Scenario, draw
from dora_pipe.sim.seed_runner import Coverage, SeedResult, run_seed

TALK_EVERY: Final = 100

COLLECT_AFTER: Final = (50_000, 20, 100)
"""As the roles have it: Python's collector of cycles looks rarely."""

CHUNK_MAX: Final = 50
"""Seeds that a process plays before the next one begins."""

LOOK_S: Final = 0.2
"""How often it looks whether a process has ended."""


def sim(
    context: typer.Context,
    seed: Annotated[int | None, typer.Option(min=0, help="Play this one and tell of it.")] = None,
    seeds: Annotated[str, typer.Option(help="Play these: A..B, both ends included.")] = "",
    count: Annotated[int, typer.Option(min=1, help="Play so many, from 0.")] = 100,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run, at least.")] = 1,
    resident: Annotated[
        bool, typer.Option("--resident", help="Most workers host several versions at once.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Play runs under faults drawn from seeds; exit code 5 with the seed if anything breaks."""
    if context.invoked_subcommand is not None:
        return
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)  # What breaks here is meant to.
    gc.set_threshold(*COLLECT_AFTER)
    if seed is not None:
        play_one(seed, steps, resident, as_json)
    else:
        first, last = range_of(seeds) if seeds else (0, count - 1)
        play_many((first, last), jobs, steps, resident, as_json)


def bugs(
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run, at least.")] = 1,
) -> None:
    """Plant wrong rules, one at a time, and say which seed finds each; exit code 5 where none
    does."""
    root = Path(dora_pipe.__file__).parent
    if not (root / "tests").is_dir():
        raise UsageError("planted bugs are not installed", hint="run it in a checkout")
    command = [sys.executable, "-m", "tests.support.mutants.command", "--steps", str(steps)]
    raise typer.Exit(subprocess.call(command, cwd=root))


def play_one(seed: int, steps: int, resident: bool, as_json: bool) -> None:
    """Play a seed and tell of it. Raises InvariantBroken."""
    drawn = draw(seed, steps=steps, resident=resident)
    played = run_seed(seed, steps=steps, resident=resident)
    if as_json:
        emit_json(msgspec.to_builtins(played))
    else:
        emit_pairs(_drawn(drawn), title=f"seed {seed}")
        faults = [(name, FAULTS[name], played.faults[name]) for name in sorted(drawn.faults)]
        emit_table(("fault", "what", "struck"), faults)
        emit_pairs(
            {
                "events": played.events,
                "records": played.records,
                "faults": played.faults.total(),
                "steps": played.steps,
                "virtual s": round(played.virtual_s, 1),
                "result": "holds" if played.holds else played.line,
            }
        )
    _raise_if_broken([played])


def play_many(seeds: tuple[int, int], jobs: int, steps: int, resident: bool, as_json: bool) -> None:
    """Play these seeds, both ends included, and sum up. Raises InvariantBroken."""
    coverage = Coverage()
    for played in _played(*seeds, jobs, steps, resident):
        coverage.add(played)
        if as_json:
            emit_json(msgspec.to_builtins(played))
        if not played.holds:
            say(f"seed {played.seed}: {played.line}")
        elif coverage.seeds % TALK_EVERY == 0:
            say(f"{coverage.seeds} seeds, {len(coverage.broken)} broken")
    if not as_json:
        _sum_up(coverage)
    _raise_if_broken(coverage.broken)


def _sum_up(coverage: Coverage) -> None:
    emit_table(("", "met", "times", "seeds"), coverage.rows())
    for name in coverage.unmet():
        say(f"warning: no seed has met: {name}")
    emit_table(
        ("", "min", "mean", "max"),
        [
            (name, min(values), round(statistics.mean(values), 1), max(values))
            for name, values in (
                ("events", coverage.events),
                ("faults", coverage.faults),
                ("steps", coverage.steps),
            )
        ],
    )
    hours, minutes = coverage.virtual_s / 3600, sum(os.times()[:4]) / 60
    say(
        f"{coverage.seeds} seeds, {hours:.1f} virtual hours in {minutes:.1f} CPU minutes, "
        f"{len(coverage.broken)} broken"
    )


def _raise_if_broken(broken: Sequence[SeedResult]) -> None:
    for played in broken:
        if not played.holds:
            raise InvariantBroken(
                f"seed {played.seed}: {played.check}: {played.what}", hint=played.again
            )


def _played(first: int, last: int, jobs: int, steps: int, resident: bool) -> Iterator[SeedResult]:
    """Every seed of a range, in this process or in several."""
    jobs = min(jobs, last - first + 1)
    if jobs == 1:
        for seed in range(first, last + 1):
            yield run_seed(seed, steps=steps, resident=resident)
        return
    size = max(1, min(CHUNK_MAX, -(-(last - first + 1) // jobs)))
    waiting = deque(
        f"{start}..{min(last, start + size - 1)}" for start in range(first, last + 1, size)
    )
    running: deque[tuple[subprocess.Popen[bytes], IO[bytes]]] = deque()
    seen = 0
    while waiting or running:
        if waiting and sum(process.poll() is None for process, _ in running) < jobs:
            running.append(_process(waiting.popleft(), steps, resident))
            continue
        if running[0][0].poll() is None:  # In the order of the seeds; later ones go on meanwhile.
            time.sleep(LOOK_S)
            continue
        _, lines = running.popleft()
        with lines:
            lines.seek(0)
            for line in lines:
                seen += 1
                yield _from_json(json.loads(line))
    if seen != last - first + 1:
        raise InvariantBroken(f"{last - first + 1 - seen} seeds were not played: a process died")


def _process(seeds: str, steps: int, resident: bool) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """A process that plays these seeds, and the file that it tells of them in."""
    lines = tempfile.TemporaryFile()  # noqa: SIM115 - closed by who reads it
    command = [sys.executable, "-P", "-m", "dora_pipe.sim", "--json", "--steps", str(steps)]
    command += ["--resident"] if resident else []
    process = subprocess.Popen(
        [*command, "--seeds", seeds],
        stdin=subprocess.DEVNULL,
        stdout=lines,
        stderr=subprocess.DEVNULL,
    )
    return process, lines


def _from_json(plain: dict[str, Any]) -> SeedResult:
    for name in ("faults", "kinds", "states"):
        plain[name] = Counter(plain[name])
    return SeedResult(**plain)


def _drawn(drawn: Scenario) -> dict[str, Any]:
    config = drawn.config
    staleness, groups, timing = config.staleness, config.groups, config.timing
    first = drawn.workers[: drawn.first]
    return {
        "steps": config.run.steps,
        "max_staleness": staleness.max_staleness,
        "in_flight_batches": staleness.in_flight_batches,
        "groups per step": groups.per_step,
        "group size": groups.size,
        "min valid, attempts": f"{groups.min_valid_siblings}, {groups.attempts_max}",
        "filter": groups.filter_zero_advantage,
        "partitions": config.bus.partitions,
        "versions a worker": ", ".join(str(plan.versions) for plan in first),
        "workers (slots+prefetch)": ", ".join(
            f"{one.name} {one.slots}+{one.prefetch}" for one in first
        ),
        "may join": ", ".join(one.name for one in drawn.workers[drawn.first :]),
        "lease s": timing.lease_s,
        "episodes": drawn.episodes,
        "agents": f"{sum(one.has_agent for one in config.tasks)} of {len(config.tasks)} tasks",
    }


def range_of(text: str) -> tuple[int, int]:
    """The two ends of A..B. Raises UsageError."""
    first, dots, last = text.partition("..")
    if not (dots and first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise UsageError(f"no seeds: {text!r}", hint="for instance --seeds 0..99")
    return int(first), int(last)


app = lazy_app(
    {
        "Commands": {
            "bugs": ("cli.sim:bugs", "Planted bugs, and the seeds that find them."),
        }
    },
    name="sim",
    help="Play runs under faults drawn from seeds; exit code 5 with the seed if anything breaks.",
    callback=sim,
)
