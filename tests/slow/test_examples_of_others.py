"""Examples with environments of other packages, from their model to their audit, as their READMEs
have it, shortened."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dora_pipe.schemas.control import WorkerJoined
from tests.support.tidy import ROOT
from tests.support.user_run import assert_clean, call, facts, steps

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

SHORT = (
    *(
        "run.steps=2",
        "rollout.group_size=4",
        "rollout.prompts_per_step=4",
        "rollout.filter_zero_advantage=false",
    ),
    *("evaluation.prompts=2", "evaluation.group_size=2", "timing.heartbeat_s=0.2"),
)
EXAMPLES = {
    "frozen-lake": "gymnasium",
    "mcp": "mcp:sums",
    "openenv": "openenv:guess",
    "reasoning-gym": "reasoning-gym",
}


SERVED = ("mcp", "openenv")
"""Of these a server is part of the example."""


@pytest.fixture
def started() -> Iterator[Callable[[str, Path], None]]:
    running: list[subprocess.Popen[str]] = []

    def start(command: str, config: Path) -> None:
        words = [sys.executable, str(ROOT / command.split()[0]), "0"]
        running.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert running[-1].stdout is not None
        address = running[-1].stdout.readline().strip()
        config.write_text(re.sub(r"http://[\w.:]+", address, config.read_text()))

    yield start
    for process in running:
        with process:
            process.kill()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_as_its_readme_has_it(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    package = EXAMPLES[name]
    module = package.partition(":")[0].replace("-", "_")
    if module not in SERVED and importlib.util.find_spec(module) is None:
        pytest.skip(f"{package} is not here: make test-adapters")
    example, path = ROOT / "examples" / name, tmp_path / "said"
    page = (example / "README.md").read_text().replace("\\\n", " ")
    *served, make = re.findall(r"^\$ python (.*?)(?: &)?$", page, re.M)
    *warm_up, run, audit = map(str.split, re.findall(r"^\$ dora-pipe (.*)$", page, re.M))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for command in served:
        request.getfixturevalue("started")(command, tmp_path / "examples" / name / "config.toml")
    subprocess.run([sys.executable, *make.split()], check=True, cwd=tmp_path)
    for command in warm_up:
        if "--steps" in command:
            command[command.index("--steps") + 1] = "4"
        assert call(tmp_path, *command) == 0, path.read_text()
    overrides = [word for override in SHORT for word in ("-o", override)]
    assert call(tmp_path, *run, *overrides) == 0, path.read_text()
    assert steps(tmp_path, name) == [0, 1]
    assert call(tmp_path, *audit) == 0, path.read_text()
    assert_clean(tmp_path, name)
    joined = [fact for fact in facts(tmp_path, name) if isinstance(fact, WorkerJoined)]
    assert joined and all(package in worker.packages for worker in joined)
    assert call(tmp_path, "replay", name) == 0, path.read_text()
