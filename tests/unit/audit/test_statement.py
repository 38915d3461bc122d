"""Tests of the statement of exported weights: form and digests."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.audit.export import export_policy
from dora_pipe.audit.statement import FILE, write_statement
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.schemas.control import (
    RunStarted,
    StepCommitted,
    WorkerJoined,
    config_digest,
    decode_control,
)
from dora_pipe.schemas.rounds import GENESIS_CHAIN, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.store.model_dir import weights_digest
from tests.support.command_line import Call, caller
from tests.support.recorded_run import RecordedRun

VERSION = 9
SHA256 = re.compile(r"[0-9a-f]{64}")


@pytest.fixture(scope="module")
def directory(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    _write(recorded, folder)
    return folder


def _write(run: RecordedRun, folder: Path) -> None:
    with closing(run.open()) as bus, closing(read_catalogue(bus, run.topics)) as tables:
        export_policy(tables, run.store, VERSION, folder)
        (folder / "adapter").mkdir()
        (folder / "adapter" / "note.txt").write_text("of a folder inside")
        write_statement(bus, run.topics, tables, folder, VERSION)


@pytest.fixture
def statement(directory: Path) -> Any:
    return json.loads((directory / FILE).read_text())


def test_shape_is_that_of_an_in_toto_statement(statement: Any) -> None:
    assert set(statement) == {"_type", "subject", "predicateType", "predicate"}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert re.fullmatch(r"[a-z]+:\S+", statement["predicateType"])
    assert isinstance(statement["predicate"], dict)
    names = [row["name"] for row in statement["subject"]]
    assert len(names) == len(set(names)) > 0
    for row in statement["subject"]:
        assert set(row) == {"name", "digest"}
        assert SHA256.fullmatch(row["digest"]["sha256"])


def test_subject_is_every_other_file_with_its_sha256(statement: Any, directory: Path) -> None:
    files = {
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    }
    assert {row["name"] for row in statement["subject"]} == files - {FILE}
    assert {"model.safetensors", "config.json", "adapter/note.txt"} <= files
    for row in statement["subject"]:
        data = (directory / row["name"]).read_bytes()
        assert row["digest"] == {"sha256": hashlib.sha256(data).hexdigest()}


def test_predicate_has_what_files_and_log_say(
    statement: Any, directory: Path, recorded: RecordedRun
) -> None:
    predicate = statement["predicate"]
    with closing(recorded.open()) as bus:
        facts = _facts(bus, recorded.topics)
        chain, number, control_next = _chain(bus, recorded.topics)
        sampled = _sampled(bus, recorded.topics, facts)
    started = next(fact for fact in facts if isinstance(fact, RunStarted))
    commits = {fact.step: fact for fact in facts if isinstance(fact, StepCommitted)}
    workers = [fact for fact in facts if isinstance(fact, WorkerJoined)]
    assert (predicate["run"], predicate["version"]) == (started.run, VERSION)
    assert (
        predicate["weightsDigest"] == weights_digest(directory) == commits[VERSION - 1].digest_after
    )
    assert predicate["log"] == {"chain": chain, "round": number, "controlNext": control_next}
    assert predicate["config"]["digest"]["sha256"] == config_digest(started.config)
    assert predicate["data"] == [
        {"name": "eval", "rows": started.eval_rows, "digest": {"sha256": started.eval_digest}},
        {
            "name": "train",
            "rows": started.dataset_rows,
            "digest": {"sha256": started.dataset_digest},
        },
    ]
    (rewards,) = predicate["rewards"]
    assert rewards["codeDigests"] == sorted({worker.reward_digest for worker in workers} - {""})
    assert predicate["code"]["package"] == [started.package]
    assert {row["version"]: row["tokens"] for row in predicate["sampledBy"]} == sampled
    assert sum(row["share"] for row in predicate["sampledBy"]) == pytest.approx(1.0, abs=1e-4)
    for row in predicate["sampledBy"]:
        assert row["share"] == pytest.approx(row["tokens"] / sum(sampled.values()), abs=1e-6)
        before = row["version"] - 1
        own = commits[before].digest_after if before >= 0 else started.policy.digest
        assert row["weightsDigest"] == own


def _facts(bus: Bus, topics: Topics) -> list[Any]:
    return [
        decode_control(record.value) for record in records_of(bus, ends_of(bus, topics.control))
    ]


def _chain(bus: Bus, topics: Topics) -> tuple[str, int, int]:
    control = list(records_of(bus, ends_of(bus, topics.control)))
    chain, folded, last = GENESIS_CHAIN, 0, None
    for record in records_of(bus, ends_of(bus, topics.decisions)):
        round_ = decode_round(record.value)
        digest = hashlib.sha256(bytes.fromhex(chain))
        for entry in control:
            if folded <= entry.offset < round_.control_next:
                digest.update(entry.offset.to_bytes(8, "big"))
                digest.update(len(entry.value).to_bytes(8, "big") + entry.value)
        bare = record.value[: record.value.rindex(b',"chain":')] + b"}"
        digest.update(bare)
        if digest.hexdigest() != round_.chain:  # from a fenced orchestrator
            continue
        chain, folded, last = round_.chain, round_.control_next, round_
    assert last is not None
    return chain, last.ordinal, last.control_next


def _sampled(bus: Bus, topics: Topics, facts: list[Any]) -> dict[int, int]:
    commits = {fact.step: fact for fact in facts if isinstance(fact, StepCommitted)}
    expected = {
        (trajectory.partition, trajectory.offset)
        for step, commit in commits.items()
        if step < VERSION
        for group in commit.groups
        for trajectory in group.trajectories
    }
    counter: Counter[int] = Counter()
    for record in records_of(bus, ends_of(bus, topics.trajectories)):
        if (record.partition, record.offset) in expected:
            for segment in decode_trajectory(record.value).segments:
                if segment.kind == "model":
                    counter[segment.version] += segment.end - segment.start
    return dict(counter)


def test_damaged_trajectory_gives_no_statement(copy: RecordedRun, tmp_path: Path) -> None:
    with closing(copy.open()) as bus:
        facts = _facts(bus, copy.topics)
        commit = next(fact for fact in facts if isinstance(fact, StepCommitted))
        record = commit.groups[0].trajectories[0]
        topic = copy.topics.trajectories
    with closing(sqlite3.connect(copy.log)) as file, file:
        file.execute(
            "UPDATE records SET value = zeroblob(length(value)) WHERE at ="
            " (SELECT at FROM log WHERE topic = ? AND partition = ? AND offset = ?)",
            (topic, record.partition, record.offset),
        )
    with pytest.raises(InvariantBroken, match="there is no statement"):
        _write(copy, tmp_path / "model")
    assert not (tmp_path / "model" / FILE).exists()


def test_command_writes_it_beside_the_model(
    recorded: RecordedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    call: Call = caller(monkeypatch, capsys)
    folder = tmp_path / "model"
    words = ("export", "policy", recorded.directory, "3", folder, "--statement")
    code, _, err = call(*words)
    assert code == 0, err
    statement = json.loads((folder / FILE).read_text())
    names = {row["name"] for row in statement["subject"]}
    assert {"README.md", "generation_config.json", "model.safetensors"} <= names
    assert call(*words, "--force")[0] == 0
    assert json.loads((folder / FILE).read_text()) == statement
