"""`fork`: sample continuations of a trajectory from its turns and print their values."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.analysis.fork import (
    FOLDER,
    Fork,
    ForkedPlace,
    Owner,
    check_forkable,
    cuts_of,
    fork_of,
    turn_starts,
)
from dora_pipe.analysis.fork_worker import Continuations
from dora_pipe.analysis.task import codes_of, say_other_code
from dora_pipe.analysis.worker_log import WorkerParts, alone
from dora_pipe.audit.replay_trajectory import engines_of, joins_of, recorded_trajectory
from dora_pipe.bus import open_bus
from dora_pipe.cli.output import draws_blocks, emit_json, emit_line, emit_table, show
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.cli.replay import rebuilder
from dora_pipe.cli.texts import decoder_of
from dora_pipe.config.several import with_each_task
from dora_pipe.core.console import say
from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.launch.run_dir import LOG, OpenRun
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.schemas.identity import SIBLINGS_MAX
from dora_pipe.schemas.trajectory import Trajectory

BAR: Final = 20
"""Characters of a value of 1 in the table."""

TURN_CHARACTERS: Final = 40
"""Of a turn's text in the table of turns."""

TEXT_CHARACTERS: Final = 60
"""Of a continuation's text in the table of one place."""

Text = Callable[[Sequence[int], int], str]
"""Decodes token ids to at most so many characters on one line."""


def fork_trajectory(
    run: OpenRun,
    trajectory: str,
    *,
    turn: int | None,
    tokens: Sequence[int],
    samples: int,
    version: int | None,
    replayable: bool,
    as_json: bool,
    report: CommandProgress,
) -> None:
    """Sample continuations, write their file and print it.

    Raises UsageError, ConfigError, TaskError, PolicyError, InvariantBroken for a damaged record,
    ReplayDiverged for an environment that answers differently.
    """
    if not 1 <= samples <= SIBLINGS_MAX:
        raise UsageError(f"--samples must be 1 to {SIBLINGS_MAX}, got {samples}")
    started, _ = policy_after(run.bus, run.topics, 0)
    with closing(run.tables()) as tables:
        recorded = recorded_trajectory(run.bus, run.topics, tables, trajectory)
        check_forkable(recorded, started.scored_together)
        cuts = cuts_of(recorded, turn, tokens)
        version = recorded.version if version is None else version
        rebuilder(run).weights(version)
        ((digest,),) = tables.query("select digest from versions where version = ?", [version])
        (engine,) = engines_of(run.bus, run.topics, tables, [trajectory])
        rewards = codes_of(joins_of(run.bus, run.topics, tables), recorded.meta.source)
    config = alone(run.config, engine or run.config.workers.engine)
    if replayable:
        config = with_each_task(config, lambda one: msgspec.structs.replace(one, replayable=True))
    source = recorded.meta.source
    parts = WorkerParts(store=run.policies, config=config, engine=open_engine, source=source)
    with (
        tempfile.TemporaryDirectory(prefix="dora-pipe-fork-") as folder,
        closing(open_bus(f"sqlite:{Path(folder) / LOG}")) as bus,
    ):
        continuations = Continuations(
            bus=bus,
            recorded=recorded,
            started=started,
            version=version,
            digest=digest,
            parts=parts,
            report=report,
        )
        found = continuations.sample(cuts, samples)
    (code,) = codes_of(continuations.joins[-1:], source)
    say_other_code("reward's code", rewards, code)
    owner = Owner(trajectory=trajectory, version=version, digest=digest)
    fork = fork_of(run.topics.run, recorded, found, owner)
    file = run.directory.path / FOLDER / f"{trajectory}-v{version}.json"
    _write(file, fork)
    if as_json:
        emit_json({**msgspec.to_builtins(fork), "file": str(file)})
    else:
        _print(fork, recorded, file, _texts(run))
    for lost in continuations.lost.values():
        say(f"not sampled: {lost.trajectory}: {lost.error}: {lost.message}")


def _write(file: Path, fork: Fork) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(fork) + b"\n")
    except OSError as error:
        raise ResourceError(f"{file}: {error.strerror or error}") from error


def _texts(run: OpenRun) -> Text:
    decode = decoder_of(run)

    def text(ids: Sequence[int], characters: int) -> str:
        return "" if decode is None else " ".join(decode(ids).split())[:characters]

    return text


def _print(fork: Fork, recorded: Trajectory, file: Path, text: Text) -> None:
    recorded_as = f"version {fork.sampled_by}, reward {show(fork.reward)}"
    emit_line(f"trajectory   {fork.trajectory}, {recorded_as}")
    emit_line(f"continued    under version {fork.version}, weights {fork.digest[:12]}...")
    samples = [one for place in fork.places for one in place.samples]
    emit_line(
        f"sampled      {len(samples)} continuations, {sum(s.sampled for s in samples)} tokens"
    )
    emit_line(f"written to   {file}")
    emit_line()
    bar = _bars(fork)
    ends = [*(one.token for one in fork.places[1:]), fork.length]
    rows: list[tuple[Any, ...]] = [
        (
            *(one.turn, one.token, show(one.mean), _interval(one), bar(one.mean)),
            text(recorded.token_ids[one.token : end], TURN_CHARACTERS),
        )
        for one, end in zip(fork.places, ends, strict=True)
    ]
    rows.append(("end", fork.length, show(fork.reward), "recorded", bar(fork.reward), ""))
    emit_table(("turn", "token", "value", "95 %", "", "text"), rows, drop=("", "text"))
    emit_line()
    if len(fork.places) > 1:
        emit_line(_verdict(fork, [*turn_starts(recorded).values(), fork.length]))
        return
    emit_table(
        ("sample", "reward", "tokens", "text"),
        [
            (number, one.reward, one.sampled, text(one.token_ids, TEXT_CHARACTERS))
            for number, one in enumerate(samples)
        ],
    )


def _verdict(fork: Fork, starts: Sequence[int]) -> str:
    decided = fork.decided
    if decided is None:
        return "no turn stands out: the intervals of neighbors overlap"
    whole = (decided.token, decided.end) in pairwise(starts)
    part = f"turn {decided.turn}" if whole else f"tokens {decided.token} to {decided.end}"
    return f"{part} decided it: {decided.before:.2f} -> {decided.after:.2f}"


def _interval(place: ForkedPlace) -> str:
    if place.low is None or place.high is None:
        return "no valid reward"
    invalid = sum(one.reward is None for one in place.samples)
    rest = f", {invalid} invalid" if invalid else ""
    return f"{place.low:.2f}-{place.high:.2f} of {len(place.samples)}{rest}"


def _bars(fork: Fork) -> Callable[[float | None], str]:
    """Return bars for values from the lowest reward (or 0) to the highest (or 1)."""
    rewards = [one.reward for place in fork.places for one in place.samples]
    known = [one for one in (*rewards, fork.reward, 0.0, 1.0) if one is not None]
    low, high, mark = min(known), max(known), "█" if draws_blocks() else "#"
    scale = BAR / (high - low)
    return lambda value: "" if value is None else "|" + mark * round(scale * (value - low))
