"""The bench of moves measures what it says: both ways give the same next token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dora_pipe.bench.moves import MoveFigure, bench_moves, move_figures
from dora_pipe.bench.moves_child import RUNNING_TOKENS, TOKENS_MAX
from dora_pipe.bench.moves_engine import LLAMA_25M
from dora_pipe.core.errors import UsageError

pytest.importorskip("torch")


def test_figures_hold_both_ways_and_leave_no_file(tmp_path: Path) -> None:
    figures = list(move_figures(tmp_path, "demo", (12, 40), repeats=1, prefills=1))
    assert [(one.way, one.tokens) for one in figures] == [
        ("files", 12),
        ("flight", 12),
        ("files", 40),
        ("flight", 40),
    ]
    for one in figures:
        assert isinstance(one, MoveFigure)
        arrays = 2 * 2 * 4 * (one.tokens - 1) * 32 * 4  # layers, k and v, heads, head_dim, float32
        assert arrays < one.bytes < arrays + 1024
        parts = (one.export_ms, one.put_ms, one.fetch_ms, one.import_ms)
        assert min(parts) > 0
        assert one.moved_ms > sum(parts) - 0.05  # and what lies between the two processes
        assert one.ratio == pytest.approx(one.prefill_ms / one.moved_ms, rel=0.05)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_model_has_about_25_million_parameters() -> None:
    parameters = sum(int(np.prod(shape)) for shape in LLAMA_25M.tensors().values())
    assert 25e6 < parameters < 26e6


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model"):
        list(bench_moves(tmp_path, ["gpt"]))
    for tokens in (RUNNING_TOKENS, TOKENS_MAX + 1):
        with pytest.raises(UsageError, match="tokens"):
            list(move_figures(tmp_path, "demo", [tokens]))
