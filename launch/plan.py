"""Checks before the roles of a new, resumed or remote run start; all precede the first write."""

from __future__ import annotations

import getpass
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe import __version__
from dora_pipe.audit.effective_config import check_change
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.config.batches import gradient_notes
from dora_pipe.config.changes import LOGGED
from dora_pipe.config.checks import commit_problem
from dora_pipe.config.load import changed_keys
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config, Task
from dora_pipe.config.retention import deletes, with_keep_every
from dora_pipe.config.several import pool_specs
from dora_pipe.consumers.learners.registry import published_dtype
from dora_pipe.consumers.teachers.registry import with_digest
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.errors import BusError, ConfigError, LogTruncated, TopicMissing, UsageError
from dora_pipe.core.loop.run_lifecycle import await_stable_offset, run_is_over
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import say, typed
from dora_pipe.core.system.durable import write_atomically
from dora_pipe.launch.inherit import inherit
from dora_pipe.launch.local_roles import own_engines
from dora_pipe.launch.model_checks import check_chat, check_model, templated, unassigned_note
from dora_pipe.launch.prompt_check import check_first
from dora_pipe.launch.run_dir import (
    BEGINS_WITH,
    RunDir,
    create,
    find_directory,
    refuse_running,
    run_dir,
    store_config,
)
from dora_pipe.orchestrator.planner import PLANNER
from dora_pipe.orchestrator.process.snapshot_files import candidates
from dora_pipe.producers.chat.template import FILE, Template, read_template
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.schemas.control import (
    Command,
    Lineage,
    RoleStarted,
    RunStarted,
    StepCommitted,
    config_digest,
    decode_control,
)
from dora_pipe.schemas.identity import source_of
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import SCHEMA_VERSION, encode
from dora_pipe.store.model_dir import asset_files, config_dtype, import_model
from dora_pipe.store.store import PolicyStore

NAMING: Final = (b'"run-started"', b'"step-committed"', b'"role-started"')
"""Kinds of control records that name the run's files in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Run that passed all checks."""

    directory: RunDir
    config: Config
    first: RunStarted
    adopt: bool = False
    resumed: bool = False
    """The user passed `--resume`: a halted run continues."""
    over: str = ""
    """Hint for a finished run, which has nothing to start."""


def plan_new(
    config: Config,
    root: Path,
    *,
    parent: str = "",
    with_optimizer: bool = False,
    here: bool = False,
) -> Plan:
    """Check a new run, then create its directory and topics; an error leaves nothing new.

    Starts from version `parent` (`RUN@STEP`), `with_optimizer` including its state. `here`: all
    workers are on this machine, so check their engines now.
    """
    directory = run_dir(config, root)
    if directory.exists():
        if not sampled_nothing(directory, config):
            create(config, root)  # raises if it exists
        say(f"run {config.run.name!r} ended before its first trajectory: it starts again")
        directory.forget()
    if here and not parent:
        check_model(config, own_engines(config), Path(config.model.path))
        if note := unassigned_note(Path(config.model.path)):
            say(f"note: {note}")
    if idle := config.trainer.stage_without_effect:
        say(idle)
    for line in gradient_notes(config):
        say(f"warning: {line}")
    with ExitStack() as undo:
        if not root.exists():
            undo.callback(_remove_empty, root)
        if not directory.path.exists():
            undo.callback(_remove_unmade, directory)
        plan = _plan_new(config, root, parent, with_optimizer, here)
        undo.pop_all()
    return plan


def _remove_empty(root: Path) -> None:
    with suppress(OSError):  # another process has created the run meanwhile
        root.rmdir()


def _remove_unmade(directory: RunDir) -> None:
    if not directory.exists():
        shutil.rmtree(directory.path, ignore_errors=True)


def _plan_new(config: Config, root: Path, parent: str, with_optimizer: bool, here: bool) -> Plan:
    directory = run_dir(config, root)
    with closing(directory.open_bus(config)) as bus:  # raises before any write
        store = directory.policies(config)
        lineage, policy = None, None
        if parent:
            lineage, policy = inherit(parent, root, store, config, with_optimizer=with_optimizer)
        model = store.assets(policy[1]) if policy else Path(config.model.path)
        config = with_digest(config, model)
        facts = facts_of(config, model if here else None)
        first = run_started(config, store, policy=policy, lineage=lineage, facts=facts)
        if note := deletes(config, first):
            say(note)
        refused = commit_problem(config, len(encode(first.policy)))
        if refused is not None:
            raise ConfigError(refused.text, hint=refused.hint)
        if config.bus.url:
            _make_topics(bus, config)
        content = msgspec.json.format(msgspec.json.encode(first)) + b"\n"
        write_atomically(directory.path / BEGINS_WITH, content)
        create(config, root)
        if not config.bus.url:
            _make_topics(bus, config)
    return Plan(directory=directory, config=config, first=first)


