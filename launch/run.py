"""Start every role of a run on this machine and supervise them."""

from __future__ import annotations

import getpass
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from dora_pipe.bus.bus import Bus
from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.registry import need_learner
from dora_pipe.core.errors import (
    BusError,
    ConfigError,
    InvariantBroken,
    LogTruncated,
    ResourceError,
    RunHalted,
    TaskError,
)
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import name_process, outlasting, say, typed
from dora_pipe.core.system.durable import need_temporary_folder
from dora_pipe.launch import local_roles
from dora_pipe.launch.disk_watch import BrokerWatch, DiskWatch
from dora_pipe.launch.local_roles import need_gpus
from dora_pipe.launch.plan import Plan
from dora_pipe.launch.processes import RoleStart, start_role
from dora_pipe.launch.run_dir import RunDir, locked
from dora_pipe.launch.supervisor import Supervisor, Workers
from dora_pipe.observe.alarms import Alarms
from dora_pipe.observe.progress import RunProgress
from dora_pipe.orchestrator.curriculum import Samplers
from dora_pipe.producers.engines.registry import check_engines, need_engines
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.transfers.open import need_transfers

RESUMABLE_CODES: Final = frozenset(
    kind.exit_code for kind in (BusError, ResourceError, TaskError, RunHalted)
)


Watch = Callable[[RunProgress, Supervisor], None]


def supervise(
    plan: Plan,
    watch: Watch | None = None,
    *,
    report: Callable[[str], None] = say,
    verbose: bool = False,
) -> bool:
    """Start every role and report until all have ended; return False if the user stopped it.

    `verbose` shows step metrics. Raises UsageError if the run is already running.
    """
    with locked(plan.directory), outlasting(plan.directory.logs / "run.log"):
        return _supervise(plan, watch, report, verbose=verbose)


def _supervise(
    plan: Plan, watch: Watch | None, report: Callable[[str], None], *, verbose: bool
) -> bool:
    directory, config = plan.directory, plan.config
    name_process("run", config.run.name)
    need_parts(config)
    shutil.rmtree(directory.handover, ignore_errors=True)
    workers = local_roles.worker_names(config)
    other_roles = [local_roles.TRAINER, local_roles.ORCHESTRATOR]
    if config.telemetry.traces != "off":
        other_roles.append(local_roles.TRACES)

    with (
        closing(directory.open_bus(config)) as bus,
        BrokerWatch(config, directory.open_bus) as brokers,
    ):
        progress = _progress(bus, config, directory.logs, verbose=verbose)
        console = RunConsole(progress, report)
        places = (directory.path, directory.store(config))
        disk = DiskWatch(places, report, SystemClock(), brokers=brokers.trouble)

        def turn() -> None:
            disk.turn()
            progress.stopping = supervisor.stopping
            console.turn()
            if watch is not None:
                watch(progress, supervisor)

        supervisor = Supervisor(
            lambda name: _start(plan, name),
            stop_order={"workers": workers} | {name: (name,) for name in other_roles},
            spare=(local_roles.TRACES,),
            workers=Workers(
                names=workers,
                elsewhere=lambda: progress.elsewhere(workers),
                served=lambda name: progress.served[name],
            ),
            timing=config.timing,
            logs=directory.logs,
            watch=turn,
            held_up=lambda: disk.full,
        )
        finished = supervisor.run()
        turn()
        progress.close()
        return finished


def _progress(bus: Bus, config: Config, logs: Path, *, verbose: bool) -> RunProgress:
    topics = Topics(config.run.name)
    past = bus.end(TopicPartition(topics.control, 0))
    alarms = Alarms(bus, topics, lease_s=config.timing.lease_s, clock=SystemClock())
    return RunProgress(bus, topics, alarms=alarms, logs=logs, past=past, verbose=verbose)


def need_parts(config: Config) -> None:
    """Raise an error if this machine lacks a requirement of the roles."""
    need_temporary_folder()
    engines = local_roles.own_engines(config)
    need_engines(["torch", *engines], config.task.directory)
    check_engines(config, engines)
    need_learner(config)
    Samplers.load(config)
    need_gpus(config)
    need_transfers(config.transfers)


def _start(plan: Plan, name: str) -> subprocess.Popen[bytes]:
    return start_role(
        RoleStart(
            name=name,
            directory=str(plan.directory.path),
            config=plan.config,
            first=plan.first,
            adopt=plan.adopt,
            resumed_by=getpass.getuser() if plan.resumed else "",
        )
    )


def refuse_copy(directory: RunDir, root: Path) -> None:
    """Raise ConfigError for the copied directory of a run."""
    if not directory.was_started:
        return
    run, called = directory.config().run.name, directory.path.resolve().name
    if run != called:
        raise ConfigError(
            f"{directory.path} holds run {run!r}, not {called!r}",
            hint=f"the run itself: {typed('run', root / run, '--resume', runs=root)};"
            f" this copy: as FOLDER/{run}, with --runs FOLDER",
        )


class RunConsole:
    """Print the progress of a run, and each outage once."""

    def __init__(self, progress: RunProgress, report: Callable[[str], None]) -> None:
        self._progress = progress
        self._report = report
        self._away = False

    def turn(self) -> None:
        """Print new lines. Raises InvariantBroken if the log was truncated."""
        try:
            lines = self._progress.lines()
        except LogTruncated as error:
            raise InvariantBroken(error.message, hint=error.hint) from error
        except BusError as error:
            if not self._away:
                self._report(f"the log is not reachable ({error.message}); the roles wait")
            self._away = True
            return
        if self._away:
            self._report("the log is reachable again")
        self._away = False
        for line in lines:
            self._report(line)
