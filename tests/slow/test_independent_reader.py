"""kcat, plain pyarrow and zstandard read a run on the broker as audit and cat do."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.kafka.broker import write_tools
from tests.support import docs_commands
from tests.support.kafka_broker import ROOT, KafkaBroker
from tests.support.user_run import WAIT_S, answer, call, furnish

pytest.importorskip("torch")
pytestmark = [pytest.mark.kafka, pytest.mark.slow]

READER = ROOT / "tests" / "support" / "independent_reader.py"
STEPS = 6
RUN = "read-by-others"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, kafka_broker: KafkaBroker) -> Path:
    """A user's folder with a finished run on the broker."""
    if shutil.which("kcat") is None:
        pytest.skip("the independent reader needs kcat, not found on this machine")
    place = furnish(tmp_path_factory.mktemp("independent"))
    config = place / "config.toml"
    url = f"kafka://{kafka_broker.bootstrap}"
    config.write_text(f'{config.read_text()}[bus]\nurl = "{url}"\n')
    words = ("-o", f"run.name={RUN}", "-o", f"run.steps={STEPS}")
    assert call(place, "run", "config.toml", *words) == 0, (place / "said").read_text()
    return place


@pytest.fixture(scope="module")
def read(place: Path, kafka_broker: KafkaBroker) -> list[dict[str, Any]]:
    """What the independent program printed, in a Python that cannot see this project."""
    topics = (f"{RUN}.trajectories", f"{RUN}.control")
    done = subprocess.run(
        [sys.executable, "-I", str(READER), kafka_broker.bootstrap, *topics],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def said_by(place: Path, *words: str) -> list[dict[str, Any]]:
    """The JSON lines that a command of ours prints."""
    done = answer(place, *words, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_independent_reader_imports_nothing_of_this_project() -> None:
    tree = ast.parse(READER.read_text())
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
        )
    }
    assert names - set(sys.stdlib_module_names) == {"pyarrow", "zstandard"}


def test_others_find_as_many_trajectories_and_bytes_as_audit(
    place: Path, read: list[dict[str, Any]]
) -> None:
    (report,) = said_by(place, "audit", RUN)
    *found, control = read
    assert len(found) == report["records"] > 0
    assert sum(one["bytes"] for one in found) == report["record_bytes"]
    assert control["committed"] == report["steps"] == STEPS
    assert len(control["logged"]) == report["standings"]["bound"]
    assert report["violations"] == []


def test_others_read_the_same_trajectories_as_cat(place: Path, read: list[dict[str, Any]]) -> None:
    ours = {}
    for line in said_by(place, "cat", RUN, "trajectories"):
        ours[line["partition"], line["offset"]] = line["record"]
    *found, _ = read
    assert len(ours) == len(found)
    for one in found:
        record = ours[one["partition"], one["offset"]]
        names = ("trajectory", "version", "digest", "reward", "tokens", "sampled", "meta")
        assert {name: record[name] for name in names} == {name: one[name] for name in names}


def test_others_compute_the_digests_that_the_log_and_the_headers_say(
    read: list[dict[str, Any]],
) -> None:
    *found, control = read
    computed = {
        (one["partition"], one["offset"]): (one["trajectory"], one["sha256"], one["bytes"])
        for one in found
    }
    assert {
        (one["partition"], one["offset"]): (one["trajectory"], one["sha256"], one["bytes"])
        for one in control["logged"]
    }.items() <= computed.items()
    for one in found:
        assert one["headers"]["sha256"] == one["sha256"]
        assert one["headers"]["trajectory"] == one["trajectory"]
        assert one["headers"]["run"] == RUN
        assert int(one["headers"]["sampled"]) == one["sampled"]
        assert one["logprobs_where_sampled"], one["trajectory"]
        assert one["segments_tile"], one["trajectory"]


def test_the_docs_read_a_run_without_this_program_as_they_say(
    place: Path, kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    if shutil.which("jq") is None:
        pytest.skip("the lines of docs/kafka.md need jq, not found on this machine")
    lines = docs_commands.commands("docs/kafka.md", "jq -r .kind")
    replaced = {"127.0.0.1:9092": kafka_broker.bootstrap, "demo.": f"{RUN}."}
    replaced["python -c"] = f"{sys.executable} -c"
    path = os.environ["PATH"]
    kinds, heads, nothing, table = (
        docs_commands.run(line, tmp_path, replaced, path) for line in lines
    )
    assert f"{STEPS} step-committed" in kinds
    assert [line.split()[1] for line in heads.splitlines()] == ["0", "1", "2"]
    assert all(f"run={RUN},group=" in line for line in heads.splitlines())
    assert nothing == "" and "token_ids: list<item: int32>" in table


def test_the_docs_ask_the_broker_for_its_replicas_as_they_say(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    scripts = tmp_path / "bin"
    write_tools(scripts)
    path = f"{scripts}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    replaced = {"broker-1:9092": kafka_broker.bootstrap}
    for line in docs_commands.commands("docs/operations.md", "kafka-topics.sh"):
        assert "error" not in docs_commands.run(line, tmp_path, replaced, path).lower()
