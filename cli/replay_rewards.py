"""`replay --rewards`: asks the task for logged rewards again; a line for each that differs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

import msgspec

from dora_pipe.audit.reading import trajectories_of
from dora_pipe.audit.rescore import Rescored, raise_if_different, rescore
from dora_pipe.audit.rescore_groups import Counted, rescore_groups
from dora_pipe.bus.logged import Damage
from dora_pipe.catalogue.database import COUNTS, Catalogue, logged_records
from dora_pipe.cli.output import emit_json, emit_line, raise_if_damaged
from dora_pipe.cli.replay import chosen
from dora_pipe.cli.task_again import opened_task, say_other_code
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.worker.role import worker_config

LINE_S: Final = 10.0
"""How often a line says how far this is."""


def replay_rewards(
    run: OpenRun, wanted: Sequence[str], random: int, seed: int, *, as_json: bool
) -> None:
    """Ask the task again for the rewards of these trajectories, or of all that count.

    Raises ReplayDiverged, naming the first that differs, TaskError, InvariantBroken behind the rest
    for records that are not those that were logged.
    """
    started, _ = policy_after(run.bus, run.topics, 0)
    with closing(run.tables()) as tables:
        names = chosen(tables, wanted, random, seed) if wanted or random else None
        asked = COUNTS if names is None else f"{COUNTS} and trajectory_id in (select unnest(?))"
        left = logged_records(tables, asked, [] if names is None else [names])
        together = {} if names is not None else _scored_together(tables)
    with opened_task(run, worker_config(started, run.config)) as task:
        say_other_code("reward's code", task.recorded, task.reward_digest)
        damage, again_left = Damage(), dict(left)
        again = rescore(
            task.ports,
            trajectories_of(run, left, damage),
            clock=SystemClock(),
            stopped=task.stopped,
        )
        first = _report(again, as_json=as_json, every=names is not None)
        if together:
            records = trajectories_of(run, again_left, Damage())
            scored = rescore_groups(task.ports, records, together, clock=SystemClock())
            second = _report(scored, as_json=as_json, every=False, what="rewards of groups")
            first = first or second
    raise_if_damaged(damage, ", and not asked for")
    if first is not None:
        raise_if_different(first)


def _scored_together(tables: Catalogue) -> dict[str, Counted]:
    """What siblings count that were scored together, by trajectory."""
    query = "select trajectory_id, reward, group_parts from trajectories"
    return {
        name: Counted(reward, msgspec.json.decode(parts, type=dict[str, float]))
        for name, reward, parts in tables.query(f"{query} where group_parts is not null")
    }


def _report(
    again: Iterator[Rescored], *, as_json: bool, every: bool, what: str = "rewards"
) -> Rescored | None:
    """Print every answer that says something; the first that differs."""
    said_s, equal, asked = time.monotonic(), 0, 0
    left: list[Rescored] = []
    first: Rescored | None = None
    for one in again:
        asked += 1
        equal += one.equal
        if one.not_compared:
            left.append(one)
        if first is None and one.difference:
            first = one
        if as_json:
            emit_json(one)
        elif every or not one.equal:
            emit_line(_line(one))
        if time.monotonic() - said_s >= LINE_S:
            said_s = time.monotonic()
            say(f"{asked} {what} asked for, {equal} as recorded")
    skipped = f", {len(left)} not compared" if left else ""
    say(f"{equal} of {asked} {what} as recorded{skipped}")
    return first


def _line(one: Rescored) -> str:
    verdict = "equal"
    if one.difference:
        verdict = f"DIFFERS: {one.difference}"
    elif one.not_compared:
        verdict = f"not compared: {one.not_compared}"
    return f"{one.trajectory}  reward {one.recorded}  {verdict}"
