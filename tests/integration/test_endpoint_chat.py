"""Tests of chat completions with OpenAI's client: requests arrive unchanged and tokens are kept."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.worker.effects import CallAsked, RefuseCall
from tests.support.chat_models import write_chat_model
from tests.support.endpoints import Stage, says, stage

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
HELLO = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("qwen"), "qwen2_5")


@pytest.fixture(scope="module")
def shared(assets: Path) -> Iterator[Stage]:
    with stage(assets, says(assets, "hi<|im_end|>")) as opened:
        yield opened


@pytest.fixture
def hi(shared: Stage, assets: Path) -> Stage:
    shared.answer = says(assets, "hi<|im_end|>")
    shared.calls.clear()
    return shared


@pytest.fixture(scope="module")
def refusing(assets: Path) -> Iterator[Stage]:
    with stage(assets, says(assets, "hi<|im_end|>"), unsupported_sampling="refuse") as opened:
        yield opened


def client_of(address: tuple[str, str]) -> openai.OpenAI:
    return openai.OpenAI(base_url=address[0], api_key=address[1], max_retries=0, timeout=60)


def create(client: openai.OpenAI, messages: Any = HELLO, **more: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **more)


def test_a_call_is_asked_as_the_template_renders_it_and_answered_with_its_text(
    hi: Stage, assets: Path
) -> None:
    with client_of(hi.open("g-0/0")) as client:
        answer = create(client, max_completion_tokens=7, user="planner")
    asked = hi.calls[-1]
    assert (
        Tokenizer(assets)
        .full_text(asked.token_ids)
        .endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    )
    assert (asked.request, asked.max_tokens, asked.api) == ("g-0/0", 7, "chat")
    assert (asked.caller, asked.asked) == ("planner", {})
    assert answer.choices[0].message.content == "hi"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(asked.token_ids)


def test_ids_and_log_probs_are_given_where_they_are_asked_for(hi: Stage) -> None:
    with client_of(hi.open("g-0/1")) as client:
        answer = create(client, logprobs=True, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert answer.prompt_token_ids == hi.calls[-1].token_ids
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5] * len(choice.token_ids)
    assert "".join(entry.token for entry in choice.logprobs.content) == "hi<|im_end|>"


def test_a_stream_has_the_whole_answer(hi: Stage) -> None:
    with client_of(hi.open("g-0/2")) as client:
        chunks = list(create(client, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text or "" for text in texts) == "hi"
    assert chunks[-1].usage.total_tokens > chunks[-1].usage.completion_tokens > 0


def test_settings_that_are_not_the_runs_are_recorded(hi: Stage) -> None:
    with client_of(hi.open("g-0/4")) as client:
        create(client, temperature=0.3, top_p=1, seed=7, stop=["END", ""], presence_penalty=0)
    assert hi.calls[-1].asked == {"temperature": 0.3, "seed": 7}
    assert hi.calls[-1].stop == ("END",)


def test_every_key_is_obeyed_recorded_or_refused(assets: Path) -> None:
    obeyed = {
        "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": False,
        "functions": [],
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "store": True,
    }
    recorded = {
        "guided_json": {"type": "object"},
        "logit_bias": {"5": -100},
        "no_such_key": 1,
        "response_format": {"type": "json_object"},
    }
    run = {"enable_thinking": False}
    with (
        stage(assets, says(assets, "hi<|im_end|>"), chat_template_kwargs=run) as opened,
        client_of(opened.open("g-0/0")) as client,
    ):
        create(client, extra_body={**obeyed, **recorded})
        assert opened.calls[-1].asked == recorded
        with pytest.raises(openai.BadRequestError, match="more than 64 unknown keys"):
            create(client, extra_body={f"key-{index}": index for index in range(65)})


@pytest.mark.parametrize("key", ["guided_json", "logit_bias", "no_such_key", "response_format"])
def test_a_key_that_is_not_the_runs_is_refused_by_its_name(refusing: Stage, key: str) -> None:
    with (
        client_of(refusing.open(f"g-1/{key}")) as client,
        pytest.raises(openai.BadRequestError, match=key),
    ):
        create(client, extra_body={key: {"type": "object"}})


def test_settings_that_are_not_the_runs_are_refused_where_the_run_says_so(
    refusing: Stage,
) -> None:
    with client_of(refusing.open("g-1/0")) as client:
        create(client, temperature=1.0, stop="END")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            create(client, temperature=0.5)
        assert len(refusing.calls) == 1


def test_a_conversation_as_it_was_answered_goes_on_behind_what_was_sampled(
    hi: Stage, assets: Path
) -> None:
    turns = {0: CALL.replace(": 1", ":  1"), 1: "three<|im_end|>"}
    hi.answer = says(assets, turns)
    with client_of(hi.open("g-0/10")) as client:
        answer = create(client, tools=[ADD]).choices[0]
        assert answer.finish_reason == "tool_calls"
        call = answer.message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("add", '{"a":1,"b":2}')
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        last = create(client, [*HELLO, answer.message, result], tools=[ADD])
    assert last.choices[0].message.content == "three"
    first, second = hi.calls
    sampled = Tokenizer(assets, special_tokens="parse").ids(turns[0])
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    behind = second.token_ids[len(first.token_ids) :]
    assert behind[: len(sampled)] == sampled
    rest = Tokenizer(assets).full_text(behind[len(sampled) :])
    assert "<tool_response>\n3\n</tool_response>" in rest
    assert rest.endswith("<|im_start|>assistant\n")


def test_calls_of_tools_have_ids_of_their_own_in_all_conversations_of_a_session(
    hi: Stage, assets: Path
) -> None:
    def ids(session: str) -> list[str]:
        with client_of(hi.open(session)) as client:
            other = [{"role": "user", "content": "anew"}]
            asked = [create(client, turn, tools=[ADD]) for turn in (HELLO, other, HELLO)]
            asked.append(create(client, tools=[ADD], n=2))
        messages = [choice.message for answer in asked for choice in answer.choices]
        return [call.id for message in messages for call in message.tool_calls]

    hi.answer = says(assets, CALL.replace("<|im_end|>", "\n" + CALL))
    actual_ids, again = ids("g-11/0"), ids("g-11/1")
    assert len(actual_ids) == len(set(actual_ids)) == 10
    assert all(re.fullmatch("[a-z0-9]{9}", name) for name in actual_ids)  # Mistral wants nine
    assert actual_ids == again  # an agent that is started again asks with the same ids


def test_a_text_ends_before_the_callers_stop_and_what_was_sampled_stays(
    hi: Stage, assets: Path
) -> None:
    hi.answer = says(assets, "one STOP two<|im_end|>")
    with client_of(hi.open("g-0/12")) as client:
        answer = create(client, stop="STOP")
        assert answer.choices[0].message.content == "one "
        message = answer.choices[0].message
        create(client, [*HELLO, message, {"role": "user", "content": "go on"}])
    assert "one STOP two<|im_end|>" in Tokenizer(assets).full_text(hi.calls[1].token_ids)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tools": [ADD], "tool_choice": "required"}, "required"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "custom"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        *(
            ({"extra_body": {key: value}}, key)
            for key, value in {
                "add_generation_prompt": False,
                "audio": {"voice": "x"},
                "chat_template": "{{ messages }}",
                "continue_final_message": True,
                "documents": [{"text": "x"}],
                "function_call": "auto",
                "functions": [{"name": "add"}],
                "modalities": ["text", "audio"],
            }.items()
        ),
        ({"extra_body": {"chat_template_kwargs": {"a": 1}}}, "set task.chat_template_kwargs"),
        ({"extra_body": {"enable_thinking": False}}, "enable_thinking"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x", "prefix": True}]}, "prefix"),
        ({"n": 1000}, r"<= 128 - at `\$.n`"),
        ({"stop": ["x" * 257]}, "length <= 256"),
        ({"stop": [str(index) for index in range(33)]}, "length <= 32"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "alien"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "image_url",
        ),
    ],
)
def test_what_is_not_offered_is_refused_by_its_name(
    hi: Stage, more: dict[str, Any], why: str
) -> None:
    asked = len(hi.calls)
    with client_of(hi.open("g-0/5")) as client, pytest.raises(openai.BadRequestError, match=why):
        create(client, **more)
    assert len(hi.calls) == asked


def test_what_the_worker_refuses_is_said_with_its_status_and_code(hi: Stage) -> None:
    def refuse(asked: CallAsked) -> RefuseCall:
        return RefuseCall(
            request=asked.request,
            call=asked.call,
            status=429,
            code="max_turns",
            message="64 calls were made: no more is sampled",
        )

    hi.answer = refuse
    with client_of(hi.open("g-0/13")) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            create(client.with_options(max_retries=2))
        assert caught.value.code == "max_turns"
        assert len(hi.calls) == 1, "what is refused for good is not asked again"


def test_keys_and_sessions(hi: Stage) -> None:
    mine, other = hi.open("g-0/7"), hi.open("g-0/8")
    with client_of((mine[0], "dora-nothing")) as client, pytest.raises(openai.AuthenticationError):
        create(client)
    with client_of((mine[0], other[1])) as client, pytest.raises(openai.NotFoundError):
        create(client)
    hi.end("g-0/7")
    with client_of(mine) as client, pytest.raises(openai.APIStatusError) as caught:
        create(client)
    assert caught.value.status_code == 410


def test_what_an_earlier_attempt_asks_is_no_call_of_the_present_one(hi: Stage) -> None:
    first = hi.open("g-0/9")
    hi.end("g-0/9")
    later = hi.open("g-0/10")
    with client_of(first) as client, pytest.raises(openai.APIStatusError) as caught:
        create(client, user="earlier")
    assert caught.value.status_code == 410
    with client_of((later[0], first[1])) as client, pytest.raises(openai.NotFoundError):
        create(client)
    with client_of(later) as client:
        create(client, user="present")
    requests = ("g-0/9", "g-0/10")
    assert [call.caller for call in hi.calls if call.request in requests] == ["present"]


def test_calls_that_wait_hear_of_the_end_of_their_session(hi: Stage) -> None:
    def end(asked: CallAsked) -> None:
        threading.Thread(target=hi.end, args=["g-0/14"]).start()

    hi.answer = end
    with client_of(hi.open("g-0/14")) as client, pytest.raises(openai.APIStatusError) as caught:
        create(client)
    assert caught.value.status_code == 410