def sampled_nothing(directory: RunDir, config: Config) -> bool:
    """Return whether a start failed before the first trajectory, on an intact log of its own.

    Raises UsageError for a running run.
    """
    if config.bus.url or not (directory.path / BEGINS_WITH).is_file() or not directory.was_started:
        return False
    refuse_running(directory)
    topic = Topics(config.run.name).trajectories
    try:
        if directory.config().bus.url:
            return False
        with closing(directory.open_bus(config)) as bus:
            return topic not in bus.topics() or not any(ends_of(bus, topic).values())
    except (BusError, ConfigError):
        return False


def _make_topics(bus: Bus, config: Config) -> None:
    topics = create_topics(bus, config)
    _settle(bus, topics)
    if started(bus, topics) is not None:
        raise ConfigError(
            f"the log already holds a run {config.run.name!r}",
            hint="continue it with --resume, or choose another run.name (-o run.name=...)",
        )


def _settle(bus: Bus, topics: Topics) -> None:
    there = set(bus.topics())
    named = [name for name in (topics.control, topics.decisions) if name in there]
    await_stable_offset(bus, [TopicPartition(name, 0) for name in named], SystemClock())


def plan_resume(config: Config, root: Path, *, here: bool = False) -> Plan:
    """Check an existing run, and append changes of logged keys to its log.

    `here`: all roles are on this machine, which has the data.
    """
    directory = find_directory(config.run.name, root)
    config = _with_teacher_of(directory.config(), config)
    if here:
        refuse_running(directory)
    with closing(directory.open_bus(config)) as bus:
        topics = Topics(config.run.name)
        _settle(bus, topics)
        check_log(directory, config, bus)
        first = started(bus, topics)
        if first is None:
            return _plan_unbegun(directory, config, bus)
        check_topics(bus, config)
        commands = resume_commands(directory.config(), config)
        if commands:
            refuse_over(bus, topics, directory, root)
        if here and is_over(bus, topics):
            over = over_hint(bus, topics, directory, root)
            return Plan(directory=directory, config=config, first=first, over=over)
        if here:
            check_data(config, first)
        _send(bus, topics, commands)
    store_config(directory, config)
    return Plan(directory=directory, config=config, first=first)


def _plan_unbegun(directory: RunDir, config: Config, bus: Bus) -> Plan:
    resume_commands(directory.config(), config)  # raises for changed frozen keys
    create_topics(bus, config)
    store, origin = directory.policies(config), planned(directory)
    if origin is None:
        first = run_started(config, store)
    else:
        policy = origin.policy, origin.assets_digest
        first = run_started(config, store, policy=policy, lineage=origin.lineage)
    store_config(directory, config)
    return Plan(directory=directory, config=config, first=first)


def planned(directory: RunDir) -> RunStarted | None:
    """Return the planned first record of a run, if its file has one. Raises SchemaError."""
    note = directory.path / BEGINS_WITH
    fact = decode_control(note.read_bytes()) if note.is_file() else None
    return fact if isinstance(fact, RunStarted) else None


def plan_elsewhere(config: Config, root: Path) -> Plan | None:
    """Plan a run that another machine started, if its log has it."""
    if not config.bus.url:
        return None  # its log would be in the missing directory
    with closing(run_dir(config, root).open_bus(config)) as bus:
        topics = Topics(config.run.name)
        _settle(bus, topics)
        first = started(bus, topics)
        if first is None:
            return None
        logged = logged_config(first.config)
        config = _with_teacher_of(logged, config)
        commands = resume_commands(logged, config)
        if commands:
            refuse_over(bus, topics, run_dir(config, root), root)
            _send(bus, topics, commands)
    return Plan(directory=create(config, root), config=config, first=first)


def _send(bus: Bus, topics: Topics, commands: Sequence[Command]) -> None:
    for command in commands:
        check_change(bus, topics, command)
        bus.writer().append([Append(topic=topics.control, value=encode(command))])


def topic_specs(config: Config) -> list[TopicSpec]:
    topics = Topics(config.run.name)
    many = {topics.trajectories, topics.progress}
    return [
        TopicSpec(
            name=name,
            partitions=config.bus.partitions if name in many else 1,
            max_record_bytes=config.bus.max_record_bytes,
        )
        for name in topics.all()
    ]


def create_topics(bus: Bus, config: Config) -> Topics:
    bus.create(topic_specs(config))
    return Topics(config.run.name)


