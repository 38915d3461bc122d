"""What a run needs that trains on the steps of another one, before its roles start; decides what is
refused, and what is copied.

Trajectories are not copied: commits name them where they lie in the source's log. Copied are the
version that the run begins with, the optimizer's state before its first step, version 0 and what
else is a reference, and the files of the model directory. The run's first record is written last: a
directory without one is begun again by the same command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from dora_pipe import __version__
from dora_pipe.audit.ended_groups import ended_groups
from dora_pipe.audit.rebuild import Rebuilder
from dora_pipe.audit.replay_step import SETTABLE
from dora_pipe.audit.taken_again import AGAIN_KEYS, BatchTaken, EndedGroups, taken_again
from dora_pipe.bus.port import Append
from dora_pipe.config.load import changed_keys, load_config, plain_overrides
from dora_pipe.config.logged import REFERENCE, logged_config
from dora_pipe.config.model import Config
from dora_pipe.config.storage import with_keep_every
from dora_pipe.consumers.learners.port import Learner, Settings
from dora_pipe.consumers.learners.registry import learner_kind
from dora_pipe.consumers.learners.settings import changed_settings
from dora_pipe.consumers.trainer.change_file import publish_change
from dora_pipe.consumers.trainer.changed_batch import UNCHANGED, BatchChange
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.errors import ConfigError, InvariantBroken, UsageError
from dora_pipe.launch.inherit import copy_state, copying
from dora_pipe.launch.plan import create_topics, started
from dora_pipe.launch.run_dir import RETRAINED_FROM, OpenRun, RunDir, check_room, store_config
from dora_pipe.orchestrator.batches_again import PLANNER
from dora_pipe.schemas.control import Lineage, Retrained, RunStarted, StepCommitted, config_digest
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.schemas.topics import Topics, check_run_name
from dora_pipe.schemas.wire import SCHEMA_VERSION, encode
from dora_pipe.store.store import PolicyStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraining:
    """What is to be trained again, and how otherwise."""

    name: str
    """Of the new run."""
    first: int
    last: int | None = None
    """The last step; None: that of the source."""
    overrides: tuple[str, ...] = ()
    """`key=value`: settings of the steps, and what is free of this machine."""
    change: BatchChange = UNCHANGED
    again: EndedGroups | None = None
    """What batches are taken again from; None: they are the source's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainPlan:
    """A run that may start, or go on."""

    directory: RunDir
    config: Config
    started: RunStarted
    goes_on: bool
    """It began before."""
    batches: Mapping[int, BatchTaken] | None = None
    """Those that are taken again, by step."""
    ends_early: bool = False
    """There are none for the last steps that were asked for."""

    @property
    def retrained(self) -> Retrained:
        assert self.started.retrained is not None
        return self.started.retrained


OpenLearner = Callable[[OpenRun, RunStarted], Learner]


def plan_retrain(source: OpenRun, wanted: Retraining, open_learner: OpenLearner) -> RetrainPlan:
    """Everything the run needs is in its directory afterwards; one that began goes on.

    Raises UsageError, ConfigError, PolicyError for what cannot be, ReplayDiverged where the state
    before its first step cannot be made again here, InvariantBroken, ResourceError, BusError.
    """
    clock = SystemClock()
    history = read_history(source.bus, source.topics, clock)
    first_record = history.run_started
    if first_record is None:
        raise InvariantBroken(f"{source.topics.control} has no `run started`")
    asked = _checked(source, first_record, history, wanted)
    settings = _settings(wanted.overrides)
    directory = RunDir(source.directory.path.parent / wanted.name)
    config = _config(source, wanted, asked)
    _check_learner(config, wanted.change)
    batches = None if wanted.again is None else _batches(wanted.again, wanted, config)
    last = asked if batches is None else max(batches)
    config = config if last == asked else _config(source, wanted, last)
    plan = partial(
        RetrainPlan, directory=directory, config=config, batches=batches, ends_early=last < asked
    )
    commits = read_commits(source.bus, source.topics, history.notes[wanted.first : last + 1], clock)
    references = _looked_through(commits, wanted, settings, config.sampling.max_tokens)
    there = _goes_on(directory, config)
    if there is not None:
        goes_on = plan(started=there, goes_on=True)
        _check_same(goes_on, first_record, wanted, last, settings)
        return goes_on
    _make(directory, config, source)
    begun = _Begun(source, history, directory.policies(config), open_learner)
    retrained = Retrained(
        run=first_record.run,
        started_ns=first_record.at_ns,
        first=wanted.first,
        last=last,
        policy=begun.version(wanted.first),
        optimizer=begun.optimizer(wanted.first),
        settings=dict(settings),
        change=publish_change(begun.store, wanted.change),
        references={
            str(version): begun.version(version).digest
            for version in sorted(references)
            if 0 < version < wanted.first
        },
        rounds=None if wanted.again is None else wanted.again.rounds,
    )
    begun.version(0)
    begun.assets(first_record.assets_digest)
    record = _run_started(first_record, config, retrained)
    with closing(directory.open_bus(config)) as bus, closing(bus.writer()) as writer:
        writer.append([Append(topic=Topics(wanted.name).control, value=encode(record))])
    return plan(started=record, goes_on=False)


