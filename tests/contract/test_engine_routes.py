"""The experts through which engines say that tokens went, on the torch engine and on vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.engine import ROUTES, Engine, TokensSampled
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.schemas.routes import check_routes, need_entries
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support import device
from tests.support.engine_contract import request
from tests.support.engine_routes import routed_run, same_experts
from tests.support.torch_engines import make
from tests.support.vllm_servers import go, held, need_vllm, open_shared, running_server

PROMPT = [1, *range(20, 60)]
"""More than a block of vLLM's KV cache."""

Mixture = tuple[Path, Engine]
"""A model, and an engine that says by which experts it goes."""


def opened(directory: Path, *, routes: bool = True) -> TorchEngine:
    return TorchEngine.open(
        directory, slots=4, context_tokens=128, threads=1, routes=routes, prefix_cache_ratio=2.0
    )


@pytest.fixture(scope="module", params=["qwen3_moe", "grouped", "vllm"])
def mixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mixture]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param != "vllm":
        model = make(request.param, folder)
        yield model, opened(model)
        return
    need_vllm()
    _, model = running_server(kind="qwen3_moe")
    engine = open_shared(slots=4, context_tokens=128, routes=True, kind="qwen3_moe")
    store = PolicyStore(folder)
    policy, _ = import_model(store, model)
    engine.load(store.weights_path(policy.digest), version=0, digest=policy.digest)
    yield model, engine
    engine.close()


def test_every_token_behind_the_first_has_its_experts(mixture: Mixture) -> None:
    folder, engine = mixture
    asked = request("r", PROMPT, max_tokens=9, routes=True)
    sparse = 2 if '"qwen3_moe"' in (folder / "config.json").read_text() else 1
    requests = [request(f"o{n}", PROMPT[: 9 * n], max_tokens=7, routes=True) for n in (1, 2)]
    result = routed_run(engine, [requests[0], replace(asked, emit_every=2), requests[1]])
    assert ROUTES in engine.declares
    for req in (asked, *requests):
        tokens, routes = result[req.request]
        assert (routes.experts, routes.layers, routes.per_token) == (8, sparse, 2)
        check_routes(routes, len(req.token_ids) + len(tokens))
        need_entries(routes, range(1, routes.tokens))
        assert (routes.choices[0] == 255).all()


def test_they_are_those_of_the_own_engine(mixture: Mixture) -> None:
    device.need_fine()
    folder, engine = mixture
    asked = request("r", PROMPT, max_tokens=30, routes=True)
    tokens, routes = routed_run(engine, [asked])["r"]
    assert same_experts(folder, [*PROMPT, *tokens], routes)


def test_samples_and_requests_that_go_on_have_all_of_them(mixture: Mixture) -> None:
    _, engine = mixture
    asked = request("r", PROMPT, max_tokens=40, routes=True)
    tokens, routes = routed_run(engine, [asked])["r"]
    assert routed_run(engine, [asked])["r"] == (tokens, routes)
    cut = len(PROMPT) + 24
    later = replace(asked, token_ids=[*PROMPT, *tokens[:24]], sampled=24)
    assert routed_run(engine, [later])["r"] == (tokens[24:], routes)
    before = engine.prompt_tokens.reused
    rest = routed_run(engine, [replace(later, routed=cut)])["r"]
    assert rest == (tokens[24:], routes.part(cut))
    assert engine.prompt_tokens.reused > before


def test_a_moved_cache_goes_on_with_the_tokens_that_were_not_known(mixture: Mixture) -> None:
    _, engine = mixture
    asked = request("r", PROMPT, max_tokens=80, routes=True)
    tokens, routes = routed_run(engine, [asked])["r"]
    with held(engine):
        engine.add(asked)
        with go(engine):
            for _ in range(4):
                engine.step()
        exported = engine.export("r")
    assert exported is not None and exported.sampled is not None
    length = len(PROMPT) + len(exported.sampled.token_ids)
    assert exported.sampled.routes == routes.part(0, length)
    ids = [*PROMPT, *exported.sampled.token_ids]
    moved = replace(asked, token_ids=ids, sampled=length - len(PROMPT), kv=exported.kv)
    assert engine.kv_error(moved) == (moved.kv and "tokens without recorded experts")
    rest = routed_run(engine, [replace(moved, routed=length)])["r"]
    assert rest == (tokens[length - len(PROMPT) :], routes.part(length))


def test_nobody_is_told_who_does_not_ask(mixture: Mixture) -> None:
    _, engine = mixture
    engine.add(request("r", PROMPT, max_tokens=3))
    events = [event for _ in range(3) for event in engine.step()]
    assert [event.routes for event in events if isinstance(event, TokensSampled)] == [None]


def test_more_experts_than_a_byte_can_name_have_two_in_the_record(tmp_path: Path) -> None:
    model = make("glm4_moe", tmp_path, n_routed_experts=300, moe_intermediate_size=8)
    asked = request("r", PROMPT, max_tokens=30, routes=True)
    _, routes = routed_run(opened(model), [asked])["r"]
    assert (routes.experts, routes.layers, routes.per_token) == (300, 1, 2)
    assert routes.choices.dtype == "uint16" and 255 < routes.choices[1:].max() < 300
    assert (routes.choices[0] == 65535).all()


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_dense_model_is_refused(engine: str, tmp_path: Path) -> None:
    if engine == "vllm":
        need_vllm()
    with pytest.raises(
        PolicyError, match=r"sampling\.return_routed_experts: .*is not a mixture of experts"
    ):
        if engine == "vllm":
            open_shared(slots=2, context_tokens=64, routes=True)
        else:
            opened(make("qwen2", tmp_path))


def test_request_for_experts_is_refused_by_an_engine_without_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not report experts"):
        opened(make("qwen3_moe", tmp_path), routes=False).add(request("r", PROMPT, routes=True))
