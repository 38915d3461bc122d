"""Tests of engines with several resident versions: each row samples under its own version.

Results are bitwise equal where an engine declares it, otherwise equal in tokens and close in
log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.engine import (
    BATCH_INVARIANT,
    COUNTER_SAMPLING,
    KV_EXPORT,
    LORA,
    PREFILL_EXACT,
    PREFIX_REUSE,
    Engine,
    EngineRequest,
    PromptTokens,
)
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.store.adapters import write_merged
from dora_pipe.store.model_dir import write_model_dir
from tests.support import models
from tests.support.adapters import RANK, make_lora, publish, random_adapter
from tests.support.device import LORA_DTYPE, MODEL_DISTANCE
from tests.support.engine_contract import Result, Subject, assert_all_alike, request, requests, run
from tests.support.tiers import more
from tests.support.torch_engines import logprob_distance, make
from tests.support.vllm_servers import need_vllm, server_opener

KINDS = ["simulated", "llama_gqa", *more(["qwen2"]), "vllm"]
TOLERANCE = MODEL_DISTANCE[LORA_DTYPE]
DIFFERENT = {"float32": 100, "bfloat16": 2}[LORA_DTYPE] * TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Several:
    kind: str
    directory: Path
    policies: list[tuple[Path, str]]
    open: Callable[..., Engine]

    @property
    def rounds(self) -> bool:
        return self.kind == "vllm"

    @property
    def vocabulary(self) -> int:
        return {
            "qwen2": models.QWEN2_VOCABULARY,
            "vllm": models.QWEN2_VOCABULARY,
            "llama_gqa": models.LLAMA_VOCABULARY,
        }.get(self.kind, 90)

    def serving(self, *versions: int, slots: int = 16, most: int = 3, **more: Any) -> Engine:
        engine = self.open(slots=slots, most=most, **more)
        if self.kind != "simulated":
            engine.load(self.policies[0][0], version=0, digest=self.policies[0][1])
            engine.drop(0)
        for version in versions:
            path, digest = self.policies[version]
            engine.load(path, version=version, digest=digest)
        return engine

    @property
    def subject(self) -> Subject:
        return Subject(
            name=self.kind,
            open=self.open,
            vocabulary=self.vocabulary,
            policies=(self.policies[0], self.policies[1]),
            rounding=TOLERANCE if self.rounds else 0.0,
            coarse=self.rounds and LORA_DTYPE == "bfloat16",
        )

    def wanted(self, count: int = 24, *, max_tokens: int = 40) -> list[EngineRequest]:
        plain = requests(self.subject, count, max_tokens=max_tokens)
        return [replace(row, version=number % 3) for number, row in enumerate(plain)]


@pytest.fixture(scope="module", params=KINDS)
def several(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Several]:
    kind = str(request.param)
    folder = tmp_path_factory.mktemp(kind)
    if kind == "simulated":
        yield Several(
            kind=kind,
            directory=folder,
            policies=[(Path("none"), f"{number:064x}") for number in range(1, 4)],
            open=lambda *, slots, most: SimulatedEngine(
                slots=slots, context_tokens=256, max_resident_versions=most
            ),
        )
        return
    if kind == "vllm":
        need_vllm()
    directory = make("qwen2" if kind == "vllm" else kind, folder / "model")
    lora = make_lora(directory, folder / "policies")
    assets = lora.store.assets_path(lora.assets)
    several = Several(
        kind=kind, directory=directory, policies=list(lora.policies), open=torch(assets)
    )
    if not several.rounds:
        yield several
        return
    with server_opener(RANK) as open_engine:
        yield replace(several, open=open_engine)


def torch(assets: Path) -> Callable[..., Engine]:
    return lambda *, slots, most, **more: TorchEngine.open(
        assets,
        slots=slots,
        context_tokens=256,
        threads=1,
        lora_rank=RANK,
        max_resident_versions=most,
        **more,
    )


def assert_same(
    several: Several, results: Mapping[str, Result], expected_results: Mapping[str, Result]
) -> None:
    assert "error" not in {result.reason for result in expected_results.values()}
    assert_all_alike(several.subject, results, expected_results)


def test_engine_declares_what_this_suite_asks_for(several: Several) -> None:
    engine = several.serving(0)
    assert engine.max_resident_versions == 3
    if several.rounds:
        assert engine.declares == {COUNTER_SAMPLING, LORA, KV_EXPORT}
        return
    assert {BATCH_INVARIANT, PREFILL_EXACT} <= engine.declares
    assert LORA in engine.declares or several.kind == "simulated"


def test_rows_of_three_versions_have_the_bits_that_each_version_alone_gives(
    several: Several,
) -> None:
    expected = several.wanted()
    together = run(several.serving(0, 1, 2), expected)
    for version in range(3):
        mine = [request for request in expected if request.version == version]
        alone = run(several.serving(version, most=1), mine)
        assert_same(
            several, {request.request: together[request.request] for request in mine}, alone
        )
    request = expected[4]
    by_itself = run(several.serving(request.version, slots=1), [request])
    assert_same(several, by_itself, {request.request: together[request.request]})


def test_versions_sample_differently(several: Several) -> None:
    engine = several.serving(0, 1, 2)
    same = [
        replace(request(f"r{version}", [5, 6, 7], max_tokens=30), version=version)
        for version in range(3)
    ]
    results = run(engine, same)
    tokens = {tuple(result.tokens) for result in results.values()}
    logprobs = {tuple(result.logprobs) for result in results.values()}
    assert len(logprobs) == 3
    assert len(tokens) > 1


def test_another_version_is_loaded_while_rows_run_and_changes_none_of_their_bits(
    several: Several,
) -> None:
    first = [replace(request, version=request.version % 2) for request in several.wanted(8)]
    wholes = run(several.serving(0, 1), first)
    engine = several.serving(0, 1)
    results: dict[str, Result] = {request.request: Result() for request in first}
    for entry in first:
        engine.add(entry)
    for number in range(400):
        if number == 3:
            path, digest = several.policies[2]
            assert engine.load(path, version=2, digest=digest).version == 2
            engine.add(replace(request("late", [3, 4], max_tokens=9), version=2))
            results["late"] = Result()
        for event in engine.step():
            collect(results, event)
        if not engine.active:
            break
    late = results.pop("late")
    assert_same(several, results, wholes)
    alone = run(several.serving(2), [replace(request("late", [3, 4], max_tokens=9), version=2)])
    assert_same(several, {"late": late}, alone)


def collect(results: dict[str, Result], event: object) -> None:
    from tests.support.engine_contract import take

    take(results[event.request], event)  # type: ignore[attr-defined,arg-type]


def test_kv_cache_goes_on_under_its_own_version_and_no_other(several: Several) -> None:
    if KV_EXPORT not in several.serving(0).declares:
        pytest.skip("it has no door for KV caches")
    trajectory = replace(request("r", [5, 6, 7, 8], max_tokens=40), version=1)
    full = run(several.serving(1), [trajectory])["r"]
    engine = several.serving(0, 1, 2)
    engine.add(trajectory)
    tokens: list[int] = []
    for _ in range(9):
        engine.step()
    export = engine.export("r")
    assert export is not None
    assert export.kv is not None
    assert export.sampled is not None
    assert export.kv.weights == several.policies[1][1]
    tokens = [*trajectory.token_ids, *export.sampled.token_ids]
    rest = replace(
        trajectory, token_ids=tokens, sampled=len(export.sampled.token_ids), kv=export.kv
    )
    there = several.serving(0, 1)
    other = replace(rest, version=0)
    assert there.kv_error(other) == "other weights"
    assert there.kv_error(rest) is None
    assert run(there, [rest])["r"] == full.after(len(export.sampled.token_ids))


def test_version_that_is_not_resident_is_refused_and_so_is_one_too_many(several: Several) -> None:
    engine = several.serving(0, 1, most=2)
    with pytest.raises(ValueError, match="version 2 is not resident"):
        engine.add(replace(request("r", [5]), version=2))
    path, digest = several.policies[2]
    with pytest.raises(ValueError, match="2 versions are resident"):
        engine.load(path, version=2, digest=digest)
    engine.drop(0)
    engine.load(path, version=2, digest=digest)
    with pytest.raises(ValueError, match="version 0 is not resident"):
        engine.add(replace(request("r", [5]), version=0))
    engine.load(*several.policies[2][:1], version=2, digest=digest)
    engine.drop(1)
    first, first_digest = several.policies[0]
    engine.load(first, version=0, digest=first_digest)
    assert run(engine, [replace(request("r", [5], max_tokens=5), version=0)])["r"].tokens


def test_two_versions_may_have_the_same_weights(several: Several) -> None:
    engine = several.serving(1)
    path, digest = several.policies[1]
    engine.load(path, version=2, digest=digest)
    engine.drop(1)
    req = request("r", [5, 6], max_tokens=12)
    result = run(engine, [replace(req, version=2)])
    assert_same(several, result, run(several.serving(1), [replace(req, version=1)]))


class TestAdapters:
    @pytest.fixture(autouse=True)
    def only_with_weights(self, several: Several) -> None:
        if several.kind == "simulated":
            pytest.skip("it has no weights")

    def test_log_probs_are_those_of_the_merged_model(
        self, several: Several, tmp_path: Path
    ) -> None:
        base, digest = several.policies[0]
        adapter = random_adapter(base, digest, seed=8, size=0.05)
        store = make_lora(several.directory, tmp_path / "p", adapters=0).store
        publication = publish(store, adapter)
        merged = tmp_path / "merged"
        write_model_dir(
            merged, several.directory, lambda position: write_merged(base, adapter, position)
        )
        engine = several.serving(0, 1)
        engine.load(store.weights_path(publication.digest), version=2, digest=publication.digest)
        entry = replace(request("r", [5, 6, 7], max_tokens=60), version=2)
        result = run(engine, [entry])["r"]
        assert logprob_distance(merged, [5, 6, 7], result) < TOLERANCE
        assert logprob_distance(several.directory, [5, 6, 7], result) > DIFFERENT

    def test_version_zero_is_the_base_bit_for_bit_where_bits_are_promised(
        self, several: Several
    ) -> None:
        expected = several.wanted(12)
        base = [request for request in expected if request.version == 0]
        actual = run(several.serving(0, 1, 2), expected)
        if several.rounds:
            for request in base:
                result = actual[request.request]
                assert logprob_distance(several.directory, request, result) < TOLERANCE
            return
        plain = TorchEngine.open(several.directory, slots=16, context_tokens=256, threads=1)
        assert {request.request: actual[request.request] for request in base} == run(plain, base)

    def test_prefixes_are_kept_apart_by_version_and_dropped_with_it(self, several: Several) -> None:
        if several.rounds:
            pytest.skip(f"{several.kind} does not declare {PREFIX_REUSE}")
        same = request("r", [5, 6, 7] * 20, max_tokens=9)
        asked = [
            replace(same, request=f"{version}-{number}", version=version)
            for number in range(2)
            for version in range(3)
        ]
        expected = run(several.serving(0, 1, 2), asked)
        engine = several.serving(0, 1, 2, slots=1, prefix_cache_ratio=9.0)
        assert run(engine, asked) == expected
        assert engine.prompt_tokens == PromptTokens(computed=3 * 59, reused=3 * 59)
        engine.drop(1)
        path, digest = several.policies[1]
        engine.load(path, version=1, digest=digest)
        assert run(engine, asked) == expected
        assert engine.prompt_tokens == PromptTokens(computed=4 * 59, reused=8 * 59)

    def test_adapter_on_other_weights_or_of_another_rank_or_model_is_refused(
        self, several: Several, tmp_path: Path
    ) -> None:
        base, digest = several.policies[0]
        engine = several.serving(0)
        before = run(engine, [replace(request("r", [5], max_tokens=9), version=0)])
        store = make_lora(several.directory, tmp_path / "p", adapters=0).store
        for adapter, match in (
            (random_adapter(base, "ab" * 32, seed=1), "has the base weights abab"),
            (random_adapter(base, digest, seed=1, rank=2), "rank 2, not 4"),
            (random_adapter(base, digest, seed=1, layers=("embed_tokens",)), "no linear layer"),
        ):
            publication = publish(store, adapter)
            with pytest.raises(PolicyError, match=match):
                engine.load(
                    store.weights_path(publication.digest), version=1, digest=publication.digest
                )
        after = run(engine, [replace(request("r", [5], max_tokens=9), version=0)])
        assert after == before

    def test_adapter_of_some_layers_leaves_the_others_alone(
        self, several: Several, tmp_path: Path
    ) -> None:
        base, digest = several.policies[0]
        store = make_lora(several.directory, tmp_path / "p", adapters=0).store
        for layers in (("q_proj",), ("v_proj", "down_proj"), ("up_proj",)):
            adapter = random_adapter(base, digest, seed=3, layers=layers)
            publication = publish(store, adapter)
            engine = several.serving(0)
            engine.load(
                store.weights_path(publication.digest), version=1, digest=publication.digest
            )
            req = request("r", [5, 6, 7], max_tokens=30)
            result = run(engine, [replace(req, version=1), replace(req, request="b", version=0)])
            assert result["r"].logprobs != result["b"].logprobs

    def test_row_whose_adapter_overflows_harms_none_of_another_version(
        self, several: Several, tmp_path: Path
    ) -> None:
        base, digest = several.policies[0]
        store = make_lora(several.directory, tmp_path / "p", adapters=0).store
        broken = random_adapter(base, digest, seed=3, size=1e30)
        publication = publish(store, broken)
        engine = several.serving(0, 1)
        engine.load(store.weights_path(publication.digest), version=2, digest=publication.digest)
        expected = several.wanted(12)
        result = run(engine, expected)
        good = run(several.serving(0, 1, 2), expected)
        for req in expected:
            if req.version == 2:
                assert result[req.request].reason == "error"
            else:
                assert_same(
                    several,
                    {req.request: result[req.request]},
                    {req.request: good[req.request]},
                )
