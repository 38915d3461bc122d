"""Tests of docs/rewards.md: configurations, functions, tests."""

from __future__ import annotations

import asyncio
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from dora_pipe.config import model
from dora_pipe.producers.rewards import bounded
from dora_pipe.producers.rewards.programs import read_tests
from dora_pipe.producers.rewards.registry import BUILT_IN, Rewards, open_rewards, single
from dora_pipe.producers.tasks.port import Completion, Retry, Reward
from tests.support.tidy import ROOT

PAGE = (ROOT / "docs" / "rewards.md").read_text()
SAID = Completion(
    text="please and thanks: 42",
    messages=({"role": "user", "content": "?"}, {"role": "assistant", "content": "as Knuth says"}),
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, block in zip(
        ("mine", "parts", "model", "served", "ranks"), blocks("python"), strict=True
    ):
        module = ModuleType(name)
        exec(block, module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("modules")
def test_every_configuration_of_the_page_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("DORA_PIPE_CACHE", str(tmp_path))
    found = [
        open_rewards(msgspec.convert(tomllib.loads(block)["task"], model.Task))
        for block in blocks("toml")
    ]
    assert [len(rewards.sources()) > 0 for rewards in found] == [True] * 4
    scored = found[0].score({"answer": "42"}, SAID)
    bounded.HELPER.close()
    assert isinstance(scored, Reward)
    assert scored.parts == {"math": 1.0, "math.parsed": 1.0, "brevity": 0.92, "form": 0.0}
    assert scored.value == pytest.approx(1.0 + 0.1 * 0.92)


@pytest.mark.usefixtures("modules")
def test_every_function_of_the_page_scores() -> None:
    def score(use: str, row: dict[str, Any], **options: Any) -> Any:
        return Rewards([model.RewardUse(use=use, options=options)]).score(row, SAID)

    async def waited(use: str, **options: Any) -> Any:
        return await score(use, {}, **options)

    assert score("mine:cites", {"source": "Knuth"}).value == 1.0
    assert single("mine:cites").score({"source": "Knuth"}, SAID) == 1.0
    assert asyncio.run(waited("model:Scores", path="weights")).value == 1.0

    ranked = Rewards([model.RewardUse(use="ranks:shortest", group=True)])
    found: Any = ranked.score_group({}, [SAID, Completion(text="42")])
    assert [one.value for one in found] == [0.0, 1.0]

    async def ask(url: str, text: str) -> float | None:
        return None if url else 0.5

    sys.modules["served"].__dict__["ask"] = ask
    assert asyncio.run(waited("served:served", url="")).value == 0.5
    with pytest.raises(Retry):
        asyncio.run(waited("served:served"))


def test_every_kind_of_tests_of_the_page_is_read() -> None:
    rows = [msgspec.json.decode(line) for line in blocks("json")[0].splitlines()]
    assert [len(read_tests(row["tests"])) for row in rows] == [2, 1, 1]


def test_every_reward_of_the_package_is_on_the_page() -> None:
    assert set(re.findall(r"^\| `([\w-]+)` \| ", PAGE, re.M)) >= set(BUILT_IN)
