"""Tests of the repository's examples."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.load import load_config
from dora_pipe.orchestrator.rows import RowStats
from dora_pipe.producers.tasks.registry import dataset_digest, open_task

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


def table(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


NEED_MORE = ("chat-math", "mcp", "openenv", "reasoning-gym", "verifiers")
"""Examples with generated data, servers or packages; tests/slow runs them."""

WITH_DATA = sorted(path for path in EXAMPLES.rglob("*.toml") if path.parent.name not in NEED_MORE)
"""Examples whose data is in the repository."""


@pytest.mark.parametrize("path", WITH_DATA, ids=lambda path: path.name)
def test_every_example_is_a_sound_configuration_whose_task_opens(path: Path) -> None:
    config = load_config(path, ())
    task = open_task(config.task)
    assert dataset_digest(task, "train")[1] > 0
    assert dataset_digest(task, "eval")[1] >= config.evaluation.prompts > 0


@pytest.mark.parametrize("name", ["arithmetic", "calculator"])
def test_examples_of_built_in_tasks_are_what_init_writes(name: str) -> None:
    assert table(EXAMPLES / f"{name}.toml") == table(ROOT / "launch" / "templates" / f"{name}.toml")


def python_blocks(page: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return "\n".join(blocks)


def test_python_of_the_pages_runs_and_does_what_it_says() -> None:
    """Run the blocks of the pages about tasks and data."""
    names: dict[str, Any] = {}
    exec(python_blocks("environments.md") + "\n" + python_blocks("data.md"), names)
    seen = [RowStats(), *(RowStats(groups=2, recent=(one, one)) for one in (0.0, 0.5, 1.0))]
    assert names["weights"](seen, 3) == pytest.approx([0.27, 0.02, 0.27, 0.02])
    squares = names["Squares"](largest=9)
    assert [row["n"] for row in squares.rows("eval")] == [1, 3, 5, 7]
    assert squares.prompt({"n": 3}) == "3 squared is"
    assert squares.reward({"n": 3}, " 9", []) == 1.0
    world = names["GuessTask"]().environment({"secret": 4})
    world.reset({"secret": 4})
    texts = [world.step(text).text for text in ("3", "x", "9", "4")]
    assert texts == ["higher", "higher", "lower", ""]
    assert world.step("4").done
    assert names["calculate"](2, "*", 3) == 6


def test_train_your_own_of_the_readme_is_the_example_with_a_chat_model() -> None:
    """Keys equal the example's file, commands its page."""
    example = EXAMPLES / "chat-math"
    readme = (ROOT / "README.md").read_text().split("## Train your own")[1].split("\n## ")[0]
    (said,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    whole = table(example / "config.toml")
    for section, keys in tomllib.loads(said).items():
        assert keys.items() <= whole[section].items()
    commands, told = (
        set(re.findall(r"^\$ (.*?)(?:  #.*)?$", text.replace("\\\n", " "), re.MULTILINE))
        for text in (readme, (example / "README.md").read_text())
    )
    assert {one for one in told if " show " not in one} <= {one.strip() for one in commands}
