"""What a vLLM server can get wrong: all that vLLM in process can, and its doors.

The tests of vLLM in process that ask no more than the port and the model are asked again here.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dora_pipe.core.errors import ConfigError, ResourceError
from dora_pipe.producers.engines.vllm.http import Address, call
from dora_pipe.producers.engines.vllm.server import VllmServerEngine
from tests.contract.test_engine_vllm import (
    test_another_order_of_min_p_and_top_p_is_refused,
    test_draws_follow_the_distribution,
    test_greedy_tokens_are_those_of_transformers,
    test_logprobs_are_those_of_transformers,
    test_no_block_of_older_weights_is_hit_after_a_load,
    test_sampler_logprobs_are_of_the_distribution_that_was_drawn_from,
    test_weights_alone_keep_blocks_apart_where_the_cache_is_not_emptied,
    test_weights_of_another_shape_or_digest_are_refused_and_the_old_ones_stay,
)
from tests.support.adapters import RANK
from tests.support.engine_contract import Subject, assert_all_alike, requests, run
from tests.support.vllm_engines import need_vllm, vllm_subject
from tests.support.vllm_servers import running_server, server_subject

__all__ = [
    "test_another_order_of_min_p_and_top_p_is_refused",
    "test_draws_follow_the_distribution",
    "test_greedy_tokens_are_those_of_transformers",
    "test_logprobs_are_those_of_transformers",
    "test_no_block_of_older_weights_is_hit_after_a_load",
    "test_sampler_logprobs_are_of_the_distribution_that_was_drawn_from",
    "test_weights_alone_keep_blocks_apart_where_the_cache_is_not_emptied",
    "test_weights_of_another_shape_or_digest_are_refused_and_the_old_ones_stay",
]

DOORS = ("/health", "/v1/models", "/collective_rpc", "/update_weights", "/weight_info", "/metrics")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """The server, under the name by which the tests of vLLM in process ask for theirs."""
    need_vllm()
    with server_subject(tmp_path_factory.mktemp("vllm-server")) as subject:
        yield subject


def test_tokens_are_those_of_vllm_in_process(
    vllm: Subject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted = requests(vllm, 24, seed=11)
    found = run(vllm.open(slots=8), wanted)
    with vllm_subject(tmp_path_factory.mktemp("vllm")) as other:
        assert other.policies[0][1] == vllm.policies[0][1]
        expected = run(other.open(slots=8), wanted)
    assert_all_alike(replace(vllm, rounding=max(1e-4, vllm.rounding)), found, expected)


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
        VllmServerEngine(model, slots=2, context_tokens=64, address=server.address, lora_rank=4)
    assert raised.value.hint is not None and "--lora-rank 4" in raised.value.hint


def test_server_listens_on_this_machine_alone(vllm: Subject) -> None:
    server, _ = running_server()
    outside = {str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None)}
    for host in outside - {"127.0.0.1", "127.0.1.1", "::1"}:
        with pytest.raises(OSError, match=r"\w"):
            socket.create_connection((host, server.address.port), 2.0).close()
