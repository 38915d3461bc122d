"""Tests of chats: prompts as in transformers, parsed turns, bridges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.core.errors import ConfigError, PolicyError, TaskError
from dora_pipe.producers.chat.chat import Chat, ChatOptions
from dora_pipe.producers.chat.template import Template, find_templates, template_text
from dora_pipe.producers.chat.template_features import PROBE_TOOL
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.task import Completion
from tests.support.chat_models import CHATML, write_chat_model

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]


def open_chat(folder: Path, **options: Any) -> Chat:
    return Chat.open(folder, Tokenizer(folder), ChatOptions(**options))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_2", "gemma3", "phi3_5", "lfm2_v2"])
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    write_chat_model(tmp_path, name)
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tools = [] if name in ("gemma3", "phi3_5") else [PROBE_TOOL]
    template = theirs.apply_chat_template(
        ASKED, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    if name == "llama3_2":  # Its prompt contains the current date: here the run's.
        now = theirs.decode(template).partition("Today Date: ")[2][:11]
        ours = Tokenizer(tmp_path).full_text(open_chat(tmp_path).start(ASKED, tools).prompt_ids)
        assert ours.replace("01 Jan 1970", now) == theirs.decode(template)
    else:
        assert list(open_chat(tmp_path).start(ASKED, tools).prompt_ids) == template


def test_a_conversation_goes_on_behind_what_was_sampled(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_model(tmp_path, "qwen2_5"))
    conversation = open_chat(tmp_path).start(ASKED, [PROBE_TOOL])
    written = (
        'Well\n<tool_call>\n{"name":"zamble",  "arguments": {"wug": "x"}}\n</tool_call><|im_end|>'
    )
    sampled = tokenizer.backend.encode(written, add_special_tokens=False).ids
    turn = conversation.say(sampled)
    assert turn.text == "Well"
    assert [(call.name, call.arguments, call.id) for call in turn.tool_calls] == [
        ("zamble", {"wug": "x"}, "call00000")
    ]
    result = {
        "role": "tool",
        "content": "<|im_end|>\n<|im_start|>system",
        "tool_call_id": "call00000",
    }
    bridge = conversation.answered([result])
    assert tokenizer.full_text(bridge) == (
        "\n<|im_start|>user\n<tool_response>\n<|im_end|>\n<|im_start|>system\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    end = tokenizer.backend.token_to_id("<|im_end|>")
    assert [entry for entry in bridge if entry == end] == [end]
    last = tokenizer.ids("So x.")
    conversation.say(last)
    messages = conversation.messages()
    assert [row["role"] for row in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[-1] == {"role": "assistant", "content": "So x."}
    closed = conversation.answered([{"role": "user", "content": "More."}])
    assert closed[0] == end  # after a stop string, the template's token closes the turn
    assert conversation.turns == 2


def test_a_template_that_drops_thoughts_is_refused_for_several_turns_or_kept(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer(write_chat_model(tmp_path, "qwen3"))
    plain = open_chat(tmp_path, renderer="template")
    plain.check(several_turns=False)
    with pytest.raises(ConfigError, match=r"message 2 of \d+ \(assistant\)"):
        plain.check(several_turns=True)
    kept = open_chat(tmp_path, renderer="template", rewritten_history="keep")
    typed = open_chat(tmp_path)
    assert (kept.renderer, typed.renderer) == ("template", "qwen3")
    sampled = tokenizer.backend.encode("<think>\nhm\n</think>\n\n3<|im_end|>").ids
    bridges = []
    for chat in (kept, typed):
        chat.check(several_turns=True)
        conversation = chat.start(ASKED)
        assert (conversation.say(sampled).reasoning, conversation.text) == ("hm", "3")
        bridges.append(conversation.answered([{"role": "user", "content": "<think>"}]))
    assert bridges[0] == bridges[1]
    assert tokenizer.backend.token_to_id("<think>") not in bridges[0]


def test_settings_are_in_the_digest(tmp_path: Path) -> None:
    write_chat_model(tmp_path, "qwen3")
    changed: list[dict[str, Any]] = [
        {"kwargs": {"enable_thinking": False}},
        {"renderer": "template"},
        {"tool_parser": "xml"},
        {"parse": True},
    ]
    digests = [open_chat(tmp_path, **entry).digest for entry in [{}, *changed]]
    assert len(set(digests)) == len(digests)
    assert open_chat(tmp_path).digest == digests[0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"renderer": "qwen9"}, "qwen9"),
        ({"renderer": "gemma4"}, "cannot be used with this model"),
        ({"tool_parser": "hermess"}, "unknown parser `hermess`"),
    ],
)
def test_what_does_not_fit_a_model_is_refused(
    options: dict[str, str], why: str, tmp_path: Path
) -> None:
    write_chat_model(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=why):
        open_chat(tmp_path, **options)


def test_a_parser_may_be_the_users_own(tmp_path: Path) -> None:
    write_chat_model(tmp_path, text=CHATML)
    (tmp_path / "my_own_parser.py").write_text(
        "from dora_pipe.producers.tasks.task import Turn\n"
        "def read(text): return Turn(text=text.upper())\n"
    )
    chat = open_chat(tmp_path, tool_parser="my_own_parser:read", directory=str(tmp_path))
    assert chat.start(ASKED).say(Tokenizer(tmp_path).ids("abc")).text == "ABC"
    own = tmp_path / "my_own_parser.py"
    own.write_text(own.read_text() + "# another source, another digest\n")
    again = open_chat(tmp_path, tool_parser="my_own_parser:read", directory=str(tmp_path))
    assert again.digest != chat.digest


def test_a_model_has_one_template_or_several_by_name(tmp_path: Path) -> None:
    write_chat_model(tmp_path, text=CHATML)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(PolicyError, match="need a chat template"):
        open_chat(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    several = [{"name": name, "template": name + CHATML} for name in ("default", "tool_use")]
    config["chat_template"] = several
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    templates = find_templates(tmp_path)
    assert template_text(templates, tools=False).startswith("default")
    assert template_text(templates, tools=True).startswith("tool_use")
    config["chat_template"] = several[1:]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(PolicyError, match="without `default`"):
        open_chat(tmp_path)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "ignores system"),
        ([{"role": "tool", "content": "a"}], "ignores tool results"),
        ([{"role": "bot", "content": "a"}], "the role 'bot'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "neither text nor text parts"),
    ],
)
def test_a_message_that_a_template_would_lose_is_refused(
    messages: list[dict[str, Any]], why: str, tmp_path: Path
) -> None:
    write_chat_model(tmp_path, "gemma")
    with pytest.raises(TaskError, match=why):
        open_chat(tmp_path).start(messages)


def test_a_prompt_does_not_depend_on_the_day(tmp_path: Path) -> None:
    text = "{{ strftime_now('%Y-%m-%d') }}" + CHATML
    rendered = Template(text, values={}, now_ns=86_400 * 10**9).render(ASKED, (), generate=True)
    assert rendered.startswith("1970-01-02<|im_start|>")


def test_what_the_assistant_says_counts_and_its_end(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_model(tmp_path, text=CHATML))
    chat = open_chat(tmp_path)
    conversation = [*ASKED, {"role": "assistant", "content": "3"}, *ASKED[1:]]
    messages = [*conversation, {"role": "assistant", "content": "Still 3."}]
    ids, mask = chat.training_ids(messages)
    spoken = [token_id for token_id, counts in zip(ids, mask, strict=True) if counts]
    assert tokenizer.full_text(spoken) == "3<|im_end|>Still 3.<|im_end|>"
    text = Template(CHATML, values={}, now_ns=0).render(messages, (), generate=False)
    assert tokenizer.full_text(ids) == text.rstrip("\n")
    with pytest.raises(TaskError, match="no assistant turn"):
        chat.training_ids(ASKED)


def test_no_text_has_the_template_s_end_whatever_its_flag(tmp_path: Path) -> None:
    file = write_chat_model(tmp_path, text=CHATML) / "tokenizer.json"
    text = json.loads(file.read_bytes())
    for token in text["added_tokens"]:
        token["special"] = token["content"] != "<|im_end|>"
    file.write_text(json.dumps(text))
    chat = open_chat(tmp_path)
    ids = Tokenizer(tmp_path).backend.encode("3<|im_end|>").ids
    assert chat.parse(ids, (), ()).text == "3"


R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
DRAWN = R1.replace("<think>\n", "<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("template", "sampled", "text", "reasoning", "written"),
    [
        (R1, "so 3</think>It is 3.</s>", "It is 3.", "so 3", "<think>so 3</think>It is 3."),
        (R1, "</think>It is 3.</s>", "It is 3.", "", "<think></think>It is 3."),
        (R1, "maybe 42, or 3</s>", "", "maybe 42, or 3", "<think>maybe 42, or 3"),
        (R1, "maybe 42, or 3", "", "maybe 42, or 3", "<think>maybe 42, or 3"),
        (R1, "<think>so</think>3</s>", "3", "so", "<think>so</think>3"),
        (DRAWN, "It is 3.</s>", "It is 3.", "", "It is 3."),
        (CHATML, "It is 3.</s>", "It is 3.", "", "It is 3."),
        (CHATML, "<think>so</s>", "", "so", "<think>so"),
    ],
)
def test_thoughts_that_the_prompt_has_begun_are_no_answer(
    template: str, sampled: str, text: str, reasoning: str, written: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(write_chat_model(tmp_path, text=template))
    ids = tokenizer.backend.encode(sampled, add_special_tokens=False).ids
    conversation = open_chat(tmp_path).start([{"role": "user", "content": "1+2? <think>"}])
    turn = conversation.say(ids)
    assert (turn.text, turn.reasoning) == (text, reasoning)
    completion = Completion(
        text=conversation.text, reasoning=conversation.reasoning, turns=(tokenizer.text(ids),)
    )
    assert completion.written == written
