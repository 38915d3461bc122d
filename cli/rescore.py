"""`rescore`: score a run's trajectories with other rewards, or with its own again, and compare."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.analysis.rescore import Rescored, ScoredTogether, rescore
from dora_pipe.analysis.rescored import Comparison, comparison_of, rules_of
from dora_pipe.analysis.task import OpenTask, opened_task, say_other_code, with_rewards
from dora_pipe.audit.line_file import append_lines, line_of, read_lines
from dora_pipe.audit.reading import trajectories_of
from dora_pipe.bus.logged import Damage
from dora_pipe.catalogue.database import COUNTS, Catalogue, logged_records
from dora_pipe.cli.output import emit_json, emit_line, emit_table, raise_if_damaged, show
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.core.errors import ReplayDiverged, ResourceError
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.worker.role import worker_config
from dora_pipe.schemas.identity import group_of, source_of
from dora_pipe.schemas.wire import sha256_hex

FOLDER: Final = "rescored"
"""Folder in a run's directory with one file per reward."""

STEPS_SHOWN: Final = 10
LINES_MAX: Final = 20
"""Lost trajectories, and those that differ, that are named."""

ENDED: Final = """
    select purpose, case purpose when 'eval' then evaluation else task end, size, group_id,
           list(trajectory_id), list(t.reward), list(group_parts)
    from groups join trajectories t using (group_id)
    where own_fate is null and record_offset is not null
      and fate in ('trained', 'filtered', 'failed', 'evaluated')
    group by all order by group_id"""


class RescoredLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the file: read by `retrain --rewards`, with parts and errors."""

    trajectory: str
    reward: float | None
    parts: dict[str, float] = {}
    error: str = ""


def rescore_run(
    run: OpenRun,
    rewards: Sequence[str],
    *,
    directory: Path | None,
    out: Path | None,
    groups: int,
    seed: int,
    as_json: bool,
    report: CommandProgress,
) -> None:
    """Score the trajectories that the file lacks, and print the comparison.

    With the run's own reward all are scored anew. Raises ReplayDiverged, last, where it gives
    other results; UsageError, ConfigError, TaskError; InvariantBroken for damaged records.
    """
    started, _ = policy_after(run.bus, run.topics, 0)
    config = with_rewards(worker_config(started, run.config), rewards, directory)
    damage, found = Damage(), list[Rescored]()
    with opened_task(run, config, other_rewards=bool(rewards)) as task:
        if not rewards:
            say_other_code("reward's code", task.recorded, task.reward_digest)
        key = [started.at_ns, *rewards, task.reward_digest]
        name = sha256_hex(msgspec.json.encode(key))[:12] if rewards else "own"
        file = out or run.directory.path / FOLDER / f"{name}.jsonl"
        resumed = bool(rewards and task.reward_digest and out is None)
        with closing(run.tables()) as tables:
            together = scored_together(tables, task.together)
            names = _chosen(tables, groups, seed)
        scored = _begin(file, together, resumed=resumed)
        with append_lines(file) as lines:
            for one in _asked(run, task, names - scored.keys(), together, damage, bool(rewards)):
                found.append(one)
                report("scoring", len(found), len(names) - len(scored))
                if not one.lost:
                    lines.write(line_of(_line(one)))
    scored |= {one.trajectory: one.reward for one in found if not one.lost}
    with closing(run.tables()) as tables:
        comparison = comparison_of(tables, scored)
    different = [one for one in found if one.difference] if not rewards else []
    if as_json:
        plain = {"file": str(file), "scored": len(found), "compared": not rewards}
        emit_json({**plain, "different": [*map(_plain, different)], **comparison.plain()})
    else:
        _print(comparison, file, len(found), different, own=not rewards)
    for lost in [one for one in found if one.lost][:LINES_MAX]:
        say(f"not scored: {lost.trajectory}: {lost.error}")
    raise_if_damaged(damage, ", and not scored")
    if different:
        raise ReplayDiverged(
            f"{len(different)} of {len(found)} trajectories differ, first {different[0].trajectory}"
            f": {different[0].difference}",
            hint="a task that is not deterministic differs by itself",
        )


def scored_together(tables: Catalogue, sources: frozenset[str]) -> dict[str, ScoredTogether]:
    """Return the groups that have ended and whose sources are scored together, by id."""
    rules, found = rules_of(tables), dict[str, ScoredTogether]()
    for purpose, name, size, group, names, rewards, parts in tables.query(ENDED):
        if source_of(purpose, name) in sources:
            recorded = {
                each: (reward, msgspec.json.decode(of_group, type=dict[str, float]))
                for each, reward, of_group in zip(names, rewards, parts, strict=True)
                if of_group is not None
            }
            valid_min = 1 if purpose == "eval" else min(rules.min_valid_siblings, size)
            found[group] = ScoredTogether(size=len(names), valid_min=valid_min, recorded=recorded)
    return found


def _chosen(tables: Catalogue, groups: int, seed: int) -> set[str]:
    """Return the trajectories that count, or those of so many random groups."""
    names = {one.trajectory for one in logged_records(tables, COUNTS).values()}
    if groups:
        all_ = sorted({group_of(name) for name in names})
        chosen = set(random.Random(seed).sample(all_, min(groups, len(all_))))
        names = {name for name in names if group_of(name) in chosen}
    return names


def _begin(
    file: Path, together: Mapping[str, ScoredTogether], *, resumed: bool
) -> dict[str, float | None]:
    """Make the file, or return what an earlier command scored; groups count as a whole."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not resumed:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise ResourceError(f"{file}: {error.strerror or error}") from error
    lines = read_lines(file, RescoredLine, hint="delete the file")
    found = {one.trajectory: one.reward for one in lines}
    counts: dict[str, int] = {}
    for name in found:
        counts[group_of(name)] = counts.get(group_of(name), 0) + 1
    return {
        name: reward
        for name, reward in found.items()
        if (group := together.get(group_of(name))) is None or counts[group_of(name)] == group.size
    }