def groups_again(source: OpenRun, wanted: Retraining) -> EndedGroups:
    """What the steps may be made of where batches are taken again: as much of the source as the
    run has read that is there by this name. Raises as `plan_retrain`."""
    history = read_history(source.bus, source.topics, SystemClock())
    if history.run_started is None:
        raise InvariantBroken(f"{source.topics.control} has no `run started`")
    last = _checked(source, history.run_started, history, wanted)
    run = msgspec.structs.replace(source.config.run, name=wanted.name)
    config = msgspec.structs.replace(source.config, run=run)
    there = _goes_on(RunDir(source.directory.path.parent / wanted.name), config)
    rounds = None if there is None or there.retrained is None else there.retrained.rounds
    return ended_groups(source.bus, source.topics, first=wanted.first, last=last, rounds=rounds)


def _batches(again: EndedGroups, wanted: Retraining, config: Config) -> Mapping[int, BatchTaken]:
    """The batches, for as long as there are whole ones. Raises UsageError for none."""
    rules, parts = config.groups, config.trainer.parts
    found = {one.step: one for one in taken_again(again, rules, wanted.change, parts=parts)}
    if not found:
        raise UsageError(
            f"no batch of {rules.per_step} groups can be taken again for step {wanted.first}",
            hint="too few would be trained by these rewards and rules, within their deadlines",
        )
    return found


def settings_again(commit: StepCommitted, settings: Settings, max_tokens: int) -> Settings:
    """The settings of a step of the source as they are in force when it is trained again."""
    if not settings:
        return commit.settings
    return changed_settings(commit.settings, settings, max_tokens=max_tokens)


def _checked(
    source: OpenRun, record: RunStarted, history: CommitHistory, wanted: Retraining
) -> int:
    """The last step; what cannot be is refused."""
    check_run_name(wanted.name)
    if record.retrained is not None:
        raise UsageError(
            f"run {record.run} has no trajectories of its own: it was trained on those of "
            f"{record.retrained.run}",
            hint=f"retrain {record.retrained.run}",
        )
    if not source.directory.path.is_dir():
        raise UsageError(
            f"{source.directory.path} is no directory of a run: the new run finds its trajectories "
            "by that",
            hint="name a run by its directory",
        )
    if wanted.name == source.directory.path.name:
        raise UsageError("the new run needs a name of its own", hint="--name NEW")
    committed = history.next_step
    last = committed - 1 if wanted.last is None else wanted.last
    if not 0 <= wanted.first <= last < committed:
        raise UsageError(
            f"steps {wanted.first} to {last} cannot be trained again",
            hint=f"steps 0 to {committed - 1} are committed (--to is the first one left out)",
        )
    if source.config.teacher.url:
        raise UsageError(
            "the teacher of this run is an endpoint, which does not say the same again",
            hint="a teacher in a directory (teacher.path) can be asked again",
        )
    return last


def _settings(overrides: tuple[str, ...]) -> dict[str, float | int | str | bool]:
    given = plain_overrides(overrides)
    return {key: value for key, value in given.items() if key in SETTABLE}


def _config(source: OpenRun, wanted: Retraining, last: int) -> Config:
    """The source's configuration with these keys. Raises ConfigError for what cannot be another."""
    own = (f"run.name={wanted.name}", f"run.steps={last + 1}")
    overrides = [*wanted.overrides, *own]
    file = source.directory.config_file
    config = load_config(file, overrides, another=True)
    frozen, logged, _ = changed_keys(source.config, config)
    free = {"run.name"} if wanted.again is None else {"run.name", *AGAIN_KEYS}
    odd = sorted((frozen - free) | (logged - SETTABLE - {"run.steps"}))
    if odd:
        there = SETTABLE if wanted.again is None else SETTABLE | AGAIN_KEYS
        raise ConfigError(
            f"{odd[0]} is no setting of a training step that can be another",
            hint="it may be another where batches are taken again: --batches again"
            if odd[0] in AGAIN_KEYS
            else f"there are: {', '.join(sorted(there))}",
        )
    return config


def _check_learner(config: Config, change: BatchChange) -> None:
    kind = learner_kind(config.trainer.kind, config.task.directory)
    if change.weights and not kind.weights:
        raise ConfigError(
            f"trainer `{config.trainer.kind}` does not weigh rows",
            hint="a LearnerKind with weights = True takes TrainBatch.weights",
        )


