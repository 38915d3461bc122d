"""`fork`: samples continuations of a trajectory from its turns, and says which of them decided."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.audit.fork import (
    FOLDER,
    Continued,
    Cut,
    Fork,
    ForkedTurn,
    Owner,
    check_forkable,
    cut_at,
    cut_of_turn,
    cuts_of_pieces,
    cuts_of_turns,
    fork_of,
    turn_starts,
)
from dora_pipe.audit.fork_log import WORKER, ForkLog, fork_id
from dora_pipe.audit.line_file import write_whole
from dora_pipe.audit.replay_trajectory import engines_of, joins_of, recorded_trajectory
from dora_pipe.audit.worker_log import started_of
from dora_pipe.bus import open_bus
from dora_pipe.cli.output import draws_blocks, emit_json, emit_line, emit_table, show
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.cli.replay import rebuilder
from dora_pipe.cli.task_again import codes_of, say_other_code
from dora_pipe.cli.texts import decoder_of
from dora_pipe.cli.worker_here import WorkerParts, alone, work_on
from dora_pipe.config.model import Config
from dora_pipe.config.several import with_each_task
from dora_pipe.core.console import say
from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.launch.run_dir import LOG, OpenRun, RunDir, locked
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.schemas.control import RequestFailed, RunStarted
from dora_pipe.schemas.identity import SIBLINGS_MAX
from dora_pipe.schemas.trajectory import Trajectory

BAR: Final = 20
"""Characters of a value of 1 in the table."""

TURN_CHARACTERS: Final = 40
"""Of what was said in a turn, in the table of turns."""

TEXT_CHARACTERS: Final = 60
"""Of what a continuation says, in the table of a single place."""

LOST_SHOWN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What of a trajectory is continued, and how often."""

    turn: int | None = None
    at: Sequence[int] = ()
    pieces: int | None = None
    samples: int = 16

    def cuts(self, recorded: Trajectory, started: RunStarted) -> list[Cut]:
        """The places, in order; all turns where none is named. Raises UsageError."""
        if (self.turn is not None) + bool(self.at) + (self.pieces is not None) > 1:
            raise UsageError("--turn, --at and --pieces say different things: give one of them")
        if not 1 <= self.samples <= SIBLINGS_MAX:
            raise UsageError(f"--samples is 1 to {SIBLINGS_MAX}")
        check_forkable(recorded, started.scored_together)
        if self.turn is not None:
            return [cut_of_turn(recorded, self.turn)]
        if self.pieces is not None:
            return cuts_of_pieces(recorded, self.pieces)
        if self.at:
            return [cut_at(recorded, token) for token in sorted({*self.at})]
        return cuts_of_turns(recorded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What the command has done."""

    now: int
    """Continuations that were not there."""
    seconds: float
    lost: Sequence[RequestFailed]
    file: Path
    """With all that is known of the trajectory under the version."""


def fork_trajectory(
    run: OpenRun,
    trajectory: str,
    wanted: Wanted,
    *,
    version: int | None,
    replayable: bool,
    out: Path | None,
    as_json: bool,
    report: CommandProgress,
) -> None:
    """Sample what is missing of these continuations, and print what they are worth.

    Raises UsageError, ConfigError, TaskError, PolicyError, InvariantBroken for a record that is not
    the one that was logged, ReplayDiverged for an environment that answers otherwise.
    """
    run.check_sampled_here(f"fork {{run}} {trajectory}")
    started, _ = policy_after(run.bus, run.topics, 0)
    with closing(run.tables()) as tables:
        recorded = recorded_trajectory(run.bus, run.topics, tables, trajectory)
        cuts = wanted.cuts(recorded, started)
        version = recorded.version if version is None else version
        rebuilder(run).weights(version)
        ((digest,),) = tables.query("select digest from versions where version = ?", [version])
        (engine,) = engines_of(run.bus, run.topics, tables, [trajectory])
        source, several = recorded.meta.source, len(run.config.tasks) > 1
        rewards = codes_of(joins_of(run.bus, run.topics, tables), source, several=several)
    folder = (out or run.directory.path / FOLDER) / fork_id(trajectory, version)
    _make(folder)
    with locked(RunDir(folder)), closing(open_bus(f"sqlite:{folder / LOG}")) as bus:
        log = ForkLog(bus=bus, recorded=recorded, version=version, digest=digest)
        first = started_of(started, log.topics.run)
        config = _local(run.config, engine, replayable=replayable)
        done = _sample(run, log, folder, first, config, cuts, wanted.samples, report)
        if joins := log.log.joins():
            (here,) = codes_of(joins[-1:], source, several=False)
            say_other_code("reward's code", rewards, here)
        found = log.continued()
    owner = Owner(trajectory=trajectory, version=version, digest=digest)
    asked = {cut: _first(found.get(cut, {}), wanted.samples) for cut in cuts}
    fork = fork_of(run.topics.run, recorded, asked, owner)
    everything = {cut: _first(some, SIBLINGS_MAX) for cut, some in found.items()}
    _write(done.file, fork_of(run.topics.run, recorded, everything, owner))
    if as_json:
        emit_json({**msgspec.to_builtins(fork), "file": str(done.file), "sampled_now": done.now})
    else:
        _print(fork, recorded, done, asked[cuts[0]], _texts(run))
    _say_lost(done.lost)


def _local(config: Config, engine: str, *, replayable: bool) -> Config:
    """This machine's part of the worker's configuration."""
    config = alone(config, engine or config.workers.engine)
    if replayable:
        config = with_each_task(config, lambda one: msgspec.structs.replace(one, replayable=True))
    return config


def _sample(
    run: OpenRun,
    log: ForkLog,
    folder: Path,
    started: RunStarted,
    config: Config,
    cuts: Sequence[Cut],
    samples: int,
    report: CommandProgress,
) -> Sampled:
    log.begin(started)
    wanted = [(cut, sample) for cut in cuts for sample in range(samples)]
    before, began_s = len(log.samples()), time.monotonic()

    source = log.recorded.meta.source
    parts = WorkerParts(store=run.policies, config=config, engine=open_engine, source=source)
    total = len(wanted)
    work = work_on(log.log, WORKER, parts, phase="sampling", total=total, report=report)
    lost = log.fill(wanted, work)
    now = len(log.samples()) - before
    file = folder.with_name(f"{folder.name}.json")
    return Sampled(now=now, seconds=time.monotonic() - began_s, lost=lost, file=file)


def _first(found: Mapping[int, Continued], samples: int) -> list[Continued]:
    """The samples with the lowest numbers, in order."""
    return [found[sample] for sample in sorted(found) if sample < samples]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"{folder}: {error.strerror or error}", hint="--out DIR") from error


def _write(file: Path, fork: Fork) -> None:
    try:
        write_whole(file, fork)
    except OSError as error:
        raise ResourceError(f"{file}: {error.strerror or error}", hint="--out DIR") from error


Text = Callable[[Sequence[int], int], str]
"""So many characters of the text of token ids, on one line."""


def _texts(run: OpenRun) -> Text:
    decode = decoder_of(run)

    def text(ids: Sequence[int], characters: int) -> str:
        return "" if decode is None else " ".join(decode(ids).split())[:characters]

    return text


def _print(
    fork: Fork, recorded: Trajectory, done: Sampled, said: Sequence[Continued], text: Text
) -> None:
    of = f"of version {fork.sampled_by}, reward {show(fork.reward)}"
    emit_line(f"trajectory   {fork.trajectory}, {of}")
    emit_line(f"continued    under version {fork.version}, weights {fork.digest[:12]}...")
    spent = sum(one.sampled for one in fork.turns)
    many = sum(one.samples for one in fork.turns)
    now = f"{done.now} continuations now in {done.seconds:.1f} s"
    emit_line(f"sampled      {now}; {many} in all, {spent} tokens")
    emit_line(f"written to   {done.file}")
    emit_line()
    bar = _bars(fork)
    ends = [*(one.token for one in fork.turns[1:]), fork.length]
    rows: list[tuple[Any, ...]] = [
        (
            *(one.turn, one.token, show(one.mean), _interval(one), bar(one.mean)),
            text(recorded.token_ids[one.token : end], TURN_CHARACTERS),
        )
        for one, end in zip(fork.turns, ends, strict=True)
    ]
    rows.append(("end", fork.length, show(fork.reward), "recorded", bar(fork.reward), ""))
    emit_table(("turn", "token", "value", "95 %", "", "and then"), rows, drop=("", "and then"))
    emit_line()
    if len(fork.turns) > 1:
        emit_line(_verdict(fork, turn_starts(recorded)))
        return
    columns = ("sample", "reward", "tokens", "and then")
    rows = [
        (at, one.reward, one.sampled, text(one.token_ids, TEXT_CHARACTERS))
        for at, one in enumerate(said)
    ]
    emit_table(columns, rows)
    if [one.token for one in fork.turns] == [*turn_starts(recorded).values()]:
        say("one place says nothing of which tokens decided: --pieces 8 cuts the turn in pieces")


def _verdict(fork: Fork, starts: Mapping[int, int]) -> str:
    found = fork.decided
    if found is None:
        return "no turn stands out: intervals of neighbours have values in common"
    places = [*starts.values(), fork.length]
    stretch = (found.token, found.end)
    what = (
        f"turn {found.turn}" if stretch in pairwise(places) else "tokens {} to {}".format(*stretch)
    )
    return f"{what} decided it: {found.before:.2f} -> {found.after:.2f}"


def _interval(one: ForkedTurn) -> str:
    if one.low is None or one.high is None:
        return "no valid reward"
    invalid = f", {one.invalid} invalid" if one.invalid else ""
    return f"{one.low:.2f}-{one.high:.2f} of {one.samples}{invalid}"


def _bars(fork: Fork) -> Callable[[float | None], str]:
    """A bar for a value, from the lowest reward that was seen (or 0) to the highest (or 1)."""
    seen = [one for turn in fork.turns for one in turn.rewards if one is not None]
    seen += [0.0, 1.0] if fork.reward is None else [0.0, 1.0, fork.reward]
    low, high, mark = min(seen), max(seen), "█" if draws_blocks() else "#"
    scale = BAR / (high - low)
    return lambda value: "" if value is None else "|" + mark * round(scale * (value - low))


def _say_lost(lost: Sequence[RequestFailed]) -> None:
    for one in lost[:LOST_SHOWN]:
        say(f"not sampled: {one.trajectory}: {one.error}: {one.message}")
    if len(lost) > LOST_SHOWN:
        say(f"not sampled: {len(lost) - LOST_SHOWN} more")
    if lost:
        say("the same command samples these again")
