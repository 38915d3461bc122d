"""Tests without torch: package, orchestrator, log readers, command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.recorded_run import recorded_in
from tests.support.slim_commands import assert_written, lay_out
from tests.support.tidy import HEAVY_HOMES, INSTALLED, ROOT, files

LIMIT_S = 60

BLOCK = """
import importlib.util, sys

HEAVY = {"torch", "transformers", "vllm", "deepspeed", "safetensors"}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)
        return None

sys.meta_path.insert(0, Block())
ask = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in HEAVY else ask(name, *more)
"""

CALLS = """
import contextlib, io, json
from dora_pipe.cli.main import main

for words in json.loads(sys.stdin.read()):
    sys.argv, out, code = ["dora-pipe", *words], io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    print(json.dumps([code, out.getvalue()]))
"""


def _run(code: str, folder: Path = ROOT, *, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", BLOCK + code],
        cwd=folder,
        input=given,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_the_block_holds() -> None:
    done = _run("import torch")
    assert done.returncode != 0
    assert "(blocked)" in done.stderr


def _modules() -> list[str]:
    names: list[str] = []
    for path in files(".py"):
        installed = path.parts[0] in (*INSTALLED, "__init__.py")
        if not installed or HEAVY_HOMES.match(str(path)):
            continue
        names.append(".".join(("dora_pipe", *path.with_suffix("").parts)).removesuffix(".__init__"))
    return names


def test_every_module_outside_the_homes_of_torch_imports_without_it() -> None:
    modules = _modules()
    assert {"dora_pipe", "dora_pipe.orchestrator", "dora_pipe.audit"} <= set(modules)
    done = _run(f"import importlib\nfor m in {modules!r}: importlib.import_module(m); print(m)")
    assert done.stdout.split() == modules, done.stderr


def test_command_line_shows_its_help_without_torch() -> None:
    done = _run("sys.argv = ['dora-pipe', '--help']\nfrom dora_pipe.cli.app import app\napp()")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_commands_that_look_at_runs_and_prove_them_work_without_torch(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calls = lay_out(recorded_in(tmp_path_factory.getbasetemp()), tmp_path / "place")
    words = json.dumps([call.words for call in calls])
    done = _run(CALLS, tmp_path / "place", given=words)
    ended = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ended) == len(calls), done.stderr
    for call, (code, out) in zip(calls, ended, strict=True):
        assert code == call.code, (call.words, done.stderr)
        assert call.says in out, call.words
    assert_written(tmp_path / "place")
