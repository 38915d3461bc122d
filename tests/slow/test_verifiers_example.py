"""examples/verifiers from its model to its replay, shortened: tasksets of verifiers with a turn and
with a tool, in an environment that has verifiers and nothing of ours."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from dora_pipe.schemas.control import WorkerJoined
from tests.support.tidy import ROOT
from tests.support.user_run import assert_clean, facts, start, warm_example

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
CONFIG = "examples/verifiers/config.toml"
SHORT = (
    *("run.steps=1", "rollout.group_size=2", "rollout.prompts_per_step=2", "evaluation.prompts=1"),
    *("rollout.filter_zero_advantage=false", "staleness.max_staleness=0"),
)
CALLS = "select trajectory_id, api, context from calls order by all"


WAIT_S = 600.0
"""For one command: every rollout is a Python process that imports much."""


def call(path: Path, *words: str) -> int:
    return start(path, *words).wait(WAIT_S)


def overrides(*keys: str) -> list[str]:
    return [word for override in (f"task.python={PYTHON}", *keys) for word in ("-o", override)]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON.parent.parent.name} is not here: make test-verifiers")
    directory = tmp_path_factory.mktemp("verifiers")
    return warm_example(directory, "verifiers", [f"task.python={PYTHON}"], steps=40)


@pytest.mark.parametrize(("taskset", "part"), [("tool_sums", "calls"), ("sums", "exact")])
def test_an_environment_of_verifiers_is_what_is_trained(
    taskset: str, part: str, warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who wanted a package index would not find one.
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    named = ("run.name=it", f"task.kind=verifiers:{taskset}", f"model.path={warm}")
    for words in (
        ["run", CONFIG, *overrides(*SHORT, *named)],
        ["audit", "it"],
        ["replay", "it", "--random", "2"],
    ):
        assert call(tmp_path, *words) == 0, (tmp_path / "said").read_text()
    assert_clean(tmp_path, "it")
    assert "2 of 2 trajectories bit-equal" in (tmp_path / "said").read_text()
    joined = [fact for fact in facts(tmp_path, "it") if isinstance(fact, WorkerJoined)]
    assert {"verifiers", taskset.replace("_", "-")} <= joined[0].packages.keys()
    (tmp_path / "said").unlink()
    query = "select reward, reward_parts from trajectories"
    assert call(tmp_path, "sql", "it", query, "--json") == 0
    rows = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    assert rows and all(row["reward"] is not None and part in row["reward_parts"] for row in rows)
    (tmp_path / "said").unlink()
    assert call(tmp_path, "sql", "it", CALLS, "--json") == 0
    calls = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    assert {call["api"] for call in calls} == {"chat"}
    turns = Counter(call["trajectory_id"] for call in calls)
    assert (max(turns.values()) > 1) == (taskset == "tool_sums")
    assert not _left(tmp_path)


def _left(path: Path) -> list[str]:
    results = []
    for entry in Path("/proc").iterdir() if os.name == "posix" else ():
        try:
            words = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if b"calculator_server" in words and str(path).encode() in environment:
            results.append(words.decode())
    return results
