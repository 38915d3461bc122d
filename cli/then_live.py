"""`retrain --then-live`: goes on with live rollouts where a retrained run has ended.

The live run is an ordinary one, `run --from NEW@STEP --with-optimizer` in the place of this
process: one that has trained has threads, and roles are forked. So nothing of it is another run
than by that command, and what goes on after a kill is `run --resume`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dora_pipe.config.load import load_config
from dora_pipe.config.model import Config
from dora_pipe.core.console import say, typed
from dora_pipe.core.errors import ConfigError, UsageError
from dora_pipe.launch.nodes import command_of
from dora_pipe.launch.plan import facts_of, planned, started
from dora_pipe.launch.run import need_parts
from dora_pipe.launch.run_dir import OpenRun, run_dir
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.topics import Topics, check_run_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The live run that is wanted behind a retrained one."""

    name: str
    retrained: str
    """Name of the run that it begins from."""
    overrides: tuple[str, ...] = ()
    """`key=value`, beside its name."""
    steps: int | None = None
    """That it shall train; None: as the source's configuration says."""

    def words(self, runs: Path, version: int, steps: int) -> list[str]:
        """The command that starts it from a version: with the retrained run's configuration, which
        is the source's with the settings laid over it."""
        own = ["-o", f"run.name={self.name}", "-o", f"run.steps={steps}"]
        parent = f"{self.retrained}@{version}"
        return ["run", str(runs / self.retrained), "--from", parent, "--with-optimizer", *own]

    def config(self, source: Path) -> Config:
        """As that command reads it, from the source's file. Raises ConfigError."""
        own = [f"run.name={self.name}"]
        own += [] if self.steps is None else [f"run.steps={self.steps}"]
        return load_config(source, [*self.overrides, *own], stored=True, another=True)


def check_live(source: OpenRun, live: Live, root: Path) -> None:
    """What the live run needs is there, before anything is trained.

    Raises UsageError, ConfigError, TaskError.
    """
    check_run_name(live.name)
    place = source.directory
    if not place.config_file.is_file():
        raise ConfigError(
            f"{place.config_file} is not there: a live run has the source's configuration",
            hint="without --then-live nothing of it is needed",
        )
    if source.config.lora.rank:
        raise UsageError(
            "a live run begins with merged weights, and an adapter's optimizer has no state of "
            "these",
            hint="retrain without --then-live, then: run --from NEW@STEP",
        )
    config = live.config(place.config_file)
    need_parts(config)
    begun = _begun(config, root)
    if begun is None:
        facts_of(config)
        return
    lineage = begun.lineage
    if lineage is None or lineage.run != live.retrained or lineage.optimizer is None:
        raise UsageError(
            f"run {live.name!r} exists, and did not begin with {live.retrained}",
            hint="another name: --live-name NAME",
        )


def go_live(source: Path, live: Live, version: int, root: Path) -> NoReturn:
    """Become the command that starts the live run, or goes on with it; `source` is the file of the
    source's configuration.

    Raises UsageError where it is running, or began with another version; BusError.
    """
    config = live.config(source)
    directory, begun = run_dir(config, root), _begun(config, root)
    words: Sequence[str] = live.words(source.parent.parent, version, config.run.steps)
    if begun is not None:
        assert begun.lineage is not None
        if begun.lineage.step != version:
            raise UsageError(
                f"run {live.name!r} exists, and began with version {begun.lineage.step}",
                hint="another name: --live-name NAME",
            )
        words = ["run", str(directory.path), "--resume"]
    say(f"goes on live: {typed(*words, runs=root)}")
    line = command_of([*words, "--runs", str(root)])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(line[0], line)


def _begun(config: Config, root: Path) -> RunStarted | None:
    """The first record of the live run, or what it will be; None where there is no such run."""
    directory = run_dir(config, root)
    if not directory.exists():
        return None
    with closing(directory.open_bus(config)) as bus:
        return started(bus, Topics(config.run.name)) or planned(directory)
