"""What `doctor --model` proposes makes a run fit, and is a configuration that a run takes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.cli.memory import estimate
from dora_pipe.config.checks import problems_of
from dora_pipe.launch.memory_estimate import Gpus, slots_that_fit, trainer_bytes, worker_parts
from dora_pipe.launch.memory_fit import (
    parallel_keys,
    trainer_keys,
    with_keys,
    worker_keys,
    zero_ways,
)
from tests.support.model_shapes import BILLIONS, NETWORKS, run, shape_of

COSTS_TIME = {
    f"trainer.{key}"
    for key in (
        "head_chunk_tokens",
        "mlp_chunk_tokens",
        "gradient_checkpointing",
        "micro_batch_tokens",
    )
}


@given(
    gigabytes=st.integers(1, 160),
    count=st.integers(1, 64),
    context=st.sampled_from([512, 8192]),
    chunk=st.sampled_from(["auto", 0]),
)
@settings(max_examples=15, deadline=None)
def test_keys_that_are_named_make_it_fit_and_none_costs_time_for_nothing(
    gigabytes: int, count: int, context: int, chunk: Any
) -> None:
    config = run(workers__context_tokens=context, trainer__head_chunk_tokens=chunk)
    room = gigabytes * 10**9

    def taken(keys: dict[str, Any]) -> int:
        return trainer_bytes(BILLIONS, with_keys(config, keys))

    keys = trainer_keys(BILLIONS, config, room, count)
    if keys is None:
        assert taken({}) > room
        return
    assert taken(keys) <= room
    for one in keys.keys() & COSTS_TIME:
        assert taken({key: value for key, value in keys.items() if key != one}) > room


@given(gigabytes=st.integers(1, 200), context=st.integers(512, 16_000))
@settings(max_examples=40, deadline=None)
def test_a_worker_has_as_many_slots_as_fit(gigabytes: int, context: int) -> None:
    config, room = run(workers__context_tokens=context), gigabytes * 10**9

    def taken(keys: dict[str, Any]) -> int:
        return sum(one.bytes for one in worker_parts(BILLIONS, with_keys(config, keys)))

    slots = slots_that_fit(BILLIONS, config, room)
    assert slots == 0 or taken({"workers.slots": slots}) <= room
    assert taken({"workers.slots": slots + 1}) > room
    keys = worker_keys(BILLIONS, config, room)
    assert keys is None or taken(keys) <= room


@pytest.mark.parametrize(
    ("name", "engine"), [("deepseek", "too"), ("qwen3 mixture", "too"), ("mixtral", "does not")]
)
def test_a_mixture_is_said_to_be_taken_by_those_that_take_it(name: str, engine: str) -> None:
    found = estimate(shape_of(NETWORKS[name]), run(), None)
    (said,) = [one for one in found.notes if "mixture" in one]
    assert said.endswith(f"both trainers and vLLM take it, the own engine {engine}")


def test_a_worker_that_no_gpu_holds_is_given_several() -> None:
    found = estimate(BILLIONS, run(), Gpus(8, 6 * 10**9))
    assert not found.good and not found.misfits
    assert found.keys["workers.engine"] == "vllm-server"
    many, count = found.keys["workers.vllm.tensor_parallel"], found.keys.get("workers.count", 2)
    assert many in (2, 4) and found.keys["workers.gpus"] == list(range(8 - many * count, 8))
    changed = with_keys(run(), found.keys)
    share = sum(one.bytes for one in worker_parts(BILLIONS, changed))
    assert share <= Gpus(8, 6 * 10**9).usable
    assert not list(problems_of(changed))
    assert estimate(BILLIONS, changed, Gpus(8, 6 * 10**9)).good


def test_a_worker_whose_heads_cannot_be_dealt_has_its_layers_dealt() -> None:
    odd = shape_of(NETWORKS["llama"], num_attention_heads=3, num_key_value_heads=3)
    found = parallel_keys(odd, run(), Gpus(3, 10**9))
    assert found is not None and "workers.vllm.tensor_parallel" not in found
    assert found["workers.vllm.pipeline_parallel"] == 2
    changed = with_keys(run(), found)
    assert changed.workers.vllm.gpus == 2 and not list(problems_of(changed))
    routes = run(sampling__routes=True)  # No process of a pipeline knows all experts of a token.
    assert parallel_keys(odd, routes, Gpus(3, 10**9)) is None


def test_layers_are_dealt_where_heads_of_keys_cannot_be() -> None:
    # 12 heads would be dealt to 3 and to 6, of 4 heads of keys and values; 2 and 4 are too few.
    sizes: dict[str, Any] = dict(num_attention_heads=12, num_key_value_heads=4, num_hidden_layers=6)
    odd = shape_of(NETWORKS["llama"], vocab_size=10**6, hidden_size=960, **sizes)
    whole = run(workers__vllm={"dtype": "bfloat16"}, workers__slots=8)
    room = sum(one.bytes for one in worker_parts(odd, whole))
    four = with_keys(whole, {"workers.vllm.tensor_parallel": 4})
    usable = sum(one.bytes for one in worker_parts(odd, four))
    assert usable < room
    found = parallel_keys(odd, whole, Gpus(9, int(usable / 0.9) - 10**7))
    assert found is not None
    assert found["workers.vllm.tensor_parallel"] * found["workers.vllm.pipeline_parallel"] in (6, 8)


def test_a_stage_with_an_embedding_is_the_largest() -> None:
    def weights(**vllm: Any) -> int:
        parts = worker_parts(
            BILLIONS,
            run(workers__engine="vllm-server", workers__vllm={"dtype": "bfloat16", **vllm}),
        )
        return next(one.bytes for one in parts if one.what.startswith("weights"))

    embedding = BILLIONS.vocabulary * BILLIONS.hidden
    body = BILLIONS.parameters - embedding  # It is tied: the first and the last stage have it.
    assert weights(pipeline_parallel=2) == 2 * (body // 2 + embedding)
    assert weights(pipeline_parallel=2, tensor_parallel=2) == body // 2 + embedding
    assert weights(pipeline_parallel=7) == 2 * (body * 6 // 36 + embedding)
    assert weights(tensor_parallel=4) == BILLIONS.parameters // 2


def test_servers_that_run_already_are_left_as_they_are() -> None:
    served = run(workers__engine="vllm-server", workers__vllm={"addresses": ["http://a:1"] * 2})
    assert parallel_keys(BILLIONS, served, Gpus(8, 6 * 10**9)) is None


@given(
    gigabytes=st.integers(8, 160),
    count=st.integers(1, 64),
    chunk=st.sampled_from(["auto", 64]),
    optimizer=st.sampled_from(["adamw", "muon"]),
)
@settings(max_examples=15, deadline=None)
def test_what_is_proposed_is_a_configuration_that_a_run_takes(
    gigabytes: int, count: int, chunk: Any, optimizer: str
) -> None:
    config = run(trainer__mlp_chunk_tokens=chunk, trainer__optimizer=optimizer)
    found = estimate(BILLIONS, config, Gpus(count, gigabytes * 10**9))
    assert not list(problems_of(with_keys(config, found.keys)))


def test_inputs_of_layers_leave_the_gpu_where_nothing_else_makes_a_long_context_fit() -> None:
    keys: dict[str, Any] = {"workers__context_tokens": 2**17, "trainer__micro_batch_tokens": 2**17}
    config = run(**keys, lora__rank=16, trainer__dtype="bfloat16")
    found = trainer_keys(BILLIONS, config, 40 * 10**9, 1)
    assert found == {"trainer.gradient_checkpointing": True, "trainer.activation_offload": True}


def test_files_that_are_quantized_are_refused_by_name() -> None:
    shape = shape_of(NETWORKS["llama"], quantization_config={"quant_method": "fp8"})
    found = estimate(shape, run(), Gpus(1, 80 * 10**9))
    assert not found.good
    assert found.misfits == [
        "the files are quantized (quantization_config): a run begins with float32 or bfloat16 ones"
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_way_is_offered_twice(dtype: str) -> None:
    ways = zero_ways(run(trainer__dtype=dtype), 14)
    assert len(ways) == len({tuple(one.items()) for one in ways})


def test_more_ranks_than_gpus_do_not_fit() -> None:
    config = run(trainer__kind="deepspeed", trainer__ranks=8)
    found = estimate(shape_of(NETWORKS["llama"]), config, Gpus(8, 80 * 10**9))
    assert not found.good
    assert found.keys == {"workers.gpus": [6, 7], "trainer.ranks": 6}


def test_everything_fits_without_a_key_where_there_is_room() -> None:
    found = estimate(shape_of(NETWORKS["llama"]), run(), Gpus(1, 80 * 10**9))
    assert found.good and not found.keys and not found.misfits
