"""`rescore`: asks another reward of all logged texts and says what it would have changed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.audit.line_file import line_of
from dora_pipe.audit.reading import trajectories_of
from dora_pipe.audit.rescore import rescore
from dora_pipe.audit.rescored_file import About, NewReward, RescoredFile
from dora_pipe.audit.rescored_run import DIGITS, EXAMPLES, FOLDER, RescoredRun, rescored_run
from dora_pipe.audit.rescoring import Rescoring
from dora_pipe.bus.logged import Damage
from dora_pipe.catalogue.database import COUNTS, logged_records
from dora_pipe.cli.output import emit_json, emit_line, emit_table, raise_if_damaged, show
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.cli.rescore_groups import ask_groups
from dora_pipe.cli.task_again import TaskAgain, opened_task
from dora_pipe.cli.texts import decoder_of
from dora_pipe.config.model import Config, RewardUse, Task
from dora_pipe.config.several import with_each_task
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.worker.role import worker_config

NAMED: Final = re.compile(r"([A-Za-z0-9_-]+)=(.+)", re.DOTALL)
"""`--reward` of one task; an inline table has its `=` inside."""

INLINE_HINT: Final = (
    '{use = "module:function", weight = 0.2, group = true}, or a list: docs/rewards.md'
)

STEPS_SHOWN: Final = 10
"""In which the rewards differ most; `--json` has every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What was asked, and what of it came to something."""

    folder: Path
    rewards: Mapping[str, NewReward]
    """By trajectory; of siblings that are scored together what they count."""
    asked: int
    """Now; the others were there."""
    groups: int
    """Whose siblings were scored together now."""
    lost: Sequence[str]
    """Trajectories and groups that infrastructure lost, each with why; the same command asks again.
    """


def rescore_run(
    run: OpenRun,
    rewards: Sequence[str],
    *,
    directory: Path | None,
    out: Path | None,
    as_json: bool,
    report: CommandProgress,
) -> None:
    """Ask the rewards of all texts that count and have not been asked, and print the difference.

    Raises UsageError, ConfigError, TaskError, InvariantBroken behind the rest for records that are
    not those that were logged.
    """
    started, _ = policy_after(run.bus, run.topics, 0)
    config = with_rewards(worker_config(started, run.config), rewards, directory)
    damage = Damage()
    with opened_task(run, config, other_rewards=bool(rewards)) as task:
        about = About(
            run=run.topics.run,
            started_ns=started.at_ns,
            reward=" ".join(rewards),
            reward_digest=task.reward_digest,
            package=version("dora-pipe"),
            together=sorted(task.together),
        )
        file = _file(run, about, out)
        alone = _ask(run, task, about, file, damage, report=report, agents=bool(rewards))
        answers = _with_groups(run, task, config, file, alone, report)
    with closing(run.tables()) as tables:
        found = rescored_run(run, tables, about, answers.rewards, partial(decoder_of, run))
    if as_json:
        kept = {
            "folder": str(answers.folder),
            "asked": answers.asked,
            "asked_groups": answers.groups,
            "lost": list(answers.lost),
        }
        emit_json({**found.plain(), **kept})
    else:
        _print(found, answers)
    raise_if_damaged(damage, ", and not asked for")


def with_rewards(config: Config, rewards: Sequence[str], directory: Path | None) -> Config:
    """The configuration with other rewards of its tasks: ``module:function``, a built-in one, or
    what `task.rewards` may be, for all; ``NAME=...`` for the task of that name. Raises UsageError.
    """
    by_name = {"": ""}
    for one in rewards:
        named = NAMED.fullmatch(one)
        by_name["" if named is None else named[1]] = one if named is None else named[2]
    names = {one.name for one in config.tasks} | {""}
    if unknown := sorted(by_name.keys() - names):
        hint = f"one of {', '.join(sorted(names - {''})) or 'none has a name'}"
        raise UsageError(f"no task {unknown[0]!r}", hint=hint)

    def changed(task: Task) -> Task:
        use = by_name.get(task.name) or by_name[""]
        where = task.directory if directory is None else str(directory.resolve())
        if not use:
            return task
        if task.url:
            raise UsageError(
                f"the task at {task.urls[0]} has the reward that its server has",
                hint="serve it with the other reward, and leave out --reward",
            )
        inline = use.startswith(("{", "["))
        uses = _uses(use) if inline else ()
        reward = "" if inline else use
        return msgspec.structs.replace(task, reward=reward, rewards=uses, directory=where)

    return with_each_task(config, changed)


def _uses(words: str) -> tuple[RewardUse, ...]:
    """An inline table, or a list of them, as `task.rewards` has it. Raises UsageError."""
    try:
        found = tomllib.loads(f"rewards = {words}")["rewards"]
        listed = found if isinstance(found, list) else [found]
        return msgspec.convert(listed, tuple[RewardUse, ...])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"--reward {words}: {error}", hint=INLINE_HINT) from None


def _file(run: OpenRun, about: About, out: Path | None) -> RescoredFile:
    """Where the scores of this reward go. Raises UsageError."""
    if not about.reward_digest and out is None:
        raise UsageError(
            "the source of this reward cannot be known, so its scores have no name",
            hint="a folder for them: --out DIR",
        )
    return RescoredFile(out or run.directory.path / FOLDER / about.reward_digest[:DIGITS])


def _ask(
    run: OpenRun,
    task: TaskAgain,
    about: About,
    file: RescoredFile,
    damage: Damage,
    *,
    report: CommandProgress,
    agents: bool,
) -> Answers:
    """Ask for what the file does not have, and write it there, a line each."""
    there = file.begin(about)
    with closing(run.tables()) as tables:
        logged = logged_records(tables, COUNTS)
    left = {place: one for place, one in logged.items() if one.trajectory not in there}
    asked, lost = 0, list[str]()
    again = rescore(
        task.ports,
        trajectories_of(run, dict(left), damage),
        clock=SystemClock(),
        stopped=task.stopped,
        agents=agents,
    )
    with file.append(file.rewards) as lines:
        for one in again:
            asked += 1
            report("asking for rewards", asked, len(left))
            if one.lost:
                lost.append(f"{one.trajectory}: {one.error}")
                continue
            new = NewReward(
                trajectory=one.trajectory, reward=one.found, parts=dict(one.parts), error=one.error
            )
            lines.write(line_of(new))
            there[new.trajectory] = new
    return Answers(folder=file.folder, rewards=there, asked=asked, groups=0, lost=lost)


def _with_groups(
    run: OpenRun,
    task: TaskAgain,
    config: Config,
    file: RescoredFile,
    alone: Answers,
    report: CommandProgress,
) -> Answers:
    """The same, with what siblings count that are scored together."""
    if not task.together:
        return alone
    found = ask_groups(run, task, config.groups, file, alone.rewards, report)
    return replace(
        alone, rewards=found.rewards, groups=found.asked, lost=[*alone.lost, *found.lost]
    )


def _print(one: RescoredRun, answers: Answers) -> None:
    found, digest = one.found, one.about.reward_digest[:DIGITS] or "unknown"
    none = f", {one.without_reward} without a reward" if one.without_reward else ""
    beside = f", {answers.groups} groups of them together" if answers.groups else ""
    emit_line(f"reward       {one.about.reward or 'as the run has it here'}, code {digest}")
    emit_line(f"asked        {answers.asked} texts now{beside}, {len(one.rewards)} in all{none}")
    emit_line(f"written to   {answers.folder}")
    mean = f"mean of training {show(found.old)} -> {show(found.new)}"
    emit_line(f"rewards      {found.differ} of {found.trajectories} differ, {mean}")
    emit_line(f"groups       {_moved(found)}")
    emit_line(f"advantages   {found.signs} of {found.advantages} have another sign")
    first = "none" if found.first is None else f"step {found.first}"
    emit_line(f"first step with another fate or advantage: {first}")
    for line in answers.lost[:EXAMPLES]:
        say(f"not scored: {line}")
    if one.left_out:
        say(f"{one.left_out} groups are left out: not all their siblings have been scored")
    if found.differ:
        _print_tables(found, one.texts)


def _moved(found: Rescoring) -> str:
    moves = sorted(found.moves.items())
    said = ", ".join(f"{count} {old} -> {new}" for (old, new), count in moves)
    return said or "every one has the fate that it had"


def _print_tables(found: Rescoring, texts: Mapping[str, str]) -> None:
    emit_line()
    most = sorted(found.steps, key=lambda one: (-one.signs - one.fates, one.at))[:STEPS_SHOWN]
    emit_table(
        ("step", "trained", "reward then", "now", "other signs", "other fates"),
        [
            (one.at, one.trajectories, one.old, one.new, one.signs, one.fates)
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
        ("trajectory", "then", "now", "its answer ends with"),
        [
            (one.trajectory, one.old, one.new, texts.get(one.trajectory, ""))
            for one in found.examples
        ],
    )
