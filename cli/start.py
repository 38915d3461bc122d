"""Commands that start roles: `run` (all on this machine), `orchestrator`, `worker`, `trainer`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.bus.port import Append, Bus
from dora_pipe.cli import prepare, roles
from dora_pipe.cli.gpus import need_gpus, show_gpus
from dora_pipe.cli.output import say
from dora_pipe.cli.rundir import RUNS, RunDir, create, find_run, opened, run_dir, store_config
from dora_pipe.cli.settings import OverrideOption, ParadigmOption
from dora_pipe.cli.supervisor import Supervisor
from dora_pipe.cli.traces import follow_run
from dora_pipe.cli.zygote import Zygote
from dora_pipe.clock import SystemClock
from dora_pipe.config.load import from_plain, load_config
from dora_pipe.config.model import Config
from dora_pipe.consumers.trainers.make import need_trainer
from dora_pipe.errors import (
    BusError,
    ConfigError,
    InvariantBroken,
    LogTruncated,
    PolicyError,
    UsageError,
)
from dora_pipe.policies.adapters import base_of, read_adapter, write_merged
from dora_pipe.policies.store import PolicyStore
from dora_pipe.schemas.control import Lineage, RunStarted
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.transfers.open import need_transfers
from dora_pipe.views.alarms import Alarms
from dora_pipe.views.lineage import policy_after
from dora_pipe.views.progress import Progress

EXIT_INTERRUPTED = 130

ConfigArgument = Annotated[Path, typer.Argument(help="A TOML file, or the directory of a run.")]
RunsOption = Annotated[Path, typer.Option("--runs", help="Where runs lie.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with a run that exists.")]
AdoptOption = Annotated[
    bool,
    typer.Option(
        "--adopt",
        help="Take the committed weights where this machine cannot reproduce them bit for bit.",
    ),
]

Watch = Callable[[Progress, Supervisor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that may start: everything was opened once and digested."""

    directory: RunDir
    config: Config
    first: RunStarted
    adopt: bool = False


def run(
    config: ConfigArgument,
    override: OverrideOption = None,
    resume: ResumeOption = False,
    from_: Annotated[
        str,
        typer.Option("--from", metavar="RUN@STEP", help="Start from a policy of another run."),
    ] = "",
    adopt: AdoptOption = False,
    paradigm: ParadigmOption = "",
    root: RunsOption = RUNS,
) -> None:
    """Start orchestrator, workers and trainer on this machine and watch over them."""
    wanted = _load(config, override or (), paradigm)
    if resume and from_:
        raise UsageError("--resume goes on with a run, --from starts a new one: choose one")
    _need_parts(wanted)
    plan = plan_resume(wanted, root) if resume else plan_new(wanted, root, parent=from_)
    if not supervise(replace(plan, adopt=adopt)):
        say(f"go on with: dora-pipe run {plan.directory.path} --resume")
        raise typer.Exit(EXIT_INTERRUPTED)


def plan_new(config: Config, root: Path, *, parent: str = "") -> Plan:
    """Everything a new run needs; its directory and topics exist afterwards."""
    if run_dir(config, root).exists():
        create(config, root)  # raises: what is there is never overwritten
    with _bus(run_dir(config, root), config) as bus:  # refused there, nothing is made here
        lineage, policy = None, None
        store = run_dir(config, root).policies(config)
        if parent:
            lineage, policy = _inherit(parent, root, store)
        first = prepare.run_started(config, store, policy=policy, lineage=lineage)
        if config.bus.url:
            _make_topics(bus, config)
        directory = create(config, root)
        if not config.bus.url:
            _make_topics(bus, config)
    return Plan(directory=directory, config=config, first=first)


def _make_topics(bus: Bus, config: Config) -> None:
    """The topics of a new run, in a log that holds no such run. Raises ConfigError, BusError."""
    topics = prepare.create_topics(bus, config)
    if prepare.started(bus, topics) is not None:
        raise ConfigError(
            f"the log already holds a run {config.run.name!r}",
            hint="go on with --resume, or choose another run.name (-o run.name=...)",
        )


def plan_resume(wanted: Config, root: Path) -> Plan:
    """A run that exists, with the logged keys that were changed written into its log."""
    directory = find_run(wanted.run.name, root)
    with _bus(directory, wanted) as bus:
        topics = Topics(wanted.run.name)
        first = prepare.started(bus, topics)
        if first is None:
            first = prepare.run_started(wanted, directory.policies(wanted))
            return Plan(directory=directory, config=wanted, first=first)
        prepare.check_topics(bus, wanted)
        commands = prepare.resume_commands(directory.config(), wanted)
        if commands:
            bus.writer().append([Append(topic=topics.control, value=one) for one in commands])
    store_config(directory, wanted)
    return Plan(directory=directory, config=wanted, first=first)


