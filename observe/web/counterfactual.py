"""What other commands made of a run's log and left in its directory, on pages: rewards that were
asked again (`rescore`), trajectories that were continued from their turns (`fork`), and which
version and which groups made it worse (`bisect`).

It decides how much of it a page has. Nothing here writes: what another process is writing is read
as far as it goes, and a file that cannot be read is a line on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dora_pipe.audit.fork import FOLDER, Fork
from dora_pipe.audit.rescored_file import RescoredFile
from dora_pipe.audit.rescored_run import (
    RescoredRun,
    counting_rewards,
    rescored_files,
    rescored_run,
    rows_of,
)
from dora_pipe.audit.rescoring import Beside
from dora_pipe.catalogue.database import Catalogue
from dora_pipe.catalogue.tables import RESCORED, RescoredRow
from dora_pipe.core.errors import DoraError, UsageError
from dora_pipe.observe.web.bisects import listed_bisects
from dora_pipe.observe.web.view import Query, RunView, marks_of, short

if TYPE_CHECKING:
    from dora_pipe.observe.web.pages import RunSource

FORKS_MAX: Final = 200
"""That a page lists."""

CHANGED_MAX: Final = 500
"""Groups with another fate that a page lists."""

_LISTED: Final = """
    select reward_digest, count(*), count(*) filter (r.reward is distinct from t.reward),
           avg(t.reward) filter (starts_with(trajectory_id, 'g')),
           avg(r.reward) filter (starts_with(trajectory_id, 'g'))
    from rescored r join trajectories t using (trajectory_id) group by reward_digest"""

_OF_TRAJECTORY: Final = "rescored r join trajectories using (trajectory_id)"


class RunFiles:
    """A run's directory. Example: ``RunFiles(Path("runs/demo"))``; one thread uses it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: list[str] = []
        """Scores that could not be read when they were laid."""
        self._laid: tuple[Any, ...] | None = None

    def rescored(self) -> list[RescoredFile]:
        """Scores of other rewards."""
        return rescored_files(self.directory)

    def lay(self, catalogue: Catalogue) -> None:
        """Make the table `rescored`, if what is there has changed."""
        files = self.rescored()
        stamp = (id(catalogue), *((one.folder, one.stamp) for one in files))
        if stamp != self._laid:
            self.problems.clear()
            catalogue.lay(RESCORED, self._rows(files, catalogue))
            self._laid = stamp

    def _rows(self, files: list[RescoredFile], catalogue: Catalogue) -> Iterator[RescoredRow]:
        for file in files:
            try:
                yield from rows_of(file, catalogue)
            except DoraError as error:
                self.problems.append(error.message)

    def forks(self, trajectory: str = "*") -> list[Fork]:
        """What is known of this trajectory's turns, or of those of all."""
        decode = msgspec.json.Decoder(Fork).decode
        found: list[Fork] = []
        for path in sorted((self.directory / FOLDER).glob(f"{trajectory}-v*.json"))[:FORKS_MAX]:
            try:
                found.append(decode(path.read_bytes()))
            except (OSError, msgspec.DecodeError) as error:
                self.problems.append(f"{path}: {error}")
        return found


def listed(view: RunView, source: RunSource) -> dict[str, Any]:
    """What there is of a run: rewards that were asked again, continued trajectories, other runs
    that it can be compared with."""
    others = source.others
    runs = {
        "others": [] if others is None else list(others.names()),
        "retrained": [] if others is None else list(others.related()),
        "beside": "" if others is None else others.beside,
    }
    files = source.files
    if files is None:
        none = dict.fromkeys(("rescored", "forks", "bisects"))
        return {**none, **runs, "problems": []}
    files.lay(view.catalogue)
    counts = {row[0]: row[1:] for row in view.rows(_LISTED)}
    problems = list(files.problems)
    files.problems.clear()
    rescored: list[list[Any]] = []
    for file in files.rescored():
        try:
            about = file.about()
        except DoraError:
            continue  # it is among the problems
        scored, differ, old, new = counts.get(about.reward_digest, (0, 0, None, None))
        named = about.reward or "the run's own"
        rescored.append([file.folder.name, named, scored, differ, short(old), short(new)])
    bisects = listed_bisects(files.directory, problems)
    forks = [[one.trajectory, one.version, len(one.turns), *_decided(one)] for one in files.forks()]
    columns = ["rescored", "reward", "trajectories", "differ", "mean then", "mean now"]
    turns = ["trajectory", "version", "turns", "decided in turn", "value before", "value after"]
    return {
        "rescored": {"columns": columns, "rows": rescored},
        "forks": {"columns": turns, "rows": forks},
        "bisects": bisects,
        **runs,
        "problems": problems + files.problems,
    }


def _decided(one: Fork) -> list[Any]:
    if one.decided is None:
        return [None, None, None]
    return [one.decided.turn, short(one.decided.before), short(one.decided.after)]


