"""`replay`: repeat training steps or trajectories; print one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from dora_pipe.analysis.replay import (
    SourceRun,
    StepResult,
    raise_if_diverged,
    replay_steps,
    with_modules,
)
from dora_pipe.analysis.task import chats_of_run
from dora_pipe.audit.replay_trajectory import (
    Regenerated,
    counted_record,
    engines_of,
    pick,
    raise_if_different,
    regenerate,
)
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_line, emit_table, show
from dora_pipe.cli.progress import CommandProgress, opened_watched
from dora_pipe.config.logged import logged_config
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.local_roles import with_engine, without_prefix_cache
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.ledger.database import Catalogue
from dora_pipe.observe.lineage import first_record
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.registry import open_engine

DISTANCES_SHOWN_MAX = 20
METRICS_SHOWN_MAX = 10


def replay(
    run: RunArgument,
    trajectory: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TRAJECTORY", help="Trajectories to generate again; default: repeat steps."
        ),
    ] = None,
    first: Annotated[
        int | None, typer.Option("--from", metavar="A", help="First step; default: 0.")
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("--to", metavar="B", help="End step, exclusive; default: the last."),
    ] = None,
    random: Annotated[
        int, typer.Option("--random", metavar="N", help="Generate N random trajectories again.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random selection.")] = 0,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Repeat steps A to B-1, or trajectories, and compare the bits; exit code 6 if any differs.

    `replay demo g0000000042-003` repeats a trajectory, `replay demo --random 10` ten of them.
    `rescore demo` repeats the rewards.
    """
    if (first is not None or last is not None) and (trajectory or random):
        raise UsageError(
            "TRAJECTORY and --random repeat sampling, --from repeats steps: choose one"
        )
    if first is not None and last is not None and first >= last:
        raise UsageError(f"--from {first} must be below --to {last}")
    with opened_watched(run, root) as (open_run, report):
        if trajectory or random:
            _replay_trajectories(open_run, trajectory or (), random, seed, as_json=as_json)
        else:
            _replay_steps(open_run, first, last, as_json=as_json, report=report)


def _replay_steps(
    run: OpenRun, first: int | None, end: int | None, *, as_json: bool, report: CommandProgress
) -> None:
    source = SourceRun.of(run)
    steps = source.steps(first, end)
    report("repeating steps")
    lines: list[StepResult] = []
    for line in replay_steps(source, steps):
        step = line.replayed
        lines.append(replace(line, replayed=replace(step, contributions=())))
        _print_step(line, as_json=as_json)
        report(f"step {step.step + 1}", max(0, step.step + 1 - steps.start), len(steps))
    _sum_up([line for line in lines if line.wanted])
    for line in lines:
        raise_if_diverged(line)


def rebuilder(run: OpenRun) -> SourceRun:
    """Return a source that rebuilds missing versions and reports each."""
    source = SourceRun.of(run)
    source.on_rebuilt = lambda rebuilt: say(rebuilt.line)
    return source


def _replay_trajectories(
    run: OpenRun, requested: Sequence[str], random: int, seed: int, *, as_json: bool
) -> None:
    from dora_pipe.producers.worker.role import params_by_source

    started = first_record(run.bus, run.topics)
    config = with_modules(logged_config(started.config), run)
    assets = run.policies.assets(started.assets_digest)
    tokenizer = Tokenizer(assets)
    results: list[Regenerated] = []
    with closing(run.tables()) as tables:
        chats = chats_of_run(tables, config, started, assets, tokenizer)
        params = params_by_source(config, tokenizer.stop_ids, chats)
        names = chosen(tables, requested, random, seed)
        for name, trajectories in engines_of(run.bus, run.topics, tables, names).items():
            own = without_prefix_cache(with_engine(config, name or config.workers.engine))
            with closing(
                open_engine(assets=assets, config=own, decode=tokenizer.full_text)
            ) as engine:
                for regenerated in regenerate(
                    run.bus,
                    run.topics,
                    run.policies,
                    tables,
                    engine,
                    trajectories,
                    params,
                    weights_of=rebuilder(run).weights,
                ):
                    results.append(regenerated)
                    _print_trajectory(regenerated, as_json=as_json)
    equal = sum(result.equal for result in results)
    tokens = sum(result.tokens for result in results)
    say(f"{equal} of {len(results)} trajectories bit-equal, {tokens} sampled tokens")
    for regenerated in results:
        raise_if_different(regenerated)


