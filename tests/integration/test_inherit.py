"""A run that starts from a retrained directory with its optimizer's state makes the first step that
the source would have made, and a run at version 0 starts with that state.

Method: steps of the recorded run, repeated without torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from dora_pipe.analysis.change import EMPTY
from dora_pipe.analysis.replay import SourceRun
from dora_pipe.analysis.retrain import retrain
from dora_pipe.audit.auditor import audit
from dora_pipe.audit.prune import plan_prune
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.consumers.trainer.replay_steps import load_base, replay_steps
from dora_pipe.core.errors import ConfigError, PolicyError
from dora_pipe.core.pure.records import Append
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.launch.inherit import inherit
from dora_pipe.launch.plan import create_topics
from dora_pipe.launch.run_dir import opened
from dora_pipe.observe.lineage import first_record
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.store.store import PolicyStore
from tests.support.recorded_run import RecordedRun

NAME, AGAIN, CHILD = "recorded", "again", "child"
CLOCK = SystemClock()
FIRST, VERSION = 5, 8
"""Before and behind the steps that were trained again."""


@pytest.fixture(scope="module")
def root(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    recorded.copy(root / NAME)
    with opened(NAME, root) as run:
        source = SourceRun(
            bus=run.bus,
            topics=run.topics,
            store=run.policies,
            make=lambda started: SimulatedLearner(),
            clock=CLOCK,
        )
        retrain(source, range(FIRST, VERSION), EMPTY, root / AGAIN)
    return root


@pytest.fixture
def store(tmp_path: Path) -> PolicyStore:
    return PolicyStore(tmp_path / "policies")


def child_of(root: Path, store: PolicyStore, *, with_optimizer: bool = True) -> RunStarted:
    with opened(NAME, root) as source:
        first = first_record(source.bus, source.topics)
        parent = str(root / AGAIN)
        lineage, (policy, assets) = inherit(
            parent, root, store, source.config, with_optimizer=with_optimizer
        )
    return msgspec.structs.replace(
        first, run=CHILD, policy=policy, assets_digest=assets, lineage=lineage
    )


def first_step_is_the_sources(root: Path, store: PolicyStore, started: RunStarted) -> bool:
    learner = SimulatedLearner()
    assert load_base(store, learner, started, []) == 0
    with opened(NAME, root) as source:
        history = read_history(source.bus, source.topics, CLOCK)
        notes = history.notes[VERSION : VERSION + 1]
        steps = read_commits(source.bus, source.topics, notes, CLOCK)
        log, run = (source.bus, source.topics), (source.policies, history)
        (again,) = replay_steps(*log, *run, learner, steps, clock=CLOCK)
    return again.equal


def test_with_its_state_the_first_step_is_what_the_source_would_have_made(
    root: Path, store: PolicyStore
) -> None:
    started = child_of(root, store)
    assert started.lineage is not None and started.optimizer is not None
    with opened(NAME, root) as source:
        digest = read_history(source.bus, source.topics, CLOCK).digest_of(VERSION)
    assert (started.lineage.run, started.lineage.step) == (NAME, VERSION)
    assert started.lineage.digest == started.policy.digest == digest
    assert first_step_is_the_sources(root, store, started)


def test_without_it_the_optimizer_begins_afresh(root: Path, store: PolicyStore) -> None:
    started = child_of(root, store, with_optimizer=False)
    assert started.optimizer is None
    assert not first_step_is_the_sources(root, store, started)


def test_a_lost_state_is_refused_and_never_replaced_by_a_fresh_one(
    root: Path, store: PolicyStore
) -> None:
    started = child_of(root, store)
    assert started.optimizer is not None
    store.drop_blob("optimizer", started.optimizer.sha256)
    with pytest.raises(PolicyError):
        load_base(store, SimulatedLearner(), started, [])


@contextmanager
def log_of(started: RunStarted, root: Path, folder: Path) -> Iterator[Bus]:
    with opened(NAME, root) as source:
        config = source.config
    run = msgspec.structs.replace(config.run, name=CHILD)
    with closing(SqliteBus(folder / "log.sqlite")) as bus:
        create_topics(bus, msgspec.structs.replace(config, run=run))
        with closing(bus.writer()) as writer:
            writer.append([Append(topic=Topics(CHILD).control, value=encode(started))])
        yield bus


def test_pruning_leaves_the_state_that_a_run_begins_with(
    root: Path, store: PolicyStore, tmp_path: Path
) -> None:
    started, topics = child_of(root, store), Topics(CHILD)
    assert started.optimizer is not None
    with log_of(started, root, tmp_path) as bus:
        plan = plan_prune(bus, topics, store, keep_every=1, stopped=True, clock=CLOCK)
        assert plan.candidates == ()
        history = read_history(bus, topics, CLOCK)
    assert history.checkpoint_of(0) == started.optimizer.sha256


def test_audit_misses_a_state_that_is_gone(root: Path, store: PolicyStore, tmp_path: Path) -> None:
    started = child_of(root, store)
    assert started.optimizer is not None
    with log_of(started, root, tmp_path) as bus:
        before = audit(bus, Topics(CHILD), store)
        store.drop_blob("optimizer", started.optimizer.sha256)
        after = audit(bus, Topics(CHILD), store)
    new = [violation.line for violation in after.violations if violation not in before.violations]
    assert len(new) == 1 and "the optimizer's state that version 0 begins with" in new[0]


@pytest.mark.parametrize(
    ("key", "value"), [("optimizer", "muon"), ("kind", "deepspeed"), ("dtype", "bfloat16")]
)
def test_a_state_of_another_optimizer_is_refused_by_name(
    root: Path, store: PolicyStore, key: str, value: str
) -> None:
    with opened(NAME, root) as source:
        trainer = msgspec.structs.replace(source.config.trainer, **{key: value})
        config = msgspec.structs.replace(source.config, trainer=trainer)
    with pytest.raises(ConfigError, match=rf"has trainer\.{key} = ") as refused:
        inherit(str(root / AGAIN), root, store, config, with_optimizer=True)
    assert "the optimizer state starts empty" in (refused.value.hint or "")


def test_an_adapters_state_is_refused_by_name(root: Path, store: PolicyStore) -> None:
    with opened(NAME, root) as source:
        lora = msgspec.structs.replace(source.config.lora, rank=4)
        config = msgspec.structs.replace(source.config, lora=lora)
    with pytest.raises(ConfigError, match="adapter"):
        inherit(str(root / AGAIN), root, store, config, with_optimizer=True)


def test_where_there_is_no_state_the_command_that_makes_it_is_named(
    root: Path, store: PolicyStore, tmp_path: Path
) -> None:
    runs = shutil.copytree(root, tmp_path / "runs")
    with opened(NAME, runs) as source:
        history = read_history(source.bus, source.topics, CLOCK)
        version = next(n for n in range(1, 9) if history.checkpoint(n) is None)
        with pytest.raises(PolicyError, match=f"state of version {version}") as refused:
            inherit(f"{NAME}@{version}", runs, store, source.config, with_optimizer=True)
    hint = refused.value.hint or ""
    assert f"retrain {NAME} --out DIR --to {version}" in hint
    with opened(NAME, runs) as source, pytest.raises(PolicyError) as refused:
        inherit(f"{NAME}@0", runs, store, source.config, with_optimizer=True)
    assert "version 0 has none" in (refused.value.hint or "")
