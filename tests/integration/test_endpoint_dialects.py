"""Tests of Responses, Anthropic messages and token ids: equal calls and prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from dora_pipe.producers.chat.tokenizer import Tokenizer
from tests.support.chat_models import write_chat_model
from tests.support.endpoints import Stage, says, stage

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
CALL = 'so:\n<tool_call>\n{"name": "add", "arguments": {"a":  1, "b": 2}}\n</tool_call><|im_end|>'
TURNS = (CALL, "three<|im_end|>")


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("qwen"), "qwen2_5")


@pytest.fixture(scope="module")
def shared_stage(assets: Path) -> Iterator[Stage]:
    words = {index: TURNS[index % 2] for index in range(64)}
    with stage(assets, says(assets, words)) as opened:
        yield opened


def check_conversation(stage: Stage, assets: Path) -> None:
    first, second = stage.calls[-2:]
    sampled = Tokenizer(assets, special_tokens="parse").ids(CALL)
    start = [*first.token_ids, *sampled]
    assert second.token_ids[: len(start)] == start
    text = Tokenizer(assets).full_text(second.token_ids[len(start) :])
    assert "<tool_response>\n3\n</tool_response>" in text


@pytest.mark.parametrize("streamed", [False, True])
def test_responses(shared_stage: Stage, assets: Path, streamed: bool) -> None:
    import openai

    url, key = shared_stage.open(f"g-1/{int(streamed)}")
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
    given: dict[str, Any] = {"model": "any", "tools": [tool], "instructions": "Add."}
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        response: Any
        asked: list[Any] = [{"role": "user", "content": "1 and 2?"}]
        if streamed:
            with client.responses.stream(input=asked, **given) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(input=asked, **given)
        assert response.output_text == "so:"
        call = response.output[-1]
        assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a":1,"b":2}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        asked += [item.model_dump(exclude_none=True) for item in response.output]
        asked.append(result)
        last = client.responses.create(input=asked, **given)
    assert last.output_text == "three"
    assert last.usage is not None
    assert last.usage.input_tokens == len(shared_stage.calls[-1].token_ids)
    assert shared_stage.calls[-1].api == "responses"
    check_conversation(shared_stage, assets)


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropics_messages(shared_stage: Stage, assets: Path, streamed: bool) -> None:
    import anthropic

    url, key = shared_stage.open(f"g-2/{int(streamed)}")
    tool = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    given: dict[str, Any] = {"model": "any", "max_tokens": 50, "system": "Add.", "tools": [tool]}
    base = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key=key, max_retries=0, timeout=60) as client:
        message: Any
        asked: list[Any] = [{"role": "user", "content": "1 and 2?"}]
        if streamed:
            with client.messages.stream(messages=asked, **given) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(messages=asked, **given)
        text, use = message.content
        assert (text.text, use.name, use.input) == ("so:", "add", {"a": 1, "b": 2})
        assert message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
        asked.append({"role": "assistant", "content": message.content})
        asked.append({"role": "user", "content": [result]})
        last = client.messages.create(messages=asked, **given)
    assert last.content[0].text == "three"
    assert (last.stop_reason, shared_stage.calls[-1].max_tokens) == ("end_turn", 50)
    assert shared_stage.calls[-1].api == "messages"
    check_conversation(shared_stage, assets)


def test_anthropics_keys_are_obeyed_recorded_or_refused(shared_stage: Stage) -> None:
    import anthropic

    url, key = shared_stage.open("g-2/keys")
    user = {"role": "user", "content": "1 and 2?"}
    given: dict[str, Any] = {"model": "any", "max_tokens": 50, "metadata": {"user_id": "me"}}
    base = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key=key, max_retries=0, timeout=60) as client:

        def create(messages: list[Any], **more: Any) -> None:
            client.messages.create(messages=messages, extra_body=more, **given)

        create([user], temperature=0.5, top_k=-1, thinking={"type": "disabled"}, no_such_key=1)
        assert shared_stage.calls[-1].asked == {"temperature": 0.5, "no_such_key": 1}
        create([user], service_tier="auto", thinking=None)
        assert shared_stage.calls[-1].asked == {}
        with pytest.raises(anthropic.BadRequestError, match="prefill"):
            create([user, {"role": "assistant", "content": "It is"}])
        with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
            create([user], mcp_servers=[{"url": "http://127.0.0.1"}])


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropics_messages_say_at_which_string_they_end(
    shared_stage: Stage, streamed: bool
) -> None:
    import anthropic

    url, key = shared_stage.open(f"g-5/{int(streamed)}")
    asked: list[Any] = [{"role": "user", "content": "1 and 2?"}]
    given: dict[str, Any] = {"model": "any", "max_tokens": 50, "stop_sequences": ["xyz", "re"]}
    base = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key=key, max_retries=0, timeout=60) as client:
        message: Any = client.messages.create(messages=asked, **given)
        assert (message.stop_reason, message.stop_sequence) != ("stop_sequence", "re")
        if streamed:
            with client.messages.stream(messages=asked, **given) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(messages=asked, **given)
    assert message.content[0].text == "th"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "re")


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/../inference/v1/generate"])
def test_token_ids_in_and_out(shared_stage: Stage, assets: Path, path: str) -> None:
    url, key = shared_stage.open("g-4/0")
    where = url + path if ".." not in path else url.removesuffix("/v1") + path[3:]
    params: Any = {"max_tokens": 5, "logprobs": 1, "temperature": 1.0, "stop_token_ids": [7]}
    answer = requests.post(
        where,
        json={"token_ids": [5, 6, 7], "sampling_params": params},
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    ).json()
    asked = shared_stage.calls[-1]
    assert (asked.token_ids, asked.max_tokens, asked.api) == ([5, 6, 7], 5, "generate")
    assert (asked.asked, asked.stop_ids) == ({}, (7,))
    (choice,) = answer["choices"]
    assert Tokenizer(assets).full_text(choice["token_ids"]) in TURNS
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/responses", {"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/responses", {"input": "hi", "tools": [{"type": "web_search"}]}, "web_search"),
        ("/responses", {"input": "hi", "truncation": "auto"}, "truncation"),
        ("/inference/v1/generate", {"token_ids": [5], "stream": True}, "stream"),
        ("/inference/v1/generate", {"token_ids": [10**6]}, "below"),
        ("/inference/v1/generate", {"token_ids": "text"}, "token_ids"),
        ("/chat/completions", {"messages": "hi"}, "messages"),
    ],
)
def test_what_is_not_offered_is_refused_by_its_name(
    shared_stage: Stage, path: str, body: dict[str, Any], why: str
) -> None:
    url, key = shared_stage.open("g-5/0")
    head = {"Authorization": f"Bearer {key}"}
    answer = requests.post(url + path, json=body, headers=head, timeout=60)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
