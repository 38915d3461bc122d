"""Tests of worker capabilities and engines that a run rejects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config.model import Config
from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.engines import registry
from dora_pipe.producers.engines.engine import KV_EXPORT, LORA, PARTIAL_ROLLOUT, UNASSIGNED_LEFT_OUT
from dora_pipe.producers.engines.registry import MOVES, capabilities, check_capabilities
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.producers.worker.role import requests_move
from tests.support.configs import plain_config


class Plain(SimulatedEngine):
    declares = frozenset()


class WithAdapters(SimulatedEngine):
    declares = frozenset({LORA})


def config(**sections: dict[str, Any]) -> Config:
    return msgspec.convert(plain_config(**sections), Config)


def test_requests_move_only_where_they_go_on_as_they_were() -> None:
    engine = SimulatedEngine(slots=1, context_tokens=8)
    assert {MOVES, KV_EXPORT} <= set(capabilities(engine, moves=True))
    assert MOVES not in capabilities(engine, moves=False)
    assert capabilities(Plain(slots=1, context_tokens=8), moves=True) == ()


def test_engine_that_cannot_change_weights_under_requests_is_refused_where_that_is_asked() -> None:
    asked = config(staleness={"partial_rollout": True})
    check_capabilities(SimulatedEngine(slots=1, context_tokens=8), asked)
    with pytest.raises(ConfigError, match="cannot change weights"):
        check_capabilities(WithAdapters(slots=1, context_tokens=8), asked)
    assert PARTIAL_ROLLOUT not in WithAdapters.declares


def test_engine_that_may_sample_ids_without_a_token_is_refused_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "unassigned_ids", lambda assets: (1, 2))

    class Careful(SimulatedEngine):
        declares = SimulatedEngine.declares | {UNASSIGNED_LEFT_OUT}

    check_capabilities(Careful(slots=1, context_tokens=8), config(), Path())
    check_capabilities(SimulatedEngine(slots=1, context_tokens=8), config())
    with pytest.raises(ConfigError, match="engine simulated may sample them"):
        check_capabilities(SimulatedEngine(slots=1, context_tokens=8), config(), Path())


@pytest.mark.parametrize(
    ("task", "text", "moves"),
    [
        ({"kind": "arithmetic"}, {"single_turn": True}, True),
        ({"kind": "mine:Game"}, {"single_turn": False}, False),
        ({"kind": "calculator"}, {"single_turn": False, "replayable": True}, True),
        ({"kind": "mine:Game", "agent": "agent:run"}, {"single_turn": False}, True),
    ],
)
def test_sessions_of_agents_move_and_episodes_only_where_they_can_be_told_again(
    task: dict[str, Any], text: dict[str, bool], moves: bool
) -> None:
    digests = dict.fromkeys(("train_digest", "eval_digest", "reward_digest"), "")
    facts = msgspec.convert(digests | {"train_rows": 1, "eval_rows": 1} | text, TaskFacts)
    assert requests_move(config(task=task), {"train": facts}) is moves
