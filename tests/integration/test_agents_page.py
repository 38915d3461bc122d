"""docs/agents.md: its three agents call the model, and what they give back counts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.model import Task
from dora_pipe.producers.tasks.calls import AgentCall, AgentEnded
from dora_pipe.producers.tasks.pool import TaskPool
from tests.support.chat_models import write_chat_model
from tests.support.endpoints import says, stage
from tests.support.task_pool import ask
from tests.support.tidy import ROOT

PAGE = (ROOT / "docs" / "agents.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROW = {"prompt": "say hi", "answer": "hi", "ids": [5, 6, 7]}
JUDGE = "def score(row, text): return float(text == row['answer'])\n"


@pytest.mark.parametrize(
    ("block", "api", "text", "reward"),
    [(0, "chat", "hi", None), (1, "chat", "hi", None), (2, "generate", None, 1.0)],
)
def test_the_agents_of_the_page(
    block: int, api: str, text: str | None, reward: float | None, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    assets = write_chat_model(tmp_path / "model", "qwen2_5")
    (tmp_path / "agent.py").write_text(BLOCKS[block])
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    agent: dict[str, Any] = {"agent": "agent:run"}
    if block == 1:
        agent = {"agent": (sys.executable, "agent.py")}
    task = Task(
        kind="dataset",
        data=str(tmp_path / "rows.jsonl"),
        reward="judge:score",
        directory=str(tmp_path),
        **agent,
    )
    with stage(assets, says(assets, "hi<|im_end|>")) as opened, TaskPool(task) as pool:
        url, key = opened.open("g-0/0")
        call = AgentCall(request="g-0/0", split="train", index=0, base_url=url, api_key=key)
        ended = ask(pool, call)
    assert isinstance(ended, AgentEnded), ended
    assert ended.text == text
    assert (ended.rewarded.reward if ended.rewarded else None) == reward
    assert [asked.api for asked in opened.calls] == [api]
