"""examples/chat-math from its model to its export, as its README has it, shortened."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tidy import ROOT
from tests.support.user_run import assert_clean, call

pytest.importorskip("torch")
pytest.importorskip("math_verify")

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "chat-math"
SHORT = (
    *(
        "run.steps=2",
        "rollout.group_size=4",
        "rollout.prompts_per_step=4",
        "rollout.filter_zero_advantage=false",
    ),
    *("evaluation.short.every=1", "evaluation.short.prompts=4", "evaluation.long.prompts=4"),
    *("timing.heartbeat_s=0.2", "timing.lease_s=5.0"),
)


def test_the_example_runs_as_its_readme_has_it(tmp_path: Path) -> None:
    page = (EXAMPLE / "README.md").read_text().replace("\\\n", " ")
    sft, run, show, export = map(str.split, re.findall(r"^\$ dora-pipe (.*)$", page, re.M))
    path = tmp_path / "build" / "chat-math"
    subprocess.run([sys.executable, str(EXAMPLE / "make.py"), str(path)], check=True)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "chat-math").symlink_to(EXAMPLE)
    overrides = [word for override in SHORT for word in ("-o", override)]
    where = [
        word
        for key, name in (
            *(("model.path", "warm"), ("task.data", "train.parquet")),
            *((f"evaluation.{entry}.data", f"{entry}.parquet") for entry in ("short", "long")),
        )
        for word in ("-o", f"{key}={path / name}")
    ]
    output = tmp_path / "said"
    shortened = ["4" if word == "400" else word for word in sft]
    assert call(tmp_path, *shortened) == 0, output.read_text()
    assert call(tmp_path, *run, *overrides, *where) == 0, output.read_text()
    assert len(re.findall(r"evaluation short of version", output.read_text())) == 3
    assert len(re.findall(r"evaluation long of version", output.read_text())) == 2
    assert call(tmp_path, *show) == 0
    assert "pass@4" in output.read_text()
    assert_clean(tmp_path, "chat-math")
    assert call(tmp_path, "rescore", "chat-math") == 0, output.read_text()
    assert call(tmp_path, "mismatch", "chat-math") == 0, output.read_text()
    exported = ["2" if word == "20" else word for word in export]
    assert call(tmp_path, *exported) == 0, output.read_text()
    for name in ("chat_template.jinja", "generation_config.json", "README.md", "tokenizer.json"):
        assert (path / "trained" / name).is_file(), name
