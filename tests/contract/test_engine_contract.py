"""The contract of engines, asked of each of them; what an engine does not declare is not asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.producers.engines.engine import BATCH_INVARIANT, PREFILL_EXACT, Engine, Kv
from dora_pipe.producers.engines.simulated import VOCABULARY, SimulatedEngine
from dora_pipe.producers.worker.kv_handover import KvHandover, KvLabel
from dora_pipe.schemas.policy import Blob
from dora_pipe.store.transfers.files import MappedFiles
from tests.support import engine_moves as moves
from tests.support import engine_prefixes as prefixes
from tests.support.engine_contract import Decode, Subject
from tests.support.engine_moves import CHECKS
from tests.support.tiers import more
from tests.support.worker import VirtualClock

SUBJECTS = (
    *("simulated", "llama_gqa", *more(["qwen2", "glm4_moe"])),
    *("vllm", "vllm of two ranks", "vllm of a mixture"),
)


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "simulated":
        yield _simulated(folder)
    elif request.param.startswith("vllm"):
        from tests.support.vllm_servers import need_vllm, server_subject

        need_vllm()
        kind = "qwen3_moe" if request.param.endswith("mixture") else "qwen2"
        ranks = 2 if request.param.endswith("ranks") else 1
        with server_subject(folder, kind, tensor_parallel_size=ranks) as opened:
            yield opened
    else:
        from tests.support.torch_engines import torch_subject

        yield torch_subject(request.param, folder)


def _simulated(folder: Path) -> Subject:
    first, second = ((folder / name, name * 64) for name in "ab")

    def open_engine(
        *, slots: int, context_tokens: int = 256, decode: Decode | None = None
    ) -> Engine:
        engine = SimulatedEngine(slots=slots, context_tokens=context_tokens, decode=decode)
        engine.load(first[0], version=0, digest=first[1])
        return engine

    policies = (first, second)
    return Subject(
        name="simulated", open=open_engine, vocabulary=VOCABULARY, policies=policies, samples=False
    )


@pytest.mark.parametrize("check", CHECKS)
def test_engine_keeps_what_it_declares(subject: Subject, check: str) -> None:
    CHECKS[check](subject)


@pytest.mark.parametrize("check", prefixes.CHECKS)
def test_engine_that_keeps_prefixes(subject: Subject, check: str) -> None:
    prefixes.CHECKS[check](subject)


@pytest.mark.parametrize("examples", [3, *more([20])])
def test_kept_prefixes_change_no_bit_of_random_episodes(subject: Subject, examples: int) -> None:
    open_keeping = prefixes.opens_keeping(subject)
    plain = subject.open(slots=4)
    keeping = [open_keeping(slots=4, prefix_cache_ratio=room) for room in (2.0, 0.3)]

    @settings(max_examples=examples, deadline=None)
    @given(st.integers(0, 2**32))
    def play(seed: int) -> None:
        for engine in keeping:
            prefixes.check_kept_prefixes_change_no_bit(subject, plain, engine, seed)

    play()


def test_cache_that_goes_through_a_file_is_the_cache(subject: Subject, tmp_path: Path) -> None:
    handover = KvHandover(MappedFiles(tmp_path, clock=VirtualClock()))
    label = KvLabel(trajectory="t", prefix="p")

    def carry(kv: Kv) -> Kv | None:
        blob = handover.put(label, kv)
        assert isinstance(blob, Blob)
        fetch = handover.fetch(label, blob)
        handover.drop(blob)  # it is mapped, and read when its request has a slot
        assert isinstance(fetch, Kv)
        return fetch

    moves.check_a_request_moves_again_and_again(subject, carry)
    if BATCH_INVARIANT in subject.open(slots=1).declares:
        moves.check_moved_requests_end_as_if_they_had_stayed(subject, carry, cuts=(7,))
    assert list(tmp_path.iterdir()) == []


def test_request_whose_cache_is_lost_on_its_way_is_prefilled(subject: Subject) -> None:
    if PREFILL_EXACT not in subject.open(slots=1).declares:
        pytest.skip(f"{subject.name} does not declare {PREFILL_EXACT}")
    moves.check_moved_requests_end_as_if_they_had_stayed(subject, lambda kv: None, cuts=(7,))
