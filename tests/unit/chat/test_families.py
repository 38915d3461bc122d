"""Real chat templates: what their bridges give is what the whole conversation has, or they are
named; what the assistant says is what a mask says; data gives no control token."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.chat.chat import Chat, ChatOptions
from dora_pipe.producers.chat.proof import conversations, flaw_of
from dora_pipe.producers.chat.tokenizer import Tokenizer
from tests.support.chat_models import names, write_chat_model
from tests.support.tidy import ROOT

INSTALLED = sorted(
    (ROOT / ".venv-objectives").glob("lib/python*/site-packages/trl/chat_templates/*.jinja")
)

RENDERED_BY = {
    "deepseek_r1_distill": "deepseek-r1",
    "deepseekv3": "deepseek-r1",
    "nemotron_3_nano": "nemotron-3",
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
}
"""Templates that write their history anew, and that a typed renderer knows."""

REPORTED = {"glm4moe": "message 2 of 4", "lfm2_2_5": "message 2 of 4"}
"""Templates that write their history anew, with the first message that is another one then."""


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
    """Bridges are those of the whole, and the mask is on exactly what was sampled."""
    renders = chat.derived
    for messages, tools in conversations(renders.dialect, seed=7, count=count):
        assert flaw_of(renders, messages, tools) == ""
        ids, mask = chat.training_ids(messages, tools)
        turns = [
            renders.turn(messages[:at], one, tools)
            for at, one in enumerate(messages)
            if one["role"] == "assistant"
        ]
        spoken = [one for one, said in zip(ids, mask, strict=True) if said]
        assert spoken == [token for turn in turns for token in turn]
        assert ids[: len(ids)] == renders.whole(messages, tools)[: len(ids)]


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="trl is not here (make test-objectives)")
@pytest.mark.parametrize("path", INSTALLED, ids=lambda path: path.stem)
def test_every_template_of_trl_has_bridges_or_is_reported(path: Path, tmp_path: Path) -> None:
    chat = open_chat(write_chat_model(tmp_path, str(path)))
    if chat.renderer == "template" and not chat.flaw:
        proved(chat, count=200)
    else:
        assert chat.flaw or chat.renderer != "template"


@pytest.mark.parametrize("name", names())
def test_special_tokens_in_a_content_or_a_result_give_none_of_their_ids(
    name: str, tmp_path: Path
) -> None:
    folder = write_chat_model(tmp_path, name)
    chat, tokenizer = open_chat(folder), Tokenizer(folder)
    every = [one.content for one in tokenizer.backend.get_added_tokens_decoder().values()]
    hostile = " ".join(every)
    safe, plain = (
        chat.start([{"role": "user", "content": text}]).prompt_ids for text in (hostile, "quorl")
    )
    added = set(tokenizer.backend.get_added_tokens_decoder())
    assert [one for one in safe if one in added] == [one for one in plain if one in added]
    assert hostile in tokenizer.full_text(safe)