def plan_elsewhere(wanted: Config, root: Path) -> Plan | None:
    """A run that another machine started, as its log has it; None where the log has none."""
    if not wanted.bus.url:
        return None  # The log would be in the run's directory, and there is none.
    with _bus(run_dir(wanted, root), wanted) as bus:
        topics = Topics(wanted.run.name)
        first = prepare.started(bus, topics)
        if first is None:
            return None
        commands = prepare.resume_commands(from_plain(first.config), wanted)
        if commands:
            bus.writer().append([Append(topic=topics.control, value=one) for one in commands])
    return Plan(directory=create(wanted, root), config=wanted, first=first)


def supervise(
    plan: Plan,
    watch: Watch | None = None,
    *,
    tell: Callable[[str], None] = say,
    torch: Zygote | None = None,
) -> bool:
    """Start every role, `tell` of it until all have ended; False when the user stopped it.

    `torch` has imported what the torch engine and the trainer need, and forks `be_torch_role`; it
    stays the caller's. Without it each of the two has a process of its own for that.
    """
    names = roles.worker_names(plan.config)
    directory, config = plan.directory, plan.config
    engines = roles.worker_engines(config)
    _need_parts(config)
    shutil.rmtree(directory.handover, ignore_errors=True)
    own: list[Zygote] = []

    def forking(preload: Sequence[str] = ()) -> Zygote:
        own.append(Zygote(lambda name: _be(plan, name), preload=preload))
        return own[-1]

    slim = forking()
    serving = {} if torch is None else {"torch": torch}
    for engine in sorted(set(engines.values()) - serving.keys()):
        serving[engine] = forking(roles.WORKER_PRELOAD[engine])
    zygotes = {roles.ORCHESTRATOR: slim, roles.TRAINER: torch or forking(roles.TRAINER_PRELOAD)}
    zygotes |= {name: serving[engine] for name, engine in engines.items()}
    if config.telemetry.traces != "off":
        zygotes[roles.TRACES] = slim
    try:
        with _bus(directory, config) as bus:
            topics = Topics(config.run.name)
            alarms = Alarms(bus, topics, lease_s=config.timing.lease_s, clock=SystemClock())
            progress = Progress(bus, topics, alarms=alarms)
            onlooker = Onlooker(progress, tell)

            def turn() -> None:
                onlooker.turn()
                if watch is not None:
                    watch(progress, supervisor)

            supervisor = Supervisor(
                zygotes,
                stop_order=stop_order(names, zygotes),
                spare=(roles.TRACES,),
                timing=config.timing,
                logs=directory.logs,
                watch=turn,
            )
            finished = supervisor.run()
            turn()
            progress.close()
            return finished
    finally:
        for zygote in own:
            zygote.close()


def _need_parts(config: Config) -> None:
    """Raise, before anything starts, for what the roles need and this machine lacks."""
    roles.need_engines(["torch", *roles.worker_engines(config).values()])
    need_trainer(config)
    need_gpus(config)
    need_transfers(config.transfers)


