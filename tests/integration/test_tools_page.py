"""docs/tools.md: its task runs in a task process, its tools are called, its reward is asked."""

import re
from pathlib import Path

from msgspec.structs import replace

from dora_pipe.config import model
from dora_pipe.producers.tasks.calls import EnvObserved, EnvStep, PromptReady, Rewarded
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.port import ToolCall, Turn
from tests.support.task_pool import ask, prompt, score
from tests.support.tidy import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tools.md").read_text(), re.DOTALL)


def config(folder: Path, kind: str) -> model.Task:
    (folder / "sums.py").write_text(BLOCKS[0])
    (folder / "judged.py").write_text(BLOCKS[1])
    (folder / "rows.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n')
    task = model.Task(kind=kind, directory=str(folder), environment_timeout_s=1.0)
    if kind == "dataset":
        return replace(task, data=str(folder / "rows.jsonl"), reward="judged:score")
    return task


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=name)


def test_the_tools_of_the_page_are_told_and_called(tmp_path: Path) -> None:
    with TaskPool(config(tmp_path, "sums:Sums")) as pool:
        ready = ask(pool, prompt("a", 3))
        assert isinstance(ready, PromptReady)
        assert ready.messages[0]["content"] == "What is 5 * 7?"
        first, second, _ = (one["function"] for one in ready.tools)
        assert first["parameters"]["properties"]["sign"]["enum"] == ["*", "+", "-", "/"]
        assert (second["name"], second["description"]) == ("look_up", "Look a word up.")
        calls = (
            call("calculate", a=5, sign="*", b=7),
            call("look_up", word="go"),
            call("calculate", a=1, sign="/", b=0),
            call("lookup", word="go"),
            call("wait", seconds=0),
            call("wait", seconds=3600),
        )
        seen = ask(pool, EnvStep(request="a", turn=Turn(text="", tool_calls=calls)))
        assert isinstance(seen, EnvObserved)
        assert [one["content"] for one in seen.messages] == [
            "35.0",
            "go: a word",
            "error: ZeroDivisionError: float division by zero",
            "error: there is no tool `lookup`: did you mean `look_up`?",
            "waited",
            "error: timed out after 1 s",
        ]
        assert ask(pool, score("a", "It is 35.", 3)) == Rewarded(
            request="a", reward=1.0, raw=None, parts={}
        )


def test_the_reward_of_the_page_may_wait(tmp_path: Path) -> None:
    with TaskPool(config(tmp_path, "dataset")) as pool:
        scored = ask(pool, score("a", "it is 4"))
        assert scored == Rewarded(request="a", reward=1.0, raw=None, parts={})
