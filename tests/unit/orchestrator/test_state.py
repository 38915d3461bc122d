"""Tests that state digests cover every field except the chain."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import pytest

from dora_pipe.orchestrator.digest import digest_of
from dora_pipe.orchestrator.index import QueueKey
from dora_pipe.orchestrator.state import State
from tests.support.orchestrator_stage import Stage


def rich() -> State:
    stage = Stage(evaluation__prompts=2).begin()
    stage.worker("w0", slots=5)
    for group in ("g0000000000", "g0000000001"):
        stage.finish_group(group)
    stage.plan()
    stage.state.counters.outcomes["failed"] = 1
    stage.finish_group(stage.running()[0].rpartition("-")[0])
    return stage.state


NAMES = [one.name for one in fields(State)]


def other(value: Any, empty: Any = 3) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return "e" * 64
    if isinstance(value, list):
        return value[:-1] if value else [QueueKey(0, 0, 0, 0)]
    if isinstance(value, dict):
        return dict(list(value.items())[:-1]) if value else {empty: None}
    if is_dataclass(value):
        changed = copy.copy(value)
        first = fields(changed)[0].name
        setattr(changed, first, other(getattr(changed, first)))
        return changed
    return None


FOLLOWS = ("chain", "started", "index", "leaves", "queues", "finished", "weights")
"""Fields outside the digest, except for keys that no run changes."""


@pytest.mark.parametrize("name", [entry for entry in NAMES if entry != "leaves"])
def test_digest_sees_every_field_but_the_chain_and_what_follows_from_others(name: str) -> None:
    state = rich()
    before = digest_of(state)
    value = getattr(state, name)
    changed = 5 if value is None else None if name in ("training",) else other(value, "r")
    setattr(state, name, changed)
    assert (digest_of(state) == before) == (name in FOLLOWS)


def test_digest_does_not_depend_on_keys_that_no_run_changes() -> None:
    state = rich()
    before, config = digest_of(state), state.config
    assert config is not None
    later = msgspec.structs.replace(config.workers, max_num_seqs=config.workers.max_num_seqs + 1)
    state.config = msgspec.structs.replace(config, workers=later)
    assert digest_of(state) == before
    lower = msgspec.structs.replace(config.staleness, max_staleness=0)
    state.config = msgspec.structs.replace(config, staleness=lower)
    assert digest_of(state) != before


def test_digest_is_the_same_in_every_process() -> None:
    program = "from tests.unit.orchestrator.test_state import rich\nprint(rich().digest())"
    results = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert results == {rich().digest()}
