"""Play simulated runs with faults drawn from seeds."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import DoraError, InvariantBroken, UsageError
from dora_pipe.core.system.console import complain, say, speak
from dora_pipe.sim.faults import FAULTS
from dora_pipe.sim.scenario import draw
from dora_pipe.sim.seed_runner import Coverage, SeedResult, run_seed

TALK_EVERY: Final = 100
COLLECT_AFTER: Final = (50_000, 20, 100)
CHUNK_MAX: Final = 50
"""Seeds per process."""


def settle() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)
    gc.set_threshold(*COLLECT_AFTER)


def play_one(seed: int, steps: int, *, as_json: bool) -> SeedResult:
    drawn, played = draw(seed, steps=steps), run_seed(seed, steps=steps)
    if as_json:
        _print(msgspec.json.encode(played).decode())
        return played
    config = drawn.config
    rollout, max_staleness = config.rollout, config.staleness.max_staleness
    _print(
        f"seed {seed}: {config.run.steps} steps of {rollout.prompts_per_step} groups of"
        f" {rollout.group_size},"
    )
    _print(f"  max_staleness {max_staleness}, workers and faults:")
    for plan in drawn.workers:
        several = f", {plan.versions} versions" if plan.versions > 1 else ""
        _print(f"  {plan.name}: {plan.slots} slots, {plan.prefetch} ahead{several}")
    for name in sorted(drawn.faults):
        _print(f"  {name:20} {played.faults[name]:5}  {FAULTS[name]}")
    _print(
        f"{played.events} events, {played.records} records, {played.steps} steps,"
        f" {played.virtual_s:.1f} virtual s: {'holds' if played.holds else played.line}"
    )
    return played


def play_many(seeds: range, jobs: int, steps: int, *, as_json: bool) -> list[SeedResult]:
    """Play seeds and print coverage; return the broken ones."""
    coverage = Coverage()
    for played in _played(seeds, jobs, steps):
        coverage.add(played)
        if as_json:
            _print(msgspec.json.encode(played).decode())
        if not played.holds:
            say(f"seed {played.seed}: {played.line}")
        elif coverage.seeds % TALK_EVERY == 0:
            say(f"{coverage.seeds} seeds, {len(coverage.broken)} broken")
    if not as_json:
        for sort, name, times, many in coverage.rows():
            _print(f"{sort:12} {name:32} {times:9} times in {many:6} seeds")
    for name in coverage.unmet():
        say(f"warning: no seed has met: {name}")
    hours = coverage.virtual_s / 3600
    say(f"{coverage.seeds} seeds, {hours:.1f} virtual hours, {len(coverage.broken)} broken")
    return coverage.broken


def _played(seeds: range, jobs: int, steps: int) -> Iterator[SeedResult]:
    if jobs == 1:
        yield from (run_seed(seed, steps=steps) for seed in seeds)
        return
    size = max(1, min(CHUNK_MAX, -(-len(seeds) // jobs)))
    chunks = [seeds[index : index + size] for index in range(0, len(seeds), size)]
    with ThreadPoolExecutor(jobs) as threads:
        for results in threads.map(_run_apart, chunks, [steps] * len(chunks)):
            yield from results


def _run_apart(seeds: range, steps: int) -> list[SeedResult]:
    """Play seeds in another process. Raises InvariantBroken if it dies."""
    words = ["--json", "--steps", str(steps), "--seeds", f"{seeds[0]}..{seeds[-1]}"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dora_pipe.sim", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    results = [_from_json(json.loads(line)) for line in done.stdout.splitlines()]
    if len(results) != len(seeds):
        raise InvariantBroken(f"a process died, and {len(seeds) - len(results)} seeds with it")
    return results


def _from_json(plain: dict[str, Any]) -> SeedResult:
    for name in ("faults", "kinds", "states"):
        plain[name] = Counter(plain[name])
    return SeedResult(**plain)


def range_of(text: str) -> range:
    """Return the seeds of A..B, both included. Raises UsageError."""
    first, dots, last = text.partition("..")
    if not (dots and first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise UsageError(f"no seeds: {text!r}", hint="for instance --seeds 0..99")
    return range(int(first), int(last) + 1)


def at_least_1(text: str) -> int:
    """Parse a number >= 1. Raises ArgumentTypeError."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text}")
    return int(text)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 5 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="Seed to play and describe.")
    parser.add_argument("--seeds", help="Seeds to play: A..B, inclusive.")
    parser.add_argument(
        "--count", type=at_least_1, default=100, help="Number of seeds to play, from 0."
    )
    parser.add_argument("--jobs", type=at_least_1, default=1, help="Processes.")
    parser.add_argument("--steps", type=at_least_1, default=1, help="Minimum steps of a run.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object per seed.")
    given = parser.parse_args(arguments)
    speak()
    settle()
    try:
        if given.seed is not None:
            broken = [play_one(given.seed, given.steps, as_json=given.json)]
        else:
            seeds = range_of(given.seeds) if given.seeds else range(given.count)
            broken = play_many(seeds, given.jobs, given.steps, as_json=given.json)
        for played in broken:
            if not played.holds:
                what = f"seed {played.seed}: {played.check}: {played.what}"
                raise InvariantBroken(what, hint=played.again)
    except DoraError as error:
        complain(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
