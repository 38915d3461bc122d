"""Tests of tokenizers: prefixes, special tokens, ends of turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from dora_pipe.core.errors import PolicyError, TaskError
from dora_pipe.producers.chat.tokenizer import Tokenizer
from tests.support.chat_models import bpe

WORDS = ["<pad>", "<s>", "</s>", "<end>", "<unk>", "one", "two", "three", "0"]
S, END, EOS = WORDS.index("<s>"), WORDS.index("<end>"), WORDS.index("</s>")


def _assets(
    directory: Path,
    *,
    template: str | None = "<s> $A",
    tokenizer_config: dict[str, Any] | None = None,
    **files: dict[str, Any],
) -> Path:
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:5]])
    if template is not None:
        specials = [(word, WORDS.index(word)) for word in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=specials
        )
    backend.save(str(directory / "tokenizer.json"))
    if tokenizer_config is None:
        tokenizer_config = {"eos_token": "</s>"}
    for name, content in (("tokenizer_config", tokenizer_config), *files.items()):
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_prompt_gets_what_the_post_processor_puts_in_front_and_other_text_does_not(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer(_assets(tmp_path))
    assert tokenizer.prompt_ids("one two") == [S, 5, 6]
    assert tokenizer.ids("one two") == [5, 6]


def test_prompt_that_begins_with_the_prefix_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer(_assets(tmp_path), special_tokens="parse")
    assert tokenizer.prompt_ids("<s> one") == [S, 5]


def test_text_for_rewards_has_no_special_tokens_and_text_for_stop_strings_has(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer(_assets(tmp_path))
    assert tokenizer.text([5, 6, EOS]) == "one two"
    assert tokenizer.full_text([5, 6, EOS]) == "one two </s>"


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    assets = _assets(tmp_path, template=None)
    backend = Backend.from_file(str(assets / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(assets / "tokenizer.json"))
    assert Tokenizer(assets).ids("one two three one") == [5, 6, 7, 5]


def test_turn_also_ends_at_configured_ids_that_are_special_tokens(tmp_path: Path) -> None:
    assets = _assets(tmp_path, generation_config={"eos_token_id": [EOS, END]})
    assert Tokenizer(assets).stop_ids == (EOS, END)


def test_configured_id_that_is_an_ordinary_word_of_this_tokenizer_does_not_end_a_turn(
    tmp_path: Path,
) -> None:
    assets = _assets(tmp_path, config={"eos_token_id": WORDS.index("two")})
    assert Tokenizer(assets).stop_ids == (EOS,)


def test_generation_config_goes_before_config(tmp_path: Path) -> None:
    assets = _assets(
        tmp_path,
        tokenizer_config={},
        config={"eos_token_id": EOS},
        generation_config={"eos_token_id": END},
    )
    assert Tokenizer(assets).stop_ids == (END,)


def test_special_tokens_map_is_asked_where_the_config_names_no_end(tmp_path: Path) -> None:
    assets = _assets(tmp_path, tokenizer_config={}, special_tokens_map={"eos_token": "<end>"})
    assert Tokenizer(assets).stop_ids == (END,)


def test_file_that_is_no_tokenizer_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PolicyError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(tmp_path)


TEMPLATE = (
    "Write <answer>x</answer>.{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _added(directory: Path, *, template: str = "") -> Path:
    backend = bpe({"<s>", "<|im_end|>", "<tool_call>"})
    plain = ["<|im_start|>", "<answer>", "</answer>", "kilogram", "  ", "<think>", "</think>"]
    backend.add_tokens([AddedToken(row, normalized=False, special=False) for row in plain])
    backend.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.parametrize(
    ("token", "in_data", "observed"),
    [
        ("<answer>", True, True),
        ("kilogram", True, True),
        ("  ", True, True),
        ("<|im_start|>", False, True),
        ("<think>", False, True),
        ("<tool_call>", False, True),
        ("<|im_end|>", False, False),
        ("<s>", False, False),
    ],
)
def test_data_become_words_and_rewards_see_all_but_special_tokens(
    token: str, in_data: bool, observed: bool, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(_added(tmp_path, template=TEMPLATE.replace("<answer>", "")))
    token_id = tokenizer.backend.token_to_id(token)
    assert (token_id in tokenizer.ids(f"a {token} b")) == in_data
    assert tokenizer.full_text(tokenizer.ids(f"a {token} b")) == f"a {token} b"
    assert token_id is not None and (token in tokenizer.text([token_id])) == observed
    assert bool(tokenizer.spelled(f"a {token} b")) != in_data


@pytest.mark.parametrize(
    ("text", "opener"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>"),
        (" \n<|im_start|>system\n", "<|im_start|>"),
        ("<s>one", "<s>"),
        ("What is <|im_start|>?", ""),
        ("<|im_end|> ends a turn", ""),
        ("<answer>2</answer>", ""),
        ("<think>", ""),
    ],
)
def test_a_rendered_prompt_is_refused_or_parsed(text: str, opener: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(_added(tmp_path, template=TEMPLATE.replace("<answer>", "")))
    if opener:
        with pytest.raises(TaskError, match="already rendered") as caught:
            tokenizer.prompt_ids(text)
        assert opener in caught.value.message and "special_tokens" in (caught.value.hint or "")
        opens = tokenizer.backend.token_to_id(opener)
        assert tokenizer.reading("parse").prompt_ids(text.lstrip())[0] == opens
    else:
        assert tokenizer.prompt_ids(text)
