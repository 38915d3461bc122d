"""The bench of turns: prefilled tokens are those that can be counted by hand."""

from __future__ import annotations

import pytest

from dora_pipe.bench.engine_turns import (
    PROMPT_TOKENS,
    SAID_TOKENS,
    SAMPLED_TOKENS,
    SIBLINGS,
    bench_turns,
)
from dora_pipe.core.errors import UsageError


def test_every_turn_prefills_what_was_said_since_and_siblings_their_prompt_once() -> None:
    first, second, third, whole = bench_turns([4], 3, episodes_per_row=4, passes=1)
    count, prompt, grown = 16, PROMPT_TOKENS - 1, SAMPLED_TOKENS + SAID_TOKENS
    assert [one.turn for one in (first, second, third, whole)] == [1, 2, 3, 0]
    assert first.plain_prefilled == count * prompt
    assert first.prefilled == count // SIBLINGS * prompt
    assert second.plain_prefilled == count * (prompt + grown)
    assert third.plain_prefilled == count * (prompt + 2 * grown)
    # The last sampled token was nobody's input, the last of the prompt is the step's.
    assert second.prefilled == third.prefilled == count * SAID_TOKENS
    assert whole.prefilled == sum(one.prefilled for one in (first, second, third))
    assert whole.saved == pytest.approx(1 - whole.prefilled / whole.plain_prefilled, abs=1e-3)
    assert min(whole.wall_ratio, whole.cpu_ratio) > 0


def test_turns_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError):
        bench_turns([4], 0)
