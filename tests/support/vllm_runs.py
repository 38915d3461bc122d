"""vLLM runs on a user's folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dora_pipe.schemas.control import WorkerJoined
from tests.support.agent_run import (
    check_answers_stand_behind_their_prompts,
    check_calls_end_where_they_asked,
    check_sampled_tokens_are_logged_once,
    furnish_agent,
)
from tests.support.device import DEVICE, DTYPE
from tests.support.models import make_llama_gqa
from tests.support.user_run import assert_clean, facts, furnish, start, steps, until
from tests.support.vllm_servers import need_vllm

WAIT_S = 600.0
"""A server imports vLLM twice, 15 CPU seconds each."""


def furnished(folder: Path) -> Path:
    need_vllm()
    furnish(folder)
    config = (folder / "config.toml").read_text()
    config = config.replace("[trainer]", f'[trainer]\ndevice = "{DEVICE}"')
    config += f'[workers.vllm]\ndtype = "{DTYPE}"\n'
    (folder / "config.toml").write_text(config)
    shutil.rmtree(folder / "model")
    make_llama_gqa(folder / "model", hidden_size=192)
    return folder


def joined(path: Path) -> dict[str, str]:
    if not (path / "runs" / "tiny" / "log.sqlite").exists():
        return {}
    results = [fact for fact in facts(path, "tiny") if isinstance(fact, WorkerJoined)]
    return {result.worker: result.engine for result in results}


def until_joined(path: Path, workers: Mapping[str, subprocess.Popen[bytes]]) -> None:
    until(lambda: workers.keys() <= joined(path).keys() or any_ended(workers), WAIT_S)
    assert not any_ended(workers), (path / "said").read_text()


def any_ended(processes: Mapping[str, subprocess.Popen[bytes]]) -> bool:
    return any(process.poll() is not None for process in processes.values())


def check_agents_run(path: Path, *words: str, steps_made: int, numerics_max: float) -> None:
    """Run agents with these options: their answers match the log, and the audit passes.
    Retraining is bitwise equal, resampling token by token; log-probs match the trainer's."""
    furnish_agent(path)
    options = ("config.toml", "-o", f"run.steps={steps_made}", *words)
    for command in (("run", *options), ("replay", "tiny"), ("replay", "tiny", "--random", "4")):
        assert start(path, *command).wait(WAIT_S) == 0, (path / "said").read_text()
    assert steps(path, "tiny") == list(range(steps_made))
    assert_clean(path, "tiny")
    check_sampled_tokens_are_logged_once(path)
    check_answers_stand_behind_their_prompts(path)
    check_calls_end_where_they_asked(path)
    (path / "said").unlink()
    assert start(path, "mismatch", "tiny", "--json").wait(WAIT_S) == 0
    lines = (path / "said").read_text().splitlines()
    (measured,) = (json.loads(line) for line in lines if line.startswith("{"))
    assert measured["causes"]["numerics"]["largest"] < numerics_max
