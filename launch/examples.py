"""What `init` and the demo start from: a configuration and a small random model for each built-in
task.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL: tuple[str, ...] = (PAD, BOS, EOS, UNK)
"""Special tokens; their ids are their places, words follow in the order given."""

HIDDEN = 192
LAYERS = 2
HEADS = 6
"""Of 32 each: of the sizes that vLLM's kernels for CPUs have, the smallest."""


CONTEXT_TOKENS: Final = 256


def example_config(task: str, engine: str = "torch") -> str:
    """The text of an example's configuration file."""
    text = example_file(task).read_text()
    section = "[workers]\n"
    assert section in text, f"the example of {task} has no {section}"
    return text if engine == "torch" else text.replace(section, f'{section}engine = "{engine}"\n')


def example_file(task: str) -> Path:
    """Where it lies in the package."""
    return Path(__file__).parent / "templates" / f"{task}.toml"


def make_model(
    directory: Path, task: str, *, context_tokens: int = CONTEXT_TOKENS, seed: int = 0
) -> int:
    """Write a random Llama of about 1 200 000 parameters with the words of a built-in task; returns
    their number.

    hidden 192, 2 layers, 6 heads, intermediate 768: it learns the built-in tasks on one core.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from dora_pipe.producers.tasks import arithmetic, calculator

    words, roles, template = {
        "arithmetic": (arithmetic.WORDS, (), ""),
        "calculator": (calculator.WORDS, calculator.ROLES, calculator.CHAT_TEMPLATE),
    }[task]
    quiet: Any = logging.disable_progress_bar
    quiet()
    torch.manual_seed(seed)
    build: Any = LlamaForCausalLM
    model = build(
        LlamaConfig(
            vocab_size=vocabulary_size(words, roles),
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=context_tokens,
            tie_word_embeddings=False,
            pad_token_id=SPECIAL.index(PAD),
            bos_token_id=SPECIAL.index(BOS),
            eos_token_id=SPECIAL.index(EOS),
        )
    ).float()
    model.save_pretrained(directory)
    write_word_tokenizer(directory, words, roles, context_tokens=context_tokens)
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return sum(weights.numel() for weights in model.parameters())


def vocabulary_size(words: Sequence[str], roles: Sequence[str] = ()) -> int:
    """Tokens of a vocabulary over `words`, special ones included."""
    return len(SPECIAL) + len(roles) + len(dict.fromkeys(words))


def write_word_tokenizer(
    directory: Path, words: Sequence[str], roles: Sequence[str] = (), *, context_tokens: int = 1024
) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json into `directory`.

    transformers' AutoTokenizer loads them. Words are split at white space, unknown ones become
    `<unk>`, `<bos>` is put in front; decoding joins with single spaces. `roles` are special tokens
    of a chat template. Raises ValueError for a word with white space in it or one that is a special
    token.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    for word in words:
        if word.split() != [word] or word in (*SPECIAL, *roles):
            raise ValueError(f"not a word: {word!r}")
    special = (*SPECIAL, *roles)
    ids = {word: place for place, word in enumerate(dict.fromkeys((*special, *words)))}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, ids[BOS])]
    )
    # Stripping white space around them keeps "a <eos> b" at three tokens.
    tokenizer.add_special_tokens(
        [AddedToken(word, lstrip=True, rstrip=True, special=True) for word in special]
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
