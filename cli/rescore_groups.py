"""Asks what siblings are worth beside each other, of groups whose rewards alone have been asked;
what it says is kept beside those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from dora_pipe.audit.line_file import line_of
from dora_pipe.audit.reading import trajectories_of
from dora_pipe.audit.rescore_groups import score_groups
from dora_pipe.audit.rescored_file import NewReward, RescoredFile
from dora_pipe.audit.rescored_run import shown_together
from dora_pipe.bus.logged import Damage
from dora_pipe.catalogue.database import COUNTS, logged_records
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.cli.task_again import TaskAgain
from dora_pipe.config.model import Groups
from dora_pipe.core.clock import SystemClock
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.schemas.identity import group_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswers:
    """What was asked of groups, and what came of it."""

    rewards: Mapping[str, NewReward]
    """By trajectory: what counts. Those of groups that were lost are not among them."""
    asked: int
    """Groups, now; the others were there."""
    lost: Sequence[str]
    """Groups that infrastructure lost, each with why."""


def ask_groups(
    run: OpenRun,
    task: TaskAgain,
    rules: Groups,
    file: RescoredFile,
    alone: Mapping[str, NewReward],
    report: CommandProgress,
) -> GroupAnswers:
    """Ask for the groups that the file does not have, and write each there in one piece.

    Raises TaskError, UsageError or ResourceError for the file.
    """
    with closing(run.tables()) as tables:
        shown = shown_together(tables, task.together, rules, alone)
        logged = logged_records(tables, COUNTS)
    there = {name: one for name, one in file.read(file.groups).items() if name in shown}
    sizes, whole = Counter(map(group_of, shown)), Counter(map(group_of, there))
    left = {
        name: one for name, one in shown.items() if whole[group_of(name)] < sizes[group_of(name)]
    }
    groups = len(set(map(group_of, left)))
    records = {place: one for place, one in logged.items() if one.trajectory in left}
    again = score_groups(
        # What is damaged has been named, and has no reward alone.
        task.ports,
        trajectories_of(run, records, Damage()),
        left,
        clock=SystemClock(),
    )
    asked, lost = 0, list[str]()
    with file.append(file.groups) as lines:
        for one in again:
            asked += 1
            report("asking for rewards of groups", asked, groups)
            if one.lost:
                lost.append(f"{one.group}: {one.lost}")
                continue
            lines.write(b"".join(map(line_of, one.siblings)))
            there |= {each.trajectory: each for each in one.siblings}
    counts = {name: one for name, one in alone.items() if name not in shown}
    gone = {line.partition(":")[0] for line in lost}
    kept = {name: one for name, one in there.items() if group_of(name) not in gone}
    return GroupAnswers(rewards=counts | kept, asked=asked, lost=lost)
