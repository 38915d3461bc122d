"""What only vLLM can get wrong with KV caches that leave and arrive (`make test-vllm`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora_pipe.producers.engines.port import EngineRequest, Exported, Kv
from dora_pipe.producers.worker.kv_handover import KvHandover, KvLabel
from dora_pipe.schemas.policy import Blob
from dora_pipe.store.transfers.files import MappedFiles
from tests.support import engine_moves as moves
from tests.support import models
from tests.support.engine_contract import Result, Subject, assert_alike, request, requests, run
from tests.support.vllm_engines import need_vllm, open_vllm, vllm_subject
from tests.support.worker import VirtualClock

LOGPROB_DISTANCE_MAX = 1e-4
"""Of vLLM's float32 log-probs from those of transformers."""

PROMPT = [5 + token % 90 for token in range(70)]
"""Two blocks of 32 and a part of a third."""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    need_vllm()
    with vllm_subject(tmp_path_factory.mktemp("vllm")) as subject:
        yield subject


def model_of(subject: Subject, number: int = 0) -> Path:
    folders = [folder / f"seed{number}" for folder in subject.policies[0][0].parents]
    return next(folder for folder in folders if folder.is_dir())


def distance(subject: Subject, one: EngineRequest, result: Result, *, policy: int = 0) -> float:
    from tests.support.torch_engines import logprob_distance

    return logprob_distance(model_of(subject, policy), one, result)


def taken(engine: Any, one: EngineRequest, *, after: int) -> tuple[Kv, EngineRequest]:
    """The request's cache after so many steps alone, and the request that goes on from it."""
    engine.add(one)
    for _ in range(after):
        engine.step()
    found: Exported = engine.export(one.request)
    assert found.kv is not None
    tokens = list(found.sampled.token_ids) if found.sampled else []
    rest = replace(one, token_ids=[*one.token_ids, *tokens], sampled=len(tokens), kv=found.kv)
    return found.kv, rest


