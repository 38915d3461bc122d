"""A whole run with trajectories above what its topics take: proved, damaged, pruned."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from dora_pipe.analysis import replay
from dora_pipe.audit.auditor import audit
from dora_pipe.audit.prune import AGE_MIN_S, PrunePlan, plan_blobs, prune_blobs
from dora_pipe.audit.report import AuditReport
from dora_pipe.bus import open_bus
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.blobs import BlobFiles, blob_of
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.config.load import dump_toml
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.core.errors import BusError
from dora_pipe.core.pure.records import Append, Record
from dora_pipe.producers.tasks.calls import EnvObserved, EnvStep
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.store.arrow_files import ArrowFiles
from dora_pipe.store.log_location import SharedBlobs
from dora_pipe.store.store import PolicyStore
from tests.support.bus_harness import log_in_memory
from tests.support.cluster import Cluster, make_config, reward_by_text
from tests.support.command_line import Call, caller
from tests.support.inline_tasks import InlineTasks
from tests.support.worker import VirtualClock

TOPICS = Topics("claimed")
HOUR_NS = 3600 * 10**9
STEPS = 3
LARGE = bytes(range(256)) * 400


RECORD_BYTES_MAX = 64 * 1024
"""The least that a configuration may say."""

OBSERVED = 18_000
BLOBS = "blobs"


class Killed(BaseException):
    """A process ends where it stands."""


@dataclass
class Deaths:
    due: bool = False
    died: list[str] = field(default_factory=list)


class MortalBlobs(BlobFiles):
    def __init__(self, folder: Path, deaths: Deaths) -> None:
        super().__init__(folder)
        self._deaths = deaths

    def write(self, digest: str, value: bytes) -> None:
        super().write(digest, value)
        if self._deaths.due:
            self._deaths.due = False
            self._deaths.died.append(digest)
            raise Killed


@dataclass
class BlobCluster(Cluster):
    deaths: Deaths = field(default_factory=Deaths)

    def open_log(self) -> Bus:
        blobs = MortalBlobs(self.store.root / BLOBS, self.deaths)
        return open_bus(f"sqlite:{self.path}", blobs=blobs)


def talkative_tasks() -> InlineTasks:
    tasks = InlineTasks(episodes=True, reward=reward_by_text)
    tasks.step = partial(_observe, tasks)
    return tasks


def _observe(tasks: InlineTasks, call: EnvStep) -> EnvObserved:
    steps = sum(isinstance(step, EnvStep) and step.request == call.request for step in tasks.seen)
    drawn = int(sha256_hex(call.request.encode())[:8], 16)
    chance = Random(drawn)
    count = OBSERVED if drawn % 3 == 0 else 2
    text = " ".join(str(chance.randrange(1, 1 << 31)) for _ in range(count))
    return EnvObserved(request=call.request, text=text, done=steps > 1, tool="calc", ok=True)


def blob_cluster(directory: Path) -> BlobCluster:
    config = make_config(
        run__steps=STEPS,
        run__name="claimed",
        rollout__prompts_per_step=2,
        bus__max_record_bytes=RECORD_BYTES_MAX,
        workers__max_model_len=2 * OBSERVED,
        trainer__micro_batch_tokens=2 * OBSERVED,
        sampling__max_tokens=40,
        evaluation__prompts=2,
    )
    cluster = BlobCluster(directory, config, tasks=talkative_tasks)
    (directory / "config.toml").write_text(dump_toml(config))
    return cluster


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("blobs") / "claimed"
    with blob_cluster(directory) as cluster:
        cluster.until(lambda: cluster.version >= 1)
        cluster.deaths.due = True
        with pytest.raises(Killed):
            cluster.run()
        for name in [role for role in cluster.roles if role.startswith("w")]:
            cluster.restart(name)
        cluster.run()
        assert len(cluster.deaths.died) == 1
    return directory


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "claimed")
    return tmp_path / "claimed"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.setattr(replay, "make_learner", lambda **_: SimulatedLearner())
    return caller(monkeypatch, capsys)


def values(run: Path) -> dict[str, Path]:
    return {path.name: path for path in (run / "policies" / BLOBS).iterdir()}


def blobs(run: Path) -> Iterator[tuple[Record, str]]:
    with closing(SqliteBus(run / "log.sqlite")) as bus:
        for record in records_of(bus, ends_of(bus, TOPICS.trajectories)):
            if digest := blob_of(record):
                yield record, digest


def opened(run: Path) -> Bus:
    return open_bus(f"sqlite:{run / 'log.sqlite'}", blobs=BlobFiles(run / "policies" / BLOBS))


def audited(run: Path) -> AuditReport:
    with closing(opened(run)) as bus:
        return audit(bus, TOPICS, PolicyStore(run / "policies"))


def test_run_with_trajectories_above_the_limit_is_proved(run: Path) -> None:
    sizes = [path.stat().st_size for path in values(run).values()]
    assert len(sizes) > 5 and min(sizes) > RECORD_BYTES_MAX
    report = audited(run)
    assert report.holds, report.violations
    assert report.steps == STEPS
    assert {digest for _, digest in blobs(run)} < values(run).keys()


def test_every_command_reads_large_values_from_the_log(
    call: Call, copy: Path, tmp_path: Path
) -> None:
    record, _ = next(blobs(copy))
    name = dict(record.headers)["trajectory"].decode()
    commands: list[tuple[object, ...]] = [
        ("audit", copy, "--json"),
        ("show", copy, name, "--json"),
        ("log", "read", copy, "trajectories", "--partition", record.partition, "--json"),
    ]

    answers = [call(*command)[:2] for command in commands]
    assert [code for code, _ in answers] == [0, 0, 0]
    assert f'"{name}"' in answers[2][1] and "unreadable" not in answers[2][1]
    assert call("replay", copy)[0] == 0
    assert call("export", "parquet", copy, tmp_path / "all.parquet")[0] == 0
    tokens = pq.read_table(tmp_path / "all.parquet", columns=["token_ids"]).column(0)
    assert max(len(entry) for entry in tokens.to_pylist()) * 4 > RECORD_BYTES_MAX


@pytest.mark.parametrize(
    ("how", "why"),
    [("gone", "the store has no such value"), ("changed", "has another digest")],
)
def test_value_that_is_gone_or_changed_is_one_line_of_audit(
    call: Call, copy: Path, how: str, why: str
) -> None:
    record, digest = trained(copy)
    path = values(copy)[digest]
    if how == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    (violation,) = audited(copy).violations
    name = dict(record.headers)["trajectory"].decode()
    where = f"{name} at trajectories:{record.partition}:{record.offset}"
    assert violation.line.startswith(f"records {where}: cannot be read: blob {digest}: ")
    assert why in violation.line
    code, _, err = call("audit", copy)
    assert code == 5 and err.count("error:") == 1 and digest in err
    code, _, err = call("replay", copy)
    assert code != 0
    assert f"trajectory {name} cannot be read: blob {digest}" in err


def trained(run: Path) -> tuple[Record, str]:
    return next(
        (record, digest)
        for record, digest in blobs(run)
        if dict(record.headers)["trajectory"].startswith(b"g")
    )


def plan(run: Path, *, hours: float = 2.0) -> PrunePlan:
    clock = VirtualClock()
    latest = max(path.stat().st_mtime_ns for path in values(run).values())
    clock.ns += latest + int(hours * HOUR_NS) - clock.wall_ns()
    with closing(opened(run)) as bus:
        return plan_blobs(bus, TOPICS, PolicyStore(run / "policies"), clock=clock)


def test_value_that_no_record_names_is_pruned_and_no_other(call: Call, copy: Path) -> None:
    named = {digest for _, digest in blobs(copy)}
    (unreferenced,) = values(copy).keys() - named
    decisions = plan(copy)
    assert [(candidate.file.name, candidate.why) for candidate in decisions.candidates] == [
        (f"{BLOBS}/{unreferenced}", "unreferenced")
    ]
    assert (decisions.files, decisions.note) == (len(named) + 1, "")
    code, out, err = call("prune", copy)
    assert (code, unreferenced in out) == (0, False), "it is younger than an hour"
    code, out, err = call("prune", copy, "--blob-hours", "0", "--json")
    assert code == 0 and "--delete deletes them" in err
    assert [json.loads(line)["why"] for line in out.splitlines()] == ["unreferenced"]
    assert unreferenced in values(copy), "a dry run deletes nothing"
    code, _, err = call("prune", copy, "--blob-hours", "0", "--delete")
    assert code == 0 and "1 of" in err
    assert values(copy).keys() == named
    assert audited(copy).holds
    assert plan(copy).candidates == ()


def test_young_value_stays_and_so_does_one_that_was_written_again(copy: Path) -> None:
    assert plan(copy, hours=AGE_MIN_S / 3600 - 0.01).candidates == ()
    decisions = plan(copy)
    (candidates,) = decisions.candidates
    path = copy / "policies" / candidates.file.name
    os.utime(path, ns=(1, 1))
    decisions = plan(copy)
    BlobFiles(path.parent).write(path.name, path.read_bytes())
    assert prune_blobs(PolicyStore(copy / "policies"), decisions) == 0
    assert path.is_file()


def test_unfinished_files_are_pruned_and_those_of_somebody_else_are_not(copy: Path) -> None:
    folder = copy / "policies" / BLOBS
    for name in (f".{'a' * 64}.0123", "notes.txt"):
        (folder / name).write_bytes(b"half")
    candidates = {candidate.file.name.rpartition("/")[2] for candidate in plan(copy).candidates}
    assert f".{'a' * 64}.0123" in candidates and "notes.txt" not in candidates
    assert len(candidates) == 2


def test_values_of_records_that_retention_deleted_stay(copy: Path) -> None:
    named = {digest for _, digest in blobs(copy)}
    store, clock = PolicyStore(copy / "policies"), VirtualClock()
    clock.ns += max(blob.modified_ns for blob in store.blobs()) + 2 * HOUR_NS - clock.wall_ns()
    with closing(SqliteBus(copy / "log.sqlite")) as bus:
        log = log_in_memory(bus)
    live = MemoryBus(log)
    for tp in ends_of(live, TOPICS.trajectories):
        log.delete_before(tp, live.end(tp))
    actual_blobs = plan_blobs(live, TOPICS, store, clock=clock)
    assert actual_blobs.candidates == ()
    assert f"{len(named) + 1} blobs are left as they are: " in actual_blobs.note
    assert "the records from offset 0 on were deleted" in actual_blobs.note


def test_log_is_not_read_while_no_value_is_old(copy: Path) -> None:
    clock = VirtualClock()
    clock.ns = 0  # Before every file.
    unread = MemoryBus(MemoryLog())
    with pytest.raises(BusError):
        ends_of(unread, TOPICS.trajectories)
    blobs = plan_blobs(unread, TOPICS, PolicyStore(copy / "policies"), clock=clock)
    assert (blobs.candidates, blobs.files) == ((), len(values(copy)))


class _Struck(BlobFiles):
    def write(self, digest: str, value: bytes) -> None:
        super().write(digest, value)
        os.kill(os.getpid(), signal.SIGKILL)


def test_process_that_is_killed_between_value_and_record_leaves_what_prune_removes(
    copy: Path,
) -> None:
    before = values(copy).keys()
    log = f"sqlite:{copy / 'log.sqlite'}"
    if (pid := os.fork()) == 0:
        try:
            bus = open_bus(log, blobs=_Struck(copy / "policies" / BLOBS))
            bus.writer().append([Append(topic=TOPICS.trajectories, value=LARGE)])
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    digest = sha256(LARGE).hexdigest()
    assert values(copy).keys() - before == {digest}
    assert audited(copy).holds
    decisions = plan(copy)
    assert digest in {candidate.file.name.rpartition("/")[2] for candidate in decisions.candidates}
    assert prune_blobs(PolicyStore(copy / "policies"), decisions) == 2
    assert values(copy).keys() == {entry for _, entry in blobs(copy)}


def test_shared_store_says_how_old_its_values_are(tmp_path: Path) -> None:
    files = ArrowFiles(fs.LocalFileSystem(), str(tmp_path / "shared"))
    digest = sha256(LARGE).hexdigest()
    SharedBlobs(files, tmp_path / "here").write(digest, LARGE)
    (listed,) = PolicyStore(tmp_path / "here", files).blobs()
    path = tmp_path / "shared" / BLOBS / digest
    assert (listed.name, listed.bytes) == (f"{BLOBS}/{digest}", len(LARGE))
    assert listed.modified_ns == path.stat().st_mtime_ns
