"""Before a run starts everything is opened and digested, so that errors come early."""

from __future__ import annotations

import getpass
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe import __version__
from dora_pipe.bus.port import Bus, TopicPartition, TopicSpec
from dora_pipe.config.load import changed_keys
from dora_pipe.config.model import LOGGED, Config
from dora_pipe.errors import ConfigError, TopicMissing
from dora_pipe.history.reading import records_of
from dora_pipe.orchestrator.planner import PLANNER
from dora_pipe.policies.store import PolicyStore, as_store
from dora_pipe.producers.tasks.pool import survey
from dora_pipe.schemas.control import Command, Lineage, RunStarted, decode_control
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import SCHEMA_VERSION, canonical, encode, sha256_hex


def create_topics(bus: Bus, config: Config) -> Topics:
    """Create the run's topics where they are missing."""
    topics = Topics(config.run.name)
    many = {topics.trajectories, topics.progress}
    bus.create(
        [
            TopicSpec(
                name=name,
                partitions=config.bus.partitions if name in many else 1,
                record_bytes_max=config.bus.record_bytes_max,
            )
            for name in topics.all()
        ]
    )
    return topics


def check_topics(bus: Bus, config: Config) -> None:
    """Refuse to go on with a run whose topics are not what it needs. Raises BusError."""
    missing = sorted(set(Topics(config.run.name).all()) - set(bus.topics()))
    if missing:  # made anew, it would be empty, and nobody would see what is lost
        raise TopicMissing(
            f"the run has lost its topic {missing[0]}",
            hint="was it deleted, or may this user not see it (Describe)?",
        )
    create_topics(bus, config)


def started(bus: Bus, topics: Topics) -> RunStarted | None:
    """The run's first record, if the run exists."""
    at = TopicPartition(topics.control, 0)
    if topics.control not in bus.topics():
        return None
    with closing(records_of(bus, {at: bus.end(at)})) as records:
        first = next(records, None)
    fact = None if first is None else decode_control(first.value)
    return fact if isinstance(fact, RunStarted) else None


def run_started(
    config: Config,
    store: PolicyStore | Path,
    *,
    policy: tuple[Manifest, str] | None = None,
    lineage: Lineage | None = None,
) -> RunStarted:
    """Import the model, open the task, digest the data. Raises ConfigError, PolicyError, TaskError.

    `policy` (manifest, assets digest) is given where version 0 lies in the store already.
    """
    store = as_store(store)
    manifest, assets = policy or store.import_model(Path(config.model.path))
    facts = survey(config.task)
    if facts.train_rows == 0:
        raise ConfigError("the training data has no rows", hint="see task.data")
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return RunStarted(
        at_ns=time.time_ns(),
        run=config.run.name,
        schema_version=SCHEMA_VERSION,
        config=plain,
        config_digest=sha256_hex(canonical(plain)),
        dataset_digest=facts.train_digest,
        dataset_rows=facts.train_rows,
        eval_digest=facts.eval_digest,
        eval_rows=facts.eval_rows,
        seed=config.run.seed,
        policy=manifest,
        assets_digest=assets,
        planner=PLANNER,
        package=__version__,
        lineage=lineage,
    )


def resume_commands(stored: Config, wanted: Config) -> list[bytes]:
    """`set` commands for logged keys that changed. Raises ConfigError for a changed frozen key."""
    frozen, logged, _ = changed_keys(stored, wanted)
    if frozen:
        raise ConfigError(
            f"a resumed run cannot change {', '.join(sorted(frozen))}",
            hint="start a new run from it with --from RUN@STEP",
        )
    assert logged <= LOGGED
    if not logged:
        return []
    command = Command(
        at_ns=time.time_ns(),
        user=getpass.getuser(),
        verb="set",
        args={key: _value(wanted, key) for key in sorted(logged)},
    )
    return [encode(command)]


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
