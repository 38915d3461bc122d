"""Through which experts the torch engine says that tokens went."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.port import ROUTES, TokensSampled
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.schemas.routes import Routes, check_routes, need_entries
from tests.support.engine_contract import request
from tests.support.engine_routes import routed_run
from tests.support.torch_engines import make

PROMPT = [1, *range(20, 60)]


@pytest.fixture(scope="module", params=["qwen3_moe", "grouped", "deepseek_v2", "deepseek_v3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(request.param, tmp_path_factory.mktemp(request.param))


def opened(directory: Path, **changes: object) -> TorchEngine:
    settings = {"slots": 4, "context_tokens": 128, "threads": 1, "routes": True} | changes
    return TorchEngine.open(directory, **settings)  # type: ignore[arg-type]


def test_every_token_behind_the_first_has_its_experts(directory: Path) -> None:
    engine = opened(directory)
    asked = request("r", PROMPT, max_tokens=9, routes=True)
    tokens, routes = routed_run(engine, [replace(asked, emit_every=2)])["r"]
    sparse = 2 if "qwen3" in str(directory) else 1
    assert (routes.experts, routes.layers, routes.per_token) == (8, sparse, 2)
    check_routes(routes, len(PROMPT) + len(tokens))
    need_entries(routes, range(1, routes.tokens))
    assert (routes.choices[0] == 255).all()
    assert ROUTES in engine.declares


def test_they_are_the_same_in_company_after_an_interruption_and_from_kept_prompts(
    directory: Path,
) -> None:
    asked = request("r", PROMPT, max_tokens=9, routes=True)
    others = [request(f"o{n}", PROMPT[: 5 * n], max_tokens=7, routes=True) for n in (1, 2)]
    tokens, routes = routed_run(opened(directory), [asked])["r"]
    kept = opened(directory, kv_keep=2.0)
    for _ in range(2):
        assert routed_run(kept, [others[0], asked, others[1]])["r"] == (tokens, routes)
    assert kept.prompt_tokens.reused
    cut = len(PROMPT) + 4
    later = replace(asked, token_ids=[*PROMPT, *tokens[:4]], sampled=4)
    assert routed_run(kept, [later])["r"][1] == routes
    rest = routed_run(kept, [replace(later, routed=cut)])["r"]
    assert rest == (tokens[4:], routes.part(cut))


def test_a_moved_cache_goes_on_with_the_tokens_that_were_not_known(directory: Path) -> None:
    asked = request("r", PROMPT, max_tokens=9, routes=True)
    tokens, routes = routed_run(opened(directory), [asked])["r"]
    first = opened(directory)
    first.add(asked)
    for _ in range(4):
        first.step()
    exported = first.export("r")
    assert exported is not None and exported.sampled is not None and exported.kv is not None
    length = len(PROMPT) + len(exported.sampled.token_ids)
    assert exported.sampled.routes == routes.part(0, length)
    ids = [*PROMPT, *exported.sampled.token_ids]
    moved = replace(asked, token_ids=ids, sampled=length - len(PROMPT), kv=exported.kv)
    second = opened(directory)
    assert second.kv_error(moved) == "tokens whose experts are not known"
    rest = routed_run(second, [replace(moved, routed=length)])["r"]
    assert rest == (tokens[length - len(PROMPT) :], routes.part(length))


def test_nobody_is_told_who_does_not_ask(directory: Path) -> None:
    engine = opened(directory)
    engine.add(request("r", PROMPT, max_tokens=3))
    events = [event for _ in range(3) for event in engine.step()]
    assert [one.routes for one in events if isinstance(one, TokensSampled)] == [None]
    silent = opened(directory, routes=False)
    with pytest.raises(ValueError, match="says nothing of experts"):
        silent.add(request("r", PROMPT, routes=True))


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"sampling\.routes: .* is no mixture of experts"):
        opened(make("qwen2", tmp_path))


def test_entries_are_of_the_model_each_expert_once(tmp_path: Path) -> None:
    engine = opened(make("qwen3_moe", tmp_path))
    _, routes = routed_run(engine, [request("r", PROMPT, max_tokens=3, routes=True)])["r"]
    data = np.array(routes.choices)
    data[5, 0] = [3, 3]
    with pytest.raises(Exception, match=r"each once \(at \$\.routed_experts\[5\]\)|each once"):
        check_routes(Routes.of(data, 8), routes.tokens)
