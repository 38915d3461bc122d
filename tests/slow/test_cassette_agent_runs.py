"""A run whose agent is a command line with a sandbox: recorded once, it runs again without the
sandbox, and under the same weights every trajectory is the same, bit for bit.

Method: a script of the standard library that asks the model twice, and its sandbox between.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.slow.test_cassette_runs import said, trajectories
from tests.support.user_run import TEMPLATE, assert_clean, call, furnish

pytestmark = pytest.mark.slow

AGENT = """
import json, os, subprocess, sys, urllib.request

def ask(*messages):
    body = {"model": "policy", "max_tokens": 4, "messages": [
        {"role": "user", "content": one} for one in messages]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

row = json.loads(os.environ["DORA_PIPE_ROW"])
said = ask(row["prompt"])
words = [sys.argv[1], "cassette", "call", "--", "./sandbox", row["answer"]]
seen = subprocess.run(words, capture_output=True, check=True, text=True).stdout
with open(os.environ["DORA_PIPE_RESULT"], "w") as file:
    json.dump(ask("go on with " + seen) + seen, file)
"""
SANDBOX = """#!/bin/sh
echo call >> made
printf '%s' "$1$1$$"
"""
TASK = """
command = ["{python}", "agent.py", "{command}"]
cassette = "c.jsonl"
[model]
path = "model"
chat_template = "own.jinja"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder after a run that has recorded."""
    import sys

    place = furnish(tmp_path_factory.mktemp("agent"))
    (place / "own.jinja").write_text(TEMPLATE)
    (place / "agent.py").write_text(AGENT)
    (place / "sandbox").write_text(SANDBOX)
    (place / "sandbox").chmod(0o755)
    text = (place / "config.toml").read_text().replace('[model]\npath = "model"\n', "")
    task = TASK.format(python=sys.executable, command=Path(sys.executable).parent / "dora-pipe")
    text = text.replace("steps = 3", "steps = 1").replace("count = 2", "count = 1")
    (place / "config.toml").write_text(text.replace("[sampling]\n", f"{task}[sampling]\n"))
    assert call(place, "run", "config.toml") == 0, (place / "said").read_text()
    return place


def test_a_strict_run_samples_the_same_without_the_agents_sandbox(place: Path) -> None:
    made = len((place / "made").read_text().split())
    (place / "sandbox").unlink()
    words = ["-o", "run.name=ci", "-o", "task.cassette_mode=strict"]
    assert call(place, "run", "config.toml", *words) == 0, (place / "said").read_text()
    assert made > 0
    assert len((place / "made").read_text().split()) == made
    one, two = trajectories(place, "tiny"), trajectories(place, "ci")
    first = sorted(name for name, each in one.items() if each.version == 0)
    assert len(first) >= 8
    for name in first:
        assert said(one[name]) == said(two[name]), name
        use = two[name].meta.cassette
        assert use is not None
        assert (use.answers, use.asked) == (1, 0)
    assert_clean(place, "ci")
    assert "cassette" in (place / "said").read_text()
