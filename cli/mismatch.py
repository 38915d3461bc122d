"""`dora-pipe mismatch`: where the ratios of a trained batch come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dora_pipe.cli.look import ArchiveOption, JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_table, say
from dora_pipe.cli.replay_lines import rebuilder
from dora_pipe.cli.rundir import RUNS, OpenRun, opened
from dora_pipe.clock import SystemClock
from dora_pipe.config.model import Config
from dora_pipe.consumers.recovery import History, read_commits, read_history
from dora_pipe.consumers.replay import batch_of_commit
from dora_pipe.consumers.trainers.make import make_scorer
from dora_pipe.errors import InvariantBroken, UsageError
from dora_pipe.history.mismatch import Mismatch, measure

MEANINGS = {
    "staleness": "other weights than those that sampled",
    "numerics": "the same weights, computed by the trainer and by the engine",
    "sampling": "the model's distribution and what temperature, top-p and top-k leave of it",
    "trained": "staleness and numerics: the ratio that the objective sees",
    "all": "trained policy to what was drawn from",
}


def mismatch(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Which step; default the last committed.")
    ] = None,
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Say how much of a batch's ratios comes from staleness, numerics, sampling, tokenisation."""
    with opened(run, root, archive) as found:
        measured = _measure(found, step)
    if as_json:
        emit_json(measured.plain())
    else:
        _print(measured)


def _measure(run: OpenRun, step: int | None) -> Mismatch:
    from dora_pipe.producers.tokenizer import Tokenizer

    clock = SystemClock()
    history = read_history(run.bus, run.topics, clock)
    started = history.run_started
    if started is None:
        raise InvariantBroken(f"{run.topics.control} has no `run started`")
    committed = len(history.notes)
    step = committed - 1 if step is None else step
    if not 0 <= step < committed:
        hint = f"steps 0 to {committed - 1} are committed" if committed else "none is committed yet"
        raise UsageError(f"step {step} was not committed", hint=hint)
    notes = history.notes[step : step + 1]
    (commit,) = read_commits(run.bus, run.topics, notes, clock)
    batch = batch_of_commit(run.bus, run.topics, commit, clock=clock)
    store = run.policies
    assets = store.assets(started.assets_digest)
    scorer = make_scorer(
        assets=assets,
        reference=store.held_weights(started.policy.digest),
        config=msgspec.convert(started.config, Config),
    )
    return measure(batch, scorer, _weights(run, history), Tokenizer(assets))


def _weights(run: OpenRun, history: History) -> Callable[[int], tuple[Path, str]]:
    """File and digest of a version, made again where retention has deleted it."""
    made = rebuilder(run)

    def weights_of(version: int) -> tuple[Path, str]:
        return made.weights(version), history.digest_of(version)

    return weights_of


def _print(found: Mismatch) -> None:
    emit_table(
        ("cause", "mean", "size", "p99", "largest", "share", "what it is"),
        [
            (
                one.cause,
                one.mean,
                one.size,
                one.p99,
                one.largest,
                "-" if one.share is None else f"{one.share:.1%}",
                MEANINGS[one.cause],
            )
            for one in found.figures
        ],
        title=f"Step {found.step}: log ratios of {found.tokens} tokens of"
        f" {found.trajectories} trajectories, nats",
    )
    emit_table(
        ("staleness of the token", "tokens", "mean", "size", "p99", "largest"),
        [
            (age, one.tokens, one.mean, one.size, one.p99, one.largest)
            for age, one in found.by_staleness.items()
        ],
        title="What staleness did, by how stale",
    )
    told = found.tokenisation
    if told is None:
        return
    line = f"tokenisation: {told.differing} of {told.trajectories} trajectories get other ids"
    if told.differing:
        line += f" when their text is encoded again, {told.tokens_after} of {told.tokens} tokens"
        line += " stand behind the first difference"
    if told.logprob_mean is not None:
        line += f"; their log-prob would change by {told.logprob_mean:.3g} nats on average"
        line += f", at most {told.logprob_largest:.3g}"
    typer.echo(line)
    say("a step trains the ids as sampled: tokenisation is no part of the ratios above")