def check_topics(bus: Bus, config: Config) -> None:
    """Check the existing topics of a run. Raises BusError for a mismatch."""
    missing = sorted(set(Topics(config.run.name).all()) - set(bus.topics()))
    if missing:  # recreating a lost topic would hide the loss
        raise TopicMissing(
            f"the run has lost its topic {missing[0]}",
            hint="check that it exists and that this user has the Describe right",
        )
    create_topics(bus, config)


def started(bus: Bus, topics: Topics) -> RunStarted | None:
    """Return the run's first record, if any. Raises SchemaError, InvariantBroken for a changed
    one."""
    control = TopicPartition(topics.control, 0)
    if topics.control not in bus.topics():
        return None
    with closing(records_of(bus, {control: bus.end(control)})) as records:
        first = next(records, None)
    fact = None if first is None else decode_control(first.value)
    if not isinstance(fact, RunStarted):
        return None
    fact.check_config()
    return fact


def run_started(
    config: Config,
    store: PolicyStore,
    *,
    policy: tuple[Manifest, str] | None = None,
    lineage: Lineage | None = None,
    facts: Mapping[str, TaskFacts] | None = None,
) -> RunStarted:
    """Return the first record of a run: import the model, open the task, digest the data.

    `policy` (manifest, assets digest) and `facts` are given if already known. Raises ConfigError,
    PolicyError, TaskError.
    """
    if policy is None:
        model = Path(config.model.path)
        dtype = published_dtype(config, config_dtype(model))
        manifest, assets = import_model(store, model, dtype)
    else:
        manifest, assets = policy
    if config.model.chat_template:
        assets = _with_template(store, assets, Path(config.model.chat_template))
    facts = facts_of(config) if facts is None else facts
    data = {source: fact.data(source) for source, fact in facts.items()}
    first = data[source_of("train", config.task.name)]
    evaluated = data[source_of("eval", config.evaluation.name)]
    plain: dict[str, Any] = msgspec.to_builtins(with_keep_every(config, manifest))
    return RunStarted(
        at_ns=time.time_ns(),
        run=config.run.name,
        schema_version=SCHEMA_VERSION,
        config=plain,
        config_digest=config_digest(plain),
        dataset_digest=first.digest,
        dataset_rows=first.rows,
        eval_digest=evaluated.digest,
        eval_rows=evaluated.rows,
        seed=config.run.seed,
        policy=manifest,
        assets_digest=assets,
        planner=PLANNER,
        package=__version__,
        lineage=lineage,
        datasets={name: dataset for name, dataset in data.items() if "/" in name},
        scored_together=tuple(source for source, fact in facts.items() if fact.scores_groups),
    )


def facts_of(config: Config, model: Path | None = None) -> dict[str, TaskFacts]:
    """Return the facts of every source (`GroupSpec.source`).

    With `model`, also checks its chat template and first prompts. Raises ConfigError, TaskError,
    PolicyError.
    """
    by_source: dict[str, TaskFacts] = {}
    for pool in pool_specs(config):
        with TaskPool(msgspec.structs.replace(pool.task, processes=1)) as processes:
            facts = processes.wait()
            _check_share(config, pool.task, facts)
            for note in facts.notes:
                say(f"note: {note}")
            if model is not None:
                with templated(config, model) as directory:
                    chats = check_chat(pool, processes, directory)
                    for note in check_first(pool, processes, directory, chats):
                        say(note)
        for source in pool.sources:
            by_source[source] = facts
            if source.startswith("train") and not facts.data(source).rows:
                name = f" of {pool.task.name}" if pool.task.name else ""
                raise ConfigError(f"the training data{name} has no rows", hint="see task.data")
    return by_source


def _check_share(config: Config, task: Task, facts: TaskFacts) -> None:
    if task.eval_share and config.evaluation.every and not facts.eval_rows:
        raise ConfigError(
            f"task.eval_share: {task.eval_share:g} of {facts.train_rows} rows selects no row for"
            " evaluation",
            hint="a larger share, task.eval_data, or evaluation.every = 0",
        )


