"""Tests of vLLM: log-probs, draws, weights, endpoints (`make test-vllm`)."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora_pipe.core.errors import ConfigError, InvariantBroken, PolicyError, ResourceError
from dora_pipe.producers.engines.engine import EngineRequest
from dora_pipe.producers.engines.vllm.core import BLOCK_TOKENS
from dora_pipe.producers.engines.vllm.http import Address, call
from dora_pipe.producers.engines.vllm.server import VllmEngine
from dora_pipe.store.model_dir import WEIGHTS, import_model, weights_digest, write_as
from tests.support import device, models
from tests.support.adapters import RANK
from tests.support.engine_contract import Subject, request, requests, run
from tests.support.engine_prefixes import since
from tests.support.vllm_servers import (
    CONTEXT_TOKENS,
    SLOTS,
    need_vllm,
    open_shared,
    running_server,
    server_subject,
    stock_server,
)

LOGPROB_DISTANCE_MAX = device.MODEL_DISTANCE[device.DTYPE]
"""Of vLLM's log-probs from those of transformers, which are float32's."""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    need_vllm()
    with server_subject(tmp_path_factory.mktemp("vllm")) as subject:
        yield subject


def _model(subject: Subject, number: int = 0) -> Path:
    folders = [folder / f"seed{number}" for folder in subject.policies[0][0].parents]
    return next(folder for folder in folders if folder.is_dir())


def test_logprobs_are_those_of_transformers(vllm: Subject) -> None:
    from tests.support.torch_engines import logprob_distance

    all_requests = requests(vllm, 12, seed=5)
    results = run(vllm.open(slots=8), all_requests)
    for req in all_requests:
        distance = logprob_distance(_model(vllm), req, results[req.request])
        assert distance < LOGPROB_DISTANCE_MAX, req


def test_greedy_tokens_are_those_of_transformers(vllm: Subject) -> None:
    from tests.support.torch_engines import greedy_tokens

    device.need_fine()
    req = request("r", [5, 9, 14], max_tokens=40, temperature=0.0)
    assert run(vllm.open(slots=8), [req])["r"].tokens == greedy_tokens(_model(vllm), [5, 9, 14], 40)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 20, "top_p": 0.8},
    ],
    ids=lambda settings: ",".join(settings) or "plain",
)
def test_sampler_logprobs_are_of_the_distribution_that_was_drawn_from(
    vllm: Subject, settings: dict[str, Any]
) -> None:
    from tests.support.torch_engines import reference_logits

    device.need_fine()
    # With plain and greedy ones, so that rows of one batch differ.
    rest = [request("plain", [7], max_tokens=40), request("g", [8], temperature=0.0)]
    req = request("r", [5, 9, 14, 21], max_tokens=40, seed=3, **settings)
    result = run(vllm.open(slots=8), [rest[0], req, rest[1]])["r"]
    logits = reference_logits(_model(vllm), [*req.token_ids, *result.tokens]).numpy()
    for index, token in enumerate(result.tokens):
        expected = _sampled_from(logits[len(req.token_ids) - 1 + index], settings)
        assert expected[token] == pytest.approx(result.sampler_logprobs[index], abs=1e-3)


def _sampled_from(logits: np.ndarray[Any, Any], settings: dict[str, Any]) -> list[float]:
    scaled = logits / settings.get("temperature", 1.0)
    order = np.argsort(-scaled, kind="stable")
    keep = np.ones(len(scaled), bool)
    if settings.get("top_k"):
        keep[order[settings["top_k"] :]] = False
    probs = np.where(keep, np.exp(scaled - scaled.max()), 0.0)
    probs /= probs.sum()
    if "top_p" in settings:
        before = np.cumsum(probs[order]) - probs[order]
        keep[order[before >= settings["top_p"]]] = False
    if "min_p" in settings:
        keep &= probs >= settings["min_p"] * probs.max()
    probs = np.where(keep, probs, 0.0)
    with np.errstate(divide="ignore"):
        log_probs: list[float] = np.log(probs / probs.sum()).tolist()
    return log_probs


def test_draws_follow_the_distribution(vllm: Subject) -> None:
    from tests.support.torch_engines import reference_logits

    count = 4000
    requests = [request(f"r{seed}", [5, 9, 14], seed=seed, max_tokens=1) for seed in range(count)]
    engine = vllm.open(slots=64)
    drawn = [result.tokens[0] for result in run(engine, requests).values()]
    logits = reference_logits(_model(vllm), [5, 9, 14])[-1].numpy()
    expected = np.exp(_sampled_from(logits, {})) * count
    counts = np.bincount(drawn, minlength=len(expected))
    common = expected >= 5
    chi = float((((counts - expected) ** 2) / expected)[common].sum())
    degrees = int(common.sum())
    assert chi < degrees + 5 * math.sqrt(2 * degrees)


def test_another_order_of_min_p_and_top_p_is_refused(vllm: Subject) -> None:
    engine = vllm.open(slots=1)
    with pytest.raises(ValueError, match="min_p"):
        engine.add(request("r", [5], min_p=0.1, top_p=0.9))
    assert engine.active == 0


def test_weights_of_another_shape_or_digest_are_refused_and_the_old_ones_stay(
    vllm: Subject, tmp_path: Path
) -> None:
    from dora_pipe.store.store import PolicyStore

    other = models.make_qwen2(tmp_path / "wide", 0, intermediate_size=256)
    store = PolicyStore(tmp_path / "policies")
    manifest = import_model(store, other)[0]
    engine = vllm.open(slots=2)
    req = request("r", [5, 6], max_tokens=20)
    before = run(engine, [req])
    with pytest.raises(PolicyError, match="shape"):
        engine.load(store.weights_path(manifest.digest), version=1, digest=manifest.digest)
    with pytest.raises(PolicyError, match="digest"):
        engine.load(vllm.policies[1][0], version=1, digest=vllm.policies[0][1])
    assert run(engine, [req]) == before


def test_weights_in_bfloat16_are_the_same_numbers_in_float32(vllm: Subject, tmp_path: Path) -> None:
    from dora_pipe.store.store import PolicyStore

    store = PolicyStore(tmp_path / "policies")
    narrow = import_model(store, _model(vllm, 1), "bfloat16")[0]
    file, wide = store.weights_path(narrow.digest), tmp_path / "wide"
    digest = write_as(file, "float32", wide).digest
    engine, req = vllm.open(slots=2), request("r", [5, 6], max_tokens=20)
    engine.load(file, version=1, digest=narrow.digest)
    result = run(engine, [req])
    engine.load(wide, version=2, digest=digest)
    assert run(engine, [req]) == result


@pytest.mark.parametrize("kept_by", ["nothing", "a cache that is never emptied"])
def test_no_block_of_older_weights_is_hit_after_a_load(
    vllm: Subject, monkeypatch: pytest.MonkeyPatch, kept_by: str
) -> None:
    engine: Any = vllm.open(slots=2)
    if kept_by != "nothing":
        never_emptied(engine, monkeypatch)
    (first, first_digest), (second, second_digest) = vllm.policies
    asked = request("r", [5 + token % 90 for token in range(200)], max_tokens=4)
    full = len(asked.token_ids) // BLOCK_TOKENS[device.DEVICE] * BLOCK_TOKENS[device.DEVICE]
    engine.load(first, version=11, digest=first_digest)
    old = run(engine, [asked])
    assert reused(engine, asked) == full, "the same weights find their own"
    engine.load(second, version=12, digest=second_digest)
    assert reused(engine, asked) == 0
    assert run(engine, [asked]) != old
    engine.load(first, version=13, digest=first_digest)
    assert reused(engine, asked) == 0, "the same bytes under another version are others, too"
    running = request("running", [*asked.token_ids, 6], max_tokens=12)
    engine.add(running)
    engine.step()
    before = engine.prompt_tokens
    engine.reload_keeping(second, version=14, digest=second_digest)
    while engine.active:
        engine.step()
    spent = since(engine, before)
    assert spent.reused == 0 and spent.computed > len(running.token_ids)


def test_weights_alone_keep_blocks_apart_where_the_cache_is_not_emptied(
    vllm: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = vllm.open(slots=2)
    never_emptied(engine, monkeypatch)
    monkeypatch.setattr(engine, "_salt", lambda adapter: "one for all")
    asked = request("r", [7 + token % 80 for token in range(200)], max_tokens=4)
    run(engine, [asked])
    path, digest = vllm.policies[1]
    engine.load(path, version=21, digest=digest)
    assert reused(engine, asked) > 0


def never_emptied(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = engine._server._call

    def asked(method: str, path: str, body: object = None) -> Any:
        if path == "/reset_prefix_cache":
            return {"success": True}
        return ask(method, path.replace("=abort", "=abort&clear_cache=false"), body)

    monkeypatch.setattr(engine._server, "_call", asked)


def reused(engine: Any, asked: EngineRequest) -> int:
    before = engine.prompt_tokens
    run(engine, [asked])
    spent = since(engine, before)
    assert spent.computed + spent.reused == len(asked.token_ids)
    return spent.reused


def test_weights_that_another_worker_has_loaded_break_the_promise(vllm: Subject) -> None:
    engine: Any = vllm.open(slots=2)
    path, digest = vllm.policies[1]
    engine._server.read(path, version=1, digest=digest)
    engine._server.replace(digest, "1:another")
    for settings in ({}, {"top_k": 5}, {"temperature": 0.0}):
        engine.add(request("r", [5, 6], max_tokens=3, **settings))
        with pytest.raises(InvariantBroken, match="sampled from other weights"):
            while engine.active:
                engine.step()
        engine.cancel("r")


def test_requests_without_kv_for_all_of_them_still_end_the_same(vllm: Subject) -> None:
    device.need_fine()
    requests = [request(f"r{n}", [5, 6, n], seed=n, max_tokens=120) for n in range(12)]
    roomy = run(vllm.open(slots=12), requests)
    tight = open_shared(slots=12, context_tokens=CONTEXT_TOKENS, kv_cache_gb=0.0012)
    (path, digest), _ = vllm.policies
    tight.load(path, version=0, digest=digest)
    assert tight.kv_tokens < 12 * 123
    result = run(tight, requests)
    assert {name: entry.tokens for name, entry in result.items()} == {
        name: result.tokens for name, result in roomy.items()
    }
    tight.close()


def test_prompts_that_do_not_fit_into_a_step_are_prefilled_over_several(vllm: Subject) -> None:
    from dora_pipe.producers.engines.vllm.core import STEP_TOKENS_MAX
    from tests.support.torch_engines import logprob_distance

    count, length = 24, 120
    assert count * length > STEP_TOKENS_MAX + SLOTS
    prompts = np.random.default_rng(3).integers(0, vllm.vocabulary, (count, length)).tolist()
    requests = [request(f"r{n}", prompts[n], seed=n, max_tokens=6) for n in range(count)]
    results = run(vllm.open(slots=count), requests)
    for req in requests:
        assert len(results[req.request].tokens) == 6
        distance = logprob_distance(_model(vllm), req, results[req.request])
        assert distance < LOGPROB_DISTANCE_MAX, req
    alone = run(vllm.open(slots=1), requests)
    assert [result.tokens for result in alone.values()] == [
        result.tokens for result in results.values()
    ]


DOORS = ("/health", "/v1/models", "/collective_rpc", "/update_weights", "/weight_info", "/metrics")


@pytest.mark.parametrize("path", DOORS)
def test_no_door_of_a_server_opens_without_the_key(vllm: Subject, path: str) -> None:
    server, _ = running_server()
    for key in ("", "guessed"):
        with pytest.raises(ResourceError, match="401"):
            call(Address.of(str(server.address), key), "GET", path)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_no_door_for_adapters_opens_without_the_key(vllm: Subject, path: str) -> None:
    server, _ = running_server(lora_rank=RANK)
    body = {"lora_name": "a", "lora_path": "/nowhere"}
    for key in ("", "guessed"):
        with pytest.raises(ResourceError, match="401"):
            call(Address.of(str(server.address), key), "POST", path, body)
    with pytest.raises(ResourceError, match="404"):  # there is no such adapter
        call(server.address, "POST", path, body)
    with pytest.raises(ResourceError, match="404"):  # there is no such door without adapters
        call(running_server()[0].address, "POST", path, body)


def test_server_without_adapters_is_refused_by_a_worker_that_hosts_some(vllm: Subject) -> None:
    server, model = running_server()
    with pytest.raises(ConfigError, match="hosts no adapters") as raised:
        VllmEngine(model, slots=2, context_tokens=64, address=server.address, lora_rank=4)
    assert raised.value.hint is not None and "--lora-rank 4" in raised.value.hint


def test_server_listens_on_this_machine_alone(vllm: Subject) -> None:
    server, _ = running_server()
    outside = {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    for host in outside - {"127.0.0.1", "127.0.1.1", "::1"}:
        with pytest.raises(OSError, match=r"\w"):
            socket.create_connection((host, server.address.port), 2.0).close()


@pytest.mark.parametrize("kind", ["tied", "tied_llama", "qwen3_moe", "whole_experts", "glm4_moe"])
def test_packed_weights_are_those_that_were_loaded_last(tmp_path: Path, kind: str) -> None:
    from tests.support.torch_engines import logprob_distance

    need_vllm()
    with server_subject(tmp_path, kind) as subject:
        engine = subject.open(slots=8)
        for seed, (weights, digest) in enumerate(subject.policies):
            engine.load(weights, version=seed, digest=digest)
            results = run(engine, all_requests := requests(subject, 6, seed=5))
            for request in all_requests:
                distance = logprob_distance(
                    _model(subject, seed), request, results[request.request]
                )
                assert distance < LOGPROB_DISTANCE_MAX, request


def test_stock_server_generates_as_transformers_does(tmp_path: Path) -> None:
    from tests.support.torch_engines import logprob_distance

    need_vllm()
    model = models.make_qwen2(tmp_path / "model", 0, scale=8.0)
    with stock_server(model) as address:
        engine = VllmEngine(model, slots=8, context_tokens=CONTEXT_TOKENS, address=address)
        engine.load(model / WEIGHTS, version=0, digest=weights_digest(model))
        asked = [request(f"r{seed}", [5, 9, 14], seed=seed, max_tokens=30) for seed in range(6)]
        greedy = request("greedy", [5, 9, 14], max_tokens=30, temperature=0.0)
        results = run(engine, [*asked, greedy])
        assert engine.version.endswith(" stock") and not engine.declares
        assert run(engine, asked) == {name: results[name] for name in results if name != "greedy"}
        engine.close()
    assert len({tuple(result.tokens) for result in results.values()}) == len(results)
    for sent in (*asked, greedy):
        assert len(results[sent.request].tokens) == 30
        distance = logprob_distance(model, sent, results[sent.request])
        assert distance < LOGPROB_DISTANCE_MAX, sent
