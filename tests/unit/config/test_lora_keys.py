"""Tests of [lora]: dependencies and changes on resume."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dora_pipe.config.checks import problems_of
from dora_pipe.config.load import changed_keys
from dora_pipe.config.model import Config
from tests.support.configs import plain_config


def config(**sections: dict[str, Any]) -> Config:
    return msgspec.convert(plain_config(**sections), Config)


def problems(**sections: dict[str, Any]) -> list[str]:
    return [problem.text for problem in problems_of(config(**sections))]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"lora": {"rank": 4, "targets": ["lm_head"]}},
            "lora.targets: `lm_head`, expected some of q_proj",
        ),
        (
            {"lora": {"rank": 4, "targets": []}},
            "lora.targets: an empty list, expected some of q_proj",
        ),
        ({"lora": {"rank": 4}, "staleness": {"partial_rollout": True}}, "need no interruption"),
    ],
)
def test_what_does_not_fit_an_adapter_is_named(sections: dict[str, Any], expected: str) -> None:
    (problem,) = problems(**sections)
    assert expected in problem


def test_resumed_run_has_the_same_adapter_and_as_much_room_as_it_likes() -> None:
    first = config(lora={"rank": 4})
    other = config(lora={"rank": 8}, workers={"max_resident_versions": 9})
    frozen, logged, free = changed_keys(first, other)
    assert (set(frozen), set(logged), set(free)) == (
        {"lora.rank"},
        set(),
        {"workers.max_resident_versions"},
    )
