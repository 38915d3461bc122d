"""Layout of a run's directory, and lookup of runs by name, path or log.

runs/NAME/
  config.toml     resolved configuration
  log.sqlite      log, unless the bus is elsewhere
  policies/       policies and checkpoints by digest; blobs/: values too large for the log
  snapshots/      caches for restarts: the orchestrator's state, the trainer's commits
  handover/       KV caches in transfer between workers
  logs/           log file of each role
  lock            held by the running process
  begins-with     planned first record

The address of a log also names a run: `kafka://HOST:PORT[,HOST:PORT]/NAME`, or a `.sqlite` file
written by `log copy`. NAME finds `runs/NAME.sqlite` if no directory has that name.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dora_pipe.bus import open_bus
from dora_pipe.bus.bus import Bus
from dora_pipe.config.load import dump_toml, load_config
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.consumers.contributions import stored_contributions
from dora_pipe.core.errors import ConfigError, ResourceError, UsageError
from dora_pipe.core.system.console import RUNS, RUNS_VARIABLE, typed
from dora_pipe.core.system.durable import write_atomically
from dora_pipe.ledger.database import Catalogue
from dora_pipe.ledger.reading import FILE as CATALOGUE
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.observe.lineage import first_record
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.files import BLOBS
from dora_pipe.store.log_location import LogLocation
from dora_pipe.store.store import PolicyStore

LOG = "log.sqlite"

LOCK = "lock"

BEGINS_WITH = "begins-with"
"""Planned first record, while a start has not written it."""

ON_KAFKA = "kafka://"

IN_FILE = "sqlite:"

LOG_SUFFIX = ".sqlite"

NAMES_MAX = 8

PID_BYTES_MAX = 32

FREE_BYTES_MIN = 200 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def handover(self) -> Path:
        """Folder in which local workers exchange KV caches."""
        return self.path / "handover"

    def config(self) -> Config:
        return load_config(self.config_file, ())

    @property
    def words(self) -> str:
        """Return the run's name or path for a command line."""
        # A bare name would be searched in the runs folder.
        return str(self.path) if self.path.name != str(self.path) else f"./{self.path}"

    def bus_url(self, config: Config) -> str:
        return config.bus.url or f"sqlite:{self.path / LOG}"

    def open_bus(self, config: Config) -> Bus:
        """Open the run's log with credentials, certificates and blob store.

        Every log is opened here. Raises BusError, ConfigError.
        """
        return self.log_location(config).open()

    def log_location(self, config: Config) -> LogLocation:
        return LogLocation(
            run=config.run.name,
            url=self.bus_url(config),
            bus=config.bus,
            blobs=str(self.store(config) / BLOBS),
            store_url=config.store.url,
        )

    def store(self, config: Config) -> Path:
        """Folder of policies, or of local copies if `store.url` is set."""
        if config.store.path:
            return Path(config.store.path)
        return self.path / "policies"

    def policies(
        self, config: Config, peers: Callable[[str, Path], bool] | None = None
    ) -> PolicyStore:
        """Return the policy store, without connecting yet; it asks `peers` first.

        Runs under one `store.url` have separate folders. Raises ConfigError.
        """
        section, every = config.store, config.policies.full_every
        root, bytes_max = self.store(config), int(section.cache_gb * 1e9)
        if not section.url:
            return PolicyStore(root, cache_bytes_max=bytes_max)
        from dora_pipe.store.arrow_files import open_files  # slow to import

        return PolicyStore(
            root,
            open_files(section.url, folder=config.run.name),
            cache_bytes_max=bytes_max,
            peers=peers,
            with_deltas=None if every == "auto" else every > 1,
        )

    @property
    def snapshots(self) -> Path:
        """Folder of the snapshots; may be deleted at any time."""
        return self.path / "snapshots"

    @property
    def commits(self) -> Path:
        """Snapshot of the trainer's commits."""
        return self.snapshots / "commits"

    @property
    def catalogue(self) -> Path | None:
        """Folder of a finished run's cached tables, if any; may be deleted at any time."""
        return self.path / CATALOGUE if self.path.is_dir() else None

    def exists(self) -> bool:
        return self.config_file.is_file()

    @property
    def was_started(self) -> bool:
        """Return whether roles have run here; a config.toml alone does not show it."""
        return self.exists() and any((self.path / name).is_file() for name in (LOG, LOCK))

    def forget(self) -> None:
        """Remove a run without results, except the logs of its roles."""
        for file in (self.path / BEGINS_WITH, *self.path.glob(f"{LOG}*"), self.config_file):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.snapshots, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class RunByLog(RunDir):
    """Run known only by its log; its directory need not exist."""

    url: str

    @property
    def words(self) -> str:
        if self.url.startswith(IN_FILE):
            return self.url.removeprefix(IN_FILE)
        return f"{self.url}/{self.path.name}"

    def config(self) -> Config:
        """Return the configuration in the run's first record. Raises UsageError, BusError,
        ConfigError."""
        topics = Topics(self.path.name)
        with closing(open_bus(self.url)) as bus:
            there = bus.topics()
            if topics.control not in there:
                names = ", ".join(_runs_among(there)) or "none"
                raise UsageError(
                    f"no run {topics.run!r} is on {self.url}", hint=f"there are: {names}"
                )
            try:
                started = first_record(bus, topics)
            except UsageError:
                raise UsageError(f"run {topics.run!r} on {self.url} has not started") from None
        try:
            return at_url(logged_config(started.config), self.url)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the configuration of run {topics.run!r}: {error}") from None

    def exists(self) -> bool:
        """Return True; `config` reports a missing run."""
        return True


