"""`demo`: a policy that learns on a laptop, a worker that is killed, and the proof afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.cli.audit import audit
from dora_pipe.cli.init import TORCH, example_config, example_file, make_model, sft, share_cores
from dora_pipe.cli.output import complain, emit_table, say
from dora_pipe.cli.report import report_costs
from dora_pipe.cli.roles import TRAINER_PRELOAD, WORKER_PRELOAD, need_engines
from dora_pipe.cli.rundir import RUNS, RunDir, opened
from dora_pipe.cli.start import be_torch_role, plan_new, supervise
from dora_pipe.cli.supervisor import RunFailed, Supervisor
from dora_pipe.cli.trust import replay
from dora_pipe.cli.zygote import Ended, Zygote
from dora_pipe.config.load import load_config
from dora_pipe.errors import DoraError
from dora_pipe.schemas.topics import Topics
from dora_pipe.views.progress import Progress

TASK: Final = "arithmetic"
KILL_AT_STEP: Final = 12
REPLAYED_STEPS: Final = 2
REWARD_MIN: Final = 0.85
"""The demo has failed when the last policy's evaluation reward is below."""

WARM_THREADS: Final = 2
"""Of the warm start: nothing else runs meanwhile."""


def demo(
    root: Annotated[Path, typer.Option("--runs", help="Where the run goes.")] = RUNS,
    engine: Annotated[str, typer.Option(help="torch, vllm or vllm-server.")] = TORCH,
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", help="key=value of the run.")
    ] = None,
) -> None:
    """Warm up, train with several policy versions at once, kill a worker, audit, replay."""
    began_s = time.monotonic()
    need_engines([TORCH, engine])
    name = _free_name(root, _in_log(root, override or ()))
    directory = RunDir(root / name)
    start = directory.path / "start"
    start.mkdir(parents=True)
    (start / "demo.toml").write_text(example_config(TASK, engine))
    steps = load_config(start / "demo.toml", override or ()).run.steps
    killer = _Killer()
    works = {
        "warm start": lambda: warm(start),
        "replay": lambda: replay(str(directory.path), first=steps - REPLAYED_STEPS, last=steps),
    }

    def role(name: str) -> int:
        return be_torch_role(directory, directory.config(), name)

    with closing(Children(works, role=role)) as children:
        say("1. a small random model, warmed up on demonstrations of which a quarter is wrong")
        children.run("warm start")
        overrides = [f'run.name="{name}"', f'model.path="{start / "warm"}"', *(override or ())]
        plan = plan_new(load_config(start / "demo.toml", overrides), root)
        workers = plan.config.workers.count
        say(f"2. orchestrator, {workers} workers and trainer as processes, log in {directory.path}")
        if not supervise(plan, killer, torch=children.zygote):
            raise typer.Exit(130)
        say("3. what the log says")
        _report(str(directory.path), killer)
        say(f"4. steps {steps - REPLAYED_STEPS} to {steps - 1} once more, from the log alone")
        children.run("replay")
    say(f"done in {time.monotonic() - began_s:.0f} s; look around: dora-pipe show {name} ID")
    first, last = killer.rewards[0], killer.rewards[-1]
    if last < REWARD_MIN:
        raise RunFailed(
            f"evaluation reward {first:.3f} -> {last:.3f}: the demo asks for {REWARD_MIN}", code=1
        )


class _Killer:
    """Kills the second worker with SIGKILL once, in the middle of its work."""

    def __init__(self) -> None:
        self.killed_pid: int | None = None
        self.evaluations: dict[int, float] = {}

    @property
    def rewards(self) -> list[float]:
        """Evaluation rewards by version."""
        return [self.evaluations[version] for version in sorted(self.evaluations)]

    def __call__(self, progress: Progress, supervisor: Supervisor) -> None:
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
    with opened(run) as open_run:
        report_costs(open_run)
    audit(run)


def warm(start: Path) -> None:
    """The demo's model under `start`, random and warmed up; `demo.toml` lies there. Needs torch."""
    make_model(start / "random", TASK)
    sft(
        start / "demo.toml",
        start / "warm",
        threads=WARM_THREADS,
        override=[f'model.path="{start / "random"}"'],
    )


class Children:
    """Works that need torch, each in a child: this process goes on to fork roles.

    What they are forked from imports torch once, for all of them, and for roles: a name that is
    none of a work is that of a role.
    """

    def __init__(
        self,
        works: Mapping[str, Callable[[], None]],
        *,
        preload: Sequence[str] = (*TRAINER_PRELOAD, *WORKER_PRELOAD[TORCH]),
        role: Callable[[str], int] | None = None,
    ) -> None:
        self._works, self._role = works, role
        share_cores()
        self.zygote = Zygote(self._work, preload=preload)

    def run(self, name: str) -> None:
        """Wait until this work is done. Raises RunFailed with its exit code."""
        self.zygote.spawn(name)
        while True:
            for report in self.zygote.reports(1.0):
                if isinstance(report, Ended):
                    if report.code:
                        raise RunFailed(f"the {name} failed", code=report.code)
                    return

    def close(self) -> None:
        """Let go of the process with torch."""
        self.zygote.close()

    def _work(self, name: str) -> int:
        if self._role is not None and name not in self._works:
            return self._role(name)
        try:
            self._works[name]()
        except DoraError as error:
            complain(error)
            return error.exit_code
        return 0


def _in_log(root: Path, override: Sequence[str]) -> frozenset[str]:
    """The topics of a log that holds other runs too; it must be there before anything is made."""
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
