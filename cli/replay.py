"""`replay`: trains steps, generates trajectories or asks for rewards again; a line for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.audit.rebuild import Rebuilder
from dora_pipe.audit.replay_step import StepLine, raise_if_diverged, replay
from dora_pipe.audit.replay_trajectory import (
    Regenerated,
    counted_record,
    engines_of,
    pick,
    raise_if_different,
    regenerate,
)
from dora_pipe.audit.rescore import Rescored, rescore
from dora_pipe.audit.rescore import raise_if_different as raise_if_rewarded_otherwise
from dora_pipe.audit.rescore_groups import Counted, rescore_groups
from dora_pipe.bus.logged import Damage, logged_trajectory
from dora_pipe.catalogue.database import COUNTS, Catalogue, LoggedRecord, logged_records
from dora_pipe.cli.output import emit_json, emit_line, emit_table, raise_if_damaged, show
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.config.several import pool_specs
from dora_pipe.consumers.learners.port import Learner
from dora_pipe.consumers.learners.registry import make_learner
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.core.errors import InvariantBroken, UsageError
from dora_pipe.launch.local_roles import keeping_nothing, with_engine
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.registry import check_data, reward_digest_of
from dora_pipe.producers.worker.chats import digest_of, recorded_chats
from dora_pipe.producers.worker.role import task_ports, worker_config
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.trajectory import Trajectory

DISTANCES_SHOWN_MAX = 20
FIGURES_SHOWN_MAX = 10

LINE_S: Final = 10.0
"""How often a line says how far this is."""


def replay_steps(
    run: OpenRun,
    first: int | None,
    last: int | None,
    changes: Sequence[str],
    *,
    as_json: bool,
    report: CommandProgress,
) -> None:
    """Train steps again. Raises ReplayDiverged after the last line."""
    clock = SystemClock()
    history = read_history(run.bus, run.topics, clock)
    started = history.run_started
    if started is None:
        raise InvariantBroken(f"{run.topics.control} has no `run started`")
    config = logged_config(started.config)
    trainer = open_trainer(run, started, _here(config, run.config))
    first = 0 if first is None else first
    last = len(history.notes) if last is None else last
    lines: list[StepLine] = []
    changed = _settings(changes)
    report("training again")
    for line in replay(
        run.bus,
        run.topics,
        run.policies,
        trainer,
        first=first,
        last=last,
        clock=clock,
        changed=changed,
    ):
        lines.append(line)
        _print_step(line, as_json=as_json)
        done = line.replayed.step + 1 - first
        report(f"step {line.replayed.step + 1}", max(0, done), last - first)  # some lead there
    _sum_up([line for line in lines if line.wanted])
    for line in lines:
        raise_if_diverged(line)


def open_trainer(run: OpenRun, started: RunStarted, config: Config | None = None) -> Learner:
    """A trainer as the run has it, without weights yet. Raises ConfigError, PolicyError."""
    store, config = run.policies, config or logged_config(started.config)
    return make_learner(
        assets=store.assets(started.assets_digest),
        reference=store.held_weights(started.policy.digest),
        config=with_modules(config, run),
        log=run.log,
    )


def with_modules(config: Config, run: OpenRun) -> Config:
    """The configuration, with the folder of the user's modules and the teacher that this machine
    has."""
    task = msgspec.structs.replace(config.task, directory=run.config.task.directory)
    teacher = config.teacher.on(run.config.teacher)
    return msgspec.structs.replace(config, task=task, teacher=teacher)


def _here(config: Config, local: Config) -> Config:
    """The run's configuration with the device that was chosen here."""
    trainer = msgspec.structs.replace(config.trainer, device=local.trainer.device)
    return msgspec.structs.replace(config, trainer=trainer)


def rebuilder(run: OpenRun) -> Rebuilder:
    """Makes versions again that the run's store lacks; says so, a line each."""
    store = run.policies
    return Rebuilder(
        run.bus,
        run.topics,
        store,
        make_learner=lambda started: open_trainer(run, started),
        clock=SystemClock(),
        on_rebuilt=lambda rebuilt: say(rebuilt.line),
    )


