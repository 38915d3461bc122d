"""A run's directory: what lies where, and how a run is found by its name or path.

runs/NAME/
  config.toml     the resolved configuration
  log.sqlite      the log, unless the bus is elsewhere
  policies/       policies and checkpoints under their digests; claims/: values too large for
                  the log
  snapshots/      the orchestrator's state now and then: a cache that a restart begins at
  handover/       KV caches on their way from worker to worker
  logs/           what each role said
  lock            held by who runs it (`locked`)
  begins-with     the first record as the start has planned it

A run may also be called by its log: `kafka://HOST:PORT[,HOST:PORT]/NAME`, or a `.sqlite` file that
`log copy` has written. Then its configuration is in its first record. A file `runs/NAME.sqlite` is
found by NAME where there is no directory of that name.
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
from dora_pipe.bus.claim_check import ClaimStore
from dora_pipe.bus.port import Bus
from dora_pipe.config.load import dump_toml, load_config
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.config.storage import Store
from dora_pipe.consumers.contributions import stored_contributions
from dora_pipe.core.console import RUNS, RUNS_VARIABLE, typed
from dora_pipe.core.errors import ConfigError, ResourceError, UsageError
from dora_pipe.ledger.database import Catalogue
from dora_pipe.ledger.reading import FILE as CATALOGUE
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.observe.lineage import policy_after
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.files import CLAIMS
from dora_pipe.store.log_location import LogLocation
from dora_pipe.store.store import PolicyStore

LOG = "log.sqlite"
"""File in a run's directory: the log, unless the bus is elsewhere."""

LOCK = "lock"
"""File in a run's directory; it says which process holds it alone (`locked`)."""

BEGINS_WITH = "begins-with"
"""File in a run's directory: what its first record is made of, if a start was killed before it."""

ON_KAFKA = "kafka://"
"""How an address of a run begins that is no name and no path."""

IN_FILE = "sqlite:"
"""How the address of a log in a file begins."""

LOG_SUFFIX = ".sqlite"
"""Of the file of a log."""

NAMES_MAX = 8
"""Of runs, in one hint."""

PID_BYTES_MAX = 32

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

    @property
    def words(self) -> str:
        """How another process, or a command line, is told which run this is."""
        # A bare name would be looked for where runs lie.
        return str(self.path) if self.path.name != str(self.path) else f"./{self.path}"

    def bus_url(self, config: Config) -> str:
        return config.bus.url or f"sqlite:{self.path / LOG}"

    def open_bus(self, config: Config) -> Bus:
        """The log as the configuration says: user, certificates, and where large values lie.

        The only way from a configuration to its log. Raises BusError, ConfigError.
        """
        return self.log_location(config).open()

    def claims(self, config: Config) -> ClaimStore:
        """Where values too large for the log lie: with the policies, so that all machines see them.

        Raises ConfigError for a `store.url` that cannot be used.
        """
        found = self.log_location(config).claim_store()
        assert found is not None
        return found

    def log_location(self, config: Config) -> LogLocation:
        """The log as another process can be told where it is."""
        return LogLocation(
            run=config.run.name,
            url=self.bus_url(config),
            bus=config.bus,
            claims=str(self.store(config) / CLAIMS),
            store_url=config.store.url,
        )

    def store(self, config: Config) -> Path:
        """Where policies lie, or copies of those that lie elsewhere (`store.url`)."""
        if config.store.path:
            return Path(config.store.path)
        return self.path / "policies"

    def policies(
        self, config: Config, peers: Callable[[str, Path], bool] | None = None
    ) -> PolicyStore:
        """The policy store, wherever it is; `peers` are asked first. Raises ConfigError."""
        every = config.policies.whole_every
        return open_store(
            self.store(config),
            config.store,
            run=config.run.name,
            patched=None if every == "auto" else every > 1,
            peers=peers,
        )

    @property
    def snapshots(self) -> Path:
        """The orchestrator's snapshots of its state; may be removed at any time."""
        return self.path / "snapshots"

    @property
    def catalogue(self) -> Path | None:
        """Where the tables of a finished run are kept; they may be removed at any time.

        None where there is no directory.
        """
        return self.path / CATALOGUE if self.path.is_dir() else None

    def exists(self) -> bool:
        return self.config_file.is_file()

    @property
    def was_started(self) -> bool:
        """Whether roles have run here: the folder that a run is configured in has a config.toml of
        that run too."""
        return self.exists() and any((self.path / one).is_file() for one in (LOG, LOCK))

    def forget(self) -> None:
        """Remove the record of a run that has made nothing; logs of its roles stay."""
        for file in (self.path / BEGINS_WITH, *self.path.glob(f"{LOG}*"), self.config_file):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.snapshots, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class RunByLog(RunDir):
    """A run that is known by its log alone; its directory, where files may go, need not exist."""

    url: str
    """Of the log."""

    @property
    def words(self) -> str:
        """See the base."""
        if self.url.startswith(IN_FILE):
            return self.url.removeprefix(IN_FILE)
        return f"{self.url}/{self.path.name}"

    def config(self) -> Config:
        """As the run's first record has it, at this address of its log.

        Raises UsageError where there is no such run, BusError, ConfigError.
        """
        topics = Topics(self.path.name)
        with closing(open_bus(self.url)) as bus:
            there = bus.topics()
            if topics.control not in there:
                names = ", ".join(_runs_among(there)) or "none"
                raise UsageError(
                    f"no run {topics.run!r} is on {self.url}", hint=f"there are: {names}"
                )
            try:
                started, _ = policy_after(bus, topics, 0)
            except UsageError:
                raise UsageError(f"run {topics.run!r} on {self.url} has not begun") from None
        try:
            return at_url(logged_config(started.config), self.url)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the configuration of run {topics.run!r}: {error}") from None

    def exists(self) -> bool:
        """See the base; who asks for the configuration finds out more."""
        return True


