"""KV caches that go from one vLLM server to another, each of two ranks (`make test-vllm`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora_pipe.producers.engines.engine import KV_EXPORT, Engine, EngineRequest, Kv
from dora_pipe.producers.engines.vllm.server import VllmEngine
from tests.support import engine_moves as moves
from tests.support.engine_contract import Result, Subject, assert_alike, request, requests, run
from tests.support.vllm_servers import (
    CONTEXT_TOKENS,
    go,
    held,
    need_vllm,
    open_shared,
    server_subject,
)

RANKS = 2

LOGPROB_DISTANCE_MAX = 1e-4
"""Of vLLM's float32 log-probs from those of transformers."""

PROMPT = [5 + token % 90 for token in range(70)]
"""Two blocks of 32 and a part of a third."""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    need_vllm()
    with server_subject(
        tmp_path_factory.mktemp("vllm-ranks"), tensor_parallel_size=RANKS
    ) as subject:
        yield subject


@pytest.fixture
def target(vllm: Subject) -> Iterator[VllmEngine]:
    engine = opened(vllm, tensor_parallel_size=RANKS, number=1)
    yield engine
    engine.close()


def model_of(subject: Subject, number: int = 0) -> Path:
    folders = [folder / f"seed{number}" for folder in subject.policies[0][0].parents]
    return next(folder for folder in folders if folder.is_dir())


def distance(subject: Subject, request: EngineRequest, result: Result, *, policy: int = 0) -> float:
    from tests.support.torch_engines import logprob_distance

    return logprob_distance(model_of(subject, policy), request, result)


def opened(vllm: Subject, **which: Any) -> VllmEngine:
    engine = open_shared(slots=24, context_tokens=CONTEXT_TOKENS, **which)
    (path, digest), _ = vllm.policies
    engine.load(path, version=0, digest=digest)
    return engine


def taken(engine: Engine, request: EngineRequest, *, sampled: int) -> tuple[Kv, EngineRequest]:
    for _ in range(moves.ATTEMPTS_MAX):
        results = defaultdict[str, Result](Result)
        engine.add(replace(request, emit_every=1))
        while len(results[request.request].tokens) < sampled:
            moves.steps(engine, results, 1)
        export = engine.export(request.request)
        if export is not None:
            assert export.sampled is None and export.kv is not None
            tokens = [*request.token_ids, *results[request.request].tokens]
            again = request.sampled + sampled
            return export.kv, replace(request, token_ids=tokens, sampled=again, kv=export.kv)
        engine.cancel(request.request)
    raise AssertionError(f"{request.request} is never given out")


def steps_until(
    engine: Engine, results: dict[str, Result], names: Iterable[str], *, tokens: int
) -> None:
    subset = [results[name] for name in names]
    for _ in range(moves.STEPS_MAX):
        if all(entry.reason is not None or len(entry.tokens) >= tokens for entry in subset):
            return
        moves.steps(engine, results, 1)
    raise AssertionError(f"not {tokens} tokens of each")


@pytest.mark.parametrize("sampled", [1, 26, 27, 59])
def test_cache_arrives_with_every_bit_each_rank_its_part(
    vllm: Subject, target: VllmEngine, sampled: int
) -> None:
    source = vllm.open(slots=3)
    source.add(request("beside", [7, 8, 9], max_tokens=180))
    kv, rest = taken(source, request("r", PROMPT, max_tokens=180), sampled=sampled)
    assert kv.tokens == len(PROMPT) + sampled - 1
    arrived, _ = taken(target, rest, sampled=3)
    assert arrived.tokens == kv.tokens + 3
    array, other = kv.array, arrived.array
    assert np.array_equal(other[:, :, : kv.tokens].view("<i4"), array.view("<i4"))
    assert all(np.abs(array[:, :, :, head]).max() > 0 for head in range(array.shape[3]))
    source.cancel("beside")


@pytest.mark.parametrize("cut", [2, 10])
def test_requests_that_move_into_company_have_the_logprobs_of_transformers(
    vllm: Subject, target: VllmEngine, cut: int
) -> None:
    source = vllm.open(slots=16)
    company = [
        replace(request, request=f"c{request.request}") for request in requests(vllm, 6, seed=cut)
    ]
    long = [
        replace(request, params=replace(request.params, max_tokens=150))
        for request in requests(vllm, 12)
    ]
    results = {request.request: Result() for request in [*long, *company]}
    with held(source, target):
        for engine, subset in ((source, long), (target, company)):
            for request in subset:
                engine.add(replace(request, emit_every=1))
            with go(engine):
                steps_until(engine, results, [request.request for request in subset], tokens=cut)
        went = []
        for request in long:
            went.append(moves.move(source, target, request, results[request.request], ahead=True))
            with go(source):  # for vLLM's workers the others are in no batch until the next step
                moves.steps(source, results, 1)
        assert sum(went) > 4
    moves.finish(source, results)
    moves.finish(target, results)
    for request in [*long, *company]:
        assert len(results[request.request].tokens) == request.params.max_tokens
        assert distance(vllm, request, results[request.request]) < LOGPROB_DISTANCE_MAX