def at_url(config: Config, url: str) -> Config:
    """Return the configuration of a run whose log is at another address."""
    return replace(config, bus=replace(config.bus, url=url))


def _runs_among(topics: Sequence[str]) -> list[str]:
    ending = Topics("x").control.removeprefix("x")
    return sorted(topic.removesuffix(ending) for topic in topics if topic.endswith(ending))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """Run with an open log."""

    directory: RunDir
    config: Config
    topics: Topics
    bus: Bus
    log: LogLocation

    @property
    def store(self) -> Path:
        return self.directory.store(self.config)

    @property
    def policies(self) -> PolicyStore:
        return self.directory.policies(self.config)

    def tables(self, on_share: Callable[[float], None] = lambda share: None) -> Catalogue:
        """Open the tables of the log; `told` receives the fraction read. Raises BusError,
        LogTruncated."""
        return read_catalogue(self.bus, self.topics, self.directory.catalogue, on_share=on_share)

    def contributions(self, sha256: str) -> list[dict[str, Any]]:
        """Return the contributions of a step's trajectories; empty if unreadable."""
        return stored_contributions(self.policies, sha256)


def run_dir(config: Config, runs: Path = RUNS) -> RunDir:
    """Return the directory of a configuration's run."""
    return RunDir(runs / config.run.name)


def find_run(name: str, runs: Path = RUNS) -> RunDir:
    """Find a run by path, name or log. Raises UsageError with the places searched."""
    if name.startswith(ON_KAFKA):
        return run_on_kafka(name, runs)
    if name.endswith(LOG_SUFFIX):
        return _run_in_file(Path(name), runs)
    sealed = runs / f"{name}{LOG_SUFFIX}"
    if name == Path(name).name and sealed.is_file() and not RunDir(runs / name).exists():
        return _run_in_file(sealed, runs)
    return find_directory(name, runs)


def find_directory(name: str, runs: Path = RUNS) -> RunDir:
    """Find the directory of a run by path or name. Raises UsageError."""
    # Prefer the run: the folder of its configuration may have the same name.
    places = (runs / name, Path(name)) if name == Path(name).name else (Path(name),)
    for candidate in map(RunDir, places):
        if candidate.exists():
            return candidate
    looked = (runs if len(places) > 1 else Path(name).parent).absolute()
    raise UsageError(f"no run {Path(name).name!r} in {looked}", hint=_near(Path(name).name, looked))


