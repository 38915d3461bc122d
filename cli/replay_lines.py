"""What `replay` prints while it goes: a line per step, or per trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import typer

from dora_pipe.cli.output import emit_json, emit_table, say, show
from dora_pipe.cli.roles import open_engine, with_engine
from dora_pipe.cli.rundir import OpenRun
from dora_pipe.clock import SystemClock
from dora_pipe.config.model import Config
from dora_pipe.consumers.recovery import read_history
from dora_pipe.consumers.trainers.make import make_trainer
from dora_pipe.consumers.trainers.port import Trainer
from dora_pipe.errors import InvariantBroken, UsageError
from dora_pipe.history.audit import build_ledger
from dora_pipe.history.rebuild import Rebuilder
from dora_pipe.history.regenerate import (
    Regenerated,
    engines_of,
    pick,
    raise_if_different,
    regenerate,
)
from dora_pipe.history.replay import StepLine, raise_if_diverged, replay
from dora_pipe.producers.engines.port import SamplingParams
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.identity import Purpose

DISTANCES_SHOWN_MAX = 20


def replay_steps(
    run: OpenRun,
    first: int | None,
    last: int | None,
    changes: Sequence[str],
    *,
    as_json: bool,
) -> None:
    """Train steps again. Raises ReplayDiverged after the last line."""
    clock = SystemClock()
    history = read_history(run.bus, run.topics, clock)
    started = history.run_started
    if started is None:
        raise InvariantBroken(f"{run.topics.control} has no `run started`")
    config = msgspec.convert(started.config, Config)
    trainer = open_trainer(run, started, _here(config, run.config))
    first = 0 if first is None else first
    last = len(history.notes) if last is None else last
    lines: list[StepLine] = []
    changed = _settings(changes)
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
    _sum_up([line for line in lines if line.wanted])
    for line in lines:
        raise_if_diverged(line)


def open_trainer(run: OpenRun, started: RunStarted, config: Config | None = None) -> Trainer:
    """A trainer as the run has it, without weights yet. Raises ConfigError, PolicyError."""
    store = run.policies
    return make_trainer(
        assets=store.assets(started.assets_digest),
        reference=store.held_weights(started.policy.digest),
        config=config or msgspec.convert(started.config, Config),
        log=run.log,
    )


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
        make_trainer=lambda started: open_trainer(run, started),
        clock=SystemClock(),
        told=lambda rebuilt: say(rebuilt.line),
    )


def replay_trajectories(
    run: OpenRun, wanted: Sequence[str], random: int, seed: int, *, as_json: bool
) -> None:
    """Generate trajectories again. Raises ReplayDiverged, naming the first that differs."""
    from dora_pipe.producers.role import sampling_params
    from dora_pipe.producers.tokenizer import Tokenizer

    ledger = build_ledger(run.bus, run.topics)
    if ledger.started is None or ledger.config is None:
        raise InvariantBroken(f"{run.topics.control} has no `run started`")
    names = sorted({*wanted, *(pick(ledger, random, seed) if random else ())})
    assets = run.policies.assets(ledger.started.assets_digest)
    tokenizer = Tokenizer(assets)
    config = ledger.config
    params: dict[Purpose, SamplingParams] = {
        "train": sampling_params(config.sampling, tokenizer.stop_ids),
        "eval": sampling_params(config.evaluation.sampling, tokenizer.stop_ids),
    }
    found: list[Regenerated] = []
    for name, some in engines_of(run.bus, run.topics, ledger, names).items():
        own = with_engine(config, name or config.workers.engine)
        engine = open_engine(assets=assets, config=own, decode=tokenizer.full_text)
        try:
            again = regenerate(
                run.bus,
                run.topics,
                run.policies,
                ledger,
                engine,
                some,
                params,
                weights_of=rebuilder(run).weights,
            )
            for one in again:
                found.append(one)
                _print_trajectory(one, as_json=as_json)
        finally:
            engine.close()
    equal = sum(one.equal for one in found)
    tokens = sum(one.tokens for one in found)
    say(f"{equal} of {len(found)} trajectories bit-equal, {tokens} sampled tokens")
    for one in found:
        raise_if_different(one)


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
    lead_in = "" if line.wanted else "  (leads there)"
    ratio = "" if line.time_ratio is None else f" ({line.time_ratio:.2f}x)"
    times = f"{step.compute_s_committed:.3f} s then, {step.compute_s_replayed:.3f} s now{ratio}"
    typer.echo(f"step {step.step:>5}  {step.digest_replayed[:16]}  {verdict}  {times}{lead_in}")
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
        "equal": step.equal,
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
    equal = sum(line.replayed.equal for line in lines)
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
                "stays": found.stays,
                "tokens": found.tokens,
                "equal": found.equal,
                "difference": found.difference,
            }
        )
        return
    verdict = "equal" if found.equal else f"DIFFERS: {found.difference}"
    stays = f"{found.stays} stay{'s' if found.stays != 1 else ''}"
    typer.echo(
        f"{found.trajectory}  version {found.version:>4}  {found.tokens:>5} tokens  "
        f"{stays}  {verdict}"
    )
