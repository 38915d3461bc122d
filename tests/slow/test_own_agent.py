"""examples/own_agent from its model to its replay, as its README has it, shortened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tidy import ROOT
from tests.support.user_run import assert_clean, call

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "own_agent"
SHORT = (
    "run.steps=2",
    "rollout.group_size=4",
    "rollout.prompts_per_step=2",
    "evaluation.prompts=4",
)


def test_the_example_runs_as_its_readme_has_it(tmp_path: Path) -> None:
    page = (EXAMPLE / "README.md").read_text().replace("\\\n   ", "")
    lines = [*map(str.split, re.findall(r"^\$ dora-pipe (.*)$", page, re.M))]
    init, sft, run, evaluated, audit, replay, show = lines
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "own_agent").symlink_to(EXAMPLE)
    warm = f"model.path={tmp_path / 'build' / 'own-agent' / 'warm'}"
    short = [word for override in (*SHORT, warm) for word in ("-o", override)]
    model = f"model.path={tmp_path / 'build' / 'own-agent' / 'model'}"
    sft = [model if word.startswith("model.path=") else word for word in sft]
    sft[sft.index("--steps") + 1] = "8"
    for words in (init, sft, [*run, *short], evaluated, audit, replay, show):
        assert call(tmp_path, *words) == 0, (tmp_path / "said").read_text()
    assert_clean(tmp_path, "own-agent")
    text = (tmp_path / "said").read_text()
    assert "8 of 8 trajectories bit-equal" in text
    assert "call 0 by " in text
