"""Model directories with real chat templates and a small tokenizer."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

TEMPLATES: Final = Path(__file__).parent / "chat_templates"

CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenizer pattern of most families."""

_TOKEN: Final = re.compile(
    r"<\|?[a-zA-Z_/0-9\uff5c\u2581.]+\|?>|<\uff5c[^\uff5c]*\uff5c>|\[/?INST\]|<\|[^|>]*\|>"
)

_NAMED: Final = re.compile(
    r"<[^\s<>{}=]+>|\[[A-Za-z]+\]|\u3008\|\S+\|\u3009|\]~[!b]+[\[\]]|\[e~\[|<\|\"\|>"
)
"""Pattern of special tokens in the sources of typed renderers."""

_OTHERS: Final = """<|endoftext|> <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call>
<tool_response> </tool_response> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> <pad>
<|eom_id|> <|python_tag|> [gMASK] <sop> <|user|> <|observation|> <s> </s>"""
"""Tokens that typed renderers require but templates do not write."""

_ENDS: Final = {
    "gemma": ("<bos>", "<eos>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "deepseek": ("<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"),
    "qwen": ("<|endoftext|>", "<|im_end|>"),
}


def names() -> list[str]:
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def bpe(special: set[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(
        ["system user assistant tool function name sum it up\n\n"] * 4, trainer
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in sorted(special)]
    )
    return tokenizer


def tokens_of(family: str) -> set[str]:
    from renderers import base, parsing

    base._populate_registry()
    modules = {entry.__module__ for entry in base.RENDERER_REGISTRY[family].__mro__} | {
        parsing.__name__
    }
    result = set(_OTHERS.split())
    for name in modules - {"builtins", "typing"}:
        for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(name)))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                result |= {node.value} if _NAMED.fullmatch(node.value) else set()
    return result


def write_chat_model(folder: Path, name: str = "", *, text: str = "", **config: object) -> Path:
    path = Path(name)
    if name:
        text = (path if path.is_absolute() else TEMPLATES / f"{name}.jinja").read_text()
    begin, end = next(
        (ends for family, ends in _ENDS.items() if path.stem.startswith(family)), ("<s>", "</s>")
    )
    special = {*_TOKEN.findall(text), *_OTHERS.split(), begin, end}
    backend = bpe(special)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": begin, "eos_token": end, "image_token": "<image>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if path.stem.startswith("glm"):
        ids = [backend.token_to_id(token) for token in ("<|user|>", "<|observation|>")]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (folder / "chat_template.jinja").write_text(text)
    return folder
