"""Example configuration and small random model of each built-in task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL: tuple[str, ...] = (PAD, BOS, EOS, UNK)
"""Special tokens; the index is the token id. Words follow in the given order."""

HIDDEN = 192
LAYERS = 2
HEADS = 6
"""Heads of size 32, the smallest that the CPU kernels of vLLM support."""


CONTEXT_TOKENS: Final = 256


def example_config(task: str, engine: str = "torch") -> str:
    """Return an example's configuration file as text."""
    text = example_file(task).read_text()
    section = "[workers]\n"
    assert section in text, f"the example of {task} has no {section}"
    return text if engine == "torch" else text.replace(section, f'{section}engine = "{engine}"\n')


def example_file(task: str) -> Path:
    return Path(__file__).parent / "templates" / f"{task}.toml"


def make_model(
    directory: Path, task: str, *, context_tokens: int = CONTEXT_TOKENS, seed: int = 0
) -> int:
    """Write a random Llama with about 1.2M parameters for a task; return the exact number.

    Hidden 192, 2 layers, 6 heads, intermediate 768: it learns the built-in tasks on one core.
    """
    from transformers.utils import logging

    from dora_pipe.producers.tasks import arithmetic, calculator

    words, roles, template = {
        "arithmetic": (arithmetic.WORDS, (), ""),
        "calculator": (calculator.WORDS, calculator.ROLES, calculator.CHAT_TEMPLATE),
    }[task]
    quiet: Any = logging.disable_progress_bar
    quiet()
    return write_word_model(
        directory,
        words,
        roles,
        template,
        shape=Shape(hidden=HIDDEN, heads=HEADS, context_tokens=context_tokens),
        seed=seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a small Llama with two layers."""

    hidden: int
    heads: int
    kv_heads: int = 0
    """0: equal to the number of heads."""
    context_tokens: int


def write_word_model(
    directory: Path,
    words: Sequence[str],
    roles: Sequence[str] = (),
    template: str = "",
    *,
    shape: Shape,
    seed: int = 0,
) -> int:
    """Write a random Llama, word tokenizer and chat template; return the number of parameters.

    Raises ValueError as `write_word_tokenizer`.
    """
    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    parameters = write_llama(
        directory,
        shape,
        vocabulary=vocabulary_size(words, roles),
        special={key: SPECIAL.index(word) for key, word in special.items()},
        seed=seed,
    )
    write_word_tokenizer(directory, words, roles, context_tokens=shape.context_tokens)
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return parameters


def write_llama(
    directory: Path,
    shape: Shape,
    *,
    vocabulary: int,
    special: Mapping[str, int | None],
    seed: int = 0,
) -> int:
    """Write config.json and float32 weights; return the number of parameters.

    `special` maps argument names of LlamaConfig to token ids.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    build: Any = LlamaForCausalLM
    config: Any = LlamaConfig
    model = build(
        config(
            vocab_size=vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=4 * shape.hidden,
            num_hidden_layers=LAYERS,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads or shape.heads,
            max_position_embeddings=shape.context_tokens,
            tie_word_embeddings=False,
            **special,
        )
    ).float()
    model.save_pretrained(directory)
    return sum(weights.numel() for weights in model.parameters())


CHATML: Final = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write_chat_model(
    directory: Path, texts: Sequence[str], *, shape: Shape, vocabulary: int
) -> tuple[int, int]:
    """Write a random Llama, a byte-level BPE tokenizer trained on texts, and a ChatML template.

    Returns the numbers of parameters and tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pad, stop = "<pad>", "<|im_end|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[pad, "<|endoftext|>", "<|im_start|>", stop],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, pad_token=pad, eos_token=stop).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(CHATML)
    size: int = tokenizer.get_vocab_size()
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 3}
    return write_llama(directory, shape, vocabulary=size, special=ids), size


def vocabulary_size(words: Sequence[str], roles: Sequence[str] = ()) -> int:
    """Return the vocabulary size for `words`, including special tokens."""
    return len(SPECIAL) + len(roles) + len(dict.fromkeys(words))


def write_word_tokenizer(
    directory: Path, words: Sequence[str], roles: Sequence[str] = (), *, context_tokens: int = 1024
) -> None:
    """Write the tokenizer files that AutoTokenizer loads into `directory`.

    Splits at white space, prepends `<bos>`, decodes with single spaces. `roles` are special tokens
    of a chat template. Raises ValueError for a word with white space or equal to a special token.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    for word in words:
        if word.split() != [word] or word in (*SPECIAL, *roles):
            raise ValueError(f"unknown token: {word!r}")
    special = (*SPECIAL, *roles)
    ids = {word: index for index, word in enumerate(dict.fromkeys((*special, *words)))}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, ids[BOS])]
    )
    # Stripping adjacent white space keeps "a <eos> b" at three tokens.
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
    for name, content in (("tokenizer_config.json", settings), ("special_tokens_map.json", named)):
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
