"""Tests of routed experts in records."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.config.load import load_config
from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.registry import BUILT_IN as TRAINERS
from dora_pipe.consumers.learners.registry import need_learner
from dora_pipe.core.errors import ConfigError, SchemaError
from dora_pipe.producers.engines.registry import check_capabilities, check_engines
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.producers.worker.requests import VALUE_BYTES_MAX
from dora_pipe.producers.worker.sequence import TokenSequence, sequence_of
from dora_pipe.producers.worker.session import ContextTree, placed
from dora_pipe.schemas.arrow_frame import COLUMN_BYTES_MAX, FRAME_BYTES_MAX
from dora_pipe.schemas.context_tokens import choices_of, contexts_of
from dora_pipe.schemas.routes import (
    BLOCK_NUMBERS,
    GrowingRoutes,
    Routes,
    check_routes,
    need_room,
    none_of,
)
from dora_pipe.schemas.trajectory_codec import (
    TRAJECTORY,
    decode_any_progress,
    decode_trajectory,
    encode_any_progress,
    encode_trajectory,
    view_trajectory,
)
from tests.support.batches import make_trajectory, progress_chunk
from tests.support.models import make_qwen3_moe
from tests.unit.producers.test_context_tree import turn_of

NAME = "g0000000001-002"


def entries(ids: Sequence[int], *, experts: int = 8, start: int = 0) -> Routes:
    choices = np.full((len(ids) - start, 2, 2), none_of(experts), "u1")
    for index in range(max(1, start), len(ids)):
        seed = crc32(repr(list(ids[:index])).encode())
        drawn = np.random.default_rng(seed).random((2, experts)).argsort(-1)
        choices[index - start] = drawn[:, :2]
    return Routes.of(choices, experts)


def test_a_record_comes_back_with_its_experts_and_without_them_has_the_bytes_it_had() -> None:
    plain = make_trajectory(NAME)
    routed = replace(plain, routed_experts=entries(plain.token_ids))
    value = encode_trajectory(routed)[0]
    assert decode_trajectory(value).routed_experts == routed.routed_experts
    assert view_trajectory(value).routed_experts == routed.routed_experts
    assert decode_trajectory(encode_trajectory(plain)[0]).routed_experts is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda value: value.part(1), "bytes for 6 tokens"),
        (lambda value: msgspec.structs.replace(value, experts=4), "each once"),
        (lambda value: Routes.of(value.choices * 0 + 255, 8), "a sampled token without experts"),
        (lambda value: msgspec.structs.replace(value, layers=0), "no sizes of a mixture"),
    ],
)
def test_what_cannot_be_is_refused_by_the_writer(change: object, why: str) -> None:
    plain = make_trajectory(NAME)
    actual_change = change(entries(plain.token_ids))  # type: ignore[operator]
    with pytest.raises(SchemaError, match=why):
        encode_trajectory(replace(plain, routed_experts=actual_change))


def test_an_expert_that_is_named_twice_is_for_the_reader_to_refuse() -> None:
    plain = make_trajectory(NAME)
    twice = Routes.of(entries(plain.token_ids).choices * 0, 8)
    check_routes(twice, len(plain.token_ids), distinct=False)
    value = encode_trajectory(replace(plain, routed_experts=twice))[0]
    for read in (decode_trajectory, view_trajectory):
        with pytest.raises(SchemaError, match="each once"):
            read(value)


@given(st.data())
def test_what_is_refused_is_what_is_no_set_of_experts_wherever_it_stands(
    data: st.DataObject,
) -> None:
    experts = data.draw(st.sampled_from([4, 128, 129, 255, 256, 32_769, 60_000]))
    tokens, layers, per_token = (data.draw(st.integers(1, most)) for most in (6, 3, 4))
    chance = np.random.default_rng(data.draw(st.integers(0, 99)))
    choices = chance.random((tokens, layers, 4 if experts == 4 else 200)).argsort(-1)
    choices = choices[:, :, :per_token]
    for position in data.draw(st.sets(st.integers(0, tokens - 1))):
        choices[position] = none_of(experts)
    for _ in range(data.draw(st.integers(0, 2))):
        index = tuple(data.draw(st.integers(0, most - 1)) for most in choices.shape)
        choices[index] = data.draw(st.sampled_from([0, 1, 3, 4, none_of(experts)]))
    entries = [choice.tolist() for choice in choices if not (choice == none_of(experts)).all()]
    sound = all(
        len({*chosen}) == per_token and max(chosen) < experts
        for entry in entries
        for chosen in entry
    )
    with nullcontext() if sound else pytest.raises(SchemaError, match="each once"):
        check_routes(Routes.of(choices.astype(np.uint16), experts), tokens)


@pytest.mark.parametrize("position", [BLOCK_NUMBERS - 1, BLOCK_NUMBERS, 2 * BLOCK_NUMBERS + 5])
def test_many_entries_are_looked_at_to_their_last_number(position: int) -> None:
    choices = np.tile(np.arange(8, dtype="u1"), (BLOCK_NUMBERS // 3 // 8 * 7, 1, 1))
    check_routes(Routes.of(choices, 128), len(choices))
    flat = choices.reshape(-1)
    flat[position] = flat[position - 1 if position % 8 else position + 1]
    with pytest.raises(SchemaError) as caught:
        check_routes(Routes.of(choices, 128), len(choices))
    assert f"$.routed_experts[{position // 8}]" in str(
        caught.value.message + str(caught.value.path)
    )


@given(st.data())
def test_a_sequence_that_grows_has_what_came_and_nothing_else(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=20))
    full_entries, growing, length = entries(ids), GrowingRoutes(), 0
    while length < len(ids) and data.draw(st.booleans()):
        end = data.draw(st.integers(length + 1, len(ids)))
        growing.add(full_entries.part(length, end), end)
        length = end
    assert growing.known == length
    between = growing.between(0, len(ids))
    if between is not None:
        assert between.part(0, length) == full_entries.part(0, length)
        assert (between.choices[length:] == none_of(8)).all()


def test_a_request_goes_on_with_the_experts_of_its_progress_records() -> None:
    prompt, sampled = [5, 6, 7], [1, 2, 3, 4]
    full_entries = entries([*prompt, *sampled])
    chunks = []
    for start, end in ((0, 6), (6, 7)):
        progress = progress_chunk(
            start,
            sampled[max(0, start - 3) : end - 3],
            [] if start else prompt,
            routed_experts=full_entries.part(start, end),
        )
        chunks.append(decode_any_progress(encode_any_progress(progress)))
    sequence = sequence_of(chunks)
    assert isinstance(sequence, TokenSequence)
    assert sequence.routes.between(0, 7) == full_entries
    assert sequence.routes.known == 7


def wide(tokens: int) -> Routes:
    firsts = np.random.default_rng(1).integers(0, 256, (tokens, 61, 1), dtype=np.uint16)
    choices = (firsts + np.arange(8, dtype=np.uint16) * 31) % 256
    choices[0] = none_of(256)
    return Routes.of(choices, 256)


def test_a_long_response_of_a_wide_mixture_has_a_record() -> None:
    tokens = 17_500
    routes = wide(tokens)
    assert len(routes.data) == tokens * 976 > COLUMN_BYTES_MAX
    sampled = [7] * (tokens - 3)
    trajectory = replace(make_trajectory(NAME, sampled=sampled), routed_experts=routes)
    read = view_trajectory(encode_trajectory(trajectory)[0])
    assert read.routed_experts == routes
    assert VALUE_BYTES_MAX == FRAME_BYTES_MAX, "a worker gives up what no reader opens"
    damaged = np.array(routes.choices)
    damaged[-1, -1, 0] = damaged[-1, -1, 1]
    twice = replace(trajectory, routed_experts=Routes.of(damaged, 256))
    with pytest.raises(SchemaError, match="each once") as caught:
        view_trajectory(encode_trajectory(twice)[0])
    assert caught.value.path == f"$.routed_experts[{tokens - 1}]"


def test_contexts_whose_experts_no_record_can_name_are_refused_before_they_begin(
    tmp_path: Path,
) -> None:
    need_room(137_518, 976)
    with pytest.raises(ConfigError, match=r"200000 tokens are 195200000 bytes") as caught:
        need_room(200_000, 976)
    assert caught.value.hint == "workers.max_model_len = 137518 or less"
    make_qwen3_moe(tmp_path, context_tokens=1 << 26)
    with pytest.raises(
        ConfigError, match=r"sampling\.return_routed_experts: the experts of 67108864 tokens"
    ):
        TorchEngine.open(tmp_path, slots=1, context_tokens=1 << 26, threads=1, routes=True)


def test_experts_above_the_bound_are_neither_written_nor_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = make_trajectory(NAME, sampled=[7] * 97)
    record = replace(plain, routed_experts=wide(100))
    value = encode_trajectory(record)[0]
    monkeypatch.setitem(TRAJECTORY.routed._wide, "routed_experts", 90_000)
    for attempt in (lambda: encode_trajectory(record), lambda: decode_trajectory(value)):
        with pytest.raises(SchemaError, match=r"column of 976.. bytes is above 90000") as caught:
            attempt()
        assert caught.value.path == "$.routed_experts"


def test_every_context_has_the_experts_of_all_its_tokens() -> None:
    tree = ContextTree()
    calls = [
        ([1, 2, 3], [4, 5]),
        ([1, 2, 3, 4, 5, 6], [7]),
        ([1, 2, 3, 4, 9], [8, 8]),
        ([30], [31]),
        ([1, 2, 3, 4, 9, 8, 8, 2], [3]),
    ]
    for prompt, sampled in calls:
        index = tree.place(prompt)
        routes = entries([*prompt, *sampled], start=len(prompt) - len(index.given_ids))
        turn = placed(replace(turn_of(tree, prompt, sampled), routed_experts=routes), index)
        assert tree.add(turn) == ""
    record = tree.record()
    sequence, plain = record.sequence, make_trajectory(NAME)
    result = replace(
        plain,
        token_ids=sequence.token_ids,
        logprobs=sequence.logprobs,
        sampler_logprobs=sequence.sampler_logprobs,
        loss_mask=sequence.loss_mask,
        segments=sequence.segments,
        routed_experts=sequence.routes.between(0, len(sequence)),
        meta=msgspec.structs.replace(plain.meta, contexts=record.contexts),
    )
    read = view_trajectory(encode_trajectory(result)[0])
    assert len(record.contexts) == 2
    for tokens in contexts_of(read):
        choices = choices_of(read, tokens.number)
        assert choices is not None
        assert np.array_equal(choices, entries(tokens.token_ids.tolist()).choices)


def config(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "model").mkdir(exist_ok=True)
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nname = "r"\nsteps = 1\n[model]\npath = "model"\n[task]\nkind = "arithmetic"\n'
    )
    return load_config(file, ["sampling.return_routed_experts=true", *overrides])


OWN_TRAINER = replace(TRAINERS["torch"], routes=False)


def test_who_cannot_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"sampling\.return_routed_experts: requires a single version"
    ):
        config(tmp_path, "staleness.partial_rollout=true")
    with pytest.raises(
        ConfigError, match=r"sampling\.return_routed_experts: engine simulated does not report"
    ):
        check_capabilities(SimulatedEngine(slots=1, context_tokens=8), config(tmp_path))
    graphs = config(tmp_path, "workers.vllm.enforce_eager=false")
    with pytest.raises(
        ConfigError, match=r"sampling\.return_routed_experts: vLLM's compiled graphs report no"
    ):
        check_engines(graphs, ["vllm"])
    check_engines(graphs, ["torch"])
    check_engines(config(tmp_path), ["torch", "vllm"])
    own = config(tmp_path, f"trainer.kind={__name__}:OWN_TRAINER")
    with pytest.raises(
        ConfigError, match=r"sampling\.return_routed_experts: trainer `.*OWN_TRAINER` does not"
    ):
        need_learner(own)