def at_url(config: Config, url: str) -> Config:
    """The configuration of a run whose log is at another address."""
    return replace(config, bus=replace(config.bus, url=url))


def _runs_among(topics: Sequence[str]) -> list[str]:
    ending = Topics("x").control.removeprefix("x")
    return sorted(one.removesuffix(ending) for one in topics if one.endswith(ending))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run whose log is open."""

    directory: RunDir
    config: Config
    topics: Topics
    bus: Bus
    log: LogLocation
    """How another process opens the same."""

    @property
    def store(self) -> Path:
        """Where its policies lie on this machine."""
        return self.directory.store(self.config)

    @property
    def policies(self) -> PolicyStore:
        """The policy store, wherever it is."""
        return self.directory.policies(self.config)

    def tables(self, told: Callable[[float], None] = lambda share: None) -> Catalogue:
        """The catalogue of its log, to be closed; `told` hears of the share that was read.

        Raises BusError, LogTruncated.
        """
        return read_catalogue(self.bus, self.topics, self.directory.catalogue, on_share=told)

    def contributions(self, sha256: str) -> list[dict[str, Any]]:
        """What each trajectory of a step did to it; no rows where nothing can be read."""
        return stored_contributions(self.policies, sha256)


def run_dir(config: Config, runs: Path = RUNS) -> RunDir:
    """The directory that a configuration's run has."""
    return RunDir(runs / config.run.name)


def find_run(name: str, runs: Path = RUNS) -> RunDir:
    """A run by path, by name, or by its log. Raises UsageError: where it looked, what is there."""
    if name.startswith(ON_KAFKA):
        return run_on_kafka(name, runs)
    if name.endswith(LOG_SUFFIX):
        return _run_in_file(Path(name), runs)
    sealed = runs / f"{name}{LOG_SUFFIX}"
    if name == Path(name).name and sealed.is_file() and not RunDir(runs / name).exists():
        return _run_in_file(sealed, runs)
    return find_directory(name, runs)


def find_directory(name: str, runs: Path = RUNS) -> RunDir:
    """The directory of a run by path or name. Raises UsageError."""
    # A plain name is a run's first: the folder that a run was configured in may have the same.
    places = (runs / name, Path(name)) if name == Path(name).name else (Path(name),)
    for candidate in map(RunDir, places):
        if candidate.exists():
            return candidate
    looked = (runs if len(places) > 1 else Path(name).parent).absolute()
    raise UsageError(f"no run {Path(name).name!r} in {looked}", hint=_near(Path(name).name, looked))


