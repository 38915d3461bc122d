"""Tests of `bench memory`.

Small sizes are counted by torch's allocator: resident memory depends on other processes.
"""

from __future__ import annotations

from collections.abc import Callable

from dora_pipe.bench.step_memory import MemoryCase, bench_step_memory, prepared

TOKENS, HEAD_VOCABULARY = 512, 100_000
LOGITS_MB = TOKENS * HEAD_VOCABULARY * 4 / 1e6


def head(chunk_tokens: int) -> MemoryCase:
    return MemoryCase(
        what="head",
        tokens=TOKENS,
        vocabulary=HEAD_VOCABULARY,
        width=16,
        head_chunk_tokens=chunk_tokens,
    )


def allocated_mb(compute: Callable[[], object]) -> tuple[float, float]:
    from torch.autograd.profiler import profile

    with profile(profile_memory=True) as profiled:
        compute()
    assert profiled.kineto_results is not None
    moves = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for move in sorted(moves, key=lambda value: value.start_ns()):
        held += move.nbytes()
        most = max(most, held)
    return held / 1e6, most / 1e6


def most_mb(case: MemoryCase) -> float:
    with prepared(case, "cpu") as compute:
        return allocated_mb(compute)[1]


def test_head_in_chunks_takes_less_than_its_logits() -> None:
    cut, full = (most_mb(head(chunk)) for chunk in (16, 0))
    assert full > 2 * LOGITS_MB
    assert cut < LOGITS_MB / 4


def test_the_peak_of_a_process_holds_what_is_allocated() -> None:
    (figure,) = bench_step_memory([head(0)])
    assert figure.peak_mb > 2 * LOGITS_MB
    assert figure.process_mb > figure.peak_mb
