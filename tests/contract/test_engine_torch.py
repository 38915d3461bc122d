"""The torch engine against transformers, and where its own rules are strained most."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.engine import (
    BATCH_INVARIANT,
    COUNTER_SAMPLING,
    KV_EXPORT,
    PARTIAL_ROLLOUT,
    PREFILL_EXACT,
    SLEEP,
    EngineRequest,
    SamplingParams,
    TokensSampled,
    WeightsLoaded,
)
from dora_pipe.producers.engines.torch import engine as torch_engine
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.producers.engines.torch.weights import OpenWeights
from dora_pipe.store.model_dir import import_model, write_as
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import PolicyStore
from tests.support.engine_contract import Result, request, run, take
from tests.support.engine_moves import finish, steps
from tests.support.tiers import more
from tests.support.torch_engines import greedy_tokens, logprob_distance, make

LOGPROB_TOLERANCE = 1e-4
PROMISES = {COUNTER_SAMPLING, BATCH_INVARIANT, PREFILL_EXACT, KV_EXPORT, PARTIAL_ROLLOUT, SLEEP}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama_gqa", tmp_path_factory.mktemp("llama_gqa"))


@pytest.fixture(scope="module", params=["qwen2", "llama_gqa"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(request.param, tmp_path_factory.mktemp(request.param))


def open_engine(directory: Path, *, slots: int = 8, context_tokens: int = 512) -> TorchEngine:
    return TorchEngine.open(directory, slots=slots, context_tokens=context_tokens, threads=1)


def test_one_thread_keeps_every_promise(family: Path) -> None:
    assert open_engine(family).declares == PROMISES


def test_logprobs_are_those_of_transformers(family: Path) -> None:
    chance = np.random.default_rng(5)
    prompts = {
        f"r{length}": chance.integers(0, 90, length).tolist() for length in (1, 5, 33, 64, 150)
    }
    engine = open_engine(family)
    requests = [request(name, prompt, max_tokens=80) for name, prompt in prompts.items()]
    results = run(engine, requests)
    for name, prompt in prompts.items():
        assert logprob_distance(family, prompt, results[name]) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("kind", ["qwen2", "llama_gqa", "glm4_moe"])
def test_weights_in_bfloat16_give_the_bits_of_the_same_numbers_in_float32(
    kind: str, tmp_path: Path
) -> None:
    store, model = PolicyStore(tmp_path / "policies"), make(kind, tmp_path / "model")
    manifest, assets = import_model(store, model, "bfloat16")
    narrow = store.weights_path(manifest.digest)
    wide = tmp_path / "wide"
    digests = manifest.digest, write_as(narrow, "float32", wide).digest
    engine = open_engine(store.assets_path(assets), slots=2, context_tokens=128)
    expected = [request("r", [5, 17, 40, 8], max_tokens=20)]
    results = []
    for version, file in enumerate((narrow, wide)):
        engine.load(file, version=version, digest=digests[version])
        results.append(run(engine, expected))
    assert results[0] == results[1]


def test_load_that_breaks_in_the_middle_leaves_an_engine_that_takes_no_request(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, store = open_engine(directory, slots=2), PolicyStore(tmp_path)
    manifest, _ = import_model(store, directory)
    weights = store.weights_path(manifest.digest)
    items = OpenWeights.items

    def broken(self: OpenWeights) -> Iterator[tuple[str, torch.Tensor]]:
        yield next(items(self))
        raise OSError("no memory")

    monkeypatch.setattr(OpenWeights, "items", broken)
    with pytest.raises(OSError, match="no memory"):
        engine.load(weights, version=1, digest=manifest.digest)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="no weights are loaded"):
        engine.add(request("r", [5]))
    engine.load(weights, version=1, digest=manifest.digest)
    engine.add(request("r", [5]))


def test_greedy_tokens_are_those_of_transformers(family: Path) -> None:
    prompt = [5, 17, 40, 8, 8]
    result = run(open_engine(family), [request("r", prompt, temperature=0.0, max_tokens=70)])
    assert result["r"].tokens == greedy_tokens(family, prompt, 70)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_other_families_have_the_logprobs_of_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 20,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    }
    build: Any = Qwen3ForCausalLM if family == "qwen3" else MistralForCausalLM
    config: Any = (
        Qwen3Config(**sizes, attention_bias=True)
        if family == "qwen3"
        else MistralConfig(**sizes, sliding_window=None)
    )
    model = build(config)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn_like(weights) * 0.05)
    model.save_pretrained(tmp_path)
    engine = open_engine(tmp_path, context_tokens=256)
    result = run(engine, [request("r", [5, 6, 7] * 12, max_tokens=50)])["r"]
    assert logprob_distance(tmp_path, [5, 6, 7] * 12, result) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "grouped"])
def test_a_mixture_keeps_every_promise_and_has_the_logprobs_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    engine = open_engine(make(kind, tmp_path))
    assert engine.declares == PROMISES
    prompt = [5, 6, 7, 80] * 12
    result = run(engine, [request("r", prompt, max_tokens=50)])["r"]
    assert logprob_distance(tmp_path, prompt, result) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("tokens", [150, *more([500])])
def test_a_long_request_among_refilled_slots_has_the_bits_it_has_alone(
    directory: Path, tokens: int
) -> None:
    engine = open_engine(directory, slots=64)
    long = request("long", [5, 6, 7], max_tokens=tokens, seed=11)
    alone = run(engine, [long])["long"]
    chance = np.random.default_rng(8)
    short = [
        request(
            f"s{number}",
            chance.integers(0, 90, int(chance.integers(1, 20))).tolist(),
            seed=number,
            max_tokens=int(chance.integers(20, 71)),
        )
        for number in range(63 * tokens // 50)
    ]
    company = run(engine, [long, *short])
    assert len(alone.tokens) == tokens
    assert company["long"] == alone


def test_long_prompts_are_prefilled_over_several_steps(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(directory, slots=8)
    prompts = [[(7 * n + 3 * index) % 90 for index in range(300 - 31 * n)] for n in range(8)]
    requests = [request(f"r{n}", prompt, max_tokens=12) for n, prompt in enumerate(prompts)]
    at_once = run(engine, requests)
    monkeypatch.setattr(torch_engine, "PREFILL_TOKENS_MAX", 70)
    assert run(engine, requests) == at_once
    engine.add(requests[0])
    assert [engine.step() for _ in range(4)] == [[], [], [], []]
    assert engine.kv_used_tokens == 280
    engine.cancel("r0")
    assert engine.kv_used_tokens == 0
    assert run(engine, requests) == at_once


def test_weights_that_change_under_long_rows_are_prefilled_over_several_steps(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(directory, slots=4)
    weights = tmp_path / "same.safetensors"
    save_file(load_all(directory), weights)
    same = read_manifest(weights).digest
    requests = [request(f"r{n}", [5, 6, 7 + n] * 40, max_tokens=60, seed=n) for n in range(4)]
    wholes = run(engine, requests)
    results = {request.request: Result() for request in requests}
    for req in requests:
        engine.add(req)
    steps(engine, results, 20)
    monkeypatch.setattr(torch_engine, "PREFILL_TOKENS_MAX", 50)
    for position in (0, 1, 5):  # also while some are prefilled and one is in the middle of it
        steps(engine, results, position)
        *pending, loaded = engine.reload_keeping(weights, version=1, digest=same)
        assert isinstance(loaded, WeightsLoaded)
        for event in pending:
            assert isinstance(event, TokensSampled)
            take(results[event.request], event)
    finish(engine, results)
    assert results == wholes and engine.kv_used_tokens == 0


def test_what_a_prompt_was_sampled_as_makes_no_difference(directory: Path) -> None:
    engine = open_engine(directory)
    full = run(engine, [request("r", [5], max_tokens=200)])["r"]
    tokens = [5, *full.tokens[:150]]
    rest = run(engine, [request("r", tokens, sampled=150, max_tokens=200)])["r"]
    assert rest == full.after(150)


def test_a_model_that_is_not_finite_ends_its_requests_and_spoils_nothing(
    directory: Path, tmp_path: Path
) -> None:
    engine = open_engine(directory, slots=4)
    requests = [request(f"r{n}", [5, 6, 7 + n], max_tokens=40) for n in range(4)]
    good = run(engine, requests)
    tensors, path = load_all(directory), tmp_path / "broken.safetensors"
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    tensors["model.layers.0.self_attn.v_proj.weight"].fill_(torch.inf)
    save_file(tensors, path)
    engine.load(path, version=1, digest=read_manifest(path).digest)
    assert all(r == Result(reason="error") for r in run(engine, requests).values())
    back = tmp_path / "back.safetensors"
    save_file(load_all(directory), back)
    engine.load(back, version=2, digest=read_manifest(back).digest)
    assert run(engine, requests) == good


def test_a_request_that_is_not_finite_harms_none_beside_or_after_it(tmp_path: Path) -> None:
    directory = make("qwen2", tmp_path / "model")
    requests = [request(f"r{n}", [5, 6, 7 + n] * 9, max_tokens=40, seed=n) for n in range(6)]
    good = run(open_engine(directory), requests)
    observed = {token for result in good.values() for token in result.tokens} | set(range(20))
    poison = next(token for token in range(100) if token not in observed)
    tensors, path = load_all(directory), tmp_path / "poisoned.safetensors"
    tensors["model.embed_tokens.weight"][poison] = torch.inf
    save_file(tensors, path)
    engine = open_engine(directory, slots=7)
    engine.load(path, version=1, digest=read_manifest(path).digest)
    bad = request("bad", [5] * 20 + [poison] * 20, max_tokens=40)
    for order in ([bad, *requests], [*requests[:3], bad, *requests[3:]], [*requests, bad]):
        results = run(engine, order)
        assert results.pop("bad") == Result(reason="error")
        assert results == good


def test_a_tied_head_may_stand_beside_its_embedding_if_it_is_equal(tmp_path: Path) -> None:
    directory = make("llama_gqa", tmp_path / "model")
    engine = open_engine(directory)
    path, tensors = tmp_path / "w.safetensors", load_all(directory)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    engine.load(path, version=1, digest=read_manifest(path).digest)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, path)
    with pytest.raises(PolicyError, match="tied"):
        engine.load(path, version=2, digest=read_manifest(path).digest)


def test_sixteen_bit_weights_are_widened(tmp_path: Path) -> None:
    directory = make("qwen2", tmp_path / "model")
    for dtype in (torch.bfloat16, torch.float16):
        half = {name: decision.to(dtype) for name, decision in load_all(directory).items()}
        save_file(half, directory / "model.safetensors", metadata={"format": "pt"})
        result = run(open_engine(directory), [request("r", [5, 6, 7], max_tokens=40)])["r"]
        assert logprob_distance(directory, [5, 6, 7], result) < LOGPROB_TOLERANCE


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


class TestWeightsThatAreRefused:
    @pytest.fixture()
    def engine(self, tmp_path: Path) -> TorchEngine:
        return open_engine(make("qwen2", tmp_path / "model"))

    @pytest.fixture()
    def tensors(self, tmp_path: Path, engine: TorchEngine) -> dict[str, torch.Tensor]:
        return load_all(tmp_path / "model")

    def check_refused(self, engine: TorchEngine, path: Path, match: str, digest: str = "") -> None:
        probe = [request("r", [5, 6], max_tokens=20)]
        before = run(engine, probe)
        with pytest.raises(PolicyError, match=match) as caught:
            engine.load(path, version=1, digest=digest or read_manifest(path).digest)
        assert "\n" not in caught.value.message
        assert run(engine, probe) == before

    def test_another_digest(
        self, engine: TorchEngine, tensors: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        path = tmp_path / "w.safetensors"
        save_file(tensors, path)
        digest = read_manifest(path).digest
        flipped = bytearray(path.read_bytes())
        flipped[-1] ^= 1
        path.write_bytes(flipped)
        self.check_refused(engine, path, "digest", digest)

    def test_a_missing_tensor(
        self, engine: TorchEngine, tensors: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, tmp_path / "w.safetensors")
        self.check_refused(
            engine, tmp_path / "w.safetensors", r"lacks tensor model\.layers\.1\.mlp\.up"
        )

    def test_unexpected_tensors(
        self, engine: TorchEngine, tensors: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        tensors |= {f"extra{number}": torch.zeros(2) for number in range(5)}
        save_file(tensors, tmp_path / "w.safetensors")
        self.check_refused(engine, tmp_path / "w.safetensors", "extra0, extra1, extra2 and 2 more")

    def test_a_wrong_shape(
        self, engine: TorchEngine, tensors: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
        save_file(tensors, tmp_path / "w.safetensors")
        self.check_refused(
            engine, tmp_path / "w.safetensors", r"lm_head.weight has shape \(99, 128\)"
        )

    def test_integers(
        self, engine: TorchEngine, tensors: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].long()
        save_file(tensors, tmp_path / "w.safetensors")
        self.check_refused(engine, tmp_path / "w.safetensors", "type I64")

    def test_no_file_and_no_safetensors(self, engine: TorchEngine, tmp_path: Path) -> None:
        self.check_refused(engine, tmp_path / "none.safetensors", "no weights", "a" * 64)
        (tmp_path / "text.safetensors").write_text("hello, this is no tensor")
        self.check_refused(engine, tmp_path / "text.safetensors", "not a safetensors", "a" * 64)


def test_a_directory_without_weights_waits_for_them(tmp_path: Path) -> None:
    directory = make("qwen2", tmp_path / "model")
    (tmp_path / "assets").mkdir()
    shutil.copy(directory / "config.json", tmp_path / "assets")
    engine = open_engine(tmp_path / "assets")
    assert BATCH_INVARIANT in engine.declares
    with pytest.raises(ValueError, match="no weights"):
        engine.add(request("r", [5]))
    weights = directory / "model.safetensors"
    engine.load(weights, version=0, digest=read_manifest(weights).digest)
    expected = [request("r", [5], max_tokens=9)]
    assert run(engine, expected) == run(open_engine(directory), expected)


def test_token_ids_beyond_the_vocabulary_are_refused(directory: Path) -> None:
    engine = open_engine(directory)
    for bad in ([5, 1000], [-1]):
        with pytest.raises(ValueError, match="vocabulary"):
            engine.add(request("r", bad))
    assert engine.active == 0


def test_sizes_that_cannot_be_are_refused(directory: Path) -> None:
    with pytest.raises(PolicyError, match="512 positions"):
        open_engine(directory, context_tokens=513)


def test_a_closed_engine_holds_no_request(directory: Path) -> None:
    engine = open_engine(directory)
    engine.add(request("r", [5, 6]))
    engine.close()
    assert engine.active == 0


def test_a_request_may_name_any_63_bit_seed_and_more(directory: Path) -> None:
    engine = open_engine(directory)
    request = EngineRequest(
        request="r", token_ids=[5], sampled=0, seed=0, params=SamplingParams(max_tokens=9)
    )
    seeds = (0, 1, 2**63 - 1, 2**64 + 5, -1)
    drawn = [tuple(run(engine, [replace(request, seed=seed)])["r"].tokens) for seed in seeds]
    assert len(set(drawn)) == len(seeds)