def replay_trajectories(
    run: OpenRun, wanted: Sequence[str], random: int, seed: int, *, as_json: bool
) -> None:
    """Generate trajectories again. Raises ReplayDiverged, naming the first that differs."""
    from dora_pipe.producers.chat.tokenizer import Tokenizer
    from dora_pipe.producers.worker.role import params_by_source

    started, _ = policy_after(run.bus, run.topics, 0)
    config = with_modules(logged_config(started.config), run)
    assets = run.policies.assets(started.assets_digest)
    tokenizer = Tokenizer(assets)
    found: list[Regenerated] = []
    with closing(run.tables()) as tables:
        chats = _chats(tables, config, started, assets, tokenizer)
        params = params_by_source(config, tokenizer.stop_ids, chats)
        names = chosen(tables, wanted, random, seed)
        for name, some in engines_of(run.bus, run.topics, tables, names).items():
            own = keeping_nothing(with_engine(config, name or config.workers.engine))
            with closing(
                open_engine(assets=assets, config=own, decode=tokenizer.full_text)
            ) as engine:
                for one in regenerate(
                    run.bus,
                    run.topics,
                    run.policies,
                    tables,
                    engine,
                    some,
                    params,
                    weights_of=rebuilder(run).weights,
                ):
                    found.append(one)
                    _print_trajectory(one, as_json=as_json)
    equal = sum(one.equal for one in found)
    tokens = sum(one.tokens for one in found)
    say(f"{equal} of {len(found)} trajectories bit-equal, {tokens} sampled tokens")
    for one in found:
        raise_if_different(one)


def _chats(
    tables: Catalogue, config: Config, started: RunStarted, assets: Path, tokenizer: Tokenizer
) -> dict[str, Chat]:
    """The chats that workers of the run had, by source; none where its prompts are text."""
    digests = {one for (one,) in tables.query("select template_digest from workers")} - {""}
    chats = recorded_chats(config, started.at_ns, assets, tokenizer, digests)
    if chats:
        _say_other_code("chat's rendering", digests, digest_of(chats))
    return chats


def chosen(tables: Catalogue, wanted: Sequence[str], random: int, seed: int) -> list[str]:
    """The trajectories that were named, and so many random ones; sorted. Raises UsageError."""
    for name in wanted:
        counted_record(tables, name)
    return sorted({*wanted, *(pick(tables, random, seed) if random else ())})


def _settings(changes: Sequence[str]) -> dict[str, float | int | str | bool]:
    """``--set trainer.learning_rate=1e-4`` as a value. Raises UsageError."""
    found: dict[str, float | int | str | bool] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"--set {change}: write key=value")
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError:
            value = text
        if not isinstance(value, float | int | str | bool):
            raise UsageError(f"--set {change}: not a plain value")
        found[key.strip()] = value
    return found


def _print_step(line: StepLine, *, as_json: bool) -> None:
    step = line.replayed
    if as_json:
        emit_json(_step_json(line))
        return
    verdict = "equal" if step.equal else f"DIFFERS, first in {step.tensor}"
    if step.equal and line.figures:
        verdict = "equal weights, OTHER FIGURES"
    lead_in = "" if line.wanted else "  (leads there)"
    ratio = "" if line.time_ratio is None else f" ({line.time_ratio:.2f}x)"
    times = f"{step.compute_s_committed:.3f} s then, {step.compute_s_replayed:.3f} s now{ratio}"
    emit_line(f"step {step.step:>5}  {step.digest_replayed[:16]}  {verdict}  {times}{lead_in}")
    for one in line.figures[:FIGURES_SHOWN_MAX]:
        emit_line(f"    {one.line}")
    if more := line.figures[FIGURES_SHOWN_MAX:]:
        emit_line(f"    and {len(more)} figures more")
    if line.distances:
        rows = [
            (one.tensor, one.differing, one.elements, f"{one.absolute_max:.3e}", one.relative_max)
            for one in line.distances[:DISTANCES_SHOWN_MAX]
        ]
        emit_table(("tensor", "other bits", "of", "largest distance", "relative"), rows)


def _step_json(line: StepLine) -> Mapping[str, Any]:
    step = line.replayed
    return {
        "step": step.step,
        "wanted": line.wanted,
        "equal": line.equal,
        "weights_equal": step.equal,
        "figures": [
            {"name": one.name, "committed": one.committed, "replayed": one.replayed}
            for one in line.figures
        ],
        "digest_committed": step.digest_committed,
        "digest_replayed": step.digest_replayed,
        "tensor": step.tensor,
        "compute_s_committed": step.compute_s_committed,
        "compute_s_replayed": step.compute_s_replayed,
        "other_numerics": step.other_numerics,
        "distances": [
            {
                "tensor": one.tensor,
                "differing": one.differing,
                "elements": one.elements,
                "absolute_max": one.absolute_max,
                "relative_max": one.relative_max,
            }
            for one in line.distances
        ],
    }


