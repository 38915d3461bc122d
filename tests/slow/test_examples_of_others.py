"""Examples with environments of other packages, from their model to their audit, as their READMEs
have it, shortened."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dora_pipe.schemas.control import WorkerJoined
from tests.support.tidy import ROOT
from tests.support.user_run import assert_clean, call, facts, steps

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

SHORT = (
    *("run.steps=2", "groups.size=4", "groups.per_step=4", "groups.filter_zero_advantage=false"),
    *("evaluation.prompts=2", "evaluation.siblings=2", "timing.heartbeat_s=0.2"),
)
EXAMPLES = {"frozen-lake": "gymnasium"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_as_its_readme_has_it(name: str, tmp_path: Path) -> None:
    package = EXAMPLES[name]
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        pytest.skip(f"{package} is not here: make test-adapters")
    example, said = ROOT / "examples" / name, tmp_path / "said"
    page = (example / "README.md").read_text().replace("\\\n", " ")
    (make,) = re.findall(r"^\$ python (.*)$", page, re.M)
    sft, run, audit = map(str.split, re.findall(r"^\$ dora-pipe (.*)$", page, re.M))
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / name).symlink_to(example)
    subprocess.run([sys.executable, *make.split()], check=True, cwd=tmp_path)
    sft[sft.index("--steps") + 1] = "4"
    assert call(tmp_path, *sft) == 0, said.read_text()
    warm = f"model.path={tmp_path / 'build' / name / 'warm'}"
    overrides = [word for one in (*SHORT, warm) for word in ("-o", one)]
    assert call(tmp_path, *run, *overrides) == 0, said.read_text()
    assert steps(tmp_path, name) == [0, 1]
    assert call(tmp_path, *audit) == 0, said.read_text()
    assert_clean(tmp_path, name)
    joined = [one for one in facts(tmp_path, name) if isinstance(one, WorkerJoined)]
    assert joined and all(package in one.packages for one in joined)
    assert call(tmp_path, "replay", name) == 0, said.read_text()
