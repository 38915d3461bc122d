"""Stop strings are found with the token that completes them, however the text is cut."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.producers.engines.requests import WINDOW_TOKENS_MAX, StopText


def bytes_decode(tokens: Sequence[int]) -> str:
    """One token per byte."""
    return bytes(tokens).decode(errors="replace")


def stripping_decode(tokens: Sequence[int]) -> str:
    """Like tokenizers that drop the space before the first word of a text."""
    return bytes_decode(tokens).removeprefix(" ")


def first_stop(text: bytes, stops: tuple[str, ...], sampled: int = 0) -> int | None:
    """After how many tokens a watcher that starts behind `sampled` of them sees a stop string."""
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
    wanted = len(text[: min(ends)].encode()) if ends else None
    assert first_stop(data, tuple(stops)) == wanted


@given(st.text("ab é", min_size=1, max_size=20), st.text("ab é", min_size=1, max_size=4), st.data())
def test_a_watcher_that_starts_later_sees_what_the_first_would_have_seen(
    text: str, stop: str, data: st.DataObject
) -> None:
    whole = first_stop(text.encode(), (stop,))
    if whole is not None:
        cut = data.draw(st.integers(0, whole - 1))
        assert first_stop(text.encode(), (stop,), cut) == whole


def test_what_stood_before_does_not_stop_what_comes() -> None:
    assert first_stop(b"a stop b", ("stop",), sampled=6) is None
    assert first_stop(b"a stop b stop c", ("stop", "longer than all"), sampled=6) == 13


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
