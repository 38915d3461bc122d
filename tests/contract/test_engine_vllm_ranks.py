"""Tests of a vLLM server with two ranks: results equal those of one rank.

The file name sorts after the files that share a server, which its own server would evict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.vllm import core as vllm_core
from dora_pipe.producers.engines.vllm import serve
from dora_pipe.producers.engines.vllm.process import ServerProcess
from tests.contract.test_engine_vllm import (
    test_greedy_tokens_are_those_of_transformers,
    test_logprobs_are_those_of_transformers,
    test_no_block_of_older_weights_is_hit_after_a_load,
    test_weights_of_another_shape_or_digest_are_refused_and_the_old_ones_stay,
)
from tests.support import models
from tests.support.device import DTYPE, MODEL_DISTANCE
from tests.support.engine_contract import Subject, assert_all_alike, request, requests, run
from tests.support.engine_routes import routed_run, same_experts
from tests.support.vllm_servers import (
    SETTINGS,
    family,
    need_vllm,
    open_shared,
    running_server,
    server_subject,
)

__all__ = [
    "test_greedy_tokens_are_those_of_transformers",
    "test_logprobs_are_those_of_transformers",
    "test_no_block_of_older_weights_is_hit_after_a_load",
    "test_weights_of_another_shape_or_digest_are_refused_and_the_old_ones_stay",
]

RANKS = 2

DEALT: dict[str, dict[str, Any]] = {
    "heads": {"tensor_parallel_size": RANKS},
    "layers": {"pipeline_parallel_size": RANKS},
}


@pytest.fixture(scope="module", params=DEALT)
def dealt(request: pytest.FixtureRequest) -> dict[str, Any]:
    return DEALT[request.param]


@pytest.fixture(scope="module")
def vllm(dealt: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    need_vllm()
    with server_subject(tmp_path_factory.mktemp("vllm-ranks"), **dealt) as subject:
        yield subject


def test_tokens_of_two_ranks_are_those_of_one(
    vllm: Subject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    all_requests = requests(vllm, 24, seed=11)
    result = run(vllm.open(slots=8), all_requests)
    with server_subject(tmp_path_factory.mktemp("vllm-one")) as subject:
        assert subject.policies[0][1] == vllm.policies[0][1]
        expected = run(subject.open(slots=8), all_requests)
    assert_all_alike(replace(vllm, rounding=max(1e-4, vllm.rounding)), result, expected)


def test_ranks_share_the_experts_of_a_mixture(tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.support.torch_engines import logprob_distance

    need_vllm()
    folder = tmp_path_factory.mktemp("vllm-mixture")
    asked = request("r", [1, *range(20, 60)], max_tokens=20, routes=True)
    with server_subject(folder, "qwen3_moe", tensor_parallel_size=RANKS) as mixture:
        all_requests = requests(mixture, 6, seed=5)
        result = run(mixture.open(slots=8), all_requests)
        engine = open_shared(
            slots=2, context_tokens=128, routes=True, tensor_parallel_size=RANKS, kind="qwen3_moe"
        )
        weights, digest = mixture.policies[0]
        engine.load(weights, version=0, digest=digest)
        reply = routed_run(engine, [asked])["r"]
    distances = [
        logprob_distance(folder / "seed0", request, result[request.request])
        for request in all_requests
    ]
    assert max(distances) < MODEL_DISTANCE[DTYPE]
    assert same_experts(folder / "seed0", [*asked.token_ids, *reply[0]], reply[1])


def test_each_rank_has_a_process_of_the_servers_session(
    dealt: dict[str, Any], vllm: Subject
) -> None:
    server, _ = running_server(**dealt)
    assert len(family(server.pid)) >= 2 + RANKS  # the front end, the engine core, the ranks


UNFIT = {
    r"4 attention heads .* 3": ("--tensor-parallel-size", "3"),
    r"2 layers are too few for 3": ("--pipeline-parallel-size", "3"),
    r"needs a model with experts": (
        *("--tensor-parallel-size", "2"),
        *("--args", '{"enable_expert_parallel": true}'),
    ),
}


@pytest.mark.parametrize("text", UNFIT)
def test_what_ranks_cannot_share_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    need_vllm()
    vllm_core.prepare(threads=1)
    words = [
        str(models.make_qwen2(tmp_path / "model")),
        "--max-num-seqs",
        "4",
        "--max-model-len",
        "256",
    ]
    asked = serve._parser().parse_args([*words, *UNFIT[text]])
    with pytest.raises(PolicyError, match=text):
        serve._arguments(asked)


def test_who_starts_a_server_hears_that_line(tmp_path: Path) -> None:
    need_vllm()
    model = models.make_qwen2(tmp_path / "model")
    with pytest.raises(PolicyError, match=r"4 attention heads .* 3"):
        settings = msgspec.structs.replace(SETTINGS, tensor_parallel_size=3)
        ServerProcess.start(model, settings, slots=4, context_tokens=256, threads=1)
