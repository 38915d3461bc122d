"""`rescore`: score a run's trajectories with other or its own rewards, and compare."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from dora_pipe.analysis.change import RewardLine, write_rewards
from dora_pipe.analysis.rescore import Rescored
from dora_pipe.analysis.rescore import rescore as rescored_of
from dora_pipe.analysis.rescored import Comparison, comparison_of, scored_together
from dora_pipe.analysis.task import opened_task, say_other_code, with_rewards
from dora_pipe.audit.reading import trajectories_of
from dora_pipe.bus.logged import Damage
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_line, emit_table, raise_if_damaged, show
from dora_pipe.cli.progress import CommandProgress, opened_watched
from dora_pipe.core.errors import ReplayDiverged, ResourceError
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.ledger.database import COUNTS, logged_records
from dora_pipe.observe.lineage import first_record
from dora_pipe.producers.worker.role import worker_config

FOLDER: Final = "rescored"

OWN: Final = "own"

NAME_CHARACTERS: Final = 60
LINES_MAX: Final = 20


class RescoredLine(RewardLine, frozen=True, kw_only=True, omit_defaults=True):
    """Line of the file; contains components or the reason for a missing reward."""

    parts: dict[str, float] = msgspec.field(default_factory=dict)
    error: str = ""


def rescore(
    run: RunArgument,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="USE",
            help="Reward of every task: module:function, a built-in one, or a value of "
            "`task.reward`; NAME=USE sets one task. Default: the run's reward, with local code.",
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Import directory; default: the run's.")
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Score all logged texts with another reward and report outcomes and advantage signs that
    differ. Without --reward, check the run's own rewards; exit code 6 if they differ.
    """
    with opened_watched(run, root) as (open_run, report):
        _rescore(open_run, reward or (), directory, report, as_json=as_json)


def _rescore(
    run: OpenRun,
    rewards: Sequence[str],
    directory: Path | None,
    report: CommandProgress,
    *,
    as_json: bool,
) -> None:
    started = first_record(run.bus, run.topics)
    config = with_rewards(worker_config(started, run.config), rewards, directory)
    file = run.directory.path / FOLDER / f"{_name_of(rewards)}.jsonl"
    damage, rescored = Damage(), list[Rescored]()
    with opened_task(run, config, other_rewards=bool(rewards)) as task:
        if not rewards:
            say_other_code("reward's code", task.recorded, task.reward_digest)
        with closing(run.tables()) as tables:
            together = scored_together(tables, task.together)
            logged = logged_records(tables, COUNTS)
        results = rescored_of(
            task.ports,
            trajectories_of(run.bus, run.topics, logged.values(), damage),
            clock=SystemClock(),
            stopped=task.stopped,
            together=together,
            agents=bool(rewards),
        )
        _write(file, _noted(results, rescored, len(logged), report))
    with closing(run.tables()) as tables:
        scored = {result.trajectory: result.reward for result in rescored if not result.lost}
        comparison = comparison_of(tables, scored)
    different = [result for result in rescored if result.difference and not rewards]
    if as_json:
        differences = {result.trajectory: result.difference for result in different}
        emit_json({"file": str(file), "differences": differences, **comparison.plain()})
    else:
        if not rewards:
            _print_own(rescored, different)
        _print(comparison, file, len(scored))
    for lost in [result for result in rescored if result.lost][:LINES_MAX]:
        say(f"not scored: {lost.trajectory}: {lost.error}")
    raise_if_damaged(damage, ", and not scored")
    if different:
        first = different[0]
        raise ReplayDiverged(
            f"{len(different)} of {len(rescored)} trajectories differ, first {first.trajectory}:"
            f" {first.difference}",
            hint="a nondeterministic task also differs without a change",
        )


def _noted(
    results: Iterable[Rescored], rescored: list[Rescored], total: int, report: CommandProgress
) -> Iterator[RescoredLine]:
    for result in results:
        rescored.append(result)
        report("scoring", len(rescored), total)
        if not result.lost:
            yield RescoredLine(
                trajectory=result.trajectory,
                reward=result.reward,
                parts=dict(result.parts),
                error=result.error,
            )


def _write(file: Path, lines: Iterable[RescoredLine]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_rewards(file, lines)
    except OSError as error:
        raise ResourceError(f"{file}: {error.strerror or error}") from error


def _name_of(rewards: Sequence[str]) -> str:
    words = re.sub(r"[^A-Za-z0-9_.]+", "-", " ".join(rewards)).strip("-.")
    return words[:NAME_CHARACTERS] or OWN


def _print_own(rescored: Sequence[Rescored], different: Sequence[Rescored]) -> None:
    for result in different[:LINES_MAX]:
        emit_line(f"{result.trajectory}  DIFFERS: {result.difference}")
    skipped = sum(bool(result.not_compared) for result in rescored)
    equal = len(rescored) - len(different) - skipped
    rest = f", {skipped} not compared" if skipped else ""
    emit_line(f"compared     {equal} of {len(rescored)} trajectories as recorded{rest}")


def _print(comparison: Comparison, file: Path, scored: int) -> None:
    emit_line(
        f"scored       {scored} trajectories, {comparison.trajectories} of groups that have ended"
    )
    emit_line(f"written to   {file}")
    mean = f"mean of training {show(comparison.old)} -> {show(comparison.new)}"
    emit_line(f"rewards      {len(comparison.differ)} of {comparison.trajectories} differ, {mean}")
    moves = Counter(f"{group.old} -> {group.new}" for group in comparison.outcomes)
    words = ", ".join(f"{count} {move}" for move, count in sorted(moves.items()))
    emit_line(f"outcomes     {words or 'equal for every group'}")
    emit_line(f"advantages   {len(comparison.signs)} of {comparison.advantages} have another sign")
    if comparison.first is not None:
        emit_line(f"first step with another outcome or advantage: {comparison.first}")
    if comparison.left_out:
        say(f"{comparison.left_out} groups are left out: not all their trajectories are scored")
    if comparison.differ:
        emit_line()
        emit_table(("trajectory", "reward then", "now"), comparison.differ[:LINES_MAX])
