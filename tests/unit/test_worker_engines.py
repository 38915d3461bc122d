"""Tests of engines of a run's workers and their errors."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.cli.options import EXAMPLES
from dora_pipe.config.model import Config, Lora
from dora_pipe.core.errors import ConfigError, DoraError, PolicyError
from dora_pipe.launch import local_roles, model_checks
from dora_pipe.launch.examples import example_config
from dora_pipe.producers.engines.registry import (
    BUILT_IN,
    check_engines,
    check_model,
    engine_kind,
    need_engines,
    open_engine,
)
from tests.support.configs import small_config
from tests.support.fake_vllm_server import FakeVllm
from tests.support.models import make_qwen2, make_qwen3_moe


def _config(**workers: object) -> Config:
    return small_config(workers=workers)


def test_servers_that_run_already_are_those_of_the_first_workers() -> None:
    addresses = ["http://a:1", "http://b:2"]
    config = _config(count=3, engine="vllm", vllm={"addresses": addresses})
    address = [local_roles.worker_address(config, name) for name in ("w0", "w1", "w2", "late")]
    assert address == ["http://a:1", "http://b:2", "", ""]
    own = local_roles.with_engine(config, "vllm", address=address[1])
    assert own.workers.vllm.addresses == ("http://b:2",)
    assert local_roles.with_engine(config, "torch").workers.vllm.addresses == ()


def test_address_without_a_key_is_one_line_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    config = _config(engine="vllm", vllm={"addresses": ["http://127.0.0.1:9"]})
    with pytest.raises(ConfigError, match="no key for vLLM's server") as raised:
        BUILT_IN["vllm"].open(tmp_path, config, lambda tokens: "")
    assert raised.value.hint is not None and "VLLM_API_KEY" in raised.value.hint


def test_worker_opens_the_server_at_its_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = FakeVllm("secret", context_tokens=1024)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    vllm = {"addresses": [server.url]}
    config = _config(engine="vllm", max_num_seqs=4, max_model_len=512, vllm=vllm)
    engine = BUILT_IN["vllm"].open(tmp_path, config, lambda tokens: "")
    assert (engine.name, engine.slots, engine.context_tokens) == ("vllm", 4, 512)
    engine.close()
    server.close()


def test_absent_package_is_one_line_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else ask(name)
    )
    need_engines(["torch"])
    with pytest.raises(ConfigError, match="engine 'vllm' needs vllm") as raised:
        need_engines(["torch", "vllm"])
    assert raised.value.hint is not None and "make vllm" in raised.value.hint


def test_unknown_engine_is_named() -> None:
    with pytest.raises(ConfigError, match=r"workers\.engine: there is no `vlm`") as raised:
        need_engines(["torch", "vlm"])
    assert raised.value.hint == "did you mean `vllm`?"


def test_module_of_an_engine_lies_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "own_engine.py").write_text(
        "from dora_pipe.producers.engines.registry import EngineKind\n"
        "def opened(assets, config, decode):\n"
        "    from own_slots import Slots\n"
        "    return Slots(config.workers.max_num_seqs)\n"
        "ENGINE = EngineKind(open=opened, packages=())\n"
    )
    (tmp_path / "own_slots.py").write_text(
        "class Slots:\n    def __init__(self, slots):\n        self.slots = slots\n"
    )
    config = _config(engine="own_engine:ENGINE", max_num_seqs=3)
    task = msgspec.structs.replace(config.task, directory=str(tmp_path))
    config = msgspec.structs.replace(config, task=task)
    check_engines(config, ["own_engine:ENGINE"])
    assert open_engine(assets=tmp_path, config=config, decode=lambda tokens: "").slots == 3
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (f"{__name__}:absent", "has no `absent`"),
        ("no_such_module:engine", "cannot import `no_such_module`"),
        (f"{__name__}:Path", "is a type, expected EngineKind"),
    ],
)
def test_what_is_no_engine_of_a_user_is_named(name: str, why: str) -> None:
    with pytest.raises(DoraError, match=re.escape(why)):
        engine_kind(name)


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ({"gpus": [0]}, "workers.gpus: engine torch computes on the CPU"),
        (
            {"vllm": {"tensor_parallel_size": 2}},
            "workers.vllm, tensor_parallel_size .*: engine torch computes",
        ),
    ],
)
def test_gpus_of_workers_that_have_none_are_refused_where_all_of_them_are_known(
    workers: dict[str, Any], why: str
) -> None:
    config = _config(engine="torch", **workers)
    check_engines(config, ["torch"])
    local_roles.need_gpus(_config(engine="vllm", **workers))
    with pytest.raises(ConfigError, match=why):
        local_roles.need_gpus(config)


def test_engine_that_does_not_go_with_a_key_is_named() -> None:
    config = msgspec.structs.replace(_config(), lora=Lora(rank=513))
    with pytest.raises(ConfigError, match="vllm hosts adapters of ranks up to 512"):
        check_engines(config, ["torch", "vllm"])


@pytest.mark.parametrize("task", EXAMPLES)
def test_example_for_vllm_is_the_example_with_its_engine(task: str) -> None:
    own, other = example_config(task), example_config(task, "vllm")
    assert other.replace('engine = "vllm"\n', "") == own != other


@pytest.mark.parametrize("engine", BUILT_IN)
def test_a_model_with_fewer_positions_than_a_context_is_one_line_alike_for_all(
    engine: str, tmp_path: Path
) -> None:
    _model(tmp_path)
    check_model(_config(engine=engine, max_model_len=512), [engine], tmp_path)
    with pytest.raises(PolicyError) as raised:
        check_model(_config(engine=engine, max_model_len=513), [engine], tmp_path)
    text = "config.json: its 512 positions are fewer than workers.max_model_len = 513"
    assert raised.value.message.endswith(text)
    assert raised.value.hint == "workers.max_model_len = 512 or less"
    _model(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    stretched = _config(engine=engine, max_model_len=1024)
    check_model(stretched, [engine], tmp_path)
    with pytest.raises(PolicyError, match="has no tokenizer"):  # the check after positions
        model_checks.check_model(stretched, [engine], tmp_path)


def test_a_cache_of_vllm_that_holds_no_whole_context_is_one_line(tmp_path: Path) -> None:
    _model(tmp_path)
    small = {"kv_cache_gb": 0.0002}  # a token has 2 layers x 2 x 2 heads x 32 numbers of 4 bytes
    config = _config(engine="vllm", max_model_len=512, vllm=small)
    with pytest.raises(
        ConfigError, match=r"workers\.vllm\.kv_cache_gb: 0\.0002 GiB hold "
    ) as raised:
        check_model(config, ["vllm"], tmp_path)
    assert raised.value.message.endswith("fewer than a context of 512")
    assert raised.value.hint is not None and "workers.vllm.kv_cache_gb = 0.001" in raised.value.hint
    check_model(config, ["torch"], tmp_path)
    addresses = {"kv_cache_gb": 0.0002, "addresses": ["http://a:1"]}
    asked = _config(engine="vllm", max_model_len=512, vllm=addresses)
    check_model(asked, ["vllm"], tmp_path)
    enough = _config(engine="vllm", max_model_len=512, vllm={"kv_cache_gb": 0.001})
    check_model(enough, ["vllm"], tmp_path)
    _model(tmp_path, model_type="of another kind")  # only vLLM knows its context memory
    check_model(config, ["vllm"], tmp_path)
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 64, "qk_rope_head_dim": 32}
    _model(tmp_path, **latent)
    with pytest.raises(ConfigError, match="fewer than a context of 512"):
        check_model(config, ["vllm"], tmp_path)


def _model(folder: Path, **changes: Any) -> None:
    config = {
        "model_type": "qwen2",
        "vocab_size": 96,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("keys", [{"router_aux_loss": 0.1}, {"expert_parallel_size": 2}], ids=str)
def test_what_is_of_experts_is_refused_of_a_dense_model_before_anything_starts(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    config = _config()
    change = msgspec.structs.replace
    asked = change(
        config,
        trainer=change(config.trainer, **keys),
        workers=change(config.workers, max_model_len=32),
    )
    with pytest.raises(ConfigError, match="dense is not a mixture of experts"):
        model_checks.check_model(asked, [], make_qwen2(tmp_path / "dense"))


def test_ranks_among_which_experts_cannot_be_dealt_are_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    config = _config()
    change = msgspec.structs.replace
    asked = change(
        config,
        trainer=change(config.trainer, expert_parallel_size=3),
        workers=change(config.workers, max_model_len=32),
    )
    with pytest.raises(ConfigError, match="8 experts cannot be split over 3 ranks"):
        model_checks.check_model(asked, [], make_qwen3_moe(tmp_path / "mixture"))