def run_on_kafka(address: str, runs: Path = RUNS) -> RunByLog:
    """The run at `kafka://HOST:PORT[,HOST:PORT]/RUN`. Raises UsageError, ConfigError."""
    url, _, run = address.rpartition("/")
    if not url.startswith(ON_KAFKA) or not run:
        raise UsageError(f"{address} names no run", hint="kafka://HOST:PORT[,HOST:PORT]/RUN")
    return RunByLog(runs / run, url)


def _run_in_file(file: Path, runs: Path) -> RunByLog:
    """The run whose log a file is. Raises UsageError, BusError."""
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    with closing(open_bus(f"{IN_FILE}{file}")) as bus:
        names = _runs_among(bus.topics())
    if len(names) != 1:
        raise UsageError(f"{file} holds the logs of {len(names)} runs, expected one")
    return RunByLog(runs / names[0], f"{IN_FILE}{file}")


def _near(name: str, runs: Path) -> str:
    """Which runs somebody may have meant, the nearest names first."""
    there = sorted(path.parent.name for path in runs.glob("*/config.toml"))
    if not there:
        return f"no run lies there; --runs DIR or {RUNS_VARIABLE} says where runs lie"
    near = get_close_matches(name, there, n=NAMES_MAX)
    names = [*near, *(one for one in there if one not in near)]
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return f"there are: {', '.join(names[:NAMES_MAX])}{more}"


@contextmanager
def opened(name: str, runs: Path = RUNS) -> Iterator[OpenRun]:
    """A run with its log open for as long as the block lasts."""
    directory = find_run(name, runs)
    config = directory.config()
    if not config.bus.url and not (directory.path / LOG).exists():
        raise UsageError(
            f"{directory.path} holds a configuration, but no log",
            hint=f"start it with: {typed('run', directory.config_file, runs=runs)}",
        )
    topics = Topics(config.run.name)
    place = directory.log_location(config)
    bus = directory.open_bus(config)
    try:
        yield OpenRun(directory=directory, config=config, topics=topics, bus=bus, log=place)
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
    partial.write_text(dump_toml(config), encoding="utf-8")
    partial.replace(directory.config_file)


def check_room(path: Path) -> None:
    """Refuse to start on a full disk. Raises ResourceError."""
    free = shutil.disk_usage(path).free
    if free < FREE_BYTES_MIN:
        raise ResourceError(
            f"{free // 1024**2} MiB free at {path}", hint="make room, or run from another disk"
        )


@contextmanager
def locked(directory: RunDir, *, shared: bool = False) -> Iterator[None]:
    """Hold a run for as long as the block lasts; nothing where its directory is not here.

    `run` holds it alone. An orchestrator or trainer that was started by itself holds it with
    others: a second one takes over from the first, as it would on another machine; beside a `run`,
    which starts its own again, the two would fence each other for ever. A worker may join whoever
    runs. The kernel takes the lock back in the end.

    A process that is started meanwhile does not inherit the descriptor. Raises UsageError where
    somebody else runs it.
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
    """Raise UsageError where somebody runs this run on this machine."""
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
            f"{directory.path.name} is running already{who}",
            hint="stop that one first: Ctrl-C where it was started, or SIGTERM",
        ) from None
    except OSError:
        return  # a file system without locks: as it was before there were any
    os.ftruncate(descriptor, 0)
    if not shared:
        os.write(descriptor, b"%d\n" % os.getpid())


def open_store(
    root: Path,
    section: Store,
    *,
    run: str,
    patched: bool | None = False,
    peers: Callable[[str, Path], bool] | None = None,
) -> PolicyStore:
    """The store of a run. `root` is its directory, or where copies of it lie if it is elsewhere.

    `peers` are asked before a store that lies elsewhere; see `PolicyStore`, also for `patched`.
    Under an address every run has a folder of its own, so that none deletes files of another.
    Raises ConfigError for an address that cannot be used. Nothing is connected yet.
    """
    bytes_max = int(section.cache_gb * 1e9)
    if not section.url:
        return PolicyStore(root, cache_bytes_max=bytes_max)
    from dora_pipe.store.arrow_files import open_files  # pyarrow's file systems are slow to import

    remote = open_files(section.url, folder=run)
    return PolicyStore(root, remote, cache_bytes_max=bytes_max, peers=peers, patched=patched)
