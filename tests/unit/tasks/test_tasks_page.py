"""Tests of the configurations in docs/environments.md and docs/data.md."""

from __future__ import annotations

import asyncio
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config.load import load_config
from dora_pipe.config.several import sections_of
from dora_pipe.orchestrator.curriculum import Samplers
from dora_pipe.producers.tasks.port import Environment, Row
from dora_pipe.producers.tasks.registry import ADAPTERS, dataset_digest, open_task
from tests.support.adapters_of_others import installed
from tests.support.data_files import TEXT, write_jsonl
from tests.support.tidy import ROOT

PAGES = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("environments", "data"))

BLOCKS = [
    block
    for block in re.findall(r"```toml\n(.*?)```", PAGES, re.DOTALL)
    if "kind =" in block and "mine:Game" not in block and "eval_share" not in block
]
"""tests/unit/data/test_page.py opens the one with `eval_share`; `mine:Game` needs servers."""

OTHERS = ("reasoning-gym", "verifiers")
"""Packages outside the developers' lock; verifiers has its own environment and tests."""

HEAD = '[run]\nname = "page"\nsteps = 2\n\n[model]\npath = "model"\n\n'

MINE = '''
def score(row, text):
    return float(text.strip() == row["answer"])


def weights(rows, version):
    return [1.0 for _ in rows]


def brevity(text):
    return 1.0 / (1 + len(text))


async def search(words: str) -> str:
    """Search.

    Args:
        words: What for.
    """
    return words


def calculate(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: The other.
    """
    return a + b
'''

MODEL = """
class Scores:
    def __init__(self, path):
        self.path = path

    def __call__(self, rows, texts):
        return [1.0 for _ in rows]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the data files and modules of the page."""
    (tmp_path / "data").mkdir()
    for name in ("train", "eval", "sums", "facts", "easy", "hard"):
        rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(80)]
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", rows)
    talks = [
        {"messages": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(80)
    ]
    TEXT["rows.parquet"](tmp_path / "data" / "train.parquet", talks)
    tables = [
        {"question": f"{n}?", "solution": str(n), "level": n % 5, "messages": talks[n]["messages"]}
        for n in range(200)
        if n < len(talks)
    ]
    TEXT["rows.parquet"](tmp_path / "data" / "train-0.parquet", tables)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "model.py").write_text(MODEL)
    shutil.copy(ROOT / "tests" / "support" / "mcp_server.py", tmp_path / "server.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "model"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return tmp_path


async def _begun(world: Environment, row: Row) -> Any:
    prompt: Any = world.reset(row)
    prompt = await prompt if inspect.isawaitable(prompt) else prompt
    close: Any = world.close
    closing = close()
    if inspect.isawaitable(closing):
        await closing
    return prompt


@pytest.fixture
def address() -> Iterator[str]:
    command = [sys.executable, str(ROOT / "examples" / "openenv" / "server.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_configuration_of_the_page_opens(
    folder: Path, block: str, request: pytest.FixtureRequest
) -> None:
    missing = [one for one in OTHERS if f"{one}:" in block and not installed(one)]
    if missing:
        pytest.skip(f"{missing[0]} is not here: make test-adapters test-verifiers")
    if "openenv:" in block:
        block = block.replace("http://127.0.0.1:8765", request.getfixturevalue("address"))
    path = folder / "run.toml"
    text = block.replace("data/train-*.parquet", "data/train-0.parquet")
    path.write_text(HEAD + text)
    config = load_config(path, ())
    tasks: list[Any] = [one for section, _, one in sections_of(config) if section == "task"]
    assert len(tasks) == max(1, len(tomllib.loads(block)["task"]) if "[[task]]" in block else 1)
    assert set(Samplers.load(config).functions) == {one.sampler for one in tasks} - {""}
    for section in tasks:
        task = open_task(section)
        assert dataset_digest(task, "train")[1] > 0
        row = task.rows("train")[0]
        task.check()
        world = task.environment(row)
        prompt = task.prompt(row) if world is None else asyncio.run(_begun(world, row))
        assert isinstance(prompt, str) == (not section.chat and not section.system_prompt)
        assert bool(task.tools(row)) == bool(section.tools or section.mcp)
        kind = msgspec.to_builtins(section)["kind"]
        assert kind == "dataset" or kind.partition(":")[0] in ADAPTERS
