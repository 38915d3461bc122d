"""Tests of generation settings exported with weights."""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.audit.model_card import generation_config
from dora_pipe.config.model import Sampling


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}),
        (
            Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1),
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
        ),
        (Sampling(temperature=0.0), {"do_sample": False}),
    ],
)
def test_generation_config_has_the_sampling_of_the_run_and_keeps_the_rest(
    sampling: Sampling, expected: dict[str, Any]
) -> None:
    settings = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "temperature": 0.6,
        "min_p": 0.3,
        "top_k": 50,
    }
    config = generation_config(settings, sampling, (9, 4))
    assert config == {
        "bos_token_id": 1,
        "eos_token_id": [4, 9],
        "max_new_tokens": sampling.max_tokens,
        **expected,
    }


def test_end_of_turn_stays_what_it_was_where_it_is_not_known() -> None:
    assert generation_config({"eos_token_id": 2}, Sampling(), ())["eos_token_id"] == 2