def prefilled(engine: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By stay, the tokens of its prompt that vLLM computes from now on."""
    seen: dict[str, int] = {}
    get_output = engine._core.engine_core.get_output

    def noting() -> Any:
        answer = get_output()
        for output in answer.outputs:
            stats = output.prefill_stats
            if stats is not None:
                seen[output.request_id] = stats.num_prompt_tokens - stats.num_cached_tokens
        return answer

    monkeypatch.setattr(engine._core.engine_core, "get_output", noting)
    return seen


@pytest.mark.parametrize("cut", [2, 7, 40])
def test_requests_that_move_into_company_have_the_logprobs_of_transformers(
    vllm: Subject, cut: int
) -> None:
    source, target = vllm.open(slots=16), vllm.open(slots=24)
    company = [replace(one, request=f"c{one.request}") for one in requests(vllm, 6, seed=cut)]
    wanted = requests(vllm, 14, seed=4, max_tokens=90)
    results = {one.request: Result() for one in [*wanted, *company]}
    for engine, some in ((source, wanted), (target, company)):
        for one in some:
            engine.add(replace(one, emit_every=1))
    moves.steps(source, results, cut)
    running = [one for one in wanted if results[one.request].reason is None]
    assert len(running) > 4
    for one in running[::2]:
        assert moves.move(source, target, one, results[one.request])
        moves.steps(target, results, 1)
    moves.finish(source, results)
    moves.finish(target, results)
    for one in [*wanted, *company]:
        assert len(results[one.request].tokens) == one.params.max_tokens
        assert distance(vllm, one, results[one.request]) < LOGPROB_DISTANCE_MAX


def test_request_with_its_cache_computes_one_token_of_its_prompt(
    vllm: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = vllm.open(slots=2), vllm.open(slots=2)
    _, rest = taken(source, request("r", PROMPT, max_tokens=80), after=40)
    counts = prefilled(target, monkeypatch)
    run(target, [rest, replace(rest, request="again", kv=None)])
    assert sorted(counts.values()) == [1, len(rest.token_ids)]


@pytest.mark.parametrize("after", [1, 26, 27, 59])
def test_cache_arrives_with_every_bit_whatever_is_cached_there(vllm: Subject, after: int) -> None:
    source, target = vllm.open(slots=3), vllm.open(slots=3)
    # Prefilled in company, and there once more in pieces: the numbers may differ in their last bit.
    source.add(request("beside", [7, 8, 9], max_tokens=150))
    run(target, [request("same", PROMPT[:40], max_tokens=3), request("r", PROMPT, max_tokens=9)])
    kv, rest = taken(source, request("r", PROMPT, max_tokens=150), after=after)
    assert kv.tokens == len(PROMPT) + after - 1
    arrived, _ = taken(target, rest, after=3)
    assert arrived.tokens == kv.tokens + 3
    (array,), (other,) = kv.arrays.values(), arrived.arrays.values()
    assert np.array_equal(other[:, :, : kv.tokens].view("<i4"), array.view("<i4"))
    assert np.abs(array).max() > 0


def test_cache_that_came_is_its_requests_alone(vllm: Subject) -> None:
    engine = vllm.open(slots=2)
    fresh = run(vllm.open(slots=2), [request("fresh", PROMPT, max_tokens=20)])["fresh"]
    kv, rest = taken(engine, request("r", PROMPT, max_tokens=80), after=5)
    zeros = {name: np.zeros_like(array) for name, array in kv.arrays.items()}
    other = run(vllm.open(slots=2), [rest])["r"]
    engine.add(replace(rest, kv=replace(kv, arrays=zeros)))
    found = {"r": Result(), "fresh": Result()}
    moves.steps(engine, found, 3)
    engine.add(request("fresh", PROMPT, max_tokens=20))
    moves.finish(engine, found)
    assert found["r"] != other, "it went on from zeros"
    assert_alike(vllm, found["fresh"], fresh)


def test_request_that_leaves_before_its_first_step_takes_the_same_cache_along(
    vllm: Subject,
) -> None:
    source: Any = vllm.open(slots=2)
    target: Any = vllm.open(slots=2)
    kv, rest = taken(source, request("r", PROMPT, max_tokens=40), after=4)
    for _ in range(2):
        again, after = taken(target, rest, after=0)
        assert again == kv and after.token_ids == rest.token_ids
        assert np.array_equal(again.arrays["kv"], kv.arrays["kv"])
    target.add(rest)
    target.cancel("r")
    assert target.step() == [] and not target._caches._connector.offered
    assert run(target, [rest])["r"] == run(vllm.open(slots=2), [rest])["r"]


def test_weights_that_change_before_the_first_step_make_the_cache_worth_nothing(
    vllm: Subject,
) -> None:
    source, target = vllm.open(slots=2), vllm.open(slots=2)
    _, rest = taken(source, request("r", PROMPT, max_tokens=40), after=4)
    target.add(replace(rest, emit_every=1))
    second, digest = vllm.policies[1]
    target.reload_keeping(second, version=1, digest=digest)
    result = {"r": Result()}
    moves.steps(target, result, 2)
    found = target.export("r")
    assert found is not None and found.kv is not None and found.kv.weights == digest
    assert distance(vllm, rest, result["r"], policy=1) < LOGPROB_DISTANCE_MAX
    last = replace(rest, token_ids=[*rest.token_ids, *result["r"].tokens], kv=found.kv)
    assert source.kv_error(last) == "other weights"


def test_request_that_vllm_sets_aside_after_it_moved_ends_right(vllm: Subject) -> None:
    from dora_pipe.producers.engines.vllm.core import VllmSettings

    source = vllm.open(slots=12)
    tight = open_vllm(
        model_of(vllm), slots=12, context_tokens=256, settings=VllmSettings(kv_gb=0.0012)
    )
    (path, digest), _ = vllm.policies
    tight.load(path, version=0, digest=digest)
    wanted = [request(f"r{n}", [5, 6, n], seed=n, max_tokens=120) for n in range(12)]
    results = {one.request: Result() for one in wanted}
    for one in wanted:
        source.add(replace(one, emit_every=1))
    moves.steps(source, results, 40)
    for one in wanted:
        assert moves.move(source, tight, one, results[one.request])
    scheduler, aside = tight._core.engine_core.engine_core.scheduler, set()
    while tight.active:
        moves.steps(tight, results, 1)
        aside |= {name for name, one in scheduler.requests.items() if one.num_preemptions}
    assert aside, "all of them had room"
    for one in wanted:
        assert len(results[one.request].tokens) == 120
        assert distance(vllm, one, results[one.request]) < LOGPROB_DISTANCE_MAX
    tight.close()


def test_request_that_was_set_aside_has_no_cache_to_take_along(vllm: Subject) -> None:
    engine = vllm.open(slots=2)
    engine.add(request("r", PROMPT, max_tokens=40))
    for _ in range(3):
        engine.step()
    scheduler = engine._core.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    (running,) = scheduler.running
    scheduler.running.remove(running)
    scheduler._preempt_request(running, 0.0)
    found = engine.export("r")
    assert found is not None and found.kv is None and found.sampled is not None
    assert len(found.sampled.token_ids) == 3


def test_bfloat16_cache_moves_through_a_file(vllm: Subject, tmp_path: Path) -> None:
    from dora_pipe.producers.engines.vllm.core import VllmSettings

    (path, digest), _ = vllm.policies
    half = [
        open_vllm(
            model_of(vllm), slots=2, context_tokens=256, settings=VllmSettings(dtype="bfloat16")
        )
        for _ in range(2)
    ]
    for engine in half:
        engine.load(path, version=0, digest=digest)
    one = request("r", PROMPT, max_tokens=100)
    whole = run(half[0], [one])["r"]
    kv, rest = taken(half[0], one, after=30)
    assert kv.layout.endswith("bfloat16") and kv.arrays["kv"].dtype == np.uint16
    handover = KvHandover(MappedFiles(tmp_path, clock=VirtualClock()))
    label = KvLabel(trajectory="t", prefix="p")
    blob = handover.put(label, kv)
    assert isinstance(blob, Blob)
    found = handover.fetch(label, blob)
    assert isinstance(found, Kv)
    assert run(half[1], [replace(rest, kv=found)])["r"] == whole.after(30)
    assert vllm.open(slots=1).kv_error(rest) == "another layout"
    for engine in half:
        engine.close()


def test_caches_of_the_torch_engine_and_of_vllm_are_not_taken_for_each_other(vllm: Subject) -> None:
    from dora_pipe.producers.engines.torch.engine import TorchEngine

    own = TorchEngine.open(model_of(vllm), slots=2, context_tokens=256, threads=1)
    (path, digest), _ = vllm.policies
    own.load(path, version=0, digest=digest)
    one = request("r", PROMPT, max_tokens=40)
    for source, target in ((own, vllm.open(slots=2)), (vllm.open(slots=2), own)):
        _, rest = taken(source, one, after=5)
        assert target.kv_error(rest) == "another layout"
        with pytest.raises(ValueError, match="another layout"):
            target.add(rest)
        result = run(target, [replace(rest, kv=None)])["r"]
        assert distance(vllm, rest, result) < LOGPROB_DISTANCE_MAX
    own.close()


def test_model_with_a_sliding_window_exports_nothing_and_runs(tmp_path: Path) -> None:
    need_vllm()
    window = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}
    model = models.make_qwen2(tmp_path / "windows", 0, **window)
    engine = open_vllm(model, slots=2, context_tokens=256)
    assert "kv_export" not in engine.declares
    engine.add(request("r", PROMPT, max_tokens=40))
    for _ in range(4):
        engine.step()
    found = engine.export("r")
    assert found is not None and found.kv is None
    engine.close()