def _asked(
    run: OpenRun,
    task: OpenTask,
    names: set[str],
    together: Mapping[str, ScoredTogether],
    damage: Damage,
    agents: bool,
) -> Iterator[Rescored]:
    with closing(run.tables()) as tables:
        logged = logged_records(tables, COUNTS)
    left = {place: one for place, one in logged.items() if one.trajectory in names}
    return rescore(
        task.ports,
        trajectories_of(run, left, damage),
        clock=SystemClock(),
        stopped=task.stopped,
        together=together,
        agents=agents,
    )


def _line(one: Rescored) -> RescoredLine:
    return RescoredLine(
        trajectory=one.trajectory, reward=one.reward, parts=dict(one.parts), error=one.error
    )


def _plain(one: Rescored) -> dict[str, Any]:
    return {name: getattr(one, name) for name in ("trajectory", "recorded", "reward", "difference")}


def _print(
    found: Comparison, file: Path, scored: int, different: Sequence[Rescored], *, own: bool
) -> None:
    for one in different[:LINES_MAX]:
        emit_line(f"{one.trajectory}  DIFFERS: {one.difference}")
    if own:
        emit_line(f"compared     {scored - len(different)} of {scored} trajectories as recorded")
    emit_line(f"scored       {scored} trajectories now, {found.trajectories} in all")
    emit_line(f"written to   {file}")
    mean = f"mean of training {show(found.old)} -> {show(found.new)}"
    emit_line(f"rewards      {len(found.differ)} of {found.trajectories} differ, {mean}")
    moves: dict[str, int] = {}
    for group in found.outcomes:
        key = f"{group.old} -> {group.new}"
        moves[key] = moves.get(key, 0) + 1
    words = ", ".join(f"{count} {key}" for key, count in sorted(moves.items()))
    emit_line(f"outcomes     {words or 'equal for every group'}")
    emit_line(f"advantages   {len(found.signs)} of {found.advantages} have another sign")
    if found.first is not None:
        emit_line(f"first step with another outcome or advantage: {found.first}")
    if found.left_out:
        say(f"{found.left_out} groups are left out: not all their trajectories are scored")
    if found.differ:
        _print_tables(found)


def _print_tables(found: Comparison) -> None:
    emit_line()
    most = sorted(found.steps, key=lambda one: (-one.signs - one.outcomes, one.at))[:STEPS_SHOWN]
    emit_table(
        ("step", "trained", "reward then", "now", "other signs", "other outcomes"),
        [
            (one.at, one.trajectories, one.old, one.new, one.signs, one.outcomes)
            for one in sorted(most, key=lambda one: one.at)
        ],
    )
    if found.evaluations:
        emit_line()
        emit_table(
            ("evaluation", "version", "trajectories", "reward then", "now"),
            [(one.name, one.at, one.trajectories, one.old, one.new) for one in found.evaluations],
        )
    emit_line()
    emit_table(
        ("trajectory", "then", "now"),
        [(one.trajectory, one.old, one.new) for one in found.examples],
    )
