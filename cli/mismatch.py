"""`mismatch`: break down the ratios of a trained batch by cause."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.audit.mismatch import Mismatch, measure
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_line, emit_table
from dora_pipe.cli.progress import CommandProgress, opened_watched
from dora_pipe.cli.replay import rebuilder
from dora_pipe.config.logged import logged_config
from dora_pipe.consumers.learners.registry import make_scorer
from dora_pipe.consumers.trainer.batch_reader import batch_of_commit
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.core.errors import InvariantBroken, UsageError
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.run_dir import OpenRun

MEANINGS = {
    "staleness": "other weights than those that sampled",
    "numerics": "the same weights, computed by the trainer and by the engine",
    "sampling": "effect of top-k, top-p and min-p (raw log-probs: and temperature)",
    "routing": "the same weights, through the experts that the trainer's own router chooses",
    "trained": "staleness and numerics: the ratio that the objective sees",
    "all": "trained policy against the sampling distribution",
}


def mismatch(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Step; default: the last committed.")
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Attribute the importance ratios of a batch to staleness, numerics, sampling, tokenization."""
    with opened_watched(run, root) as (open_run, report):
        measured = _measure_step(open_run, step, report)
    if as_json:
        emit_json(measured.plain())
    else:
        _print(measured)


def _measure_step(run: OpenRun, step: int | None, report: CommandProgress) -> Mismatch:
    from dora_pipe.producers.chat.tokenizer import Tokenizer

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
    report("opening the model")
    config = logged_config(started.config)
    store = run.policies
    assets = store.assets(started.assets_digest)
    reference = store.held_weights(started.policy.digest)
    scorer = make_scorer(assets=assets, reference=reference, config=config)
    tokenizer = Tokenizer(assets, special_tokens=config.task.special_tokens)
    policies = rebuilder(run)

    def weights_of(version: int) -> tuple[Path, str]:
        report(f"scoring the batch under version {version}")
        return policies.weights(version), history.digest_of(version)

    return measure(batch, scorer, weights_of, tokenizer)


def _print(mismatch: Mismatch) -> None:
    emit_table(
        ("cause", "mean", "size", "p99", "largest", "share", "meaning"),
        [
            (
                metric.cause,
                metric.mean,
                metric.size,
                metric.p99,
                metric.largest,
                "-" if metric.share is None else f"{metric.share:.1%}",
                MEANINGS[metric.cause],
            )
            for metric in mismatch.metrics
        ],
        title=f"Step {mismatch.step}: log ratios of {mismatch.tokens} tokens of"
        f" {mismatch.trajectories} trajectories, nats",
    )
    emit_table(
        ("staleness of the token", "tokens", "mean", "size", "p99", "largest"),
        [
            (age, metric.tokens, metric.mean, metric.size, metric.p99, metric.largest)
            for age, metric in mismatch.by_staleness.items()
        ],
        title="Effect of staleness, by staleness",
    )
    if mismatch.rerouted is not None:
        rerouted = mismatch.rerouted
        emit_line(
            f"routing: {rerouted.differing} of {rerouted.choices} expert choices (token,"
            " layer) differ; "
            "the step uses the logged routing, so `all` alone contains the difference"
        )
    again = mismatch.tokenization
    if again is None:
        return
    line = f"tokenization: {again.differing} of {again.trajectories} trajectories get other ids"
    if again.differing:
        line += f" when their text is encoded again, {again.tokens_after} of {again.tokens} tokens"
        line += " follow the first difference"
    if again.logprob_mean is not None:
        line += f"; their log-prob would change by {again.logprob_mean:.3g} nats on average"
        line += f", at most {again.logprob_largest:.3g}"
    emit_line(line)
    say("a step trains the ids as sampled: tokenization does not affect the ratios above")