def _with_template(store: PolicyStore, assets: str, template: Path) -> str:
    Template(read_template(template), values={}, now_ns=0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(shutil.copyfile(template, Path(folder, FILE)))
        files = [file for file in asset_files(store.assets(assets)) if file.name != FILE]
        return store.publish_assets(sorted([*files, file], key=lambda path: path.name))


def resume_commands(stored: Config, config: Config) -> list[Command]:
    """Return `set` commands for changed logged keys. Raises ConfigError for frozen ones."""
    frozen, logged, _ = changed_keys(stored, config)
    if frozen:
        raise ConfigError(
            f"a resumed run cannot change {', '.join(sorted(frozen))}",
            hint=f"start a new run from a version of it with --from {stored.run.name}@STEP",
        )
    assert logged <= LOGGED
    if not logged:
        return []
    command = Command(
        at_ns=time.time_ns(),
        user=getpass.getuser(),
        verb="set",
        args={key: attrgetter(key)(config) for key in sorted(logged)},
    )
    return [command]


def _with_teacher_of(stored: Config, config: Config) -> Config:
    if not config.teacher.path or config.teacher.digest:
        return config
    teacher = msgspec.structs.replace(config.teacher, digest=stored.teacher.digest)
    return msgspec.structs.replace(config, teacher=teacher)


def check_data(config: Config, first: RunStarted) -> None:
    """Check that the data equal those of the run's start. Raises ConfigError, TaskError."""
    for source, facts in facts_of(config).items():
        current = facts.data(source)
        if facts.scores_groups != (source in first.scored_together):
            raise ConfigError(
                f"the task of {source} has changed its group scoring since the start",
                hint="restore score_group or task.reward, or start a new run with --from",
            )
        purpose, _, own = source.partition("/")
        kind, key = _DATA[purpose]
        recorded = first.data(source)
        if recorded is None or current.digest != recorded.digest:
            digest = "none" if recorded is None else recorded.digest
            raise ConfigError(
                f"the {kind} data{own and f' of {own}'} changed: digest {current.digest[:12]},"
                f" at the start {digest[:12]}",
                hint=f"restore the data ({key}), or start a new run with --from",
            )


_DATA: Final = {"train": ("training", "task.data"), "eval": ("evaluation", "task.eval_data")}


def is_over(bus: Bus, topics: Topics) -> bool:
    """Return whether the run's last decision is in the log. Raises BusError."""
    end = bus.end(TopicPartition(topics.decisions, 0))
    return run_is_over(bus, topics, end, SystemClock())


def over_hint(bus: Bus, topics: Topics, directory: RunDir, root: Path) -> str:
    """Return the command that continues from a finished run. Raises BusError."""
    newest = f"{topics.run}@{read_history(bus, topics, SystemClock()).next_step}"
    words = ("run", directory.path, "--from", newest, "-o", "run.name=NEW")
    return f"start a new run from it: {typed(*words, runs=root)}"


def refuse_over(bus: Bus, topics: Topics, directory: RunDir, root: Path) -> None:
    """Raise UsageError if the run is finished. Raises BusError."""
    if is_over(bus, topics):
        raise UsageError(
            f"run {topics.run!r} is finished and cannot be changed",
            hint=over_hint(bus, topics, directory, root),
        )


def check_log(directory: RunDir, config: Config, bus: Bus) -> None:
    """Raise LogTruncated if the store or the snapshots are ahead of the log.

    Each trainer start leaves at most one version without a commit. Snapshots are taken only of
    logged rounds.
    """
    topics = Topics(config.run.name)
    beyond = _snapshots_beyond(directory, bus, topics)
    if beyond:
        raise _lost(directory, f"a snapshot names decisions offset {beyond}")
    if config.store.path or config.store.url:
        return  # other runs may share it
    digests, trainers = _named(bus, topics)
    files = (directory.path / "policies" / "weights").glob("[!.]*.safetensors")
    unknown = {file.stem for file in files} - digests
    # Before the first record a start may have left version 0.
    if len(unknown) > max(1, trainers):
        raise _lost(directory, f"{len(unknown)} versions of the store are not in the log")


def _lost(directory: RunDir, why: str) -> LogTruncated:
    return LogTruncated(
        f"the log of {directory.path.name} is incomplete: {why}",
        hint="restore the log from a copy (log.sqlite with its -wal file), or start a "
        "new run with --from",
    )


def _named(bus: Bus, topics: Topics) -> tuple[set[str], int]:
    digests: set[str] = set()
    trainers = 0
    if topics.control not in bus.topics():
        return digests, trainers
    partition = TopicPartition(topics.control, 0)
    for record in records_of(bus, {partition: bus.end(partition)}):
        if not any(kind in record.value for kind in NAMING):
            continue
        match decode_control(record.value):
            case RunStarted() as fact:
                digests.add(fact.policy.digest)
            case StepCommitted() as fact:
                digests.add(fact.digest_after)
            case RoleStarted(role="trainer"):
                trainers += 1
            case _:
                pass
    return digests, trainers


def _snapshots_beyond(directory: RunDir, bus: Bus, topics: Topics) -> int:
    there = topics.decisions in bus.topics()
    end = bus.end(TopicPartition(topics.decisions, 0)) if there else 0
    offsets = (candidate.offset for candidate in candidates(directory.snapshots, topics.run))
    return max((offset for offset in offsets if offset >= end), default=0)
