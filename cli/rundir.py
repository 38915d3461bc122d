"""A run's directory: what lies where, and how a run is found by its name or path.

runs/NAME/
  config.toml     the resolved configuration
  log.sqlite      the log, unless the bus is elsewhere
  policies/       policies and checkpoints under their digests; claims/: values too large for
                  the log
  snapshots/      the orchestrator's state now and then: a cache that a restart begins at
  handover/       KV caches on their way from worker to worker
  logs/           what each role said
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dora_pipe.bus.kafka_security import KafkaSecurity
from dora_pipe.bus.open import open_bus
from dora_pipe.bus.port import Bus
from dora_pipe.config.load import dump_toml, load_config
from dora_pipe.config.model import Config
from dora_pipe.errors import ConfigError, ResourceError, UsageError
from dora_pipe.policies.open import open_store
from dora_pipe.policies.store import PolicyStore
from dora_pipe.schemas.topics import Topics

RUNS = Path("runs")
"""Where runs lie, seen from where the command is started."""

FREE_BYTES_MIN = 200 * 1024 * 1024
"""A run does not start on a disk with less room than this."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of one run."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def logs(self) -> Path:
        """One file of talk per role."""
        return self.path / "logs"

    @property
    def handover(self) -> Path:
        """Where workers of this machine hand KV caches to each other."""
        return self.path / "handover"

    def config(self) -> Config:
        """The run's configuration as it was stored."""
        return load_config(self.config_file, ())

    def bus_url(self, config: Config) -> str:
        """Where the log is."""
        return config.bus.url or f"sqlite:{self.path / 'log.sqlite'}"

    def open_bus(self, config: Config) -> Bus:
        """The log as the configuration says: user, certificates, and where large values lie.

        The only way from a configuration to its log. Raises BusError, ConfigError.
        """
        security = KafkaSecurity.of(config.bus)
        return open_bus(self.bus_url(config), security, claims=self.store(config) / "claims")

    def store(self, config: Config) -> Path:
        """Where policies lie, or copies of those that lie elsewhere (`store.url`)."""
        return Path(config.store.path) if config.store.path else self.path / "policies"

    def policies(self, config: Config) -> PolicyStore:
        """The policy store, wherever it is. Raises ConfigError."""
        return open_store(self.store(config), config.store)

    @property
    def snapshots(self) -> Path:
        """The orchestrator's snapshots of its state; may be removed at any time."""
        return self.path / "snapshots"

    def exists(self) -> bool:
        """Whether a run was made here."""
        return self.config_file.is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run whose log is open."""

    directory: RunDir
    config: Config
    topics: Topics
    bus: Bus

    @property
    def store(self) -> Path:
        """Where its policies lie on this machine."""
        return self.directory.store(self.config)

    @property
    def policies(self) -> PolicyStore:
        """The policy store, wherever it is."""
        return self.directory.policies(self.config)


def run_dir(config: Config, runs: Path = RUNS) -> RunDir:
    """The directory that a configuration's run has."""
    return RunDir(runs / config.run.name)


def find_run(name: str, runs: Path = RUNS) -> RunDir:
    """A run by path or by name. Raises UsageError, naming the runs there are."""
    # A plain name is a run's first: the folder that a run was configured in may have the same.
    places = (runs / name, Path(name)) if name == Path(name).name else (Path(name),)
    for candidate in map(RunDir, places):
        if candidate.exists():
            return candidate
    there = sorted(path.parent.name for path in runs.glob("*/config.toml"))
    hint = f"there are: {', '.join(there)}" if there else f"there is no run in {runs}/ yet"
    raise UsageError(f"no run {name!r}", hint=hint)


@contextmanager
def opened(name: str, runs: Path = RUNS) -> Iterator[OpenRun]:
    """A run with its log open, for as long as the block lasts."""
    directory = find_run(name, runs)
    config = directory.config()
    if not config.bus.url and not (directory.path / "log.sqlite").exists():
        raise UsageError(
            f"{directory.path} holds a configuration, but no log",
            hint=f"start it with: dora-pipe run {directory.config_file}",
        )
    bus = directory.open_bus(config)
    try:
        yield OpenRun(directory=directory, config=config, topics=Topics(config.run.name), bus=bus)
    finally:
        bus.close()


def create(config: Config, runs: Path = RUNS) -> RunDir:
    """Make the directory of a new run; one that is there already is never overwritten."""
    directory = run_dir(config, runs)
    if directory.exists():
        raise ConfigError(
            f"run {config.run.name!r} exists in {directory.path}",
            hint="go on with --resume, or choose another run.name (-o run.name=...)",
        )
    directory.path.mkdir(parents=True, exist_ok=True)
    check_room(directory.path)
    directory.logs.mkdir(exist_ok=True)
    store_config(directory, config)
    return directory


def store_config(directory: RunDir, config: Config) -> None:
    """Write the resolved configuration into the run's directory, all or nothing."""
    partial = directory.config_file.with_suffix(".partial")
    partial.write_text(dump_toml(config))
    partial.replace(directory.config_file)


def check_room(path: Path) -> None:
    """Refuse to start on a full disk. Raises ResourceError."""
    free = shutil.disk_usage(path).free
    if free < FREE_BYTES_MIN:
        raise ResourceError(
            f"{free // 1024**2} MiB free at {path}", hint="make room, or run from another disk"
        )
