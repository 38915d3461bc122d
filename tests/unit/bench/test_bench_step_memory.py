"""`bench memory` measures what it says."""

import pytest

from dora_pipe.bench.adapter_memory import bench_adapter_memory
from dora_pipe.bench.step_memory import MemoryCase, bench_step_memory, memory_cases


def test_head_in_chunks_takes_less_than_its_logits() -> None:
    cases = [
        MemoryCase(what="head", tokens=512, vocabulary=100_000, width=16, head_chunk_tokens=chunk)
        for chunk in (16, 0)
    ]
    cut, whole = bench_step_memory(cases)
    logits_mb = 512 * 100_000 * 4 / 1e6
    assert whole.peak_mb > 2 * logits_mb
    assert cut.peak_mb < logits_mb / 2


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
