"""`archive` as a user calls it, and every reading command on what it made."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dora_pipe.audit.archive import verify
from dora_pipe.audit.reading import records_of
from dora_pipe.bus.archive.manifest import MANIFEST, SEGMENTS, load_manifest
from dora_pipe.bus.archive.reader import ArchiveBus
from dora_pipe.bus.archive.writer import ArchiveWriter
from dora_pipe.bus.memory import MemoryBus
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.cli import replay as replay_command
from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.launch import run_dir as rundir
from tests.support.bus_archive import everything, log_in_memory, partitions_of
from tests.support.command_line import Call, caller
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.small_disk import small_disk


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command line: exit code, stdout, stderr. The trainer is simulated."""
    monkeypatch.setattr(replay_command, "make_learner", lambda **_: SimulatedLearner())
    return caller(monkeypatch, capsys)


def test_archive_and_verify_print_the_same_head(
    call: Call, copy: RecordedRun, tmp_path: Path
) -> None:
    place = tmp_path / "kept"
    code, out, _ = call("archive", copy.directory, "--to", place)
    assert code == 0
    head = load_manifest(place).head
    assert out.rstrip().endswith(f"chain {head}")
    code, out, _ = call("archive", "--verify", place, "--head", head)
    assert (code, "run recorded" in out) == (0, True)
    path = next((place / SEGMENTS).iterdir())
    path.write_bytes(path.read_bytes()[:-3])
    code, out, err = call("archive", "--verify", place)
    assert code == 5
    assert f"segment {path.name} of the archive was changed (sha256)" in out
    assert err.count("error:") == 1


def test_every_reading_command_reads_an_archive_whose_run_is_gone(
    call: Call, copy: RecordedRun, tmp_path: Path
) -> None:
    place = tmp_path / "kept"
    commands: list[tuple[object, ...]] = [
        ("audit", "RUN", "--json", "--fresh"),
        ("topics", "RUN", "--json"),
        ("cat", "RUN", "control", "--json"),
        ("show", "RUN", "1", "--json"),
        ("why", "RUN", "--summary", "--json"),
    ]

    def answers(name: Path) -> list[tuple[int, str]]:
        filled = [[name if one == "RUN" else one for one in command] for command in commands]
        return [call(*command)[:2] for command in filled]

    of_the_log = answers(copy.directory)
    assert [code for code, _ in of_the_log] == [0] * len(commands)
    code, out, _ = call("archive", copy.directory, "--to", place, "--with-policies")
    assert code == 0 and "files of policies" in out
    shutil.rmtree(copy.directory)
    assert answers(place) == of_the_log
    code, _, _ = call("replay", place, "--from", 0, "--to", STEPS)
    assert code == 0
    code, _, _ = call("export", place, "--parquet", tmp_path / "all.parquet")
    assert code == 0 and pq.read_metadata(tmp_path / "all.parquet").num_rows > 0


def test_an_archive_without_policies_is_audited_without_them(
    call: Call, copy: RecordedRun, tmp_path: Path
) -> None:
    place = tmp_path / "kept"
    call("archive", copy.directory, "--to", place)
    shutil.rmtree(copy.directory)
    code, out, _ = call("audit", place)
    assert code == 0
    assert "policy files were not looked at" in out
    code, _, _ = call("export", place, "--parquet", tmp_path / "all.parquet")
    assert code == 0 and pq.read_metadata(tmp_path / "all.parquet").num_rows > 0


def test_what_cannot_be_is_refused_with_a_hint(
    call: Call, copy: RecordedRun, tmp_path: Path
) -> None:
    place = tmp_path / "kept"
    assert call("archive", copy.directory)[0] == 2
    assert call("archive", copy.directory, "--to", copy.directory)[0] == 2
    assert call("archive", "--verify", copy.directory)[0] == 2
    call("archive", copy.directory, "--to", place)
    assert call("archive", place, "--to", tmp_path / "again")[0] == 2
    code, _, err = call("tell", place, "pause")
    assert code == 4 and "cannot be written to" in err and err.count("error:") == 1
    with closing(ArchiveWriter(place, "recorded", load_manifest(place).topics)):
        code, _, err = call("archive", copy.directory, "--to", place)
    assert code == 4 and "another process writes the archive" in err


