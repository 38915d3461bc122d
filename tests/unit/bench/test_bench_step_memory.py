"""`bench memory` measures what it says.

Method: what a process holds also depends on the pages of libraries that a busy machine has taken
from it. What has to be small is therefore counted where torch allocates it, the same every time.
"""

from __future__ import annotations

import pytest

from dora_pipe.bench.adapter_memory import bench_adapter_memory
from dora_pipe.bench.step_memory import MemoryCase, bench_step_memory, memory_cases, prepared

TOKENS, VOCABULARY = 512, 100_000
LOGITS_MB = TOKENS * VOCABULARY * 4 / 1e6


def head(chunk_tokens: int) -> MemoryCase:
    """A head whose logits are most of what it takes."""
    return MemoryCase(
        what="head", tokens=TOKENS, vocabulary=VOCABULARY, width=16, head_chunk_tokens=chunk_tokens
    )


def allocated_mb(case: MemoryCase) -> float:
    """Most that its tensors have at a time, by torch's own account of its allocator."""
    from torch.autograd.profiler import profile

    with prepared(case, "cpu") as compute, profile(profile_memory=True) as profiled:
        compute()
    assert profiled.kineto_results is not None
    moves = [one for one in profiled.kineto_results.events() if one.name() == "[memory]"]
    held = most = 0
    for one in sorted(moves, key=lambda one: one.start_ns()):
        held += one.nbytes()
        most = max(most, held)
    return most / 1e6


def test_head_in_chunks_takes_less_than_its_logits() -> None:
    cut, whole = (allocated_mb(head(chunk)) for chunk in (16, 0))
    assert whole > 2 * LOGITS_MB
    assert cut < LOGITS_MB / 4


def test_the_peak_of_a_process_holds_what_is_allocated() -> None:
    (whole,) = bench_step_memory([head(0)])
    assert whole.peak_mb > 2 * LOGITS_MB
    assert whole.process_mb > whole.peak_mb


def test_cases_are_the_head_and_the_step_that_are_asked_for() -> None:
    assert [one.tokens for one in memory_cases(1600, 1000, 0)] == [1600, 100, 100]
    step = memory_cases(1600, 1000, 800)[3:]
    assert [(one.gradient_checkpointing, one.head_chunk_tokens) for one in step] == [
        (True, "auto"),
        (False, "auto"),
        (False, 0),
    ]
    (least,) = memory_cases(0, 1000, 800, least=True)
    assert (least.what, least.gradient_checkpointing) == ("step", True)


@pytest.mark.slow
def test_base_in_bfloat16_takes_half_of_what_one_in_float32_does_and_is_never_more() -> None:
    wide, narrow, computed_narrow = bench_adapter_memory(512, 64)
    parameters_mb = wide.parameters / 1e6
    # Products in bfloat16 have buffers of their own, some 20 MB.
    for figure, own_mb in ((narrow, 0), (computed_narrow, 25)):
        assert wide.held_mb - figure.held_mb > 1.7 * parameters_mb - own_mb
        assert wide.made_mb - figure.made_mb > parameters_mb
    # A pass widens one layer's matrix at a time, the head's the largest.
    assert narrow.peak_mb - wide.peak_mb < 1.5 * 4 * 16_384 * 512 / 1e6
    assert (narrow.base, narrow.computed) == ("bfloat16", "float32")
