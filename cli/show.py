"""`show`: a run or step on one screen; a group or trajectory in full."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dora_pipe.audit.effective_config import config_drift
from dora_pipe.audit.export import best_version
from dora_pipe.cli.options import RUN_HELP, JsonOption, RunsOption
from dora_pipe.cli.output import (
    emit_flow,
    emit_json,
    emit_line,
    emit_pairs,
    emit_rows,
    emit_table,
    flow,
    show,
    takes_unicode,
    terminal_columns,
)
from dora_pipe.cli.texts import source_of
from dora_pipe.core.errors import DoraError, InvariantBroken
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.run_dir import OpenRun, RunDir, opened
from dora_pipe.ledger.account import mean
from dora_pipe.ledger.evaluations import Evaluated, Interval, evaluations_of
from dora_pipe.ledger.marks import Mark
from dora_pipe.observe.describe import DAMAGE, TRACE, Description, describe
from dora_pipe.observe.run_stats import RunStats, StepStats
from dora_pipe.observe.text import counted, duration, sparkline
from dora_pipe.observe.top import frame
from dora_pipe.observe.traces import tree
from dora_pipe.observe.waits import RoleWaits, Summary, summarise
from dora_pipe.observe.web.view import view_of
from dora_pipe.schemas.control import by_fault

CURVE_MAX: Final = 60
"""Width of the reward curve; longer runs average neighboring steps."""

LABEL: Final = 40

WORST: Final = 3

WORST_COLUMNS: Final = (
    *("trajectory", "version", "reward", "advantage", "tokens", "ratio_min", "ratio_max"),
    "clipped_share",
)

GROUP_LINES: Final = 3

METRICS: Final = (
    *("reward_mean", "loss", "grad_norm", "ratio_mean", "ratio_min", "ratio_max", "clipped_share"),
    *("entropy", "truncated", "kl", "teacher_kl", "tokens", "updates", "staleness_mean"),
    "without_gradient",
)
"""Shown without `--all`."""

CELL_CHARACTERS_MAX: Final = 600

EVALUATIONS_SHOWN: Final = 3
"""First and newest versions, besides the best."""

MARKS_SHOWN: Final = 2


def show_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help=f"{RUN_HELP} Default: list all runs.")
    ] = "",
    identifier: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="Trajectory (g0000000042-003), group or step; default: the run."
        ),
    ] = "",
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Show all evaluations and changes, or all trajectories of a step."
        ),
    ] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Show the progress of a run, or the lineage of a step, group or trajectory.

    Without a run: list the runs on this machine.
    """
    if not run:
        columns = ("run", "state", "steps", "of", "task", "log")
        emit_rows(columns, run_rows(root), as_json=as_json)
        return
    with opened(run, root) as open_run:
        if drift := config_drift(open_run.bus, open_run.topics, open_run.config):
            say(f"differs from the run's configuration: {drift.line}")
        if identifier:
            _show_id(open_run, identifier, everything=everything, as_json=as_json)
        elif as_json:
            emit_json(overview(open_run).plain())
        else:
            print_overview(overview(open_run), everything=everything)


def run_rows(root: Path) -> list[dict[str, Any]]:
    """Return a row per run; unreadable runs give the reason."""
    rows = []
    for path in sorted(root.glob("*/config.toml")):
        try:
            with opened(RunDir(path.parent).words) as run:
                rows.append(_run_row(run))
        except DoraError as error:
            rows.append({"run": path.parent.name, "state": f"unreadable: {error.message}"})
    return rows


def _run_row(run: OpenRun) -> dict[str, Any]:
    stats = RunStats(run.topics.run)
    stats.read(run.bus, run.topics, statuses=False)
    return {
        "run": run.config.run.name,
        "steps": stats.version,
        "reward": stats.steps[-1].reward if stats.steps else None,
        "of": run.config.run.steps,
        "task": ", ".join(task.name or task.kind for task in run.config.tasks),
        "log": run.directory.bus_url(run.config),
        "state": stats.state,
    }