def test_an_archive_that_lost_its_manifest_is_one_line_and_not_written_over(
    call: Call, copy: RecordedRun, tmp_path: Path
) -> None:
    place = tmp_path / "kept"
    assert call("archive", copy.directory, "--to", place)[0] == 0
    (place / MANIFEST).unlink()
    kept = {path.name: path.read_bytes() for path in (place / SEGMENTS).iterdir()}
    commands = [
        ("audit", place),
        ("topics", place),
        ("archive", "--verify", place),
        ("archive", copy.directory, "--to", place),
        ("audit", copy.directory, "--archive", place),
    ]
    for command in commands:
        code, _, err = call(*command)
        assert (code, err.count("error:"), err.count("hint:")) == (4, 1, 1), (command, err)
        assert MANIFEST in err
    assert {path.name: path.read_bytes() for path in (place / SEGMENTS).iterdir()} == kept


def test_a_flipped_bit_is_one_line_with_a_hint_in_every_command(
    call: Call, copy: RecordedRun, tmp_path: Path
) -> None:
    place = tmp_path / "kept"
    assert call("archive", copy.directory, "--to", place)[0] == 0
    path = next((place / SEGMENTS).glob("recorded.trajectories-0-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for command in [
        ("audit", place),
        ("cat", place, "trajectories"),
        ("archive", "--verify", place),
    ]:
        code, _, err = call(*command)
        assert (code, err.count("error:"), err.count("hint:")) == (5, 1, 1), (command, err)
        assert f"segment {path.name} of the archive was changed" in err
        assert "from a copy" in err


def test_a_full_disk_is_one_line_with_a_hint_and_the_next_call_goes_on(
    call: Call, copy: RecordedRun, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        place = disk.path / "kept"
        words = ("archive", copy.directory, "--to", place, "--with-policies")
        for free_bytes in (0, 4096, 12_288, 32_768):
            disk.fill(but_bytes=free_bytes)
            code, _, err = call(*words)
            assert code in (4, 7), err
            assert (err.count("error:"), err.count("hint:")) == (1, 1), err
            assert "no room left" in err and "archive again" in err
            disk.make_room()
        assert call(*words)[0] == 0
        assert call("archive", "--verify", place)[0] == 0
        assert call("audit", place)[0] == 0


def test_an_archive_of_a_run_whose_directory_cannot_be_written_says_so(
    call: Call, copy: RecordedRun, tmp_path: Path
) -> None:
    (copy.directory / rundir.ARCHIVED_TO).mkdir()
    code, _, err = call("archive", copy.directory, "--to", tmp_path / "kept")
    assert code == 0 and "note:" in err and "--archive DIR" in err


@pytest.fixture
def shortened(
    copy: RecordedRun, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """An archive of a run whose log then loses the first half of each trajectories partition."""
    place = tmp_path / "kept"
    assert call("archive", copy.directory, "--to", place)[0] == 0
    with closing(copy.open()) as bus:
        log = log_in_memory(bus)
    live = MemoryBus(log)
    for partition in range(live.partitions(copy.topics.trajectories)):
        tp = TopicPartition(copy.topics.trajectories, partition)
        log.delete_before(tp, live.end(tp) // 2)
    opened = rundir.RunDir.open_bus

    def open_bus(directory: rundir.RunDir, config: Config) -> Bus:
        return opened(directory, config) if directory.is_archive else MemoryBus(log)

    monkeypatch.setattr(rundir.RunDir, "open_bus", open_bus)
    return place


def test_a_log_without_its_beginning_needs_its_archive_and_says_so(
    call: Call, copy: RecordedRun, shortened: Path
) -> None:
    (copy.directory / rundir.ARCHIVED_TO).unlink()
    code, _, err = call("export", copy.directory, "--parquet", shortened / "x.parquet")
    assert code == 4
    assert re.search(r"error: recorded\.trajectories/\d begins at \d+: .* from offset 0 on", err)
    assert "hint: read the log together with its archive: --archive DIR" in err
    code, out, _ = call("audit", copy.directory, "--archive", shortened, "--json")
    assert (code, json.loads(out)["finished"]) == (0, True)


def test_the_archive_that_was_made_here_is_found_without_being_named(
    call: Call, copy: RecordedRun, shortened: Path
) -> None:
    code, out, _ = call("audit", copy.directory, "--json")
    assert (code, json.loads(out)["finished"]) == (0, True)
    code, out, _ = call("topics", copy.directory, "--json")
    assert code == 0
    assert {json.loads(line)["begin"] for line in out.splitlines()} == {0}


def test_plain_pyarrow_reads_every_segment(call: Call, copy: RecordedRun, tmp_path: Path) -> None:
    """As docs/storage.md shows it: none of our code."""
    place = tmp_path / "kept"
    call("archive", copy.directory, "--to", place)
    manifest = json.loads((place / MANIFEST).read_text())
    found = []
    for entry in manifest["entries"]:
        if entry["file"]:
            with pa.input_stream(place / SEGMENTS / entry["file"]) as file:
                table = pa.ipc.open_stream(file).read_all()
            assert table.num_rows == entry["records"]
            found += [(entry["topic"], entry["partition"], row) for row in table.to_pylist()]
    with closing(copy.open()) as bus:
        for tp, records in everything(bus, partitions_of(manifest["topics"])).items():
            mine = [row for topic, partition, row in found if (topic, partition) == tp]
            assert [(row["offset"], row["key"], row["value"]) for row in mine] == [
                (one.offset, one.key, one.value) for one in records
            ]
            pairs = [
                tuple(zip(row["header_names"], row["header_values"], strict=True)) for row in mine
            ]
            assert pairs == [one.headers for one in records]


def test_follow_ends_with_a_run_that_has_ended(
    call: Call, copy: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.cli.archive.SETTLE_S", 0.0)
    code, out, _ = call("archive", copy.directory, "--to", tmp_path / "kept", "--follow")
    assert code == 0
    assert len(out.splitlines()) == 2


_ARCHIVE_SLOWLY = """
import sys
from pathlib import Path
from dora_pipe.bus.archive import writer
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.audit.archive import Archiver
from dora_pipe.schemas.topics import Topics
writer.PENDING_MAX = 3
log, place = sys.argv[1:]
archiver = Archiver(SqliteBus(Path(log)), Topics("recorded"), Path(place), segment_bytes=4000)
print("ready", flush=True)
archiver.once()
print("done", flush=True)
"""


def test_kill_9_at_any_moment_leaves_a_valid_manifest_and_the_next_goes_on(
    copy: RecordedRun, tmp_path: Path
) -> None:
    place = tmp_path / "kept"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    killed = 0
    for turn in range(12):
        child = subprocess.Popen(
            [sys.executable, "-c", _ARCHIVE_SLOWLY, str(copy.log), str(place)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert child.stdout is not None
        with child, child.stdout as talk:
            assert talk.readline() == "ready\n"
            time.sleep(0.004 + 0.013 * turn)
            child.send_signal(signal.SIGKILL)
            ended = talk.read()
        assert verify(place).problems == []
        if ended == "done\n":
            break
        killed += 1
    assert killed >= 2
    subprocess.run(
        [sys.executable, "-c", _ARCHIVE_SLOWLY, str(copy.log), str(place)],
        check=True,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    assert verify(place).problems == []
    with closing(ArchiveBus(place)) as kept, closing(copy.open()) as bus:
        for tp in partitions_of(load_manifest(place).topics):
            assert kept.end(tp) == bus.end(tp)
            assert list(records_of(kept, {tp: kept.end(tp)})) == list(
                records_of(bus, {tp: bus.end(tp)})
            )
