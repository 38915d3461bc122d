"""`demo`: train a policy on a laptop, kill a worker, and verify the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.cli.audit import audit
from dora_pipe.cli.options import SFT_STEPS_OF, TORCH, OverrideOption, RunsOption
from dora_pipe.cli.output import emit_table
from dora_pipe.cli.replay import replay
from dora_pipe.cli.start import sft
from dora_pipe.config.load import load_config
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.console import RUNS, say, typed
from dora_pipe.launch.examples import example_config, example_file, make_model
from dora_pipe.launch.plan import plan_new
from dora_pipe.launch.roles import share_cores
from dora_pipe.launch.run import supervise
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.launch.supervisor import RunFailed, Supervisor
from dora_pipe.observe.progress import RunProgress
from dora_pipe.producers.engines.registry import need_engines
from dora_pipe.schemas.topics import Topics

TASK: Final = "arithmetic"
KILL_AT_STEP: Final = 12
REWARD_MIN: Final = 0.75
REPLAYED_STEPS: Final = 2
OWN_KEYS: Final = ("run.name", "model.path")

WARM_THREADS: Final = 2


def demo(
    root: RunsOption = RUNS,
    engine: Annotated[str, typer.Option(help="torch or vllm.")] = TORCH,
    override: OverrideOption = None,
) -> None:
    """Warm up, train with several policy versions at once, kill a worker, audit, replay."""
    override = override or []
    began_s = time.monotonic()
    for word in override:
        if (key := word.partition("=")[0].strip()) in OWN_KEYS:
            raise UsageError(f"{key}: the demo sets it", hint=f"dora-pipe run CONFIG -o {word}")
    need_engines([TORCH, engine])
    name = _free_name(root, _in_log(root, override))
    directory = RunDir(root / name)
    start = directory.path / "start"
    start.mkdir(parents=True)
    (start / "demo.toml").write_text(example_config(TASK, engine))
    steps = load_config(start / "demo.toml", override).run.steps
    killer = _Killer()
    say("1. a small random model, warmed up on demonstrations of which a quarter is wrong")
    warm(start)
    overrides = [f'run.name="{name}"', f'model.path="{start / "warm"}"', *override]
    plan = plan_new(load_config(start / "demo.toml", overrides), root)
    workers = plan.config.workers.count
    say(f"2. orchestrator, {workers} workers and trainer as processes, log in {directory.path}")
    if not supervise(plan, killer):
        raise typer.Exit(130)
    say("3. summary of the log")
    _report(str(directory.path), killer)
    say(f"4. steps {steps - REPLAYED_STEPS} to {steps - 1} replayed from the log alone")
    replay(str(directory.path), first=steps - REPLAYED_STEPS, last=steps)
    look = typed("show", name, runs=root)
    say(f"done in {time.monotonic() - began_s:.0f} s; look around: {look}")
    first, last = killer.rewards[0], killer.rewards[-1]
    if last < REWARD_MIN:
        raise RunFailed(
            f"evaluation reward {first:.3f} -> {last:.3f}: the demo asks for {REWARD_MIN}", code=1
        )


class _Killer:
    def __init__(self) -> None:
        self.killed_pid: int | None = None
        self.evaluations: dict[int, float] = {}

    @property
    def rewards(self) -> list[float]:
        return [self.evaluations[version] for version in sorted(self.evaluations)]

    def __call__(self, progress: RunProgress, supervisor: Supervisor) -> None:
        self.evaluations = progress.evaluations
        pid = supervisor.pid("w1")
        late = progress.steps and progress.steps[-1].step >= KILL_AT_STEP
        if self.killed_pid is None and late and pid is not None:
            say(f"kill -9 {pid} (w1)")
            os.kill(pid, signal.SIGKILL)
            self.killed_pid = pid


def _report(run: str, killer: _Killer) -> None:
    emit_table(
        ("version", "evaluation reward (fixed prompts and seeds, temperature 1)"),
        [(version, reward) for version, reward in sorted(killer.evaluations.items())],
    )
    audit(run)


def warm(start: Path, task: str = TASK) -> None:
    """Make the warmed-up model of a task and `demo.toml` under `start`. Needs torch."""
    share_cores()
    make_model(start / "random", task)
    sft(
        start / "demo.toml",
        start / "warm",
        steps=SFT_STEPS_OF[task],
        packing=True,
        threads=WARM_THREADS,
        override=[f'model.path="{start / "random"}"'],
    )


def _in_log(root: Path, override: Sequence[str]) -> frozenset[str]:
    config = load_config(example_file(TASK), override)
    if not config.bus.url.startswith("kafka:"):
        return frozenset()
    with closing(RunDir(root).open_bus(config)) as bus:
        return frozenset(bus.topics())


def _free_name(root: Path, topics: frozenset[str]) -> str:
    number = 1
    while (root / _name(number)).exists() or Topics(_name(number)).control in topics:
        number += 1
    return _name(number)


def _name(number: int) -> str:
    return "demo" if number == 1 else f"demo-{number}"
