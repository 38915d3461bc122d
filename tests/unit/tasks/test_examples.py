"""Tests of the repository's examples."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.load import load_config
from dora_pipe.producers.tasks.registry import open_task, rows_digest

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
    assert rows_digest(task.rows("train"), "train")[1] > 0
    assert rows_digest(task.rows("eval"), "eval")[1] >= config.evaluation.prompts > 0


@pytest.mark.parametrize("name", ["arithmetic", "calculator"])
def test_examples_of_built_in_tasks_are_what_init_writes(name: str) -> None:
    assert table(EXAMPLES / f"{name}.toml") == table(ROOT / "launch" / "templates" / f"{name}.toml")


def test_train_your_own_of_the_readme_is_the_example_with_a_chat_model() -> None:
    example = EXAMPLES / "chat-math"
    readme = (ROOT / "README.md").read_text().split("## Train your own")[1].split("\n## ")[0]
    (match,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    full_table = table(example / "config.toml")
    for section, keys in tomllib.loads(match).items():
        assert keys.items() <= full_table[section].items()
    commands, outputs = (
        set(re.findall(r"^\$ (.*?)(?:  #.*)?$", text.replace("\\\n", " "), re.MULTILINE))
        for text in (readme, (example / "README.md").read_text())
    )
    assert {entry for entry in outputs if " show " not in entry} <= {
        command.strip() for command in commands
    }
