"""Tests of control tokens in texts, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_letters

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from dora_pipe.producers.chat.tokenizer import Tokenizer

TEXT = ["the <tool> said: </s> is no end, and neither is <|im_end|>\n", "1+2=3 a-z [x] {y} / | _"]
SPECIAL = ("<s>", "</s>", "<|im_end|>", "<|im_start|>", "<pad>")
ADDED = ("<tool_call>", "</tool_call>")
"""Not special, but part of call formats."""
WORD = "thinking"
"""Added but not special: an ordinary word."""
UNKNOWN = "<unk>"
SPACES = "   "
"""White space added by some tokenizers: ordinary text."""


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT * 9, trainer)
    return backend


def merged() -> Backend:
    pieces = ["<", "/", "s", ">", "</", "</s", "</s>", "</s>>", *SPECIAL, *ascii_letters, *" |_"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("<", "/"), ("</", "s"), ("</s", ">"), ("</s>", ">")]
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=True))
    backend.decoder = decoders.Fuse()
    return backend


def metaspace() -> Backend:
    backend = Backend(models.BPE(byte_fallback=False, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[UNKNOWN, *SPECIAL], show_progress=False
    )
    backend.train_from_iterator(TEXT * 9, trainer)
    return backend


def unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.Fuse()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=[UNKNOWN, *SPECIAL], unk_token=UNKNOWN, show_progress=False
    )
    backend.train_from_iterator(TEXT * 9, trainer)
    return backend


MAKERS = {one.__name__: one for one in (byte_level, merged, metaspace, unigram)}
LOSSLESS = ("byte_level", "merged", "unigram")
"""Tokenizers that restore known characters and white space."""


@pytest.fixture(scope="module", params=MAKERS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    backend = MAKERS[request.param]()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in (*ADDED, WORD, SPACES)])
    folder = tmp_path_factory.mktemp(str(request.param))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return str(request.param), folder


def added_ids(folder: Path) -> set[int]:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    decoder = backend.get_added_tokens_decoder()
    return {
        location
        for location, token in decoder.items()
        if token.content not in (UNKNOWN, WORD, SPACES)
    }


@hypothesis_settings(max_examples=60)
@given(
    parts=st.lists(
        st.one_of(st.sampled_from([*SPECIAL, *ADDED]), st.sampled_from([" ", "s", "<", ">", "</"])),
        max_size=8,
    )
)
def test_no_text_gives_the_id_of_an_added_token_and_it_decodes_back_to_the_text(
    case: tuple[str, Path], parts: Sequence[str]
) -> None:
    kind, folder = case
    tokenizer, text = Tokenizer(folder), "".join(parts)
    ids = tokenizer.ids(text)
    assert added_ids(folder).isdisjoint(ids)
    if kind in LOSSLESS and UNKNOWN not in tokenizer.full_text(ids):
        assert tokenizer.full_text(ids) == text
        assert tokenizer.text(ids) == text


def test_what_has_no_control_tokens_is_encoded_as_it_was(case: tuple[str, Path]) -> None:
    _, folder = case
    for text in ("one two s", "the is no end", "1+2=3 a-z", " _ | "):
        parsed = Tokenizer(folder, special_tokens="parse")
        assert Tokenizer(folder).ids(text) == parsed.ids(text)


def test_sampled_control_tokens_stay_themselves_when_their_text_is_encoded_again(
    case: tuple[str, Path],
) -> None:
    kind, folder = case
    tokenizer = Tokenizer(folder)
    end = tokenizer.stop_ids[0]
    plain = Tokenizer(folder, special_tokens="parse").ids("s" if kind != "words" else "one")
    assert tokenizer.again([*plain, end]) == [*plain, end]
    # Sampled as text, it stays text; parsing gives the token.
    written = tokenizer.ids("</s>")
    assert end not in tokenizer.again(written)
    if kind in LOSSLESS:
        assert Tokenizer(folder, special_tokens="parse").again(written) == [end]


def test_added_white_space_is_encoded_as_it_was(case: tuple[str, Path]) -> None:
    _, folder = case
    parsed = Tokenizer(folder, special_tokens="parse").ids(f"s{SPACES}s")
    assert Tokenizer(folder).ids(f"s{SPACES}s") == parsed
    space = Backend.from_file(str(folder / "tokenizer.json")).token_to_id(SPACES)
    assert space in parsed
