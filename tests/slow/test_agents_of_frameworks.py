"""examples/agents from its model to its replay, shortened: agents of LangGraph and of OpenAI's
Agents SDK, in an environment that has them and nothing of ours."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.support.tidy import ROOT
from tests.support.user_run import assert_clean, call, warm_example

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

PYTHON = ROOT / ".venv-agents" / "bin" / "python"
CONFIG = "examples/agents/config.toml"
SHORT = (
    "run.steps=2",
    "rollout.group_size=4",
    "rollout.prompts_per_step=2",
    "evaluation.prompts=4",
)
CALLS = "select api, context, trajectory_id from calls order by all"


def overrides(*keys: str) -> list[str]:
    return [word for override in (f"task.python={PYTHON}", *keys) for word in ("-o", override)]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON.parent.parent.name} is not here: make test-agents")
    directory = tmp_path_factory.mktemp("agents")
    return warm_example(directory, "agents", [f"task.python={PYTHON}"], steps=24)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://{}:{}".format(*listening.getsockname()))
    return listening


@pytest.mark.parametrize(
    ("agent", "api", "contexts"),
    [
        ("langgraph_agent:run", "chat", 1),
        ("openai_agent:run", "responses", 2),
        ("openai_agent:run_by_chat", "chat", 2),
    ],
)
def test_an_agent_of_a_framework_is_what_is_trained(
    agent: str, api: str, contexts: int, warm: Path, tmp_path: Path, proxy: socket.socket
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    named = ("run.name=it", f"task.agent={agent}", f"model.path={warm}")
    for words in (
        ["run", CONFIG, *overrides(*SHORT, *named)],
        ["audit", "it"],
        ["replay", "it", "--random", "4"],
    ):
        assert call(tmp_path, *words) == 0, (tmp_path / "said").read_text()
    assert_clean(tmp_path, "it")
    assert "4 of 4 trajectories bit-equal" in (tmp_path / "said").read_text()
    (tmp_path / "said").unlink()
    assert call(tmp_path, "sql", "it", CALLS, "--json") == 0
    calls = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    assert {call["api"] for call in calls} == {api}
    assert {call["context"] for call in calls} == set(range(contexts))
    last = [call["trajectory_id"] for call in calls if call["context"] == contexts - 1]
    assert len(last) > len(set(last))  # what its tools said was answered in the same context
    with proxy, pytest.raises(BlockingIOError):
        proxy.accept()  # no request to another host
