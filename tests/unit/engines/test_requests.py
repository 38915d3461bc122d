"""Tests of shared request handling: stop strings, held tokens, seeds, sizes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.engine import (
    EngineRequest,
    RequestFinished,
    SamplingParams,
    TokensSampled,
)
from dora_pipe.producers.engines.requests import WINDOW_TOKENS_MAX, RunningRequest, StopText
from dora_pipe.producers.engines.vllm.core import token_kv_values


def bytes_decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def stripping_decode(tokens: Sequence[int]) -> str:
    return bytes_decode(tokens).removeprefix(" ")


def first_stop(text: bytes, stops: tuple[str, ...], sampled: int = 0) -> int | None:
    watcher = StopText(bytes_decode, stops, list(text[:sampled]))
    for count in range(sampled, len(text)):
        if watcher.feed(text[count]):
            return count + 1
    return None


@given(
    st.text("ab é€", max_size=30),
    st.lists(st.text("ab é€", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_is_found_with_the_byte_that_completes_it(
    text: str, stops: list[str]
) -> None:
    data = text.encode()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = len(text[: min(ends)].encode()) if ends else None
    assert first_stop(data, tuple(stops)) == expected


@given(st.text("ab é", min_size=1, max_size=20), st.text("ab é", min_size=1, max_size=4), st.data())
def test_a_watcher_that_starts_later_sees_what_the_first_would_have_seen(
    text: str, stop: str, data: st.DataObject
) -> None:
    full_stop = first_stop(text.encode(), (stop,))
    if full_stop is not None:
        cut = data.draw(st.integers(0, full_stop - 1))
        assert first_stop(text.encode(), (stop,), cut) == full_stop


def test_the_space_that_a_tokenizer_drops_at_the_start_is_seen_in_the_middle() -> None:
    watcher = StopText(stripping_decode, ("a b",), [])
    assert [watcher.feed(token) for token in b" a b"] == [False, False, False, True]


def test_bytes_that_never_make_a_character_do_not_make_the_window_grow() -> None:
    sizes: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        sizes.append(len(tokens))
        return bytes_decode(tokens)

    watcher = StopText(decode, ("stop",), [])
    for _ in range(500):
        assert not watcher.feed(0xFF)
    assert max(sizes) <= WINDOW_TOKENS_MAX
    assert [watcher.feed(token) for token in b"stop"] == [False, False, False, True]


def _row(*, emit_every: int = 0, stops: StopText | None = None) -> RunningRequest:
    request = EngineRequest(
        request="r",
        token_ids=[1, 2, 3],
        sampled=0,
        seed=7,
        params=SamplingParams(max_tokens=99),
        emit_every=emit_every,
    )
    return RunningRequest(request=request, stops=stops)


@given(sizes=st.lists(st.integers(1, 5), max_size=8), every=st.integers(0, 6))
def test_every_token_goes_out_once_and_in_order(sizes: list[int], every: int) -> None:
    row, count = _row(emit_every=every), 0
    sent: list[int] = []
    for size in sizes:
        for token in range(count, count + size):
            assert row.sample(token, -1.0, -0.5, 99) is None
        count += size
        due = every > 0 and count - len(sent) >= every
        out = row.events(None)
        assert len(out) == due
        for event in out:
            assert isinstance(event, TokensSampled)
            sent += event.token_ids
    *rest, last = row.events("length")
    for event in rest:
        assert isinstance(event, TokensSampled)
        sent += event.token_ids
    assert sent == list(range(count)) and isinstance(last, RequestFinished)
    assert row.sequence == [1, 2, 3, *range(count)] and row.emit() is None


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_logprob_that_is_not_finite_ends_a_row_without_its_token(logprob: float) -> None:
    row = _row()
    assert row.sample(4, -1.0, -1.0, 99) is None
    assert row.sample(5, logprob, -1.0, 99) == "error"
    tokens, finished = row.events("error")
    assert tokens == row_tokens(row, [4])
    assert isinstance(finished, RequestFinished)
    assert finished.error is not None and "token 4" in finished.error


def row_tokens(row: RunningRequest, tokens: list[int]) -> object:
    copy = RunningRequest(request=row.request, stops=None, first_ns=row.first_ns)
    for token in tokens:
        copy.sample(token, -1.0, -1.0, 99)
    return copy.emit()


def test_kv_of_a_token_counts_keys_and_values_of_all_layers() -> None:
    config = {"num_attention_heads": 6, "num_hidden_layers": 2, "hidden_size": 144}
    assert token_kv_values(config) == 2 * 2 * 6 * 24
    assert token_kv_values({**config, "num_key_value_heads": 2}) == 2 * 2 * 2 * 24
    assert token_kv_values({**config, "head_dim": 32}) == 2 * 2 * 6 * 32
    with pytest.raises(PolicyError, match="sizes of its attention"):
        token_kv_values({"num_attention_heads": 6})