def stop_order(workers: tuple[str, ...], started: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Whom to ask first to stop: see `supervisor`. Who follows the run goes last."""
    order = (workers, (roles.TRAINER,), (roles.ORCHESTRATOR,), (roles.TRACES,))
    return tuple(names for names in order if all(name in started for name in names))


class Onlooker:
    """Tells what the log says of a run. An outage is told once: roles have their own patience."""

    def __init__(self, progress: Progress, tell: Callable[[str], None]) -> None:
        self._progress = progress
        self._tell = tell
        self._away = False

    def turn(self) -> None:
        """What is new. Raises InvariantBroken when the log was cut."""
        try:
            lines = self._progress.lines()
        except LogTruncated as error:
            raise InvariantBroken(error.message, hint=error.hint) from error
        except BusError as error:
            if not self._away:
                self._tell(f"the log is away ({error.message}); the roles wait for it")
            self._away = True
            return
        if self._away:
            self._tell("the log is back")
        self._away = False
        for line in lines:
            self._tell(line)


def _be(plan: Plan, name: str) -> int:
    directory, config = plan.directory, plan.config
    slim: dict[str, Callable[[], None]] = {
        roles.ORCHESTRATOR: lambda: roles.orchestrator(directory, config, plan.first),
        roles.TRACES: lambda: follow_run(directory, config, roles.settle()),
    }
    if name in slim:
        return roles.be_role(name, directory, slim[name])
    return be_torch_role(directory, config, name, adopt=plan.adopt)


def be_torch_role(directory: RunDir, config: Config, name: str, *, adopt: bool = False) -> int:
    """Be the trainer or a worker in this process, its talk in a file; gives the exit code."""

    def start() -> None:
        if name == roles.TRAINER:
            show_gpus(config, name)
            roles.trainer(directory, config, adopt=adopt)
            return
        own = roles.with_engine(
            config, roles.worker_engine(config, name), address=roles.worker_address(config, name)
        )
        show_gpus(own, name)
        roles.worker(directory, own, name)

    return roles.be_role(name, directory, start)


def orchestrator(
    config: ConfigArgument, override: OverrideOption = None, root: RunsOption = RUNS
) -> None:
    """Start the orchestrator of a run, on any machine; a second one fences the first."""
    roles.talk(roles.ORCHESTRATOR)
    wanted = _load(config, override or ())
    if run_dir(wanted, root).exists():
        plan = plan_resume(wanted, root)
    else:
        plan = plan_elsewhere(wanted, root) or plan_new(wanted, root)
    roles.orchestrator(plan.directory, plan.config, plan.first)


def worker(
    config: ConfigArgument,
    name: Annotated[str, typer.Option(help="The worker's name, its own in the run.")],
    engine: Annotated[
        str, typer.Option(help="torch, vllm or vllm-server; else the run's workers.engine.")
    ] = "",
    override: OverrideOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Start one rollout worker of a run; its engine may be another than that of the others."""
    roles.talk(name)
    wanted = _load(config, override or ())
    engine = engine or roles.worker_engine(wanted, name)
    roles.need_engines([engine])
    wanted = roles.with_engine(wanted, engine, address=roles.worker_address(wanted, name))
    show_gpus(wanted, name)
    roles.worker(run_dir(wanted, root), wanted, name)


def trainer(
    config: ConfigArgument,
    override: OverrideOption = None,
    adopt: AdoptOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Start the trainer of a run; a second one of the same run fences the first."""
    roles.talk(roles.TRAINER)
    wanted = _load(config, override or ())
    show_gpus(wanted, roles.TRAINER)
    roles.trainer(run_dir(wanted, root), wanted, adopt=adopt)


def create_topics(config: ConfigArgument, override: OverrideOption = None) -> None:
    """Create a run's topics, or check those that exist: what its user of the log needs to be
    allowed only once. `run` and `orchestrator` do it by themselves where they may."""
    wanted = _load(config, override or ())
    if not wanted.bus.url:
        raise ConfigError(
            "the log of this run is made with its directory", hint="topics are of kafka:// logs"
        )
    with _bus(run_dir(wanted), wanted) as bus:
        topics = prepare.create_topics(bus, wanted)
        for name in topics.all():
            say(f"{name}: {bus.partitions(name)} partitions")


def _load(config: Path, overrides: Sequence[str], paradigm: str = "") -> Config:
    inside = config / "config.toml"
    return load_config(inside if inside.is_file() else config, overrides, paradigm=paradigm)


@contextmanager
def _bus(directory: RunDir, config: Config) -> Iterator[Bus]:
    bus = directory.open_bus(config)
    try:
        yield bus
    finally:
        bus.close()


def _inherit(parent: str, root: Path, target: PolicyStore) -> tuple[Lineage, tuple[Manifest, str]]:
    """Bring the policy of RUN@STEP into the new run's store."""
    name, at, step = parent.rpartition("@")
    if not at or not step.isdigit():
        raise UsageError(f"not RUN@STEP: {parent!r}", hint="e.g. --from demo@40")
    with opened(name, root) as old:
        first, manifest = policy_after(old.bus, old.topics, int(step))
        source = old.policies
        if not source.has_weights(manifest.digest):  # Training is not for the process that forks.
            raise PolicyError(
                f"version {step} of {name} is not in its store any more",
                hint=f"make it again first: dora-pipe export {name} --policy {step} DIR",
            )
        source.verify(manifest.digest)
        parent_digest = manifest.digest
        manifest = target.publish_weights(_whole(source, manifest))
        files = sorted(source.assets(first.assets_digest).iterdir())
        assets = target.publish_assets(files)
    lineage = Lineage(run=first.run, step=int(step), digest=parent_digest)
    return lineage, (manifest, assets)


def _whole(source: PolicyStore, manifest: Manifest) -> Callable[[Path], Manifest]:
    """Writes the weights of a policy; those of an adapter merged into what it stands on."""
    weights = source.weights(manifest.digest)
    base = base_of(weights)
    if base is None:
        return _copying(weights, manifest)
    source.verify(base)
    adapter = read_adapter(weights, digest=manifest.digest)
    return lambda path: write_merged(source.weights(base), adapter, path)


def _copying(source: Path, manifest: Manifest) -> Callable[[Path], Manifest]:
    def write(target: Path) -> Manifest:
        shutil.copyfile(source, target)
        return manifest

    return write