def chosen(tables: Catalogue, names: Sequence[str], random: int, seed: int) -> list[str]:
    """Return named and random trajectories, sorted. Raises UsageError."""
    for name in names:
        counted_record(tables, name)
    return sorted({*names, *(pick(tables, random, seed) if random else ())})


def _print_step(line: StepResult, *, as_json: bool) -> None:
    step = line.replayed
    if as_json:
        emit_json(_step_json(line))
        return
    verdict = "equal" if step.equal else f"DIFFERS, first in {step.tensor}"
    if step.equal and line.metrics:
        verdict = "equal weights, OTHER METRICS"
    lead_in = "" if line.wanted else "  (prefix)"
    ratio = "" if line.time_ratio is None else f" ({line.time_ratio:.2f}x)"
    times = f"{step.compute_s_committed:.3f} s then, {step.compute_s_replayed:.3f} s now{ratio}"
    emit_line(f"step {step.step:>5}  {step.digest_replayed[:16]}  {verdict}  {times}{lead_in}")
    for metric in line.metrics[:METRICS_SHOWN_MAX]:
        emit_line(f"    {metric.line}")
    if more := line.metrics[METRICS_SHOWN_MAX:]:
        emit_line(f"    and {len(more)} more metrics")
    if line.distances:
        rows = [
            (
                distance.tensor,
                distance.differing,
                distance.elements,
                f"{distance.absolute_max:.3e}",
                distance.relative_max,
            )
            for distance in line.distances[:DISTANCES_SHOWN_MAX]
        ]
        emit_table(("tensor", "other bits", "of", "largest distance", "relative"), rows)


def _step_json(line: StepResult) -> Mapping[str, Any]:
    step = line.replayed
    return {
        "step": step.step,
        "wanted": line.wanted,
        "equal": line.equal,
        "weights_equal": step.equal,
        "metrics": [asdict(metric) for metric in line.metrics],
        "digest_committed": step.digest_committed,
        "digest_replayed": step.digest_replayed,
        "tensor": step.tensor,
        "compute_s_committed": step.compute_s_committed,
        "compute_s_replayed": step.compute_s_replayed,
        "other_numerics": step.other_numerics,
        "distances": [asdict(distance) for distance in line.distances],
    }


def _sum_up(lines: Sequence[StepResult]) -> None:
    equal = sum(line.equal for line in lines)
    then_s = sum(line.replayed.compute_s_committed for line in lines)
    now_s = sum(line.replayed.compute_s_replayed for line in lines)
    ratio = f" ({show(now_s / then_s)}x)" if then_s > 0 else ""
    say(
        f"{equal} of {len(lines)} steps bit-equal; "
        f"compute {then_s:.2f} s then, {now_s:.2f} s now{ratio}"
    )


def _print_trajectory(regenerated: Regenerated, *, as_json: bool) -> None:
    if as_json:
        emit_json({**asdict(regenerated), "equal": regenerated.equal})
        return
    verdict = "equal" if regenerated.equal else f"DIFFERS: {regenerated.difference}"
    prefills = f"{regenerated.prefills} prefill{'s' if regenerated.prefills != 1 else ''}"
    emit_line(
        f"{regenerated.trajectory}  version {regenerated.version:>4}"
        f"  {regenerated.tokens:>5} tokens  {prefills}  {verdict}"
    )
