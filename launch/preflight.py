"""What is looked at before a run starts or goes on, so that nothing is written in vain.

It decides what is refused: a model that this run's engines cannot take, data that are not those of
the run, a run that is over, and a log that knows less than the files beside it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from dora_pipe.audit.reading import records_of
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.config.model import Config
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import typed
from dora_pipe.core.errors import ConfigError, LogTruncated, PolicyError, UsageError
from dora_pipe.core.run_lifecycle import run_is_over
from dora_pipe.launch.local_roles import worker_engines
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.observe.lineage import newest_version
from dora_pipe.orchestrator.snapshots import candidates
from dora_pipe.producers.engines.registry import check_model as check_engine_model
from dora_pipe.producers.tasks.pool import survey
from dora_pipe.producers.worker.tokenizer import Tokenizer
from dora_pipe.schemas.control import RoleStarted, RunStarted, StepCommitted, decode_control
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.model_dir import read_config

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""One of these is in every model directory that has a tokenizer."""

NAMING: Final = (b'"run-started"', b'"step-committed"', b'"role-started"')
"""Kinds of control records that say which files of the store belong to the run."""


def check_model(config: Config, directory: Path) -> None:
    """A model directory that the run's engines take, with a tokenizer. Raises PolicyError."""
    check_engine_model(config, worker_engines(config).values(), directory)
    longest = read_config(directory).get("max_position_embeddings")
    if isinstance(longest, int) and longest < config.workers.context_tokens:
        raise PolicyError(
            f"{directory}: its {longest} positions are fewer than a context of "
            f"{config.workers.context_tokens} tokens",
            hint="lower workers.context_tokens",
        )
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise PolicyError(
            f"{directory} has no tokenizer",
            hint="save it with `save_pretrained` of a fast tokenizer, which writes tokenizer.json",
        )
    if (directory / TOKENIZER_FILES[0]).is_file() and importlib.util.find_spec("tokenizers"):
        Tokenizer(directory)


def check_data(config: Config, first: RunStarted) -> None:
    """The data are those that the run began with. Raises ConfigError, TaskError."""
    facts = survey(config.task)
    for name, key, found, wanted in (
        ("training", "task.data", facts.train_digest, first.dataset_digest),
        ("evaluation", "task.eval_data", facts.eval_digest, first.eval_digest),
    ):
        if found != wanted:
            raise ConfigError(
                f"the {name} data were changed: digest {found[:12]}, the run began with "
                f"{wanted[:12]}",
                hint=f"bring the data back ({key}), or start a new run from this one with --from",
            )


def is_over(bus: Bus, topics: Topics) -> bool:
    """Whether the run's last decision is in the log. Raises BusError."""
    end = bus.end(TopicPartition(topics.decisions, 0))
    return run_is_over(bus, topics, end, SystemClock())


def over_hint(bus: Bus, topics: Topics, directory: RunDir, root: Path) -> str:
    """How one goes on from a run that is over, as a command. Raises BusError."""
    newest = f"{topics.run}@{newest_version(bus, topics)}"
    words = ("run", directory.path, "--from", newest, "-o", "run.name=NEW")
    return f"start a new one from it: {typed(*words, runs=root)}"


def refuse_over(bus: Bus, topics: Topics, directory: RunDir, root: Path) -> None:
    """A run that is over does not change any more. Raises UsageError."""
    if is_over(bus, topics):
        raise UsageError(
            f"run {topics.run!r} is over: nothing of it can be changed",
            hint=over_hint(bus, topics, directory, root),
        )


def check_log(directory: RunDir, config: Config, bus: Bus) -> None:
    """The log knows what lies beside it. Raises LogTruncated where it must have lost its end.

    A trainer names what it has published before it publishes more, so each that was started leaves
    at most one version that no commit names. A snapshot is taken of a round that is in the log.
    """
    topics = Topics(config.run.name)
    beyond = _snapshots_beyond(directory, bus, topics)
    if beyond:
        raise _lost(directory, f"a snapshot was taken of a round at offset {beyond} of decisions")
    if config.store.path or config.store.url:
        return  # other runs may have their policies there
    digests, trainers = _named(bus, topics)
    unknown = _versions(directory) - digests
    # Before the run's first record there is version 0, which a start may have left.
    if len(unknown) > max(1, trainers):
        raise _lost(directory, f"{len(unknown)} versions lie in the store that it does not name")


def _lost(directory: RunDir, why: str) -> LogTruncated:
    return LogTruncated(
        f"the log of {directory.path.name} has lost its end: {why}",
        hint="bring the log back from a copy or archive (log.sqlite with its -wal file); or start "
        "a new run from what it still has, with --from",
    )


def _named(bus: Bus, topics: Topics) -> tuple[set[str], int]:
    """Digests of all versions that control names, and how many trainers were started."""
    digests: set[str] = set()
    trainers = 0
    for value in _naming(bus, topics):
        match decode_control(value):
            case RunStarted() as fact:
                digests.add(fact.policy.digest)
            case StepCommitted() as fact:
                digests.add(fact.digest_after)
            case RoleStarted(role="trainer"):
                trainers += 1
            case _:
                pass
    return digests, trainers


def _naming(bus: Bus, topics: Topics) -> Iterator[bytes]:
    if topics.control not in bus.topics():
        return
    at = TopicPartition(topics.control, 0)
    with closing(records_of(bus, {at: bus.end(at)})) as records:
        for record in records:
            if any(kind in record.value for kind in NAMING):
                yield record.value


def _versions(directory: RunDir) -> set[str]:
    found = (directory.path / "policies" / "weights").glob("*.safetensors")
    return {path.stem for path in found if not path.name.startswith(".")}


def _snapshots_beyond(directory: RunDir, bus: Bus, topics: Topics) -> int:
    """The offset of a snapshot that lies behind the end of decisions; 0 where none does."""
    there = topics.decisions in bus.topics()
    end = bus.end(TopicPartition(topics.decisions, 0)) if there else 0
    offsets = (one.offset for one in candidates(directory.snapshots, topics.run))
    return max((one for one in offsets if one >= end), default=0)