def _looked_through(
    commits: Iterator[StepCommitted], wanted: Retraining, settings: Settings, max_tokens: int
) -> set[int]:
    """The versions that the steps name as their reference. Raises UsageError for rows of the change
    that are in none of the steps, ConfigError for settings that one of them cannot have."""
    change, references = wanted.change, set[int]()
    named = {*change.without, *change.rewards, *change.weights}
    # Other rewards may be of all texts of the source, trained or not.
    unknown = {*change.without, *change.weights}
    for group in () if wanted.again is None else wanted.again.groups:
        unknown -= {group.taken.group, *group.rewards}
    for commit in commits:
        found = settings_again(commit, settings, max_tokens)
        if (version := found.get(REFERENCE)) is not None:
            references.add(int(version))
        if named:
            for taken in commit.groups:
                unknown.discard(taken.group)
                unknown.difference_update(one.trajectory for one in taken.trajectories)
    if unknown:
        raise UsageError(
            f"{min(unknown)} is trained in none of the steps",
            hint=f"{len(unknown)} of the rows that the change names are not"
            if len(unknown) > 1
            else "`show RUN STEP` names the rows of a step",
        )
    return references


def _goes_on(directory: RunDir, config: Config) -> RunStarted | None:
    """The first record of a run that is there; None for none, or a beginning without one."""
    if not directory.exists():
        return None
    if not directory.lender:
        raise UsageError(
            f"run {directory.path.name!r} exists, and was not made by `retrain`",
            hint="another name: --name NEW",
        )
    with closing(directory.open_bus(config)) as bus:
        return started(bus, Topics(config.run.name))


def _check_same(
    plan: RetrainPlan, source: RunStarted, wanted: Retraining, last: int, settings: Settings
) -> None:
    """The command is the one that the run was begun with. Raises UsageError."""
    found = plan.retrained
    store = plan.directory.policies(plan.config)
    asked: dict[str, tuple[Any, Any]] = {
        "source": ((found.run, found.started_ns), (source.run, source.at_ns)),
        "first step": (found.first, wanted.first),
        "settings": (found.settings, dict(settings)),
        "batches": (found.rounds, None if wanted.again is None else wanted.again.rounds),
        "rules for groups": (logged_config(plan.started.config).groups, plan.config.groups),
        "rows": (_sha256(found.change), _sha256(publish_change(store, wanted.change))),
        "last step": (found.last, last),
    }
    for what, (there, here) in asked.items():
        if there != here:
            other = f"other {what}" if what.endswith("s") else f"another {what}"
            raise UsageError(
                f"run {plan.started.run!r} exists, with {other}",
                hint="another name (--name), or the command that it was begun with",
            )


def _sha256(blob: Blob | None) -> str:
    return "" if blob is None else blob.sha256


def _make(directory: RunDir, config: Config, source: OpenRun) -> None:
    """The directory with its configuration and topics. Idempotent."""
    directory.path.mkdir(parents=True, exist_ok=True)
    check_room(directory.path)
    directory.logs.mkdir(exist_ok=True)
    note = directory.path / RETRAINED_FROM
    note.write_text(f"{source.directory.path.name}\n")
    store_config(directory, config)
    with closing(directory.open_bus(config)) as bus:
        create_topics(bus, config)


class _Begun:
    """What a run begins with, in its own store."""

    def __init__(
        self, source: OpenRun, history: CommitHistory, store: PolicyStore, open_learner: OpenLearner
    ) -> None:
        assert history.run_started is not None
        self._first = history.run_started
        self._source = source
        self._history = history
        self.store = store
        make = partial(open_learner, source)
        log, clock = (source.bus, source.topics), SystemClock()
        self._made = Rebuilder(*log, source.policies, make_learner=make, clock=clock)

    def version(self, version: int) -> Manifest:
        """The weights of a version of the source, made again where its store lacks them."""
        source, manifest = self._source, self._first.policy
        for note in self._history.notes[version - 1 : version] if version else ():
            (commit,) = read_commits(source.bus, source.topics, [note], SystemClock())
            manifest = commit.policy
        if self.store.has_weights(manifest.digest):
            return manifest
        return self.store.publish_weights(copying(self._made.weights(version), manifest))

    def optimizer(self, step: int) -> Blob | None:
        """The optimizer's state before a step: a checkpoint, or made again from the nearest one."""
        kept = self._history.checkpoint(step)
        if kept is None and step == 0:
            return None
        policies = self._source.policies
        if kept is not None and policies.has_blob("optimizer", kept.sha256):
            return copy_state(policies, self.store, kept.sha256)
        return self.store.publish_blob("optimizer", self._made.before(step).save_optimizer)

    def assets(self, digest: str) -> None:
        """Configuration and tokenizer files."""
        files = sorted(self._source.policies.assets(digest).iterdir())
        self.store.publish_assets(files)


def _run_started(source: RunStarted, config: Config, retrained: Retrained) -> RunStarted:
    plain: Mapping[str, Any] = msgspec.to_builtins(with_keep_every(config, source.policy))
    return msgspec.structs.replace(
        source,
        at_ns=time.time_ns(),
        run=config.run.name,
        schema_version=SCHEMA_VERSION,
        config=dict(plain),
        config_digest=config_digest(plain),
        planner=PLANNER,
        package=__version__,
        lineage=Lineage(run=source.run, step=retrained.first, digest=retrained.policy.digest),
        retrained=retrained,
    )
