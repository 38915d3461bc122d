"""docs/tasks.md: environments of the page run in task processes."""

import re
from pathlib import Path

from dora_pipe.config import model
from dora_pipe.producers.tasks.calls import EnvObserved, EnvStep, Rewarded
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.port import Turn
from tests.support.task_pool import ask, prompt, score
from tests.support.tidy import ROOT

PAGE = (ROOT / "docs" / "tasks.md").read_text()

REST = """

class Page(Task):
    def rows(self, split):
        return [{"question": "2+2?", "answer": "4"}]

    def prompt(self, row):
        return row["question"]

    def environment(self, row):
        return Shell()

    def reward(self, row, text, turns):
        return float(text == row["answer"])
"""


def block(heading: str, language: str) -> str:
    """The first block of a language behind a heading of the page."""
    _, found, rest = PAGE.partition(f"## {heading}\n")
    assert found
    (first,) = re.findall(rf"```{language}\n(.*?)```", rest, re.DOTALL)[:1]
    return str(first)


def check_episode(pool: TaskPool) -> None:
    assert ask(pool, prompt("a")).request == "a"
    for text, done in (("5", False), ("4", True)):
        seen = ask(pool, EnvStep(request="a", turn=Turn(text=text)))
        assert seen == EnvObserved(request="a", text="", done=done, tool="", ok=True)
    assert ask(pool, score("a", "4")) == Rewarded(request="a", reward=1.0, raw=None, parts={})


def test_the_slow_environment_of_the_page_is_played(tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(block("My environment is slow", "python") + REST)
    with TaskPool(model.Task(kind="page:Page", directory=str(tmp_path))) as pool:
        check_episode(pool)
