"""Tests of vLLM options passed through or rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.config.workers import Vllm
from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.engines.vllm.http import Address
from dora_pipe.producers.engines.vllm.options import REASONS, check_args, command_words
from dora_pipe.producers.engines.vllm.serve import vllm_parser
from dora_pipe.producers.engines.vllm.server import VllmEngine
from tests.support.fake_vllm_server import FakeVllm


@pytest.mark.parametrize(
    ("name", "why", "hint"),
    [
        ("max_model_len", "workers.max_model_len sets it", "set workers.max_model_len"),
        ("middleware", "the engine sets it", "remove it"),
        ("quantization", "not use the published weights", "remove it"),
        ("speculative-config", "recorded log-probs would not match", "remove it"),
        ("hf_overrides.rope_theta", "not use the published weights", "remove it"),
    ],
)
def test_option_that_breaks_a_promise_is_refused_by_name(name: str, why: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"workers\.vllm\.args\.{name}: .*{why}") as refused:
        check_args({"max_num_batched_tokens": 8192, name: 1})
    assert hint in str(refused.value.hint)


def test_refused_options_are_options_of_vllm() -> None:
    pytest.importorskip("vllm.engine.arg_utils")
    assert REASONS.keys() <= {action.dest for action in vllm_parser()._actions}


def test_option_is_not_abbreviated() -> None:
    pytest.importorskip("vllm.engine.arg_utils")
    with pytest.raises(ConfigError, match="speculative-confi"):
        vllm_parser().parse_args(["--speculative-confi={}"])


def test_options_become_words_of_vllms_command_line() -> None:
    args = {
        "enable_prefix_caching": False,
        "swap_space": 2,
        "x": "a",
        "compilation_config": {"a": 1},
    }
    assert command_words(args) == [
        "--no-enable-prefix-caching",
        "--swap-space=2",
        "--x=a",
        '--compilation-config={"a": 1}',
    ]


def test_options_are_part_of_the_version_that_a_worker_reports(tmp_path: Path) -> None:
    server = FakeVllm()
    settings = Vllm(args={"swap_space": 2, "enable_prefix_caching": False})
    engine = VllmEngine(
        tmp_path,
        slots=2,
        context_tokens=64,
        address=Address.of(server.url, server.key),
        settings=settings,
    )
    assert engine.version == "0.32.0 enable_prefix_caching=false swap_space=2"
    engine.close()
    server.close()
