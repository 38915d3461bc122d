"""What `replay --rewards` prints: where the task says otherwise than the log has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Final

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.audit.rescore import Rescored, raise_if_different, rescore
from dora_pipe.bus.logged import Damage, logged_trajectory
from dora_pipe.catalogue.logged import COUNTS, LoggedRecord, logged_records
from dora_pipe.cli.damage import raise_if_damaged
from dora_pipe.cli.output import emit_json, emit_line
from dora_pipe.cli.replay_lines import chosen
from dora_pipe.config.model import Config
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.tasks.calls import Facts
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.registry import check_data
from dora_pipe.producers.worker.ports import TaskPort
from dora_pipe.producers.worker.role import worker_config
from dora_pipe.producers.worker.tokenizer import Tokenizer
from dora_pipe.schemas.trajectory import Trajectory

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
        digests = {one for (one,) in tables.query("select reward_digest from workers")}
    config = worker_config(started, run.config)
    tokenizer = Tokenizer(
        run.policies.assets(started.assets_digest), special_tokens=config.task.special_tokens
    )
    with TaskPool(config.task) as pool:
        facts = pool.wait()
        check_data(facts, started)
        _say_other_code(digests, facts)
        damage = Damage()
        again = rescore(
            TaskPort(pool, tokenizer),
            _trajectories(run, left, damage),
            clock=SystemClock(),
            stopped=_stopped(config, tokenizer),
        )
        first = _report(again, as_json=as_json, every=names is not None)
    raise_if_damaged(damage, ", and not asked for")
    if first is not None:
        raise_if_different(first)


def _report(again: Iterator[Rescored], *, as_json: bool, every: bool) -> Rescored | None:
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
            say(f"{asked} rewards asked for, {equal} as recorded")
    skipped = f", {len(left)} not compared" if left else ""
    say(f"{equal} of {asked} rewards as recorded{skipped}")
    return first


def _line(one: Rescored) -> str:
    verdict = "equal"
    if one.difference:
        verdict = f"DIFFERS: {one.difference}"
    elif one.not_compared:
        verdict = f"not compared: {one.not_compared}"
    return f"{one.trajectory}  reward {one.recorded}  {verdict}"


def _trajectories(
    run: OpenRun, left: dict[tuple[int, int], LoggedRecord], damage: Damage
) -> Iterator[Trajectory]:
    """These records, in the order of the log, each held against control."""
    for record in records_of(run.bus, ends_of(run.bus, run.topics.trajectories)):
        named = left.pop((record.partition, record.offset), None)
        if named is not None and damage.is_sound(record, named):
            yield logged_trajectory(record, named)
    damage.look_for_the_rest(left)


def _say_other_code(digests: set[str], facts: Facts) -> None:
    """Another reward's code than workers had explains what differs; it is said first."""
    for digest in sorted(digests - {facts.reward_digest}):
        then, now = digest[:12] or "unknown", facts.reward_digest[:12] or "unknown"
        say(f"the reward's code is another one here ({now}) than workers of the run had ({then})")


def _stopped(config: Config, tokenizer: Tokenizer) -> Callable[[Sequence[int]], bool]:
    """Whether a turn ended by a stop token or a stop string."""
    texts = tuple(one for one in (*config.sampling.stop, *config.evaluation.sampling.stop) if one)

    def stopped(ids: Sequence[int]) -> bool:
        if not ids:
            return False
        return ids[-1] in tokenizer.stop_ids or (
            bool(texts) and tokenizer.full_text(ids).endswith(texts)
        )

    return stopped
