"""`fork`: sample continuations of a trajectory from its turns and print their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Annotated, Any, Final

import msgspec
import typer

from dora_pipe.analysis.fork import (
    REASON,
    Fork,
    ForkedTurn,
    check_forkable,
    check_replayable,
    continuations,
    cuts_of,
    fork_of,
)
from dora_pipe.analysis.task import codes_of, say_other_code
from dora_pipe.analysis.worker_log import TemporaryWorker, WorkerParts, alone, started_of
from dora_pipe.audit.replay_trajectory import engines_of, joins_of, recorded_trajectory
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_line, emit_table, show
from dora_pipe.cli.progress import CommandProgress, opened_watched
from dora_pipe.cli.replay import rebuilder
from dora_pipe.cli.texts import decoder_of
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import first_record
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.producers.tasks.registry import reward_digest_of
from dora_pipe.schemas.identity import SAMPLES_MAX
from dora_pipe.schemas.trajectory import Trajectory

TEXT_CHARACTERS: Final = 60

Text = Callable[[Sequence[int]], str]


def fork(
    run: RunArgument,
    trajectory: Annotated[str, typer.Argument(metavar="TRAJECTORY", help="Trajectory id.")],
    turn: Annotated[
        int | None, typer.Option(help="Continue from this turn; default: every turn.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, max=SAMPLES_MAX, help="Continuations from each turn.")
    ] = 16,
    version: Annotated[
        int | None, typer.Option(help="Version that continues; default: the trajectory's own.")
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Continue a trajectory from its turns with new seeds and compare the rewards: they show which
    turn decided the episode.
    """
    with opened_watched(run, root) as (open_run, report):
        _fork(open_run, trajectory, turn, samples, version, report, as_json=as_json)


def _fork(
    run: OpenRun,
    trajectory: str,
    turn: int | None,
    samples: int,
    version: int | None,
    report: CommandProgress,
    *,
    as_json: bool,
) -> None:
    started = first_record(run.bus, run.topics)
    with closing(run.tables()) as tables:
        recorded = recorded_trajectory(run.bus, run.topics, tables, trajectory)
        check_forkable(recorded, started.scored_together)
        cuts = cuts_of(recorded, turn)
        version = recorded.version if version is None else version
        rebuilder(run).weights(version)
        ((digest,),) = tables.query("select digest from versions where version = ?", [version])
        (engine,) = engines_of(run.bus, run.topics, tables, [trajectory])
        rewards = codes_of(joins_of(run.bus, run.topics, tables), recorded.meta.source)
    source = recorded.meta.source

    def check(facts: Mapping[str, TaskFacts]) -> None:
        check_replayable(recorded, facts)
        tasks = [facts[source]] if "/" in source else [*facts.values()]
        say_other_code("reward's code", rewards, reward_digest_of(tasks))

    config = alone(run.config, engine or run.config.workers.engine)
    worker = TemporaryWorker(
        started=started_of(started, "fork"),
        parts=WorkerParts(store=run.policies, config=config, engine=open_engine, source=source),
        version=version,
        digest=digest,
        reason=REASON,
        report=report,
        check=check,
    )
    sampled, lost = continuations(recorded, cuts, samples, worker)
    result = fork_of(run.topics.run, recorded, sampled, worker)
    if as_json:
        emit_json(msgspec.to_builtins(result))
    else:
        _print(result, recorded, _texts(run))
    for failure in lost:
        say(f"not sampled: {failure.trajectory}: {failure.error}: {failure.message}")


def _texts(run: OpenRun) -> Text:
    decode = decoder_of(run)

    def text(ids: Sequence[int]) -> str:
        return "" if decode is None else " ".join(decode(ids).split())[:TEXT_CHARACTERS]

    return text


def _print(fork: Fork, recorded: Trajectory, text: Text) -> None:
    recorded_as = f"version {fork.sampled_by}, reward {show(fork.reward)}"
    emit_line(f"trajectory   {fork.trajectory}, {recorded_as}")
    emit_line(f"continued    under version {fork.version}, weights {fork.digest[:12]}...")
    samples = [sample for turn in fork.turns for sample in turn.samples]
    emit_line(
        f"sampled      {len(samples)} continuations, {sum(s.sampled for s in samples)} tokens"
    )
    emit_line()
    ends = [*(turn.token for turn in fork.turns[1:]), fork.length]
    rows: list[tuple[Any, ...]] = [
        (
            turn.turn,
            turn.token,
            show(turn.mean),
            _interval(turn),
            text(recorded.token_ids[turn.token : end]),
        )
        for turn, end in zip(fork.turns, ends, strict=True)
    ]
    rows.append(("end", fork.length, show(fork.reward), "recorded", ""))
    emit_table(("turn", "token", "value", "95 %", "text"), rows)
    emit_line()
    if len(fork.turns) > 1:
        emit_line(_verdict(fork))
        return
    emit_table(
        ("sample", "reward", "tokens", "text"),
        [
            (number, sample.reward, sample.sampled, text(sample.token_ids))
            for number, sample in enumerate(samples)
        ],
    )


def _verdict(fork: Fork) -> str:
    decided = fork.decided
    if decided is None:
        return "no turn stands out: the intervals of neighbors overlap"
    return f"turn {decided.turn} decided it: {decided.before:.2f} -> {decided.after:.2f}"


def _interval(turn: ForkedTurn) -> str:
    if turn.low is None or turn.high is None:
        return "no valid reward"
    invalid = sum(sample.reward is None for sample in turn.samples)
    rest = f", {invalid} invalid" if invalid else ""
    return f"{turn.low:.2f}-{turn.high:.2f} of {len(turn.samples)}{rest}"
