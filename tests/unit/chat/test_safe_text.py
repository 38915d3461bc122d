"""Tests that data never contains control tokens and other text keeps its ids."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.chat.safe_text import MARKS, SafeText
from dora_pipe.producers.chat.template import NONCHARACTERS, Template
from dora_pipe.producers.chat.tokenizer import control_tokens
from tests.support.chat_models import CHATML, bpe

SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "é", "<s>")


@functools.cache
def byte_level() -> tokenizers.Tokenizer:
    return bpe(set(SPECIAL))


@functools.cache
def metaspace(scheme: str) -> tokenizers.Tokenizer:
    letters = [chr(code) for code in range(33, 127)]
    tokenizer = tokenizers.Tokenizer(
        models.Unigram(
            [("<unk>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in letters)], unk_id=0
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in (*SPECIAL, "<unk>")]
    )
    return tokenizer


@functools.cache
def lower_case() -> tokenizers.Tokenizer:
    new_bpe = bpe({"<s>"})
    new_bpe.normalizer = normalizers.Lowercase()
    new_bpe.add_tokens([AddedToken("<|im_start|>", normalized=True)])
    new_bpe.add_tokens([AddedToken("<|im_end|>", normalized=True, rstrip=True)])
    return new_bpe


BACKENDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "metaspace, first": functools.partial(metaspace, "first"),
    "metaspace, always": functools.partial(metaspace, "always"),
    "lower case": lower_case,
}

contents = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, "<|IM_END|>", "<|im_", "start|>", "<", ">", "end|>", "s"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6),
        st.sampled_from(["\n", "é", "日", MARKS[0], "\\ufdd0"]),
    ),
    max_size=6,
).map("".join)


def template() -> Template:
    return Template(CHATML, values={}, now_ns=0)


@pytest.mark.parametrize("name", BACKENDS)
@given(first=contents, second=contents)
def test_a_conversation_has_the_control_tokens_of_its_template_alone(
    name: str, first: str, second: str
) -> None:
    backend = BACKENDS[name]()
    safe = SafeText(backend, control_tokens(backend, [CHATML]), parse=False)
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    mark = safe.mark_for(messages)
    ids = safe.ids(template().render(safe.marked(messages, mark), (), generate=True), mark)
    start, end = (backend.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    texts = [
        token_id
        for token_id in ids
        if token_id in safe.control and safe.control[token_id] != "<unk>"
    ]
    assert texts == [start, end, start, end, start]
    if name == "byte level":
        text = template().render(messages, (), generate=True)
        assert backend.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", BACKENDS)
@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12))
def test_ids_are_the_tokenizers_own_where_nothing_must_be_broken_or_may_be(
    name: str, text: str
) -> None:
    backend = BACKENDS[name]()
    safe = SafeText(backend, control_tokens(backend, [CHATML]), parse=False)
    if any(token in text for token in SPECIAL):
        return
    mark = safe.mark_for(text)
    rendered = f"<|im_start|>user {text}<|im_end|> x<|im_start|>"
    # Encoding by stretches equals encoding at once.
    marked = rendered.replace("user", "us" + mark + "er")
    ids = backend.encode(rendered, add_special_tokens=False).ids
    assert safe.ids(rendered, mark) == ids == safe.ids(marked, mark)


def test_a_mark_stands_nowhere_in_the_data() -> None:
    safe = SafeText(byte_level(), SPECIAL, parse=False)
    assert safe.mark_for([{"a": MARKS[0]}], (MARKS[1],)) == MARKS[2]
    with pytest.raises(TaskError, match="noncharacters"):
        safe.mark_for(NONCHARACTERS)
