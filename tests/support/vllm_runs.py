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
    check_what_was_told_is_logged_once,
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


def joined(place: Path) -> dict[str, str]:
    if not (place / "runs" / "tiny" / "log.sqlite").exists():
        return {}
    found = [one for one in facts(place, "tiny") if isinstance(one, WorkerJoined)]
    return {one.worker: one.engine for one in found}


def until_joined(place: Path, workers: Mapping[str, subprocess.Popen[bytes]]) -> None:
    until(lambda: workers.keys() <= joined(place).keys() or any_ended(workers), WAIT_S)
    assert not any_ended(workers), (place / "said").read_text()


def any_ended(processes: Mapping[str, subprocess.Popen[bytes]]) -> bool:
    return any(one.poll() is not None for one in processes.values())


def check_agents_run(place: Path, *words: str, steps_made: int, numerics_max: float) -> None:
    """Run agents with these options: their answers match the log, and the audit passes.
    Retraining is bitwise equal, resampling token by token; log-probs match the trainer's."""
    furnish_agent(place)
    options = ("config.toml", "-o", f"run.steps={steps_made}", *words)
    for command in (("run", *options), ("replay", "tiny"), ("replay", "tiny", "--random", "4")):
        assert start(place, *command).wait(WAIT_S) == 0, (place / "said").read_text()
    assert steps(place, "tiny") == list(range(steps_made))
    assert_clean(place, "tiny")
    check_what_was_told_is_logged_once(place)
    check_answers_stand_behind_their_prompts(place)
    check_calls_end_where_they_asked(place)
    (place / "said").unlink()
    assert start(place, "mismatch", "tiny", "--json").wait(WAIT_S) == 0
    lines = (place / "said").read_text().splitlines()
    (measured,) = (json.loads(line) for line in lines if line.startswith("{"))
    assert measured["causes"]["numerics"]["largest"] < numerics_max
