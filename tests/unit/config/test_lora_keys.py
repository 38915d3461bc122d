"""Tests of [lora]: dependencies and changes on resume."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dora_pipe.config.checks import problems_of
from dora_pipe.config.load import changed_keys
from dora_pipe.config.model import Config

PLAIN: dict[str, Any] = {
    "run": {"name": "r", "steps": 1},
    "model": {"path": "m"},
    "task": {"kind": "arithmetic"},
}


def config(**sections: dict[str, Any]) -> Config:
    return msgspec.convert(PLAIN | sections, Config)


def problems(**sections: dict[str, Any]) -> list[str]:
    return [problem.text for problem in problems_of(config(**sections))]


def test_no_adapter_is_the_default() -> None:
    assert config().lora.rank == 0
    assert problems() == []


def test_adapter_of_every_linear_layer_fits() -> None:
    assert problems(lora={"rank": 8}) == []
    assert problems(lora={"rank": 8, "targets": ["q_proj", "v_proj"]}) == []
    assert problems(lora={"rank": 513}) == []
    assert problems(lora={"rank": 8}, policies={"dtype": "bfloat16"}) == []
    deepspeed = {"kind": "deepspeed", "zero_stage": 3, "offload": "all", "dtype": "bfloat16"}
    assert problems(lora={"rank": 8}, trainer=deepspeed) == []
    assert problems(lora={"rank": 512}, workers={"engine": "vllm"}) == []


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
