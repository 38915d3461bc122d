"""The contract of engines, asked of each of them; what an engine does not declare is not asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.producers.engines.port import (
    BATCH_INVARIANT,
    COUNTER_SAMPLING,
    PREFILL_EXACT,
    Engine,
)
from dora_pipe.producers.engines.simulated import VOCABULARY, SimulatedEngine
from tests.support import engine_contract as contract
from tests.support.engine_contract import Decode, Subject
from tests.support.engine_temperature import check_logprobs_are_at_the_temperature_asked_for

SUBJECTS = ("simulated", "qwen2", "llama_gqa", "vllm", "vllm-server")


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """Each engine with two policies, the first one loaded."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "simulated":
        yield _simulated(folder)
    elif request.param in ("vllm", "vllm-server"):
        from tests.support.vllm_engines import need_vllm, vllm_subject
        from tests.support.vllm_servers import server_subject

        need_vllm()
        make = vllm_subject if request.param == "vllm" else server_subject
        with make(folder) as opened:
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
        name="simulated",
        open=open_engine,
        vocabulary=VOCABULARY,
        policies=policies,
        samples=False,
    )


def test_requests_run_to_their_end(subject: Subject) -> None:
    contract.check_requests_run_to_their_end(subject)


def test_an_engine_says_what_it_is(subject: Subject) -> None:
    contract.check_declarations_are_known(subject)


def test_tokens_are_emitted_as_asked(subject: Subject) -> None:
    contract.check_tokens_are_emitted_as_asked(subject)


def test_logprobs_are_at_the_temperature_asked_for(subject: Subject) -> None:
    check_logprobs_are_at_the_temperature_asked_for(subject)


def test_what_cannot_be_taken_is_refused_and_changes_nothing(subject: Subject) -> None:
    contract.check_refusals(subject)


def test_a_cancelled_request_leaves_without_an_event(subject: Subject) -> None:
    contract.check_cancel(subject)


def test_a_stop_token_ends_a_request_and_is_part_of_it(subject: Subject) -> None:
    contract.check_stop_ids(subject)


def test_a_stop_string_ends_a_request_with_the_token_that_completes_it(subject: Subject) -> None:
    contract.check_stop_strings(subject, _decode)


def test_a_sequence_ends_with_the_context(subject: Subject) -> None:
    contract.check_context_end(subject)


def test_seed_and_position_decide_the_token(subject: Subject) -> None:
    _ask(subject, COUNTER_SAMPLING)
    contract.check_counter_sampling(subject)


def test_every_bit_is_the_same_alone_and_in_company(subject: Subject) -> None:
    _ask(subject, BATCH_INVARIANT)
    contract.check_batch_invariance(subject)


def test_going_on_from_a_prefix_gives_the_same_bits(subject: Subject) -> None:
    _ask(subject, PREFILL_EXACT)
    contract.check_exact_prefill(subject)


def test_weights_change_between_requests_only(subject: Subject) -> None:
    contract.check_load(subject)


def test_active_rows_and_their_keys_are_counted(subject: Subject) -> None:
    contract.check_accounting(subject)


def _decode(tokens: Sequence[int]) -> str:
    """Text as the byte tokenizer's: three ids for special tokens, then one per byte."""
    return bytes(token - 3 for token in tokens if 3 <= token < 259).decode(errors="replace")


def _ask(subject: Subject, what: str) -> None:
    engine: Any = subject.open(slots=1)
    if what not in engine.declares:
        pytest.skip(f"{subject.name} does not declare {what}")