def test_caches_go_between_two_ranks_and_one(vllm: Subject) -> None:
    single = opened(vllm)
    assert KV_EXPORT in single.declares
    last = request("r", PROMPT, max_tokens=150)
    kv, last = taken(vllm.open(slots=2), last, sampled=9)
    for engine in (single, vllm.open(slots=2), single):
        arrived, last = taken(engine, last, sampled=5)
        array, other = kv.array, arrived.array
        assert arrived.layout == kv.layout
        assert np.array_equal(other[:, :, : kv.tokens].view("<i4"), array.view("<i4"))
        kv = arrived
    single.close()


def test_request_with_its_cache_computes_one_token_of_its_prompt(
    vllm: Subject, target: VllmEngine
) -> None:
    _, rest = taken(vllm.open(slots=2), request("r", PROMPT, max_tokens=120), sampled=40)
    before = target.prompt_tokens
    run(target, [rest])
    assert target.prompt_tokens.computed - before.computed == 1
    assert target.prompt_tokens.reused - before.reused == len(rest.token_ids) - 1


def test_cache_whose_file_is_gone_is_computed(vllm: Subject, target: VllmEngine) -> None:
    _, rest = taken(vllm.open(slots=2), request("r", PROMPT, max_tokens=60), sampled=9)
    expected = run(target, [replace(rest, kv=None)])["r"]
    target.add(rest)
    (file,) = Path(str(target._caches._folder)).glob("*.npy")
    file.unlink()
    result = {"r": Result()}
    moves.finish(target, result)
    assert result["r"].tokens == expected.tokens


def test_request_that_has_ended_in_the_server_ends_where_it_is(vllm: Subject) -> None:
    engine = vllm.open(slots=2)
    engine.add(request("r", PROMPT, max_tokens=4))
    result = {"r": Result()}
    moves.steps(engine, result, 1)
    run(vllm.open(slots=2), [request("later", PROMPT, max_tokens=30)])  # by now it has ended
    assert engine.export("r") is None and engine.active == 1
    moves.finish(engine, result)
    assert len(result["r"].tokens) == 4 and result["r"].reason == "length"


def test_cache_that_came_is_its_requests_alone(vllm: Subject) -> None:
    engine = vllm.open(slots=2)
    fresh = run(vllm.open(slots=2), [request("fresh", PROMPT, max_tokens=20)])["fresh"]
    kv, rest = taken(engine, request("r", PROMPT, max_tokens=80), sampled=5)
    other = run(vllm.open(slots=2), [rest])["r"]
    engine.add(replace(rest, kv=replace(kv, array=np.zeros_like(kv.array))))
    results = {"r": Result(), "fresh": Result()}
    moves.steps(engine, results, 3)
    engine.add(request("fresh", PROMPT, max_tokens=20))
    moves.finish(engine, results)
    assert results["r"] != other, "it went on from zeros"
    assert_alike(vllm, results["fresh"], fresh)


def test_caches_of_the_torch_engine_and_of_vllm_are_not_taken_for_each_other(vllm: Subject) -> None:
    from dora_pipe.producers.engines.torch.engine import TorchEngine

    own = TorchEngine.open(model_of(vllm), slots=2, context_tokens=256, threads=1)
    (path, digest), _ = vllm.policies
    own.load(path, version=0, digest=digest)
    req = request("r", PROMPT, max_tokens=40)
    for source, target in ((own, vllm.open(slots=2)), (vllm.open(slots=2), own)):
        _, rest = taken(source, req, sampled=5)
        assert target.kv_error(rest) == "another layout"
        with pytest.raises(ValueError, match="another layout"):
            target.add(rest)
        result = run(target, [replace(rest, kv=None)])["r"]
        assert distance(vllm, rest, result) < LOGPROB_DISTANCE_MAX
    own.close()


def test_model_with_a_sliding_window_exports_nothing_and_runs(tmp_path: Path) -> None:
    need_vllm()
    with server_subject(tmp_path, "windows") as windows:
        engine = windows.open(slots=2)
        assert KV_EXPORT not in engine.declares
        with held(engine):
            engine.add(request("r", PROMPT, max_tokens=40))
            with go(engine):
                for _ in range(4):
                    engine.step()
            export = engine.export("r")
        assert export is not None and export.kv is None