def _show_id(run: OpenRun, identifier: str, *, everything: bool, as_json: bool) -> None:
    with closing(run.tables()) as tables:
        view = view_of(tables, run.topics.run)
        description = describe(view, source_of(run), identifier)
    if as_json:
        emit_json(description)
    elif "metrics" in description and not everything:  # of a step
        print_step(description, run.topics.run)
    else:
        print_description(description)
    for defect in description.get(DAMAGE, ()):
        raise InvariantBroken(defect["what"], hint="`dora-pipe audit` checks the whole log")


# A run.


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A run, from its log."""

    stats: RunStats
    waits: Summary
    evaluations: list[Evaluated]
    log: str
    state: str
    best: tuple[int, float] | None
    """Version and its reward, if an evaluation determines it."""
    agents: tuple[int, float, float] | None
    """Trajectories with agent calls, and their mean calls and contexts."""
    selection: Sequence[Mapping[str, Any]]
    """Rows of the view `selection`, if some trajectories were not waited for."""

    def plain(self) -> dict[str, Any]:
        stats, evaluated = self.stats, self.stats.evaluated.values()
        return {
            "run": stats.run,
            "state": self.state,
            "log": self.log,
            "steps": stats.version,
            "steps_planned": stats.steps_planned,
            "rewards": [step.reward for step in stats.steps],
            "task_rewards": [dict(step.task_rewards) for step in stats.steps],
            "parts": [step.parts for step in stats.steps],
            "evaluation": next(
                (
                    {"version": evaluation.version, "reward": evaluation.reward}
                    for evaluation in evaluated
                ),
                None,
            ),
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
            "best": None
            if self.best is None
            else dict(zip(("version", "reward"), self.best, strict=True)),
            "staleness": dict(staleness(stats)),
            "bound": stats.bound,
            "groups": dict(stats.outcomes),
            "selection": list(self.selection),
            "errors": dict(stats.errors),
            "faults": by_fault(stats.errors),
            "step_errors": [dict(step.errors) for step in stats.steps],
            "waits": asdict(self.waits),
            "marks": [asdict(mark) for mark in stats.marks],
            **({"agents": dict(zip(_AGENTS, self.agents, strict=True))} if self.agents else {}),
        }


_AGENTS: Final = ("trajectories", "calls", "contexts")


def overview(run: OpenRun) -> Overview:
    """Read the log. Raises BusError, LogTruncated."""
    stats = RunStats(run.topics.run)
    stats.read(run.bus, run.topics)
    with closing(run.tables()) as tables:
        waits = summarise(run.bus, run.topics, tables)
        best = best_version(tables, run.config)
        evaluations = evaluations_of(tables)
        agents = tables.one(
            "select count(*), avg(calls), avg(contexts) from trajectories where calls > 0"
        )
        selection = tables.records("select * from selection")
    return Overview(
        stats=stats,
        waits=waits,
        evaluations=evaluations,
        best=best,
        agents=(agents[0], agents[1], agents[2]) if agents and agents[0] else None,
        selection=selection,
        log=run.directory.bus_url(run.config),
        state=frame(stats, time.time_ns()).head.partition(": ")[2],
    )


def staleness(stats: RunStats) -> list[tuple[int, int]]:
    """Return (staleness, groups) of the kept steps."""
    counts: Counter[int] = Counter()
    for step in stats.steps:
        counts.update(dict(step.staleness))
    return sorted(counts.items())


def print_overview(overview: Overview, *, everything: bool = False) -> None:
    """Print a run; `everything` includes every evaluation and mark."""
    stats = overview.stats
    emit_line(f"{stats.run}: {overview.state}")
    emit_line()
    pairs = {"log": overview.log, "task": _task(stats), "reward": _reward(list(stats.steps))}
    if stats.errors:
        share = stats.errors.total() / max(1, stats.trajectories.total())
        pairs["no reward"] = f"{share:.1%} of the trajectories; {_errors(stats.errors)}"
    if stats.steps and any(len(part) > 1 for part in stats.steps[-1].parts.values()):
        pairs["parts"] = _parts(stats.steps[-1])
    if stats.steps and stats.steps[-1].task_rewards:
        last = stats.steps[-1].task_rewards
        pairs["of tasks"] = ", ".join(f"{name} {value:.3f}" for name, value in last)
    if overview.best is not None:
        version, reward = overview.best
        pairs["best"] = f"version {version}, {reward:.3f}"
    if overview.agents is not None:
        pairs["agents"] = "{:.0f} trajectories, {:.1f} calls and {:.1f} contexts each".format(
            *overview.agents
        )
    pairs["staleness"] = _staleness(stats)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in stats.outcomes.most_common())
    pairs["groups"] = f"{outcomes or 'none has ended'}; {len(stats.account.open)} open"
    pairs["steps"] = _steps(list(stats.steps))
    pairs |= _marks(stats.marks, everything=everything)
    emit_pairs(pairs)
    emit_line()
    print_evaluations(overview.evaluations, everything=everything)
    _print_selection(overview.selection)
    waits = [_waited(role) for role in overview.waits.shown]
    emit_table(("role", "waited", "share", "most of it for"), waits)
    say(f"next: dora-pipe show {stats.run} STEP, dora-pipe why {stats.run}")


def _print_selection(rows: Sequence[Mapping[str, Any]]) -> None:
    if all(row["outcome"] == "trained" for row in rows):
        return

    def mean_of(row: Mapping[str, Any], name: str) -> str:
        value, error = row[name], row[f"{name}_error"]
        return show(value) + ("" if error is None else f" ± {error:.2g}")

    emit_table(
        ("outcome", "trajectories", "sampled tokens", "reward", "seconds"),
        [
            (
                *(row["outcome"], row["trajectories"]),
                *(mean_of(row, name) for name in ("tokens", "reward", "seconds")),
            )
            for row in rows
        ],
        title="trained and unused trajectories (means, 95 % intervals)",
    )
    emit_line()


MARKS: Final = {"setting": "changed", "resumed": "stopped"}
"""Row names by kind of mark."""


def _marks(marks: Iterable[Mark], *, everything: bool) -> dict[str, str]:
    rows: dict[str, list[str]] = {}
    for mark in marks:
        short = f"step {mark.step}: {mark.subject} {mark.kind}"
        line = mark.line if everything or mark.kind in MARKS else short
        rows.setdefault(MARKS.get(mark.kind, "roles"), []).append(line)
    shown = {name: lines if everything else lines[-MARKS_SHOWN:] for name, lines in rows.items()}
    counts = {name: len(rows[name]) - len(lines) for name, lines in shown.items()}
    earlier = {name: f"; {count} earlier (--all)" for name, count in counts.items() if count}
    return {name: "; ".join(lines) + earlier.get(name, "") for name, lines in shown.items()}


def shown_evaluations(evaluations: Sequence[Evaluated]) -> list[Evaluated]:
    """Return `EVALUATIONS_SHOWN` versions of each evaluation: first, newest, best, then newer."""
    places: dict[str, list[int]] = {}
    for index, evaluation in enumerate(evaluations):
        places.setdefault(evaluation.evaluation, []).append(index)
    best = _best_of(evaluations)
    kept: set[int] = set()
    for name, of_name in places.items():
        top = [index for index in of_name if evaluations[index].version == best.get(name)]
        by_rank = dict.fromkeys([of_name[0], of_name[-1], *top, *reversed(of_name)])
        kept.update(itertools.islice(by_rank, EVALUATIONS_SHOWN))
    return [evaluation for index, evaluation in enumerate(evaluations) if index in kept]


def _best_of(evaluations: Sequence[Evaluated]) -> dict[str, int]:
    best: dict[str, tuple[int, float, int]] = {}
    for evaluation in evaluations:
        mean = next((v.value for k, v in evaluation.metrics.items() if k.startswith("mean@")), None)
        if (
            mean is not None
            and (evaluation.prompts, mean) > best.get(evaluation.evaluation, (0, -math.inf))[:2]
        ):
            best[evaluation.evaluation] = (evaluation.prompts, mean, evaluation.version)
    return {name: version for name, (*_, version) in best.items()}


def print_evaluations(evaluations: Sequence[Evaluated], *, everything: bool) -> None:
    """Print evaluations with confidence intervals; omit a component that is the whole reward."""
    if not evaluations:
        return
    shown = list(evaluations) if everything else shown_evaluations(evaluations)
    count = len(evaluations) - len(shown)
    left_out = f"; {counted(count, 'evaluation')} left out (--all)" if count else ""
    best = _best_of(evaluations)
    metrics = list(dict.fromkeys(name for evaluation in shown for name in evaluation.metrics))
    parts = [name for name in metrics if name.startswith("part/")]
    metrics = [name for name in metrics if name not in parts]
    named = any(evaluation.evaluation for evaluation in shown)
    for names, title in ((metrics, "evaluations"), (parts, "parts of their rewards")):
        rows = [
            (
                f"{evaluation.version} (best)"
                if best.get(evaluation.evaluation) == evaluation.version
                else evaluation.version,
                *([evaluation.evaluation] if named else []),
                evaluation.prompts,
                *(_interval(evaluation.metrics.get(name)) for name in names),
            )
            for evaluation in shown
        ]
        columns = ("version", *(["evaluation"] if named else []), "prompts")
        heads = (name.removeprefix("part/") for name in names)
        if names and (names is metrics or len(names) > 1):
            title = f"{title}, with 95 % intervals over prompts{left_out}"
            emit_table((*columns, *heads), rows, title=title)
            emit_line()


def _interval(interval: Interval | None) -> str:
    return (
        "" if interval is None else f"{interval.value:.3f} ({interval.low:.2f}-{interval.high:.2f})"
    )


def _waited(waits: RoleWaits) -> tuple[str, str, str, str]:
    most = ""
    if waits.waits:
        _, cause, seconds = waits.waits[0]
        most = f"{cause}: {duration(seconds)}"
    return waits.role, duration(waits.waited_s), f"{waits.share(waits.waited_s):.0%}", most


def _task(stats: RunStats) -> str:
    config = {} if stats.started is None else stats.started.config
    rollout, workers = config.get("rollout", {}), config.get("workers", {})
    sections = [config.get("task", {}), *config.get("more_tasks", ())]
    tasks = [str(section.get("name") or section.get("kind", "?")) for section in sections]
    return (
        f"{', '.join(tasks) or '?'}, {rollout.get('prompts_per_step', '?')} groups of "
        f"{rollout.get('group_size', '?')} a step, {workers.get('count', '?')} workers"
    )


def _reward(steps: list[StepStats]) -> str:
    rewards = [step.reward for step in steps if step.reward is not None]
    if not rewards:
        return "no step yet"
    width = terminal_columns()
    room = CURVE_MAX if width is None else max(8, min(CURVE_MAX, width - LABEL))
    curve = sparkline(_shared(rewards, room), plain=not takes_unicode())
    return f"{rewards[0]:.3f} {curve} {rewards[-1]:.3f} at step {steps[-1].step}"


def _errors(errors: Mapping[str, int]) -> str:
    return "; ".join(
        f"{fault}: {', '.join(f'{count} {name}' for name, count in Counter(of).most_common())}"
        for fault, of in by_fault(errors).items()
        if of
    )


def _parts(step: StepStats) -> str:
    parts = (
        (f"{task}: " if task else "")
        + ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
        for task, parts in step.parts.items()
    )
    return "; ".join(parts)


def _shared(values: list[float], most: int) -> list[float]:
    if len(values) <= most:
        return values
    edges = [len(values) * index // most for index in range(most + 1)]
    pieces = [values[low:high] for low, high in pairwise(edges)]
    return [sum(piece) / len(piece) for piece in pieces]


def _staleness(stats: RunStats) -> str:
    counts = staleness(stats)
    total = sum(count for _, count in counts) or 1
    text = ", ".join(f"{value}: {count / total:.0%}" for value, count in counts)
    bound = "" if stats.bound is None else f" (bound {stats.bound})"
    return f"{text or 'no step yet'}{bound}"


def _steps(steps: list[StepStats]) -> str:
    timed = [step for step in steps if step.seconds is not None]
    if not timed:
        return "no step was timed"
    lasted = sum(step.seconds or 0.0 for step in timed)
    return (
        f"{duration(lasted / len(timed))} each, {sum(step.tokens for step in timed) / lasted:,.0f} "
        f"sampled tokens/s trained"
    )


# A step.


def print_step(description: Description, run: str) -> None:
    """Print a step on one screen."""
    step, groups, rows = description["step"], description["groups"], description["trajectories"]
    metrics = description["metrics"]
    count = f"{metrics.get('trajectories', len(rows)):.0f}"
    emit_line(
        f"step {step['step']} of {run}: {len(groups)} groups, {count} trajectories, attempt "
        f"{step['attempt']}, computed in {show(step['compute s'])} s"
    )
    if "parts" in step:
        emit_line(f"parts of {step['parts']} groups; {show(step['early s'])} s computed early")
    emit_line(f"batch reason: {step['batch reason']}")
    invalid = Counter(error for of in groups for error in of.get("no reward", "").split())
    if invalid:
        emit_line(f"{invalid.total()} trajectories without a reward; {_errors(invalid)}")
    emit_line(f"weights {str(description['weights']['after']).rpartition(' ')[2]}")
    emit_flow(flow([f"{name} {show(metrics[name])}" for name in METRICS if name in metrics]))
    columns = ("sampled by version", "staleness", "groups", "mean reward", "tokens")
    emit_table(columns, _by_version(groups))
    named = flow([f"{group['group']} {show(mean(_rewards(group)))}" for group in groups])
    shown = sum(map(len, named[:GROUP_LINES]))
    which = "" if shown == len(groups) else f" ({shown} of {len(groups)}; all with --all)"
    emit_line(f"groups and their mean rewards{which}")
    emit_flow(named[:GROUP_LINES])
    worst = sorted(filter(_size, rows), key=_size, reverse=True)[:WORST]
    title = "ratios: the contributions file of the step is not in the store"
    if worst:
        title = f"the {len(worst)} trajectories with the worst ratios"
    emit_table(WORST_COLUMNS, [[*map(row.get, WORST_COLUMNS)] for row in worst], title=title)
    if DAMAGE not in description:
        say("--all shows every trajectory, the settings, the lineage and the trace")


def _by_version(groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    groups_by_version: dict[int, list[Mapping[str, Any]]] = {}
    for group in groups:
        if "version" in group:
            groups_by_version.setdefault(group["version"], []).append(group)
    return [
        (
            version,
            of[0]["staleness"],
            len(of),
            mean([reward for group in of for reward in _rewards(group)]),
            sum(group["tokens"] for group in of),
        )
        for version, of in sorted(groups_by_version.items())
    ]


def _size(row: Mapping[str, Any]) -> float:
    ratios = [row.get("ratio_min"), row.get("ratio_max")]
    return max((abs(math.log(ratio)) for ratio in ratios if ratio), default=0.0)


def _rewards(group: Mapping[str, Any]) -> list[float]:
    return [float(word) for word in str(group.get("rewards", "")).split() if word != "-"]


# The whole description.


def print_description(description: Description) -> None:
    """Every section, in order."""
    for section, content in description.items():
        if isinstance(content, Mapping):
            emit_pairs({name: _cut(value) for name, value in content.items()}, title=section)
        elif section == TRACE:
            rows = tree.draw(content, plain=not takes_unicode())
            emit_table(tree.COLUMNS, rows, title=section)
        else:
            _print_rows(section, content)
        emit_line()


def _print_rows(section: str, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        emit_pairs({"none": "-"}, title=section)
        return
    cells = [[_cut(row.get(column)) for column in columns] for row in rows]
    emit_table(columns, cells, title=section)


def _cut(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= CELL_CHARACTERS_MAX:
        return value
    return f"{value[:CELL_CHARACTERS_MAX]}... ({len(value)} characters)"
