"""Tests of tokenizer files of built-in tasks."""

from pathlib import Path

import pytest

from dora_pipe.launch.examples import EOS, SPECIAL, vocabulary_size, write_word_tokenizer
from dora_pipe.producers.tasks import arithmetic, calculator
from dora_pipe.producers.tasks.calculator import CalculatorTask


@pytest.mark.parametrize("words", [arithmetic.WORDS, calculator.WORDS])
def test_every_word_is_one_token_and_comes_back(tmp_path: Path, words: tuple[str, ...]) -> None:
    from tokenizers import Tokenizer

    write_word_tokenizer(tmp_path, words)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocabulary_size(words) == len(SPECIAL) + len(words)
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False).ids
    assert ids == list(range(len(SPECIAL), len(SPECIAL) + len(words)))
    assert tokenizer.decode(ids) == " ".join(words)


def test_beginning_is_put_in_front_and_the_end_is_read_as_one_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_word_tokenizer(tmp_path, calculator.WORDS)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    context, turn = CalculatorTask().demonstrations(seed=1, count=2)[1]
    encoded = tokenizer.encode(f"{context} {turn}")
    assert encoded.ids[0] == SPECIAL.index("<bos>")
    assert encoded.ids.count(SPECIAL.index(EOS)) == 1
    assert len(encoded.ids) == 1 + len(f"{context} {turn}".split())
    assert SPECIAL.index("<unk>") not in encoded.ids
    assert tokenizer.encode("unheard").ids == [1, SPECIAL.index("<unk>")]


@pytest.mark.parametrize("word", ["two words", "", " a", "<eos>"])
def test_what_is_no_word_is_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(ValueError, match="unknown token"):
        write_word_tokenizer(tmp_path, ["a", word])