def run_on_kafka(address: str, runs: Path = RUNS) -> RunByLog:
    """Return the run at `kafka://HOST:PORT[,HOST:PORT]/RUN`. Raises UsageError, ConfigError."""
    url, _, run = address.rpartition("/")
    if not url.startswith(ON_KAFKA) or not run:
        raise UsageError(f"{address} is not a run", hint="kafka://HOST:PORT[,HOST:PORT]/RUN")
    return RunByLog(runs / run, url)


def _run_in_file(file: Path, runs: Path) -> RunByLog:
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    with closing(open_bus(f"{IN_FILE}{file}")) as bus:
        names = _runs_among(bus.topics())
    if len(names) != 1:
        raise UsageError(f"{file} holds the logs of {len(names)} runs, expected one")
    return RunByLog(runs / names[0], f"{IN_FILE}{file}")


def _near(name: str, runs: Path) -> str:
    there = sorted(path.parent.name for path in runs.glob("*/config.toml"))
    if not there:
        return f"no runs there; set the directory with --runs DIR or {RUNS_VARIABLE}"
    near = get_close_matches(name, there, n=NAMES_MAX)
    names = [*near, *(name for name in there if name not in near)]
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return f"there are: {', '.join(names[:NAMES_MAX])}{more}"


@contextmanager
def opened(name: str, runs: Path = RUNS) -> Iterator[OpenRun]:
    """Open a run and its log for the duration of the block."""
    directory = find_run(name, runs)
    config = directory.config()
    if not config.bus.url and not (directory.path / LOG).exists():
        raise UsageError(
            f"{directory.path} has a configuration but no log",
            hint=f"start it with: {typed('run', directory.config_file, runs=runs)}",
        )
    topics = Topics(config.run.name)
    location = directory.log_location(config)
    bus = directory.open_bus(config)
    try:
        yield OpenRun(directory=directory, config=config, topics=topics, bus=bus, log=location)
    finally:
        bus.close()


def create(config: Config, runs: Path = RUNS) -> RunDir:
    """Create the directory of a new run; never overwrite an existing one."""
    directory = run_dir(config, runs)
    if directory.exists():
        raise ConfigError(
            f"run {config.run.name!r} exists in {directory.path}",
            hint="continue it with --resume, or choose another run.name (-o run.name=...)",
        )
    directory.path.mkdir(parents=True, exist_ok=True)
    check_room(directory.path)
    directory.logs.mkdir(exist_ok=True)
    store_config(directory, config)
    return directory


def store_config(directory: RunDir, config: Config) -> None:
    """Write the resolved configuration into the run's directory."""
    write_atomically(directory.config_file, dump_toml(config).encode())


def check_room(path: Path) -> None:
    """Raise ResourceError if the disk is full."""
    free = shutil.disk_usage(path).free
    if free < FREE_BYTES_MIN:
        raise ResourceError(
            f"{free // 1024**2} MiB free at {path}",
            hint="free disk space, or run from another disk",
        )


@contextmanager
def locked(directory: RunDir, *, shared: bool = False) -> Iterator[None]:
    """Lock a run for the duration of the block; do nothing if its directory is missing.

    `run` locks it exclusively, because its restarting roles and a second orchestrator would fence
    each other endlessly. Roles started alone share the lock, so that one can take over. Workers
    take none. Raises UsageError.
    """
    if not directory.path.is_dir():
        yield
        return
    descriptor = os.open(directory.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(descriptor, directory, shared=shared)
        yield
    finally:
        os.close(descriptor)


def refuse_running(directory: RunDir) -> None:
    """Raise UsageError if the run is running on this machine."""
    with locked(directory):
        return


def _lock(descriptor: int, directory: RunDir, *, shared: bool) -> None:
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(descriptor, PID_BYTES_MAX).decode("ascii", errors="replace").strip()
        who = f" (process {pid})" if pid else ""
        raise UsageError(
            f"{directory.path.name} is already running{who}",
            hint="stop it first: Ctrl-C in its terminal, or SIGTERM",
        ) from None
    except OSError:
        return  # the file system has no locks
    os.ftruncate(descriptor, 0)
    if not shared:
        os.write(descriptor, b"%d\n" % os.getpid())
