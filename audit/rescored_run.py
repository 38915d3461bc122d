"""What another reward's scores say of a run: made of the folder that has them, the run's tables and
its log; the same for the terminal and the pages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.audit.reading import OpenLog, named_records
from dora_pipe.audit.rescored_file import ABOUT, About, NewReward, RescoredFile
from dora_pipe.audit.rescoring import Rescoring, ScoredGroup, compare
from dora_pipe.bus.logged import Damage, logged_trajectory
from dora_pipe.catalogue.database import COUNTS, Catalogue, logged_records
from dora_pipe.catalogue.tables import RescoredRow
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Groups
from dora_pipe.schemas.identity import group_of, source_of
from dora_pipe.schemas.trajectory import answer_of
from dora_pipe.schemas.wire import canonical

FOLDER: Final = "rescored"
"""In a run's directory: a folder for every reward, by the digest of its code."""

DIGITS: Final = 12
"""Of that digest, in the folder's name."""

EXAMPLES: Final = 20

TEXT_CHARACTERS: Final = 60
"""Of the end of an example's answer."""

GROUPS: Final = """
    select group_id, g.version, size, fate, step, ended_ns, evaluation,
           list(trajectory_id order by sibling), list(t.reward order by sibling)
    from groups g join trajectories t using (group_id)
    where own_fate is null and record_offset is not null
      and fate in ('trained', 'filtered', 'failed', 'evaluated')
    group by all order by group_id"""

ENDED: Final = """
    select purpose, case purpose when 'eval' then evaluation else task end, size,
           list(trajectory_id order by sibling)
    from groups join trajectories t using (group_id)
    where own_fate is null and record_offset is not null
      and fate in ('trained', 'filtered', 'failed', 'evaluated')
    group by all"""

Texts = Callable[[Sequence[int]], str]
"""Token ids to text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoredRun:
    """Both rewards of a run beside each other."""

    about: About
    rewards: Mapping[str, NewReward]
    """By trajectory."""
    found: Rescoring
    left_out: int
    """Groups of which a sibling has not been asked."""
    texts: Mapping[str, str]
    """Ends of the examples' answers; none where they cannot be read."""

    @property
    def without_reward(self) -> int:
        """Trajectories that have none now."""
        return sum(one.reward is None for one in self.rewards.values())

    def plain(self) -> dict[str, Any]:
        return {
            **msgspec.to_builtins(self.about),
            "without_reward": self.without_reward,
            **asdict(self.found),
            "left_out": self.left_out,
            "texts": dict(self.texts),
        }


def rescored_files(directory: Path) -> list[RescoredFile]:
    """The scores that a run's directory has, a folder each."""
    return [RescoredFile(one.parent) for one in sorted((directory / FOLDER).glob(f"*/{ABOUT}"))]


def rescored_rows(directory: Path, tables: Catalogue) -> Iterator[RescoredRow]:
    """The table `rescored`. Raises UsageError for a file that is none, ResourceError."""
    for file in rescored_files(directory):
        yield from rows_of(file, tables)


def rows_of(file: RescoredFile, tables: Catalogue) -> Iterator[RescoredRow]:
    """What one folder gives to the table. Raises as `rescored_rows`."""
    about = file.about()
    for one in counting_rewards(file, about, tables).values():
        yield RescoredRow(
            trajectory_id=one.trajectory,
            reward_digest=about.reward_digest,
            asked=about.reward,
            reward=one.reward,
            parts=canonical(one.parts).decode() if one.parts else None,
            error=one.error or None,
        )


def counting_rewards(file: RescoredFile, about: About, tables: Catalogue) -> dict[str, NewReward]:
    """What each trajectory counts by these scores: with its siblings where they are scored
    together, and then without those whose group has not been. Raises UsageError, ResourceError."""
    alone = file.read(file.rewards)
    if not about.together:
        return alone
    shown = shown_together(tables, about.together, _rules(tables), alone)
    beside = {name: one for name, one in file.read(file.groups).items() if name in shown}
    sizes, whole = Counter(map(group_of, shown)), Counter(map(group_of, beside))
    counts = {name: one for name, one in alone.items() if name not in shown}
    return counts | {
        name: one for name, one in beside.items() if whole[group_of(name)] == sizes[group_of(name)]
    }


def shown_together(
    tables: Catalogue, together: Collection[str], rules: Groups, alone: Mapping[str, NewReward]
) -> dict[str, NewReward]:
    """The siblings that are scored together, with their rewards alone: of the groups that have
    ended and do not fail without it (`state_ops.outcome_of`), those that have a reward."""
    found: dict[str, NewReward] = {}
    for purpose, name, size, names in tables.query(ENDED):
        if source_of(purpose, name) not in together or not all(one in alone for one in names):
            continue
        valid = {one: alone[one] for one in names if alone[one].reward is not None}
        least = 1 if purpose == "eval" else min(rules.min_valid_siblings, size)
        if len(valid) >= least:
            found |= valid
    return found


def _rules(tables: Catalogue) -> Groups:
    ((config,),) = tables.query("select config from runs")
    return logged_config(msgspec.json.decode(config)).groups


def rescored_run(
    log: OpenLog,
    tables: Catalogue,
    about: About,
    rewards: Mapping[str, NewReward],
    decode: Callable[[], Texts | None],
) -> RescoredRun:
    """What these rewards would have changed; `decode` is asked for where there are examples."""
    groups, left_out = scored_groups(tables, rewards)
    settings = {
        step: msgspec.json.decode(one)
        for step, one in tables.query("select step, settings from steps")
    }
    found = compare(groups, _rules(tables), settings, examples=EXAMPLES)
    texts = decode() if found.examples else None
    names = [one.trajectory for one in found.examples]
    return RescoredRun(
        about=about,
        rewards=rewards,
        found=found,
        left_out=left_out,
        texts={} if texts is None else answer_ends(log, tables, names, texts),
    )


def scored_groups(
    tables: Catalogue, rewards: Mapping[str, NewReward]
) -> tuple[list[ScoredGroup], int]:
    """Groups that have ended, with both rewards of their siblings; how many are left out, because
    one of these has not been asked."""
    taken = [one for (one,) in tables.query("select taken_ns from steps order by step")]
    found: list[ScoredGroup] = []
    rows = tables.query(GROUPS)
    for group, at, size, fate, step, ended_ns, evaluation, names, old in rows:
        if not all(name in rewards for name in names):
            continue
        found.append(
            ScoredGroup(
                group=group,
                version=at,
                size=size,
                fate=fate,
                step=bisect_left(taken, ended_ns) if step is None else step,
                evaluation=evaluation,
                trajectories=tuple(names),
                old=tuple(old),
                new=tuple(rewards[name].reward for name in names),
            )
        )
    return found, len(rows) - len(found)


def answer_ends(
    log: OpenLog, tables: Catalogue, names: Sequence[str], decode: Texts
) -> dict[str, str]:
    """The ends of these trajectories' answers; of damaged records none."""
    where = f"{COUNTS} and trajectory_id in (select unnest(?))"
    rows = logged_records(tables, where, [list(names)]).values()
    found = (logged_trajectory(*one) for one in named_records(log, rows, Damage()))
    return {
        one.trajectory: " ".join(decode(answer_of(one)).split())[-TEXT_CHARACTERS:] for one in found
    }
