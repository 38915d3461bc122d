"""Word-level tokenizer files for the built-in tasks: one word, one token; decides nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL: tuple[str, ...] = (PAD, BOS, EOS, UNK)
"""Special tokens; their ids are their places, words follow in the order given."""


def vocabulary_size(words: Sequence[str]) -> int:
    """Tokens of a vocabulary over `words`, special ones included."""
    return len(SPECIAL) + len(dict.fromkeys(words))


def write_word_tokenizer(
    directory: Path, words: Sequence[str], *, context_tokens: int = 1024
) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into `directory`.

    transformers' AutoTokenizer loads them. Words are split at white space, unknown ones become
    `<unk>`, `<bos>` is put in front; decoding joins with single spaces. Raises ValueError for a
    word with white space in it or one that is a special token.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    for word in words:
        if word.split() != [word] or word in SPECIAL:
            raise ValueError(f"not a word: {word!r}")
    ids = {word: place for place, word in enumerate(dict.fromkeys((*SPECIAL, *words)))}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, ids[BOS])]
    )
    # Stripping white space around them keeps "a <eos> b" at three tokens.
    tokenizer.add_special_tokens(
        [AddedToken(word, lstrip=True, rstrip=True, special=True) for word in SPECIAL]
    )
    named = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    settings = {
        **named,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "padding_side": "right",
    }
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in (
        ("tokenizer_config.json", settings),
        ("special_tokens_map.json", named),
    ):
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
