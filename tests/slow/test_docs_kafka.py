"""Tests of the commands in docs/clusters.md that read a run on a broker."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.kafka_broker import KafkaBroker, write_tools
from tests.support.user_run import call, furnish

pytest.importorskip("torch")
pytestmark = [pytest.mark.kafka, pytest.mark.slow]

STEPS = 6
RUN = "read-by-kcat"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, kafka_broker: KafkaBroker) -> Path:
    if shutil.which("kcat") is None:
        pytest.skip("the commands of docs/clusters.md need kcat, not found on this machine")
    directory = furnish(tmp_path_factory.mktemp("kcat"))
    config = directory / "config.toml"
    url = f"kafka://{kafka_broker.bootstrap}"
    config.write_text(f'{config.read_text()}[bus]\nurl = "{url}"\n')
    words = ("-o", f"run.name={RUN}", "-o", f"run.steps={STEPS}")
    assert call(directory, "run", "config.toml", *words) == 0, (directory / "said").read_text()
    return directory


def test_the_docs_read_a_run_without_this_program_as_they_say(
    directory: Path, kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    if shutil.which("jq") is None:
        pytest.skip("the lines of docs/clusters.md need jq, not found on this machine")
    lines = pages.console("jq -r .kind")
    replaced = {"127.0.0.1:9092": kafka_broker.bootstrap, "demo.": f"{RUN}."}
    replaced["python -c"] = f"{sys.executable} -c"
    path = os.environ["PATH"]
    kinds, heads, nothing, table = (
        pages.run(typed.line, tmp_path, replaced, path) for typed in lines
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
    for typed in pages.console("kafka-topics.sh"):
        assert "error" not in pages.run(typed.line, tmp_path, replaced, path).lower()
