"""Tests of real chat templates: bridges, masks, control tokens in data."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.chat.chat import Chat, ChatOptions
from dora_pipe.producers.chat.proof import conversations, flaw_of
from dora_pipe.producers.chat.safe_text import SafeText
from dora_pipe.producers.chat.template_features import TemplateFeatures
from dora_pipe.producers.chat.tokenizer import Tokenizer, control_tokens
from dora_pipe.producers.chat.typed_renderer import TypedRenderer, known
from tests.support.chat_models import bpe, names, tokens_of, write_chat_model
from tests.support.tidy import ROOT

INSTALLED = sorted((ROOT / ".venv-objectives" / "trl" / "chat_templates").glob("*.jinja"))

RENDERED_BY = {
    "deepseek_r1_distill": "deepseek-r1",
    "deepseekv3": "deepseek-r1",
    "nemotron_3_nano": "nemotron-3",
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
}
"""Templates that rewrite history, with their typed renderer."""

REPORTED = {"glm4moe": "message 2 of 4", "lfm2_2_5": "message 2 of 4"}
"""Templates that rewrite history, with the first changed message."""


FAMILIES = sorted(
    set(known()) - {"gpt-oss", "prime-qwen3", "deepseek-r1", "deepseek-v3", "deepseek-v4", "hy3"}
)
"""Families except those whose renderer downloads, lacks masks, or does not name special tokens."""

ONE_CALL = ("llama-3",)
EVERYTHING = [
    TemplateFeatures(
        system=True,
        tools=True,
        calls=True,
        results=True,
        parallel=parallel,
        reasoning="reasoning_content",
    )
    for parallel in (True, False)
]


def open_chat(folder: Path, **options: object) -> Chat:
    return Chat.open(folder, Tokenizer(folder), ChatOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", names())
def test_a_bridge_gives_the_ids_of_the_whole_or_the_template_is_reported(
    name: str, tmp_path: Path
) -> None:
    chat = open_chat(write_chat_model(tmp_path, name))
    assert chat.renderer == RENDERED_BY.get(name, "template")
    assert chat.flaw.startswith(REPORTED.get(name, "")) and bool(chat.flaw) == (name in REPORTED)
    if name in REPORTED:
        with pytest.raises(ConfigError, match="no bridge between turns"):
            chat.check(several_turns=True)
    elif name not in RENDERED_BY:
        proved(chat, count=40)


def proved(chat: Chat, *, count: int) -> None:
    renders = chat.template_renderer
    for messages, tools in conversations(renders.features, seed=7, count=count):
        assert flaw_of(renders, messages, tools) == ""
        ids, mask = chat.training_ids(messages, tools)
        turns = [
            renders.turn(messages[:index], message, tools)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        spoken = [token_id for token_id, bit in zip(ids, mask, strict=True) if bit]
        assert spoken == [token for turn in turns for token in turn]
        # An opened thought may merge with its first token: the text is equal.
        strict = not renders.features.reasoning
        assert ids == renders.ids(messages, tools, generate=False)[: len(ids)] or not strict


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="trl is not here (make test-objectives)")
@pytest.mark.parametrize("path", INSTALLED, ids=lambda path: path.stem)
def test_every_template_of_trl_has_bridges_or_is_reported(path: Path, tmp_path: Path) -> None:
    chat = open_chat(write_chat_model(tmp_path, str(path)))
    if chat.flaw:
        with pytest.raises(ConfigError, match="no bridge between turns"):
            chat.check(several_turns=True)
    elif chat.renderer == "template":
        proved(chat, count=200)
    else:
        assert chat.renderer in known()


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_typed_renderer_keeps_what_was_sampled_and_gives_data_no_control_token(
    family: str,
) -> None:
    backend = bpe(tokens_of(family))
    typed = TypedRenderer(
        family, SafeText(backend, control_tokens(backend, ()), parse=False), backend, kwargs={}
    )
    added = backend.get_added_tokens_decoder()
    hostile = " ".join(entry.content for entry in added.values())
    bridged = 0
    for messages, tools in conversations(EVERYTHING[family in ONE_CALL], seed=3, count=200):
        spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for index, after in itertools.pairwise(spoken):
            history, text, new = messages[:index], messages[index], messages[index + 1 : after]
            before = typed.ids(history, tools, generate=True)
            sampled = typed.turn(history, text, tools)
            controls = []
            for reply in (new, [{**entry, "content": hostile} for entry in new]):
                try:
                    ids = typed.bridge(history, text, reply, tools, before=before, sampled=sampled)
                except TaskError:
                    continue  # no bridge after this turn
                controls.append([token_id for token_id in ids if token_id in added])
                bridged += 1
            assert not controls[1:] or controls[0] == controls[1]
    assert bridged > 400


@pytest.mark.parametrize("name", names())
def test_special_tokens_in_a_content_or_a_result_give_none_of_their_ids(
    name: str, tmp_path: Path
) -> None:
    folder = write_chat_model(tmp_path, name)
    chat, tokenizer = open_chat(folder), Tokenizer(folder)
    every = [entry.content for entry in tokenizer.backend.get_added_tokens_decoder().values()]
    hostile = " ".join(every)
    safe, plain = (
        chat.start([{"role": "user", "content": text}]).prompt_ids for text in (hostile, "quorl")
    )
    added = set(tokenizer.backend.get_added_tokens_decoder())
    assert [token_id for token_id in safe if token_id in added] == [
        row for row in plain if row in added
    ]
    assert hostile in tokenizer.full_text(safe)