def _sum_up(lines: Sequence[StepLine]) -> None:
    equal = sum(line.equal for line in lines)
    then_s = sum(line.replayed.compute_s_committed for line in lines)
    now_s = sum(line.replayed.compute_s_replayed for line in lines)
    ratio = f" ({show(now_s / then_s)}x)" if then_s > 0 else ""
    say(
        f"{equal} of {len(lines)} steps bit-equal; "
        f"compute {then_s:.2f} s then, {now_s:.2f} s now{ratio}"
    )


def _print_trajectory(found: Regenerated, *, as_json: bool) -> None:
    if as_json:
        emit_json(
            {
                "trajectory": found.trajectory,
                "version": found.version,
                "prefills": found.prefills,
                "tokens": found.tokens,
                "equal": found.equal,
                "difference": found.difference,
            }
        )
        return
    verdict = "equal" if found.equal else f"DIFFERS: {found.difference}"
    prefills = f"{found.prefills} prefill{'s' if found.prefills != 1 else ''}"
    emit_line(
        f"{found.trajectory}  version {found.version:>4}  {found.tokens:>5} tokens  "
        f"{prefills}  {verdict}"
    )


# Rewards.


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
        digests = {one for (one,) in tables.query("select reward_digest from workers")}
        config = worker_config(started, run.config)
        assets = run.policies.assets(started.assets_digest)
        tokenizer = Tokenizer(assets)
        chats = _chats(tables, config, started, assets, tokenizer)
    with ExitStack() as stack:
        pools = [(one, stack.enter_context(TaskPool(one.task))) for one in pool_specs(config)]
        facts = [pool.wait() for _, pool in pools]
        for (one, _), its in zip(pools, facts, strict=True):
            check_data(its, started, one.sources)
        _say_other_code("reward's code", digests, reward_digest_of(facts))
        damage, again_left, ports = Damage(), dict(left), task_ports(pools, tokenizer, chats)
        again = rescore(
            ports,
            _trajectories(run, left, damage),
            clock=SystemClock(),
            stopped=_stopped(config, tokenizer, chats),
        )
        first = _report(again, as_json=as_json, every=names is not None)
        if together:
            records = _trajectories(run, again_left, Damage())
            scored = rescore_groups(ports, records, together, clock=SystemClock())
            second = _report(scored, as_json=as_json, every=False, what="rewards of groups")
            first = first or second
    raise_if_damaged(damage, ", and not asked for")
    if first is not None:
        raise_if_rewarded_otherwise(first)


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


def _trajectories(
    run: OpenRun, left: dict[tuple[int, int], LoggedRecord], damage: Damage
) -> Iterator[Trajectory]:
    """These records, in the order of the log, each held against control."""
    for record in records_of(run.bus, ends_of(run.bus, run.topics.trajectories)):
        named = left.pop((record.partition, record.offset), None)
        if named is not None and damage.is_sound(record, named):
            yield logged_trajectory(record, named)
    damage.look_for_the_rest(left)


def _say_other_code(what: str, digests: set[str], here: str) -> None:
    """Another one than workers had explains what differs; it is said first."""
    for digest in sorted(digests - {here}):
        then, now = digest[:12] or "unknown", here[:12] or "unknown"
        say(f"the {what} is another one here ({now}) than workers of the run had ({then})")


def _stopped(
    config: Config, tokenizer: Tokenizer, chats: Mapping[str, Chat]
) -> Callable[[Sequence[int]], bool]:
    """Whether a turn ended by a stop token or a stop string."""
    samplings = (config.sampling, *(one.sampling for one in config.evaluations))
    texts = tuple(text for one in samplings for text in one.stop if text)

    stop_ids = set(tokenizer.stop_ids).union(*(one.stop_ids for one in chats.values()))

    def stopped(ids: Sequence[int]) -> bool:
        if not ids:
            return False
        return ids[-1] in stop_ids or (bool(texts) and tokenizer.full_text(ids).endswith(texts))

    return stopped