def rescored_page(view: RunView, source: RunSource, asked: Query) -> dict[str, Any]:
    """Both rewards of a run beside each other. Raises UsageError, ResourceError."""
    file = _file(source, asked.path[-1])
    about = file.about()
    rewards = counting_rewards(file, about, view.catalogue)
    found = rescored_run(source, view.catalogue, about, rewards, lambda: source.decode)
    return {
        "id": file.folder.name,
        "reward": about.reward or "the run's own, as it was here",
        "facts": _facts(found),
        "marks": marks_of(view.catalogue, view.first_ns),
        "steps": _columns(found.found.steps),
        "evaluations": _evaluations(found),
        "moves": {
            "columns": ["fate then", "fate now", "groups"],
            "rows": [[*fates, count] for fates, count in sorted(found.found.moves.items())],
        },
        "changed": {
            "columns": ["group", "step", "fate then", "fate now"],
            "rows": [
                [one.group, one.step, one.old, one.new] for one in found.found.fates[:CHANGED_MAX]
            ],
            "of": len(found.found.fates),
        },
        "examples": _examples(found, source.said),
        "redacted": source.redact,
    }


def rescored_stamp(source: RunSource, asked: Query) -> tuple[int, ...]:
    """Changes whenever the page does, of a run that has not grown. Raises UsageError."""
    return _file(source, asked.path[-1]).stamp


def _file(source: RunSource, name: str) -> RescoredFile:
    files = [] if source.files is None else source.files.rescored()
    for one in files:
        if one.folder.name == name:
            return one
    there = ", ".join(one.folder.name for one in files) or "none"
    raise UsageError(f"no reward {name!r} was asked of this run", hint=f"there are: {there}")


def _facts(one: RescoredRun) -> dict[str, Any]:
    found = one.found
    return {
        "code": one.about.reward_digest,
        "trajectories": found.trajectories,
        "another reward": found.differ,
        "without a reward": one.without_reward,
        "mean then": short(found.old),
        "mean now": short(found.new),
        "another fate": f"{len(found.fates)} groups",
        "another sign": f"{found.signs} of {found.advantages} advantages",
        "matters first in": "no step" if found.first is None else f"step {found.first}",
        "left out": f"{one.left_out} groups, not all of them scored"
        if one.left_out
        else "no group",
    }


def _columns(rows: tuple[Beside, ...]) -> dict[str, list[Any]]:
    return {
        "at": [one.at for one in rows],
        "old": [short(one.old) for one in rows],
        "new": [short(one.new) for one in rows],
        "signs": [one.signs for one in rows],
        "fates": [one.fates for one in rows],
    }


def _evaluations(one: RescoredRun) -> list[dict[str, Any]]:
    names = dict.fromkeys(each.name for each in one.found.evaluations)
    return [
        {
            "name": name,
            **_columns(tuple(each for each in one.found.evaluations if each.name == name)),
        }
        for name in names
    ]


EXAMPLE: Final = ("trajectory", "reward then", "reward now", "its answer ends with", "parts now")


def _examples(one: RescoredRun, said: Callable[[str | None], str | None]) -> dict[str, Any]:
    """Those that differ most; columns that none of them has are left out."""
    rows: list[list[Any]] = []
    for each in one.found.examples:
        new = one.rewards[each.trajectory]
        parts = ", ".join(f"{name} {value:.4g}" for name, value in new.parts.items())
        text = one.texts.get(each.trajectory)
        own = [each.trajectory, short(each.old), short(each.new), text, parts]
        rows.append([*own, said(new.error or None)])
    columns = (*EXAMPLE, "why there is none")
    used = [at for at in range(len(columns)) if at < 3 or any(row[at] for row in rows)]
    return {
        "columns": [columns[at] for at in used],
        "rows": [[row[at] for at in used] for row in rows],
    }


def other_rewards(view: RunView, source: RunSource, name: str) -> dict[str, Any]:
    """What other rewards say of one trajectory."""
    if source.files is None:
        return {"columns": [], "rows": []}
    source.files.lay(view.catalogue)
    rows = view.catalogue.keyed(
        "reward_digest, asked, r.reward, parts, r.error",
        _OF_TRAJECTORY,
        "trajectory_id",
        name,
        order="reward_digest",
    )
    columns = ["rescored", "reward", "it says", "parts", "why"]
    return {
        "columns": columns,
        "rows": [
            [digest[:12], asked or "the run's own", short(reward), parts, source.said(error)]
            for digest, asked, reward, parts, error in rows
        ],
    }


def turn_values(source: RunSource, name: str) -> list[dict[str, Any]]:
    """The value of every turn of a trajectory, under every version that it was continued by."""
    return [] if source.files is None else [_values(one) for one in source.files.forks(name)]


def _values(one: Fork) -> dict[str, Any]:
    columns = ["turn", "from token", "samples", "without a reward", "value", "low", "high"]
    rows = [
        [each.turn, each.token, each.samples, each.invalid]
        + [short(value) for value in (each.mean, each.low, each.high)]
        for each in one.turns
    ]
    decided = one.decided
    return {
        "version": one.version,
        "sampled_by": one.sampled_by,
        "reward": one.reward,
        "length": one.length,
        "columns": columns,
        "rows": rows,
        "decided": None if decided is None else msgspec.structs.asdict(decided),
    }
