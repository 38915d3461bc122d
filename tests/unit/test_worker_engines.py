"""Which engine a worker of a run has, and what is said where it cannot run."""

from __future__ import annotations

import importlib.util

import pytest

from dora_pipe.cli import roles
from dora_pipe.cli.init import EXAMPLES, example_config
from dora_pipe.config.load import from_plain
from dora_pipe.config.model import Config
from dora_pipe.errors import ConfigError, UsageError


def _config(**workers: object) -> Config:
    return from_plain(
        {
            "run": {"name": "r", "steps": 1},
            "model": {"path": "m"},
            "task": {"kind": "arithmetic"},
            "workers": workers,
        }
    )


def test_workers_take_the_engines_in_turn_and_strangers_the_runs() -> None:
    config = _config(count=3, engines=["vllm", "torch"])
    found = [roles.worker_engine(config, name) for name in ("w0", "w1", "w2", "late")]
    assert found == ["vllm", "torch", "vllm", "torch"]
    assert roles.worker_engine(_config(engine="vllm"), "w0") == "vllm"


def test_engine_of_one_worker_changes_nothing_else() -> None:
    config = _config(count=2, engines=["torch", "vllm"], slots=7)
    own = roles.with_engine(config, "vllm")
    assert own.workers.engine == "vllm" and own.workers.engines == ()
    assert own.workers.slots == 7
    assert roles.worker_engine(own, "w0") == "vllm"


def test_absent_package_is_one_line_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else ask(name)
    )
    roles.need_engines(["torch"])
    with pytest.raises(ConfigError, match="engine 'vllm' needs vllm") as raised:
        roles.need_engines(["torch", "vllm"])
    assert raised.value.hint is not None and "make vllm" in raised.value.hint


def test_unknown_engine_is_named() -> None:
    with pytest.raises(UsageError, match="no engine 'sglang'"):
        roles.need_engines(["sglang"])


def test_unknown_engine_in_a_file_is_an_error_of_its_key() -> None:
    with pytest.raises(ConfigError, match=r"workers\.engines"):
        _config(engines=["torch", "sglang"])


@pytest.mark.parametrize("task", EXAMPLES)
def test_example_for_vllm_is_the_example_with_its_engine(task: str) -> None:
    own, other = example_config(task), example_config(task, "vllm")
    assert other.replace('engine = "vllm"\n', "") == own != other
