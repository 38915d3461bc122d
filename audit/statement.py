"""Statement of exported weights: an unsigned in-toto Statement v1 over the model files.

The predicate names log, data, rewards, code and sampling versions.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dora_pipe.audit.reading import trajectories_of
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import Damage
from dora_pipe.config.logged import logged_config
from dora_pipe.core.errors import ResourceError, SchemaError, UsageError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.ledger.database import Catalogue, logged_records
from dora_pipe.ledger.reading import last_round
from dora_pipe.schemas.control import (
    Control,
    RoleStarted,
    RunStarted,
    StepCommitted,
    WorkerJoined,
    decode_control,
)
from dora_pipe.schemas.identity import source_of
from dora_pipe.schemas.topics import Topics

FILE: Final = "statement.json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "urn:dora-pipe:weights:v1"
READ_BYTES: Final = 1 << 20

TRAINED: Final = (
    "status = 'bound' and trajectory_id in (select trajectory_id from trajectories"
    " join groups using (group_id)"
    " where trajectories.outcome is null and groups.outcome = 'trained' and step < ?)"
)


def write_statement(
    bus: Bus, topics: Topics, catalogue: Catalogue, directory: Path, version: int
) -> Path:
    """Write an exported version's statement and return the file. Raises UsageError if no round
    covers the version yet, InvariantBroken for a damaged trained trajectory, ResourceError."""
    (directory / FILE).unlink(missing_ok=True)
    predicate = _predicate(bus, topics, catalogue, version)
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": _subject(directory),
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }
    try:
        (directory / FILE).write_text(json.dumps(statement, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {directory / FILE}: {error.strerror}") from error
    return directory / FILE


def _subject(directory: Path) -> list[dict[str, Any]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [
        {"name": path.relative_to(directory).as_posix(), "digest": {"sha256": _sha256(path)}}
        for path in files
    ]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _predicate(bus: Bus, topics: Topics, catalogue: Catalogue, version: int) -> dict[str, Any]:
    facts = _facts(bus, topics)
    started = next(fact for _, fact in facts if isinstance(fact, RunStarted))
    weights = dict(catalogue.query("select version, digest from versions"))
    sampled = _sampled(bus, topics, catalogue, version)
    workers = set(
        catalogue.query(f"select distinct incarnation from records where {TRAINED}", [version])
    )
    joined = [
        fact for offset, fact in facts if isinstance(fact, WorkerJoined) and (offset,) in workers
    ]
    return {
        "run": started.run,
        "version": version,
        "weightsDigest": weights[version],
        "seed": started.seed,
        "log": _log(bus, topics, facts, version),
        "config": {"digest": {"sha256": started.config_digest}},
        "assets": {"digest": {"sha256": started.assets_digest}},
        "code": _code(started, facts, joined),
        "data": _data(started),
        "rewards": _rewards(started, joined),
        "sampledBy": _shares(sampled, weights),
        "baseModel": _base(started),
    }


def _facts(bus: Bus, topics: Topics) -> list[tuple[int, Control]]:
    facts: list[tuple[int, Control]] = []
    for record in records_of(bus, ends_of(bus, topics.control)):
        with suppress(SchemaError):
            fact = decode_control(record.value)
            if isinstance(fact, Control):
                facts.append((record.offset, fact))
    return facts


def _log(
    bus: Bus, topics: Topics, facts: Sequence[tuple[int, Control]], version: int
) -> dict[str, Any]:
    last = last_round(bus, topics, bus.end(TopicPartition(topics.decisions, 0)))
    committed = (
        offset
        for offset, fact in facts
        if isinstance(fact, StepCommitted) and fact.step + 1 == version
    )
    if last is None or max(committed, default=0) >= last.control_next:
        raise UsageError(
            f"no round of {topics.run} covers version {version} yet",
            hint="wait for the orchestrator's next round",
        )
    return {"chain": last.chain, "round": last.ordinal, "controlNext": last.control_next}


def _code(
    started: RunStarted, facts: Sequence[tuple[int, Control]], joined: Sequence[WorkerJoined]
) -> dict[str, Any]:
    roles = [fact for _, fact in facts if isinstance(fact, RoleStarted)]
    packages = {name: digest for worker in joined for name, digest in worker.packages.items()}
    return {
        "package": sorted({started.package, *_packages(roles), *_packages(joined)}),
        "planner": started.planner,
        "engines": sorted({f"{worker.engine} {worker.engine_version}" for worker in joined}),
        "taskPackages": dict(sorted(packages.items())),
    }


def _packages(facts: Sequence[RoleStarted | WorkerJoined]) -> set[str]:
    return {fact.package for fact in facts}


def _data(started: RunStarted) -> list[dict[str, Any]]:
    names = started.datasets or ("train", "eval")
    datasets = ((name, started.data(name)) for name in sorted(names))
    return [
        {"name": name, "rows": data.rows, "digest": {"sha256": data.digest}}
        for name, data in datasets
        if data is not None and data.rows
    ]


def _rewards(started: RunStarted, joined: Sequence[WorkerJoined]) -> list[dict[str, Any]]:
    rewards = []
    for task in logged_config(started.config).tasks:
        source = source_of("train", task.name)
        digests = {worker.reward_digests.get(source, worker.reward_digest) for worker in joined}
        names = [use.called for use in task.rewards] or [str(task.reward) or task.kind]
        rewards.append({"task": task.name, "names": names, "codeDigests": sorted(digests - {""})})
    return rewards


def _base(started: RunStarted) -> dict[str, Any]:
    base: dict[str, Any] = {"weightsDigest": started.policy.digest}
    if started.lineage is not None:
        base |= {"run": started.lineage.run, "step": started.lineage.step}
    return base


def _sampled(
    bus: Bus, topics: Topics, catalogue: Catalogue, version: int
) -> dict[int, tuple[int, int]]:
    expected = logged_records(catalogue, TRAINED, [version])
    trajectories: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    damage = Damage()
    for trajectory in trajectories_of(bus, topics, expected.values(), damage):
        own = [segment for segment in trajectory.segments if segment.kind == "model"]
        trajectories.update({segment.version for segment in own})
        for segment in own:
            tokens[segment.version] += segment.end - segment.start
    damage.raise_if_any(": there is no statement")
    return {version: (trajectories[version], tokens[version]) for version in sorted(tokens)}


def _shares(
    sampled: Mapping[int, tuple[int, int]], weights: Mapping[int, str]
) -> list[dict[str, Any]]:
    total = sum(tokens for _, tokens in sampled.values())
    return [
        {
            "version": version,
            "weightsDigest": weights[version],
            "trajectories": trajectories,
            "tokens": tokens,
            "share": round(tokens / total, 6),
        }
        for version, (trajectories, tokens) in sampled.items()
    ]
